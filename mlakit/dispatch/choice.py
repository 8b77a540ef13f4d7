"""What a policy answers, and the paths that engines have and mlakit does not."""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.context import Context
from mlakit.dispatch import switches
from mlakit.errors import MisuseError
from mlakit.paths import registry

RAISES = "raises"
"""The path of a choice where the engine fails instead of running anything."""


@dataclass(frozen=True)
class Outside:
    """A path that an engine has and mlakit's registry has not.

    ``stand_in`` is the registry's path that does the same work in the same number of launches:
    what a measurement of the policy may run in its place, and must name when it does.
    """

    text: str
    launches: int
    fused: bool
    stand_in: str | None


OUTSIDE: dict[str, Outside] = {
    "aiter_split": Outside("AITER's RMSNorm, once for q and once for kv", 2, False, None),
    "aiter_fp8_token": Outside(
        "AITER's dual norm with q to FP8 per token", 1, True, "triton_fp8_token"
    ),
    "triton_split": Outside("a plain Triton RMSNorm, once for q and once for kv", 2, False, None),
    "engine_split": Outside(
        "the engine's own RMSNorm kernel, once for q and once for kv", 2, False, "torch_rms_norm"
    ),
    "atom_reduce_norm_quant": Outside(
        "ATOM: the qkv_a split-K reduction, both norms and q's quantisation in one", 1, True, None
    ),
    RAISES: Outside("the engine fails; nothing runs", 0, False, None),
}


@dataclass(frozen=True)
class Choice:
    """A policy's answer: the path, one line that says why, and what that costs in launches."""

    path: str
    reason: str
    launches: int
    fused: bool
    fallback: bool = False
    """the policy wanted a fused path and none can run; ``reason`` says why not"""


def made(path: str, reason: str, launches: int | None = None, *, fallback: bool = False) -> Choice:
    """A choice of a path of the registry or of ``OUTSIDE``, with that path's own launches.

    ``launches`` overrides where a release copies first or AITER splits; more than one launch is
    then not a fused kernel, whatever its name.
    """
    known = OUTSIDE[path] if path in OUTSIDE else registry.get(path)
    count = known.launches if launches is None else launches
    return Choice(path, reason, count, known.fused and count == 1, fallback)


def switch_on(context: Context, name: str) -> bool:
    """Whether an engine's switch is on in a context: ``NAME``, ``NAME=0``, or its default."""
    if f"{name}=0" in context.switches:
        return False
    return name in context.switches or switches.KNOWN[name][1] == "1"


def check_switches(context: Context) -> None:
    """Refuse a context with a switch that no engine has, or with a value other than ``=0``.

    Raises:
        MisuseError: one line with the near match.
    """
    for text in context.switches:
        name, _, value = text.partition("=")
        switches.read(name, {})
        if value not in ("", "0") or (value == "" and "=" in text):
            raise MisuseError(f"switch {text!r}: write {name} (on) or {name}=0 (off)")
