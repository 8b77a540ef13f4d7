"""Truth tables of policies, and what changes from one policy to another over all contexts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from mlakit.archs import fp8_format, vendor_of
from mlakit.context import Context
from mlakit.dispatch.choice import Choice
from mlakit.dispatch.policies import choose
from mlakit.errors import MisuseError
from mlakit.paths.aiter_api import SPLITS_FROM_M

_SWITCHES: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"SGLANG_ROCM_USE_MULTI_STREAM"}),
    frozenset({"AITER_FORCE_A8W4"}),
    frozenset({"AITER_FORCE_A8W4", "SGLANG_QK_RMSNORM_TORCH"}),
    frozenset({"ATOM_ENABLE_DS_QKNORM_FUSION=0", "ATOM_ENABLE_DS_QKNORM_QUANT_FUSION=0"}),
    frozenset({"ATOM_USE_TRITON_GEMM"}),
)

AXES: dict[str, tuple] = {
    "arch": ("gfx942", "gfx950", "gfx1250", "gfx1100", "sm_90", "cpu"),
    "use_aiter": (False, True),
    "aiter_api": ("none", "pair", "unified"),
    "weight_dtype": ("bf16", "int8", "fp8_ocp", "fp8_fnuz", "mxfp4"),
    "block_scale": (True, False),
    "q_lora_rank": (1536, 0),
    "prefill": (False, True),
    "capture": (False, True),
    "switches": _SWITCHES,
    "m": (64, SPLITS_FROM_M),
    "k_eps": (1e-6, 1e-5),
}
"""The values that any policy tells apart; ``contexts()`` is every combination that can exist."""


def _exists(v: dict) -> bool:
    """Whether a combination is a context, and not another combination said twice."""
    amd = vendor_of(v["arch"]) == "amd"
    if not amd and (v["use_aiter"] or v["aiter_api"] != "none" or v["switches"]):
        return False
    fp8 = v["weight_dtype"].startswith("fp8")
    if not v["block_scale"] and not fp8:
        return False
    return not fp8 or v["weight_dtype"] == fp8_format(v["arch"])


@cache
def contexts() -> tuple[Context, ...]:
    """Every context of the grid ``AXES`` that can exist, in a fixed order (some 19,000)."""
    found = []
    for values in product(*AXES.values()):
        v = dict(zip(AXES, values, strict=True))
        if not _exists(v):
            continue
        try:
            found.append(Context(**v))
        except MisuseError:
            continue  # MXFP4 on a card without it: the record itself refuses
    return tuple(found)


def describe(context: Context) -> dict[str, str]:
    """The fields of ``AXES`` as short text, for a table's row."""
    text = {name: str(getattr(context, name)) for name in AXES}
    text["switches"] = " ".join(sorted(context.switches)) or "-"
    return text


@dataclass(frozen=True)
class Change:
    """One context in which two policies differ; a ``surprise`` is a fused kernel lost."""

    context: Context
    before: Choice
    after: Choice

    @property
    def surprise(self) -> bool:
        """Whether the first policy fuses here and the second does not."""
        return self.before.fused and not self.after.fused


def diff(policy_a: str, policy_b: str) -> tuple[Change, ...]:
    """Every context of ``contexts()`` in which the two policies run different paths.

    A path that only changes its launch count is a change too.

    Raises:
        MisuseError: unknown policy.
    """
    found = []
    for c in contexts():
        a, b = choose(c, policy_a), choose(c, policy_b)
        if (a.path, a.launches) != (b.path, b.launches):
            found.append(Change(c, a, b))
    return tuple(found)


def summary(changes: Iterable[Change]) -> list[dict]:
    """Changes grouped by what became of what: one row a group, surprises first.

    ``where`` names, for each axis that does not take all its values in the group, those it takes.
    """
    groups: dict[tuple, list[Change]] = defaultdict(list)
    for c in changes:
        groups[c.before.path, c.before.launches, c.after.path, c.after.launches].append(c)
    rows = []
    for (before, n_before, after, n_after), members in groups.items():
        rows.append(
            {
                "before": before,
                "launches_before": n_before,
                "after": after,
                "launches_after": n_after,
                "surprise": any(m.surprise for m in members),
                "contexts": len(members),
                "where": _where(m.context for m in members),
                "why": members[0].after.reason,
            }
        )
    return sorted(rows, key=lambda r: (not r["surprise"], -r["contexts"]))


def _where(members: Iterable[Context]) -> str:
    seen: dict[str, set[str]] = defaultdict(set)
    for c in members:
        for name, value in describe(c).items():
            seen[name].add(value)
    some = {name: values for name, values in seen.items() if len(values) < len(AXES[name])}
    return "; ".join(f"{name}={'|'.join(sorted(values))}" for name, values in some.items())


_950: dict[str, Any] = {"arch": "gfx950", "use_aiter": True}
_942: dict[str, Any] = {"arch": "gfx942", "use_aiter": True}
ROWS: dict[str, Context] = {
    "gfx950, AITER, BF16 weights": Context(**_950),
    "gfx942, AITER, BF16 weights": Context(**_942),
    "gfx950, AITER, MXFP4 weights": Context(**_950, weight_dtype="mxfp4"),
    "gfx950, AITER, FP8 weights, block scales": Context(**_950, weight_dtype="fp8_ocp"),
    "gfx950, AITER, FP8 weights, per-channel scales": Context(
        **_950, weight_dtype="fp8_ocp", block_scale=False
    ),
    "gfx942, AITER, FP8 weights": Context(**_942, weight_dtype="fp8_fnuz"),
    "gfx950, AITER, int8 weights": Context(**_950, weight_dtype="int8"),
    "gfx950, AITER, BF16, no q latent": Context(**_950, q_lora_rank=0),
    "gfx950, AITER, BF16, prefill": Context(**_950, prefill=True, m=4096),
    "gfx950, AITER, BF16, M = 16384": Context(**_950, m=16384),
    "gfx950, AITER, BF16, captured, second-stream switch": Context(
        **_950, capture=True, switches=frozenset({"SGLANG_ROCM_USE_MULTI_STREAM"})
    ),
    "gfx950, AITER of the unified generation, BF16": Context(**_950, aiter_api="unified"),
    "gfx950, AITER without the dual norm, BF16": Context(**_950, aiter_api="none"),
    "gfx1250, AITER unified, A8W4 workaround": Context(
        "gfx1250", use_aiter=True, aiter_api="unified", switches=frozenset({"AITER_FORCE_A8W4"})
    ),
    "gfx950, no AITER, BF16": Context(arch="gfx950"),
    "sm_90, eager, BF16": Context(arch="sm_90"),
    "sm_90, captured, BF16": Context(arch="sm_90", capture=True),
    "cpu, BF16": Context(),
}
"""The rows of the teaching table: each is a branch of some policy."""


def truth_table(policies: Iterable[str]) -> Iterator[dict]:
    """One dict a row: ``context`` and, by policy, the path and its launches as ``path x launches``.

    Raises:
        MisuseError: unknown policy.
    """
    names = tuple(policies)
    for label, context in ROWS.items():
        row = {"context": label}
        for name in names:
            choice = choose(context, name)
            row[name] = f"{choice.path} x{choice.launches}" if choice.launches else choice.path
        yield row
