"""A report card for anyone's fused QK norm."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mlakit.dispatch import probe
from mlakit.drift.audit_cases import CASES
from mlakit.drift.audit_subject import FAIL, REFUSED, Failed, Subject
from mlakit.errors import MisuseError, one_line
from mlakit.paths import registry


@dataclass(frozen=True)
class Line:
    """One promise: pass, fail, convention difference, refused or not applicable; and why."""

    name: str
    verdict: str
    detail: str
    smallest: str = ""
    """the smallest input found that shows a failure"""


@dataclass(frozen=True)
class ReportCard:
    """What an audit found."""

    target: str
    device: str
    dtype: str
    lines: tuple[Line, ...]

    @property
    def failures(self) -> tuple[Line, ...]:
        """The lines that failed."""
        return tuple(line for line in self.lines if line.verdict == FAIL)

    @property
    def ok(self) -> bool:
        """Whether nothing failed; refusals and convention differences are no failures."""
        return not self.failures

    @property
    def text(self) -> str:
        """One line a promise, the smallest failing input below a failure."""
        head = f"audit of {self.target} on {self.device}, {self.dtype}: "
        head += "no failures" if self.ok else f"{len(self.failures)} of {len(self.lines)} failed"
        body = []
        for line in self.lines:
            body.append(f"  {line.name:<21} {line.verdict:<21} {line.detail}")
            if line.smallest:
                body.append(f"  {'':<43} smallest input: {line.smallest}")
        return "\n".join([head, *body])

    def to_json(self) -> dict:
        """A plain dict."""
        lines = [dict(vars(line)) for line in self.lines]
        return {k: getattr(self, k) for k in ("target", "device", "dtype", "ok")} | {"lines": lines}


@torch.no_grad()
def audit(
    fn: Callable | str,
    *,
    device: str = "cpu",
    dtype: str = "bf16",
    target: str | None = None,
    max_m: int | None = None,
) -> ReportCard:
    """Hold a fused QK norm to every promise of ``audit_cases.CASES``, against float64.

    Args:
        fn: ``fn(q, q_weight, q_eps, k, k_weight, k_eps) -> (q_out, k_out)``, one of AITER's other
            generations (see ``adapt``), a path's name, or ``"module:function"``.
        device: where its inputs go: ``cpu``, ``cuda``.
        dtype: bf16, fp16 or fp32.
        target: what the card calls it.
        max_m: largest batch to try, 1 or more (65537 without).

    Raises:
        MisuseError: ``fn`` names nothing that can be loaded or run here, or can't be called as
            asked; or ``max_m`` is below 1.
    """
    if max_m is not None and max_m < 1:
        raise MisuseError(f"max_m is {max_m}: give 1 or more, the largest batch to try")
    if isinstance(fn, str) and ":" not in fn:
        why = registry.get(fn).supports(
            replace(probe.here(device), m=1, dtype=dtype, norm_weight_dtype=dtype)
        )
        if why:
            raise MisuseError(f"{fn} can't be audited on {device}: {why}")
    name = target or (fn if isinstance(fn, str) else str(getattr(fn, "__name__", type(fn))))
    loaded = load_target(fn) if isinstance(fn, str) else fn
    call, takes_out = adapt(loaded)
    subject = Subject(call, device, dtype, takes_out, max_m)
    return ReportCard(name, device, dtype, tuple(_line(subject, *case) for case in CASES))


def _line(subject: Subject, name: str, case: Callable, may_refuse: bool) -> Line:
    try:
        return Line(name, *case(subject))
    except Failed as failure:
        return Line(name, FAIL, str(failure), failure.smallest)
    except Exception as error:
        # anyone's callable may raise anything; that is a finding of this line alone
        return Line(name, REFUSED if may_refuse else FAIL, f"raised {one_line(error)}")


def load_target(text: str) -> Callable:
    """The callable that ``"module:function"`` or a path's name stands for.

    Raises:
        MisuseError: no such path, module or function, or it isn't callable.
    """
    module, colon, attribute = text.partition(":")
    if not colon:
        return registry.get(text).call
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # of anyone's module, while it is imported
        raise MisuseError(
            f"can't load {text!r} ({one_line(error)}); give module:function, importable from here"
        ) from error
    if not callable(found):
        raise MisuseError(f"{text!r} is {type(found).__name__}, no function; give module:function")
    return found


_BUFFERS = {"q_out": "q", "q_out_quantized": "q", "k_out": "k"}
_EPS = {"q_eps": 2, "q_epsilon": 2, "k_eps": 5, "k_epsilon": 5}


def adapt(fn: Callable) -> tuple[Callable, bool]:
    """``fn`` as call(q, q_weight, q_eps, k, k_weight, k_eps), and whether it takes ``out=``.

    A callable with parameters named ``q_out`` or ``q_out_quantized`` and ``k_out`` (AITER's later
    generations, which return nothing) is called by keyword with new buffers; a required
    ``quant_type`` is its module's ``QuantType.No``. Any other is called by position.

    Raises:
        MisuseError: it takes fewer than six arguments.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return fn, False
    buffers = [p for p in parameters if p in _BUFFERS]
    if len(buffers) == 2:
        return _with_buffers(fn, parameters, buffers), False
    kinds = [p.kind for p in parameters.values()]
    positional = sum(k in (inspect.Parameter.POSITIONAL_ONLY, 1) for k in kinds)
    if positional < 6 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise MisuseError(
            f"{getattr(fn, '__name__', fn)} takes {positional} arguments by position; an audit "
            "wants fn(q, q_weight, q_eps, k, k_weight, k_eps)"
        )
    return fn, "out" in parameters


def _with_buffers(fn: Callable, parameters, buffers: list[str]) -> Callable:
    def call(*args):
        outs = {b: torch.empty_like(args[0 if _BUFFERS[b] == "q" else 3]) for b in buffers}
        outs = {b: t.contiguous() for b, t in outs.items()}
        named = dict(
            zip(("q", "q_weight", "k", "k_weight"), (args[0], args[1], *args[3:5]), strict=True)
        )
        named |= {p: args[i] for p, i in _EPS.items() if p in parameters}
        for p, value in parameters.items():
            if p not in named and p not in outs and value.default is inspect.Parameter.empty:
                named[p] = _no_quant(fn) if p == "quant_type" else None
        fn(**named, **outs)
        return tuple(outs[b] for b in sorted(buffers, reverse=True))

    return call


def _no_quant(fn: Callable):
    kind = getattr(sys.modules.get(fn.__module__), "QuantType", None)
    return getattr(kind, "No", None)
