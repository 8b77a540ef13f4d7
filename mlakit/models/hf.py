"""transformers: swap the norm step of any MLA model that it ships, restore it, evaluate through it.

What is fused: in transformers q's projection, q's norm, kv's projection and kv's norm run one after
the other. Where an attention has all four under their usual names, kv's projection is brought
forward to q's norm (the same product on the same input, so the same bits) and one call of the path
does both norms. Elsewhere (no q latent) kv's norm is one call with an empty q.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from mlakit.errors import MisuseError, unknown
from mlakit.paths import registry
from mlakit.paths.torch_native import normalised32
from mlakit.rounding import ROUNDINGS

_PROJECTIONS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa")
_KEY = "_mlakit"


def families() -> list[str]:
    """The model packages of the installed transformers whose attention has a ``kv_a_layernorm``.

    Read off its sources; nothing of them is imported.

    Raises:
        MisuseError: transformers is not installed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise MisuseError("transformers is not here: pip install 'mlakit[transformers]'")
    folder = Path(spec.submodule_search_locations[0]) / "models"
    files = sorted(folder.glob("*/modeling_*.py"))
    return sorted({f.parent.name for f in files if "self.kv_a_layernorm" in f.read_text("utf-8")})


def cast_then_weight(q, q_weight, q_eps, k, k_weight, k_eps):
    """Both norms in transformers' own order of operations, bit for bit; traceable."""
    return hf_norm(q, q_weight, q_eps) if q.shape[-1] else q, hf_norm(k, k_weight, k_eps)


def hf_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """transformers' RMSNorm: rounded to x's dtype before the weight, and again after it."""
    return weight * normalised32(x, eps).to(x.dtype)


def _by_rounding(name: str) -> Callable:
    if name == "cast_then_weight":
        return cast_then_weight
    formula = ROUNDINGS[name]

    def call(q, q_weight, q_eps, k, k_weight, k_eps):
        q_out = formula(q, q_weight, q_eps) if q.shape[-1] else q
        return q_out, formula(k, k_weight, k_eps)

    return call


def step_of(name: str | Callable | None) -> Callable:
    """The step that a path's or a rounding's name stands for; None: the call that mlakit chooses.

    Raises:
        MisuseError: an unknown name, or a path that delivers a quantised q.
    """
    if callable(name):
        return name
    from mlakit.dispatch.call import qk_rmsnorm

    if name is None:
        return qk_rmsnorm
    if name in ROUNDINGS:
        return _by_rounding(name)
    if name not in registry.names():
        raise unknown("path or rounding", name, (*registry.names(), *ROUNDINGS))
    if registry.get(name).output != "none":
        raise MisuseError(f"{name} delivers a quantised q: transformers' q_b_proj can't read it")
    return partial(qk_rmsnorm, path=name)


class _Mark:
    """What every patched module carries, so that ``deepcopy`` of it is refused.

    A copy would hold the same forwards, and they read the original's weights.
    """

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise MisuseError(
            "this model is patched, and a copy would go on computing with its weights: call "
            "restore() on its handle first, copy, and patch each"
        )


