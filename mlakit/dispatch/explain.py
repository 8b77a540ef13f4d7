"""Why this path, and for every other path why not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlakit import archs
from mlakit.context import Context
from mlakit.dispatch import policies, probe
from mlakit.dispatch.choice import OUTSIDE, RAISES, Choice
from mlakit.errors import MisuseError
from mlakit.paths import registry


@dataclass(frozen=True)
class Verdict:
    """One path in one context. ``state``: chosen, could run, or cannot run."""

    path: str
    state: str
    reason: str
    launches: int
    text: str


@dataclass(frozen=True)
class Explanation:
    """A policy's choice in a context, what became of every other path, and whether it runs here.

    ``here`` is None if the chosen path can run on this machine, else one line that says why not.
    """

    context: Context
    rule: policies.Policy
    choice: Choice
    here: str | None
    verdicts: tuple[Verdict, ...]

    @property
    def line(self) -> str:
        """One line for a person."""
        launches = f"{self.choice.launches} launch{'es' if self.choice.launches != 1 else ''}"
        return f"{self.rule.name}: {self.choice.path} ({launches}): {self.choice.reason}"

    def to_rows(self) -> list[dict]:
        """One dict a path, the chosen one first: path, state, reason, launches, text."""
        return [vars(v) for v in self.verdicts]

    def to_json(self) -> dict:
        """Plain values only."""
        return {
            "policy": self.rule.name,
            "rule": self.rule.text,
            "source": self.rule.source,
            "arch": self.context.arch,
            "path": self.choice.path,
            "reason": self.choice.reason,
            "launches": self.choice.launches,
            "runs_here": self.here is None,
            "why_not_here": self.here,
            "paths": self.to_rows(),
        }


def explain(context: Context, policy: str = "mlakit") -> Explanation:
    """The path that ``policy`` takes in ``context``, and one reason for every other path.

    Raises:
        MisuseError: unknown policy, switch or requested path.
        RefusedError: the context's requested path cannot run.
    """
    if not isinstance(context, Context):
        raise MisuseError(
            f"context is {context!r}: give a Context, for example Context(arch='gfx950')"
        )
    choice = policies.choose(context, policy)
    verdicts = [_verdict(context, choice, name) for name in registry.names()]
    if choice.path in OUTSIDE:
        text = OUTSIDE[choice.path].text
        verdicts.append(Verdict(choice.path, "chosen", choice.reason, choice.launches, text))
    verdicts.sort(key=lambda v: ("chosen", "could run", "cannot run").index(v.state))
    here = _why_not_here(context, choice)
    return Explanation(context, policies.get(policy), choice, here, tuple(verdicts))


def _verdict(context: Context, choice: Choice, name: str) -> Verdict:
    path = registry.get(name)
    if name == choice.path:
        return Verdict(name, "chosen", choice.reason, choice.launches, path.text)
    why = path.supports(context)
    if why is not None:
        return Verdict(name, "cannot run", why, path.launches, path.text)
    if context.vendor == "cpu" and not path.timed:
        why = "correctness only on a CPU: the interpreter"
    else:
        why = f"the policy prefers {choice.path}"
    return Verdict(name, "could run", why, path.launches, path.text)


def _why_not_here(context: Context, choice: Choice) -> str | None:
    if choice.path == RAISES:
        return "nothing runs: the engine fails"
    if context.arch not in archs.here():
        return f"no {context.arch} on this machine: it has {', '.join(archs.here())}"
    if choice.path in OUTSIDE:
        stand_in = OUTSIDE[choice.path].stand_in
        also = f"; {stand_in} does the same work" if stand_in else ""
        return f"{choice.path} belongs to the engine, mlakit does not run it{also}"
    path = registry.get(choice.path)
    if path.output != context.quant:
        return f"it delivers q as {path.output}, {context.quant} was asked for"
    return path.supports(replace(context, packages=context.packages & probe.packages()))
