"""Other projects' RMSNorm as paths: two calls of one norm, guarded where its package is absent."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from mlakit.errors import RefusedError
from mlakit.paths.checks import as_rows, check, current, delivered


def pair_of(norm: Callable, package: str, install: str) -> Callable:
    """A path's ``call`` that runs ``norm(x, weight, eps) -> y`` on q and on k, as they lie.

    The norm takes no output: with ``out`` its results are copied there.
    """

    def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
        if find_spec(package) is None:
            raise RefusedError(f"{package} is not installed: pip install {install}")
        check(q, q_weight, q_eps, k, k_weight, k_eps, out)
        with current(q.device):
            results = tuple(
                norm(as_rows(x, name), w, eps).view(x.shape) if x.numel() else x.new_empty(x.shape)
                for name, x, w, eps in (("q", q, q_weight, q_eps), ("k", k, k_weight, k_eps))
            )
        return delivered(results, out)

    return call
