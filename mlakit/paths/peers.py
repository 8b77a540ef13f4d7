"""Other projects' RMSNorm as paths: two calls of one norm, guarded where its package is absent."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from mlakit.context import Context
from mlakit.errors import RefusedError
from mlakit.paths.checks import as_rows, check, current, delivered, kernel_limits
from mlakit.paths.registry import Path


def peer(
    name: str, text: str, norm: Callable, package: str, install: str, limits: Callable,
    rounding: str = "round_once",
) -> Path:  # fmt: skip
    """A path that runs ``norm(x, weight, eps) -> y`` on q and on k, as they lie.

    Args:
        name: of the path.
        text: one line for a person.
        norm: it takes no output: with ``out`` its results are copied there.
        package: what it imports; a hypothetical context has it.
        install: what pip calls that.
        limits: of a context: why the norm cannot run there, in one line, or None.
        rounding: a name of ``mlakit.rounding.ROUNDINGS``.

    Its call raises ``RefusedError`` where the package is not installed.
    """
    absent = f"{package} is not installed: pip install {install}"

    def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
        if find_spec(package) is None:
            raise RefusedError(absent)
        check(q, q_weight, q_eps, k, k_weight, k_eps, out)
        with current(q.device):
            results = tuple(
                norm(as_rows(x, name), w, eps).view(x.shape) if x.numel() else x.new_empty(x.shape)
                for name, x, w, eps in (("q", q, q_weight, q_eps), ("k", k, k_weight, k_eps))
            )
        return delivered(results, out)

    def supports(context: Context) -> str | None:
        if package not in context.packages:
            return absent
        return limits(context) or kernel_limits(context)

    return Path(name, text, call, supports, rounding, launches=2, makes_outputs=True)
