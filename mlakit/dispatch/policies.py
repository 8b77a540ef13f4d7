"""Policies by name: one rule each that picks a path from a context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mlakit.context import Context
from mlakit.dispatch import engines, table
from mlakit.dispatch.choice import RAISES, Choice, check_switches, made
from mlakit.errors import RefusedError, unknown
from mlakit.paths import registry
from mlakit.shapes import Widths

PREFERRED = ("cpu_fused", "triton_fused", "aiter_fused", "torch_rms_norm", "torch_native")
"""mlakit's first ordering, by measurement where there is one: fused before split, then eager."""
_FUSED = {
    "cpu": ("cpu_fused",),
    "nvidia": ("triton_fused",),
    "amd": ("triton_fused", "aiter_fused"),
}


@dataclass(frozen=True)
class Policy:
    """One named rule: ``decide(context)`` is pure and imports no kernel; ``source`` says whence."""

    name: str
    text: str
    source: str
    decide: Callable[[Context], Choice]


def torch_only(c: Context) -> Choice:
    """Two ``F.rms_norm`` on the views, whatever is here."""
    return made("torch_rms_norm", "PyTorch alone, by policy")


def able(c: Context) -> list[registry.Path]:
    """The paths that deliver ``c.quant`` and can run in ``c``, in our order of preference.

    Those of ``PREFERRED``; for a quantised q, the registry's with the fewest launches first. A
    path that is correctness only on a CPU (the interpreter) is not among them there.
    """
    found = [p for p in _candidates(c) if p.supports(c) is None and (p.timed or c.vendor != "cpu")]
    return found if c.quant == "none" else sorted(found, key=lambda p: p.launches)


def _candidates(c: Context) -> list[registry.Path]:
    names = PREFERRED if c.quant == "none" else registry.names()
    return [p for p in map(registry.get, names) if p.output == c.quant]


def ordered(c: Context) -> Choice:
    """The first fused path that is able, else the first unfused one, as a fallback."""
    paths = able(c)
    for path in paths:
        if path.fused and not (path.splits_from_m and c.m >= path.splits_from_m):
            return made(path.name, f"one launch for both norms on {c.arch}")
    if not paths:
        # Torch's own operators ask least of their arguments: their reason is the one to mend.
        least = max(_candidates(c), key=lambda p: p.launches, default=None)
        why = least and least.supports(c)
        told = f" ({why})" if why else ""
        return made(RAISES, f"no path delivers {c.quant} on {c.arch} here{told}")
    fused = [p for p in _candidates(c) if p.fused]
    if c.quant == "none":
        fused = [p for p in fused if p.name in _FUSED[c.vendor]]
    why = "; ".join(f"{p.name}: {p.supports(c) or 'not one launch here'}" for p in fused)
    return made(paths[0].name, f"no fused path can run here ({why})", fallback=True)


def modelled(c: Context) -> Choice | None:
    """The path that the latency model gives the least time, of those that can run in ``c``.

    None where the model knows too few of them to choose from: a quantised q, or one path.
    """
    # they bring pandas, which a call that was measured can do without
    from mlakit import latency, launches

    widths = Widths(c.q_lora_rank, c.kv_lora_rank)
    paths = [p for p in able(c) if p.name in launches.MODELLED and p.splits_from_m is None]
    if c.quant != "none" or len(paths) < 2 or c.m < 1:
        return None
    found = {p: latency.estimate(p.name, c.arch, widths, c.m, c.dtype) for p in paths}
    best = min(found, key=lambda p: found[p].us)
    error = found[best].error_pct
    known = "error unknown" if error is None else f"its error: {error:.0f} % at the median"
    return made(best.name, f"fastest by the latency model ({known})")


def measured(c: Context) -> Choice:
    """The fastest measured path where a table speaks for ``c`` and that path can run; else the
    fastest modelled one, else ``ordered``; the reason then says why not by measurement."""
    found = table.choose(c)
    if found is None:
        rest = ordered(c)
        if not rest.fallback and rest.path != RAISES:
            rest = modelled(c) or rest
        return replace(rest, reason=f"{rest.reason}; nothing was measured on {c.arch} for this")
    name, reason = found
    path = registry.get(name)
    why = path.supports(c)
    if why is None:
        return made(name, reason)
    rest = ordered(c)
    return replace(rest, reason=f"{rest.reason}; {name} was measured faster, but {why}")


