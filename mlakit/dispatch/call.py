"""The call: the step by the path that a policy chooses, remembered per kind of arguments."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from mlakit.context import Context
from mlakit.dispatch import policies, probe
from mlakit.dispatch.choice import OUTSIDE, RAISES
from mlakit.errors import MisuseError, RefusedError
from mlakit.paths import checks, registry
from mlakit.paths.aiter_api import one_line

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MOST_KINDS = 4096
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


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


class _Kind:
    """One kind of arguments: what runs for it, and how often it did."""

    __slots__ = ("call", "calls", "context", "ran", "strict")

    def __init__(self, ran: Ran, context: Context | None, strict: bool) -> None:
        self.ran, self.context, self.strict = ran, context, strict
        self.call = registry.get(ran.path).call
        self.calls = 0


_kinds: dict[tuple, _Kind] = {}
_past: Counter = Counter()
_warned: set[str] = set()
_last: _Kind | None = None


def qk_rmsnorm(
    q,
    q_weight,
    q_eps,
    k,
    k_weight,
    k_eps,
    *,
    path: str | None = None,
    policy: str = "mlakit",
    strict: bool = False,
    out=None,
):
    """RMSNorm of q and of k by the path that ``policy`` chooses here.

    The choice is made once per kind of arguments (shape, dtype, layout, device); after the probe's
    facts changed, call ``reset``. ``last_call`` and ``counts`` say which path ran and why. Inside
    ``torch.compile`` the two norms are traced as PyTorch operations.

    Args:
        q: (..., q_lora_rank) bf16, fp16 or fp32; any row stride; width 0: none.
        q_weight: (q_lora_rank,).
        q_eps: added to q's mean square.
        k: (..., kv_lora_rank), the same rows as q.
        k_weight: (kv_lora_rank,).
        k_eps: added to k's mean square.
        path: a path by name: obeyed or refused, never replaced.
        policy: a name of ``mlakit.dispatch.policies``.
        strict: refuse instead of falling back to another path than the policy's.
        out: two tensors to write to, shaped like q and k.

    Returns:
        (q_out, k_out), contiguous, or ``out``.

    Raises:
        MisuseError: arguments that cannot be (rows, dtypes, devices, eps), or an unknown name.
        RefusedError: ``path`` cannot run here, or ``strict`` and the policy's path cannot.
    """
    if torch.compiler.is_compiling():
        return _traced(q, q_weight, q_eps, k, k_weight, k_eps, path, out)
    global _last
    try:
        key = (
            q.shape,
            k.shape,
            q.stride(),
            k.stride(),
            q.dtype,
            q_weight.dtype,
            q.device,
            q_eps,
            k_eps,
            path,
            policy,
            strict,
            torch.is_grad_enabled() and _wants_grad(q, q_weight, k, k_weight),
            q.is_cuda and _capturing(),
        )
        kind = _kinds.get(key)
    except (AttributeError, IndexError, TypeError) as error:
        raise MisuseError(f"q, k and their weights must be tensors: {one_line(error)}") from error
    if kind is None:
        kind = _decide(key, q, q_weight, q_eps, k, k_weight, k_eps, path, policy, strict, out)
    while True:
        try:
            result = kind.call(q, q_weight, q_eps, k, k_weight, k_eps, out=out)
            break
        except Exception as error:
            kind = _after_failure(key, kind, error)
    kind.calls += 1
    _last = kind
    return result


def last_call() -> Ran | None:
    """What the latest call of this process ran, and why; None before the first."""
    return _last.ran if _last else None


def counts() -> dict[Ran, int]:
    """How often each path ran in this process, by reason."""
    total = Counter(_past)
    for kind in _kinds.values():
        if kind.calls:
            total[kind.ran] += kind.calls
    return dict(total)


def reset() -> None:
    """Forget every choice, count and warning, and probe anew: after an install or a new switch."""
    global _last
    _kinds.clear()
    _past.clear()
    _warned.clear()
    _last = None
    probe.refresh()


def _wants_grad(q, q_weight, k, k_weight) -> bool:
    return q.requires_grad or q_weight.requires_grad or k.requires_grad or k_weight.requires_grad


def _traced(q, q_weight, q_eps, k, k_weight, k_eps, path, out):
    if path not in (None, "torch_rms_norm"):
        raise RefusedError(f"{path} cannot be traced by torch.compile: call it outside, or no path")
    parts = ((q, q_weight, q_eps), (k, k_weight, k_eps))
    pair = tuple(
        torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps) if x.shape[-1] else x.clone()
        for x, w, eps in parts
    )
    if out is None:
        return pair
    out[0].copy_(pair[0])
    out[1].copy_(pair[1])
    return out


def _decide(key, q, q_weight, q_eps, k, k_weight, k_eps, path, policy, strict, out) -> _Kind:
    """The first call of a kind: check its arguments, build its context, ask the policy."""
    checks.check(q, q_weight, q_eps, k, k_weight, k_eps, out)
    rule = policies.get(policy)
    try:
        context = _context(q, q_weight, q_eps, k, k_weight, k_eps, path)
    except MisuseError as error:
        # A card outside data/archs.csv has no context, yet PyTorch's own norms run on it.
        name = path or "torch_rms_norm"
        kind = _Kind(Ran(name, str(error), rule.name, path, path is None), None, strict)
        if path is None:
            _say(f"mlakit: torch_rms_norm ran instead of a choice: {error}")
        return _remember(key, kind)
    choice = policies.choose(context, policy)
    if choice.path == RAISES or (choice.fallback and strict):
        raise RefusedError(f"policy {rule.name}: {choice.reason}")
    if choice.path in OUTSIDE:
        engine = OUTSIDE[choice.path]
        why = f"that is the engine's ({engine.text})"
        return _remember(key, _next(context, choice.path, why, rule.name, strict, engine.stand_in))
    why = None if path else registry.get(choice.path).supports(context)
    if why is not None:
        return _remember(key, _next(context, choice.path, why, rule.name, strict))
    if choice.fallback:
        _say(f"mlakit: {choice.path} runs: {choice.reason}")
    ran = Ran(choice.path, choice.reason, rule.name, path, choice.fallback)
    return _remember(key, _Kind(ran, context, strict))


def _remember(key, kind: _Kind) -> _Kind:
    if len(_kinds) >= _MOST_KINDS:
        _past.update({k.ran: k.calls for k in _kinds.values() if k.calls})
        _kinds.clear()
    _kinds[key] = kind
    return kind


def _context(q, q_weight, q_eps, k, k_weight, k_eps, path) -> Context:
    device = str(q.device)
    arch = probe.device_arch(device)
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
        dtype=_NAMES[q.dtype],
        norm_weight_dtype=_NAMES[q_weight.dtype],
        layout=layout,
        q_eps=q_eps,
        k_eps=k_eps,
        capture=bool(q.is_cuda and _capturing()),
        requires_grad=torch.is_grad_enabled() and _wants_grad(q, q_weight, k, k_weight),
        packages=probe.packages(),
        requested=path,
        **(probe.machine_fields() if arch.startswith("gfx") else {}),
    )


def _after_failure(key, kind: _Kind, error: Exception) -> _Kind:
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
    why = f"it failed: {one_line(error)}"
    following = _next(kind.context, kind.ran.path, why, kind.ran.policy, kind.strict)
    _past[kind.ran] += kind.calls
    return _remember(key, following)


def _next(context, failed, why, policy, strict, first=None) -> _Kind:
    """The path that replaces ``failed``, said once.

    Raises:
        RefusedError: strict, or nothing is left to run.
    """
    if strict:
        raise RefusedError(f"strict: policy {policy} takes {failed}, but {why}")
    order = policies.PREFERRED
    start = order.index(failed) + 1 if failed in order else 0
    for name in (first, *order[start:]):
        if name is None or name == failed:
            continue
        path = registry.get(name)
        able = path.output == context.quant and (path.timed or context.vendor != "cpu")
        if able and path.supports(context) is None:
            reason = f"instead of {failed}: {why}"
            kind = _Kind(Ran(name, reason, policy, None, True), context, strict)
            _say(f"mlakit: {name} ran {reason}")
            return kind
    raise RefusedError(f"{failed} cannot run ({why}), and no other path can either")


def _say(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, FallbackWarning, stacklevel=5)
