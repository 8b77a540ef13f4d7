"""The call: the step by the path that a policy chooses, remembered per kind of arguments."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mlakit import archs
from mlakit.context import Context
from mlakit.dispatch import policies, probe, switches
from mlakit.dispatch.choice import OUTSIDE, RAISES
from mlakit.errors import MisuseError, RefusedError, one_line
from mlakit.inputs import DTYPE_NAMES
from mlakit.paths import checks, custom_op, registry

_MOST_KINDS = 4096
_Six = tuple[Any, Any, Any, Any, Any, Any]
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
# Names of the module's own: every look-up in torch's costs a call 50 ns.
_compiling = torch.compiler.is_compiling


class FallbackWarning(UserWarning):
    """Another path ran than the policy chose; the text says which and why."""


@dataclass(frozen=True)
class Ran:
    """What a call ran: ``fallback`` says whether it is another path than was chosen first."""

    path: str
    reason: str
    policy: str
    requested: str | None
    fallback: bool


def _never(*tensors) -> bool:
    return False


class _Kind:
    """One kind of arguments: what runs for it, and how often it did."""

    __slots__ = (
        "again",
        "asked",
        "call",
        "calls",
        "context",
        "key",
        "ran",
        "same",
        "strict",
        "tried",
    )

    def __init__(self, ran: Ran, context: Context | None, strict: bool, tried=frozenset()) -> None:
        self.ran, self.context, self.strict = ran, context, strict
        self.tried = tried | {ran.path}
        self.call = registry.get(ran.path).call
        self.calls = 0
        self.key = self.asked = self.again = None
        self.same: Callable[..., bool] = _never

    def expect(self, q, q_weight, k, k_weight) -> None:
        """Be found at once, and launched unchecked, by the next plain call like this one."""
        self.same = checks.same_as(q, q_weight, k, k_weight)
        path = registry.get(self.ran.path)
        self.again = path.again(q, q_weight, k, k_weight) if path.again else None


_kinds: dict[tuple, _Kind] = {}
_past: Counter = Counter()
_warned: set[str] = set()
_last: _Kind | None = None


def qk_rmsnorm(
    q: torch.Tensor,
    q_weight: torch.Tensor,
    q_eps: float,
    k: torch.Tensor,
    k_weight: torch.Tensor,
    k_eps: float,
    *,
    path: str | None = None,
    policy: str = "mlakit",
    quant: str = "none",
    strict: bool = False,
    out: tuple | None = None,
) -> tuple[Any, torch.Tensor]:
    """RMSNorm of q and of k by the path that ``policy`` chooses here.

    The choice is made once per kind of arguments (shape, dtype, layout, device); after the probe's
    facts changed, call ``reset``. ``last_call`` and ``counts`` say which path ran and why. Inside
    ``torch.compile`` one operator is traced where Triton can run, else PyTorch's two norms.

    Args:
        q: (..., q_lora_rank) bf16, fp16 or fp32; any row stride; width 0: none.
        q_weight: (q_lora_rank,).
        q_eps: added to q's mean square.
        k: (..., kv_lora_rank), the same rows as q.
        k_weight: (kv_lora_rank,).
        k_eps: added to k's mean square.
        path: a path by name: obeyed or refused, never replaced. It brings its own ``quant``.
        policy: a name of ``mlakit.dispatch.policies``.
        quant: what q is delivered as: a name of ``mlakit.context.QUANTS``.
        strict: refuse instead of falling back to another path than the policy's.
        out: two tensors to write to, shaped like q and k.

    Returns:
        (q_out, k_out), contiguous, or ``out``; with ``quant``, q_out is a ``QuantisedQ``.

    Raises:
        MisuseError: arguments that cannot be (rows, dtypes, devices, eps), an unknown name, or an
            environment switch with a value it does not have.
        RefusedError: ``path`` cannot run here, or ``strict`` and the policy's path cannot.
    """
    if _compiling():
        return _traced(q, q_weight, q_eps, k, k_weight, k_eps, path, quant, out)
    global _last
    try:
        asked = (q.is_cuda and _capturing(), q_eps, k_eps, path, policy, quant, strict)
        kind = _last
        known = (
            kind is not None
            and kind.asked == asked
            and kind.same(q, q_weight, k, k_weight)
            and checks.unwatched()
        )
        if not known:
            plain = checks.plain(q, q_weight, k, k_weight)
            wanted = not plain and checks.derivative_wanted(q, q_weight, k, k_weight)
            key = (checks.facts(q, q_weight, k, k_weight), plain, wanted, *asked)
            kind = _kinds.get(key)
            if kind is not None and plain:
                kind.expect(q, q_weight, k, k_weight)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
        if any(isinstance(n, torch.SymInt) for n in getattr(q, "shape", ())):
            raise MisuseError(
                f"q has the symbolic shape {tuple(q.shape)}, and a path is chosen by numbers: "
                "trace with torch.compile, or trace torch_native's own call"
            ) from error
        checks.check(q, q_weight, q_eps, k, k_weight, k_eps)
        raise MisuseError(f"a call cannot be told by these arguments: {one_line(error)}") from error
    if kind is None:
        kind = _decide(
            key, (q, q_weight, q_eps, k, k_weight, k_eps), out, path, policy, quant, strict
        )
    again = kind.again if known and out is None else None  # once: other threads set it
    while True:
        try:
            result = again(q, q_weight, q_eps, k, k_weight, k_eps) if again else None
            if result is None:
                result = kind.call(q, q_weight, q_eps, k, k_weight, k_eps, out=out)
            break
        except Exception as error:
            # what is the caller's fault demotes no path for the calls to come
            plain = registry.get(kind.ran.path).output == "none"
            checks.check(q, q_weight, q_eps, k, k_weight, k_eps, out if plain else None)
            kind, again = _after_failure(kind, error), None
    kind.calls += 1
    _last = kind
    return result


def last_call() -> Ran | None:
    """What the latest call of this process ran, and why; None before the first."""
    kind = _last
    return kind.ran if kind else None


def counts() -> dict[Ran, int]:
    """How often each path ran in this process, by reason."""
    total = Counter(_past)
    for kind in list(_kinds.values()):  # other threads add theirs meanwhile
        total[kind.ran] += kind.calls
    return {ran: n for ran, n in total.items() if n}


def reset() -> None:
    """Forget every choice, count and warning, and probe anew: after an install or a new switch."""
    global _last
    _retire(*_kinds.values())
    _kinds.clear()
    _past.clear()
    _warned.clear()
    _last = None
    probe.refresh()


def _operator_runs() -> bool:
    return probe.package_reason("triton") is None


# torch.compiler.assume_constant_result does this, and imports dynamo (two seconds) to do so.
vars(_operator_runs)["_dynamo_marked_constant"] = True


def _traced(q, q_weight, q_eps, k, k_weight, k_eps, path, quant, out):
    checks.check(q, q_weight, q_eps, k, k_weight, k_eps)
    if path not in (None, "torch_rms_norm", "triton_fused") or quant != "none":
        raise RefusedError(f"{path or quant} cannot be traced by torch.compile: call it outside")
    if path != "torch_rms_norm" and q.is_cuda and out is None and _operator_runs():
        return custom_op.qk_rmsnorm(q, q_weight, q_eps, k, k_weight, k_eps)
    if path == "triton_fused":
        raise RefusedError("triton_fused is traced on a GPU with Triton, and without out, only")
    parts = ((q, q_weight, q_eps), (k, k_weight, k_eps))
    pair = tuple(
        torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps) if x.shape[-1] else x.clone()
        for x, w, eps in parts
    )
    return checks.delivered(pair, out)


def _decide(key, args: _Six, out, path, policy, quant, strict) -> _Kind:
    """The first call of a kind: check its arguments, build its context, ask the policy."""
    rule = policies.get(policy)
    switches.check()
    if path is not None:
        quant = registry.get(path).output
    checks.check(*args, out if quant == "none" else None)
    arch = probe.device_arch(str(args[0].device))
    if arch not in archs.known():
        # No context can name this card, yet PyTorch's own norms run on it.
        why = f"{arch} is not in data/archs.csv, so no choice can be made for it"
        if path is None:
            if strict or quant != "none":
                raise RefusedError(why)
            _say(f"mlakit: torch_rms_norm ran: {why}")
        ran = Ran(path or "torch_rms_norm", why, rule.name, path, path is None)
        return _remember(key, _Kind(ran, None, strict))
    context = _context(arch, quant, path, *args)
    choice = policies.choose(context, policy)
    if choice.path == RAISES or (choice.fallback and strict):
        raise RefusedError(f"policy {rule.name}: {choice.reason}")
    if choice.path in OUTSIDE:
        engine = OUTSIDE[choice.path]
        why = f"that is the engine's ({engine.text})"
        tried = frozenset({choice.path})
        return _remember(key, _next(context, tried, why, rule.name, strict, engine.stand_in))
    wrong = None if path else _unable(context, choice.path)
    if wrong is None and path is None and choice.path == "cpu_fused":
        wrong = _not_for_cpu_fused(*args)
    if wrong is not None:
        tried = frozenset({choice.path})
        return _remember(key, _next(context, tried, wrong, rule.name, strict))
    if choice.fallback:
        _say(f"mlakit: {choice.path} ran: {choice.reason}")
    ran = Ran(choice.path, choice.reason, rule.name, path, choice.fallback)
    return _remember(key, _Kind(ran, context, strict))


def _not_for_cpu_fused(q, q_weight, q_eps, k, k_weight, k_eps) -> str | None:
    """What a context does not say of a call and the CPU kernel cannot serve."""
    if q_weight.dtype is not k_weight.dtype:
        return "it wants both weights of one dtype"
    if checks.lazy(q, q_weight, k, k_weight):
        return "a tensor's memory does not hold what torch reads there"
    try:
        checks.as_rows(q, "q"), checks.as_rows(k, "k")
    except MisuseError as error:
        return str(error)
    return None


def _unable(context: Context, name: str) -> str | None:
    """Why the path a policy chose cannot serve this call; policies need not ask ``supports``."""
    path = registry.get(name)
    if path.output != context.quant:
        return f"it delivers {path.output}, {context.quant} was asked for"
    if not path.timed and context.vendor == "cpu":
        return "on a CPU it is the interpreter: correctness only"
    return path.supports(context)


def _remember(key, kind: _Kind) -> _Kind:
    if len(_kinds) >= _MOST_KINDS:
        _retire(*_kinds.values())
        _kinds.clear()
    elif key in _kinds:
        _retire(_kinds[key])
    kind.key, kind.asked = key, key[3:]
    _kinds[key] = kind
    return kind


def _retire(*kinds: _Kind) -> None:
    """Keep what they counted; the latest of a thread is not found any more without a look-up."""
    for kind in kinds:
        _past[kind.ran] += kind.calls
        kind.calls, kind.asked = 0, None


def _context(arch, quant, path, q, q_weight, q_eps, k, k_weight, k_eps) -> Context:
    width = q.shape[-1] or k.shape[-1]
    rows = (q if q.shape[-1] else k).numel() // width if width else 0
    if q.ndim != 2:
        layout = "rank3"
    elif max(q.stride(-1), k.stride(-1)) != 1:
        layout = "inner_strided"
    else:
        layout = "contiguous" if q.is_contiguous() and k.is_contiguous() else "split"
    return Context(
        arch=arch,
        m=rows,
        q_lora_rank=q.shape[-1],
        kv_lora_rank=k.shape[-1],
        dtype=DTYPE_NAMES[q.dtype],
        norm_weight_dtype=DTYPE_NAMES[q_weight.dtype],
        quant=quant,
        layout=layout,
        q_eps=q_eps,
        k_eps=k_eps,
        capture=bool(q.is_cuda and _capturing()),
        requires_grad=checks.derivative_wanted(q, q_weight, k, k_weight),
        packages=probe.packages(),
        requested=path,
        **(probe.machine_fields() if arch.startswith("gfx") else {}),
    )


def _after_failure(kind: _Kind, error: Exception) -> _Kind:
    """Another path for a kind whose path failed on call; raises where none may replace it."""
    text = str(error).lower()
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in ("out of memory", "can't allocate memory")
    )
    # A failed launch poisons the device: whatever ran next would fail too, or lie.
    poisoned = isinstance(error, getattr(torch, "AcceleratorError", ()))
    if memory or poisoned or isinstance(error, MisuseError):
        raise error
    if kind.context is None or kind.ran.requested is not None:
        raise error
    # Where a gradient is wanted torch's operators run, through which others' hooks may raise:
    # checkpointing stops a recomputation that way.
    if kind.context.requires_grad:
        raise error
    why = f"it failed: {one_line(error)}"
    following = _next(kind.context, kind.tried, why, kind.ran.policy, kind.strict, failed=kind.ran)
    _retire(kind)
    return _remember(kind.key, following)


def _next(context, tried, why, policy, strict, first=None, failed: Ran | None = None) -> _Kind:
    """The able path that replaces those ``tried``, said once; ``first`` is asked before the rest.

    Raises:
        RefusedError: strict, or nothing is left to run.
    """
    wanted = failed.path if failed else next(iter(tried))
    if strict:
        raise RefusedError(f"strict: policy {policy} takes {wanted}, but {why}")
    left = [p for p in policies.able(context) if p.name not in tried]
    left.sort(key=lambda p: p.name != first)
    if not left:
        raise RefusedError(f"{wanted} cannot run ({why}), and no other path can either")
    reason = f"instead of {wanted}: {why}"
    _say(f"mlakit: {left[0].name} ran {reason}")
    return _Kind(Ran(left[0].name, reason, policy, None, True), context, strict, tried)


def _say(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, FallbackWarning, stacklevel=5)