_SGL = "sglang {} from PyPI: deepseek_common/attention_forward_methods/{}, models/deepseek_v2.py"
_SGLANG = (
    ("sglang_0_5_10_post1", "2026-04-08: MXFP4 and FP8 fused on gfx95; BF16 is split on every card",
     _SGL.format("0.5.10.post1", "forward_mla.py"), engines.SGLANG_0_5_10_POST1),
    ("sglang_pr23186_before",
     "the gate that pull request 23186 says it removes; no release held it",
     "https://github.com/sgl-project/sglang/pull/23186", engines.SGLANG_PR23186_BEFORE),
    ("sglang_0_5_11",
     "2026-05-07: BF16 fused with AITER on every AMD card; needs AITER v0.1.12 or v0.1.13",
     _SGL.format("0.5.11", "forward_mla.py"), engines.SGLANG_0_5_11),
    ("sglang_0_5_12",
     "to 0.5.15: both AITER generations; a second-stream switch on ROCm bypasses all fusion",
     _SGL.format("0.5.12 and 0.5.15", "forward_mla.py"), engines.SGLANG_0_5_12),
    ("sglang_0_5_23", "ROCm has a file of its own: per-channel FP8 goes to BF16 fused",
     _SGL.format("0.5.23", "forward_mla_rocm.py, forward_mla.py"), engines.SGLANG_0_5_23),
)  # fmt: skip
_ALL = (
    Policy("mlakit", "ours: the fastest path that can run here, by measurement, else by the model",
           "mlakit", measured),
    Policy("torch_only", "PyTorch's F.rms_norm, twice", "mlakit", torch_only),
    *(Policy(n, t, s, partial(engines.sglang, release)) for n, t, s, release in _SGLANG),
    Policy("vllm_compile",
           "0.33.0: a compile pass that matches the two RMSNorms of one split, whatever reads q",
           "vllm 0.33.0 from PyPI: compilation/passes/fusion/rocm_aiter_fusion.py, _aiter_ops.py",
           engines.vllm_compile),
    Policy("vllm_eager", "0.33.0 without compilation: no pass",
           "vllm 0.33.0 from PyPI: models/kimi_k3/amd/mla.py; pull request 52494",
           engines.vllm_eager),
    Policy("atom", "weight dtype and two switches; never the arch",
           "https://github.com/ROCm/ATOM as of 2026-08-22", engines.atom),
)  # fmt: skip
POLICIES: dict[str, Policy] = {p.name: p for p in _ALL}

ALIASES = {
    "sglang_before_fix": "sglang_pr23186_before",
    "sglang_after_fix": "sglang_0_5_11",
    "sglang_0_5_15": "sglang_0_5_12",
    "sglang_today": "sglang_0_5_23",
    "vllm_today": "vllm_compile",
}


def get(name: str) -> Policy:
    """The policy called ``name``, aliases too.

    Raises:
        MisuseError: no such policy, with the nearest match.
    """
    found = POLICIES.get(ALIASES.get(name, name))
    if found is None:
        raise unknown("policy", name, (*POLICIES, *ALIASES))
    return found


def choose(context: Context, policy: str = "mlakit") -> Choice:
    """What ``policy`` runs in ``context``.

    A context with ``requested`` set is an explicit request: obeyed, or an error.

    Raises:
        MisuseError: unknown policy, switch or requested path.
        RefusedError: the requested path cannot run in the context; the message says why.
    """
    rule = get(policy)
    check_switches(context)
    if context.requested is not None:
        path = registry.get(context.requested)
        why = path.supports(context)
        if why is not None:
            raise RefusedError(f"{path.name} was asked for and cannot run: {why}")
        return made(path.name, "asked for by name")
    return rule.decide(context)