class Patched(ExitStack):
    """What ``patch`` did; ``restore`` (or leaving a ``with``) undoes it exactly.

    ``fused`` counts the attentions whose two norms are one call, ``separate`` those with a kv norm
    alone.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.fused, self.separate = path, 0, 0

    def restore(self) -> None:
        """Put every forward back as it was; twice does no harm."""
        self.close()


def patch(
    model: nn.Module, path: str | Callable | None = None, *, rounding: str | None = None
) -> Patched:
    """Run the norm step of every MLA attention in ``model`` through another path.

    Weights, state dict, hooks and module classes stay as they are; a compiled model must be
    compiled anew. A patched model can't be copied (``deepcopy``): restore it first.
    Works under ``torch.compile`` with paths that can be traced. Merge adapters (LoRA) into the
    projections first.

    Args:
        model: of one of ``families()``, on any device.
        path: a path's name, a callable with a path's signature, or None: mlakit's choice here.
        rounding: instead of a path, a name of ``mlakit.rounding.ROUNDINGS``, as a formula (slow);
            ``cast_then_weight`` is transformers' own arithmetic, bit for bit.

    Raises:
        MisuseError: no MLA attention in it, patched already, or a name that is not known.
    """
    if path is not None and rounding is not None:
        raise MisuseError(f"path {path!r} and rounding {rounding!r}: give one, a path has its own")
    if rounding is not None and rounding not in ROUNDINGS:
        raise unknown("rounding", rounding, ROUNDINGS)
    step = step_of(rounding or path)
    found = [m for m in model.modules() if getattr(m, "kv_a_layernorm", None) is not None]
    if not found:
        raise MisuseError(
            f"{type(model).__name__} has no MLA attention (no kv_a_layernorm): nothing to patch"
        )
    if any(_KEY in m.__dict__ for m in found):
        raise MisuseError("this model is patched already: call restore() on its handle first")
    name = rounding or (path if isinstance(path, str) else getattr(path, "__name__", "mlakit"))
    done = Patched(str(name))
    try:
        for attention in found:
            if all(getattr(attention, p, None) is not None for p in _PROJECTIONS):
                _fuse(attention, step, done)
                done.fused += 1
            else:
                _kv_alone(attention, step, done)
                done.separate += 1
            _mark(attention, done)
    except BaseException:
        done.restore()  # no model is left half patched, whatever the reason
        raise
    return done


def _eps(norm: nn.Module) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise MisuseError(f"{type(norm).__name__} has no eps that is known: patch can't take it over")


def _mark(module: nn.Module, undo: ExitStack) -> None:
    undo.callback(module.__dict__.pop, _KEY, None)
    module.__dict__[_KEY] = _Mark()


def _swap(module: nn.Module, forward: Callable, undo: ExitStack) -> None:
    undo.callback(_put_back, module, module.__dict__.get("forward"))
    module.forward = forward
    _mark(module, undo)


def _put_back(module: nn.Module, old: Callable | None) -> None:
    if old is None:
        del module.__dict__["forward"]
    else:
        module.forward = old


def _kv_alone(attention: Any, step: Callable, undo: ExitStack) -> None:
    norm = attention.kv_a_layernorm
    eps = _eps(norm)

    def kv_norm(x):
        nothing = x.new_empty(*x.shape[:-1], 0)
        return step(nothing, norm.weight[:0], eps, x, norm.weight, eps)[1]

    _swap(norm, kv_norm, undo)


def _fuse(attention: Any, step: Callable, undo: ExitStack) -> None:
    q_norm, k_norm = attention.q_a_layernorm, attention.kv_a_layernorm
    q_eps, k_eps = _eps(q_norm), _eps(k_norm)
    project, width = attention.kv_a_proj_with_mqa.forward, k_norm.weight.shape[0]
    held: dict[str, torch.Tensor] = {}

    def remember(module, args, kwargs):
        held["hidden"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def q_forward(x):
        rows = held.pop("hidden")
        row = project(rows)
        held["row"] = row
        q, held["k"] = step(x, q_norm.weight, q_eps, row[..., :width], k_norm.weight, k_eps)
        return q

    def kv_project(hidden):
        return held.pop("row")

    def k_forward(x):
        return held.pop("k")

    hook = attention.register_forward_pre_hook(remember, with_kwargs=True)
    undo.callback(hook.remove)
    _swap(q_norm, q_forward, undo)
    _swap(attention.kv_a_proj_with_mqa, kv_project, undo)
    _swap(k_norm, k_forward, undo)


@torch.no_grad()
def answers(model: Any, questions: Sequence[dict], tokenizer: Any) -> list[dict]:
    """``id``, ``correct`` and ``text`` of each question, decoded greedily, one at a time.

    Correct is a continuation that starts with the answer.

    Args:
        model: a causal language model.
        questions: dicts with ``id``, ``prompt`` and ``answer`` (texts).
        tokenizer: transformers' of that model.
    """
    results = []
    for question in questions:
        given = tokenizer(question["prompt"], return_tensors="pt").to(model.device)
        wanted = str(question["answer"]).strip()
        # A few more than the answer's own: generated text may be split into tokens otherwise.
        most = len(tokenizer(wanted)["input_ids"]) + 4
        out = model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            max_new_tokens=most,
            do_sample=False,
        )
        text = tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        right = text.strip().startswith(wanted)
        results.append({"id": str(question["id"]), "correct": right, "text": text})
    return results


def read_questions(file: str | Path) -> list[dict]:
    """Questions from JSONL with ``id``, ``prompt`` and ``answer`` in each line.

    lm-evaluation-harness's per-sample logs of generating tasks (``--log_samples``) will do too: the
    prompt is the request's, the answer the target, of the first filter's lines.

    Raises:
        MisuseError: no such file, no questions, a line that lacks one of the three, or a log of
            requests that only score given choices.
    """
    file = Path(file)
    if not file.is_file():
        raise MisuseError(f"no file {file}: give a JSONL of id, prompt and answer")
    try:
        lines = [x for x in file.read_text(encoding="utf-8-sig").splitlines() if x.strip()]
        rows = [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError, RecursionError) as error:
        raise MisuseError(f"{file} does not read as JSONL of objects: {error}") from None
    for row in rows:
        if {"doc_id", "arguments", "target"} <= set(row):
            row |= {"id": row["doc_id"], "prompt": _request(row, file), "answer": row["target"]}
    first = rows[0].get("filter") if rows else None
    rows = [row for row in rows if row.get("filter") == first]
    for number, row in enumerate(rows, 1):
        lacks = {"id", "prompt", "answer"} - set(row)
        if lacks:
            raise MisuseError(f"{file} line {number} lacks {', '.join(sorted(lacks))}")
    if not rows:
        raise MisuseError(f"{file} holds no questions")
    return rows


def _request(row: dict, file: Path) -> str:
    given = row["arguments"]
    requests = [list(r.values()) for r in given.values()] if isinstance(given, dict) else given
    if len(requests) != 1 or not isinstance(requests[0][-1], dict):
        raise MisuseError(
            f"{file}: its requests score given choices, nothing is generated: judge two such logs "
            "with mlakit significance"
        )
    return requests[0][0]
