"""Accuracy rows: every path of a cell, on every input family, held against float64."""

from __future__ import annotations

from dataclasses import replace

import torch

from mlakit import archs
from mlakit.dispatch.probe import context_for
from mlakit.drift.ulp import Drift, compare, ulps
from mlakit.errors import MisuseError, fault_status, one_line
from mlakit.inputs import TORCH_DTYPES, Inputs, make
from mlakit.paths import quantised, registry
from mlakit.records import ACCURACY_FIGURES, Cell, CellResult, check_row
from mlakit.rounding import ROUNDINGS, oracle

FAMILIES = ("normal", "outlier", "tiny", "large", "heavy", "sparse")
"""Families of every accuracy row; zero and non-finite rows are the audit's."""

MAX_ROWS = 4096
"""Distinct rows made and judged. A larger batch repeats them, and its first and last are judged,
so that a path still sees its true M and a lost last row still shows."""

_FORMULA_ULPS = {"bf16": 1, "fp16": 1, "fp32": 256}
"""Ulps a path may be off its declared formula: a float32 sum of n terms leaves about sqrt(n) ulps
in float32, which in 16 bits moves only elements next to a tie."""

_FORMULA_SHARE = 0.01
"""Share of 16-bit elements that may differ from the declared formula before it is flagged."""

_EXECUTED_ROWS = 64
"""Rows of a batch that are run through the emulator; a batch-invariant kernel needs no more."""

_AITER_SOURCE = "ROCm/aiter csrc/kernels/fused_qk_norm.cu; ROCm/aiter#5151"


def accuracy_cell(cell: Cell, *, device: str = "cpu", run: dict | None = None) -> CellResult:
    """One row per path, input family and output (q, k) of ``cell``, against float64.

    A path that cannot run here gives one ``skipped`` row with the reason. A cell of an AMD arch
    that is not here also gets ``emulated_rows`` (AITER's arithmetic by a rounding formula) and
    ``executed_rows`` (that arch's own binary of ``triton_fused``, run on numpy).

    Args:
        cell: what to run; clock and cache are kept but mean nothing here.
        device: where: ``cpu``, ``cuda``, ``cuda:1``.
        run: columns that only the caller knows (``run_id``, ``hidden_size``).
    """
    context = context_for(cell, device)
    base = _identity(cell, run)
    rows = []
    here = ("cpu",) if device == "cpu" else archs.here()
    absent = None if cell.arch in here else f"no {cell.arch} device here"
    for name in cell.paths:
        path = registry.get(name)
        reason = absent or path.supports(context)
        if reason:
            rows.append(_row(base, name, status="skipped", reason=reason))
        else:
            rows += _path_rows(base, path, cell, device)
    if absent and archs.vendor_of(cell.arch) == "amd":
        rows += emulated_rows(cell)
        if "triton_fused" in cell.paths and cell.quant == "none":
            rows += executed_rows(cell)
    return CellResult(rows)


def _identity(cell: Cell, run: dict | None) -> dict:
    where = {"arch": cell.arch, "vendor": archs.vendor_of(cell.arch), "seed": cell.seed}
    which = cell.columns | {"model": cell.model or None, "evidence": "measured"}
    return where | (run or {}) | which


def _row(base: dict, path: str, **more) -> dict:
    empty = dict.fromkeys(ACCURACY_FIGURES) | {"seed": base["seed"]}
    return check_row(empty | base | {"path_requested": path} | more, "accuracy")


def _inputs(cell: Cell, family: str, device: str) -> tuple[Inputs, torch.Tensor]:
    """The cell's arguments, and the indices of the rows to judge."""
    distinct = make(
        min(cell.m, MAX_ROWS),
        cell.widths,
        cell.dtype,
        weight_dtype=cell.norm_weight_dtype or None,
        family=family,
        layout="split" if cell.layout == "split_out" else cell.layout,
        eps=cell.eps,
        seed=cell.seed,
        device=device,
    )
    if cell.m <= MAX_ROWS:
        return distinct, torch.arange(cell.m, device=device)
    buffer = distinct.buffer.repeat(-(-cell.m // MAX_ROWS), 1)[: cell.m]
    q, k, _ = buffer.split([cell.q_lora_rank, cell.kv_lora_rank, cell.qk_rope_head_dim], -1)
    if cell.layout == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    half = torch.arange(MAX_ROWS // 2, device=device)
    judged = torch.cat([half, half + cell.m - MAX_ROWS // 2])
    return replace(distinct, buffer=buffer, q=q, k=k), judged


def _path_rows(base: dict, path: registry.Path, cell: Cell, device: str) -> list[dict]:
    rows = []
    for family in FAMILIES:
        try:
            given, judged = _inputs(cell, family, device)
            q_out, k_out = path.call(*given.args)
        except MisuseError as error:
            return [_row(base, path.name, status="skipped", reason=str(error))]
        except Exception as error:
            # whatever a path raises is its row's status; the cell's other paths go on
            why = {"status": fault_status(error), "reason": one_line(error)}
            rows.append(_row(base, path.name, input_family=family, **why))
            continue
        rows += _output_rows(base, path, cell, given, (q_out, k_out), judged, input_family=family)
    return rows


def _output_rows(base, path, cell: Cell, given: Inputs, outputs, judged, **more) -> list[dict]:
    """A row for each of the two outputs that has a width; ``more`` overrides what is found."""
    rows = []
    parts = (("q", outputs[0], given.q, given.q_weight), ("k", outputs[1], given.k, given.k_weight))
    for output, got, x, weight in parts:
        if x.shape[-1]:
            found = _judge(path, got, x[judged], weight, cell, judged) | more
            rows.append(_row(base, path.name, output=output, **found))
    return rows


def _judge(path, got, x, weight, cell: Cell, judged: torch.Tensor) -> dict:
    """Status, figures and flags of one output. x and the judged rows of ``got``: (rows, N)."""
    want = oracle(x, weight, cell.eps)
    rounding = path.rounding_on(cell.arch, cell.dtype)
    common = {"path_ran": path.name, "reference": "float64", "rounding": rounding}
    if not isinstance(got, torch.Tensor):
        return common | _judge_quantised(path.output, got, x, weight, cell.eps, judged)
    got = got[judged]
    drift = compare(got, want)
    formula = ROUNDINGS[rounding](x, weight, cell.eps).to(got.dtype)
    off = ulps(got, formula.double()).abs()
    flags = _flags(drift)
    # each rounding of the formula may fall the other way, next to a tie
    roundings = 2 if rounding == "cast_then_weight" else 1
    wrong = drift.nonfinite_mismatch > 0 or int(off.max()) > roundings * _FORMULA_ULPS[cell.dtype]
    if cell.dtype != "fp32" and float((off > 0).double().mean()) > _FORMULA_SHARE:
        flags = ",".join(filter(None, (flags, "unlike_declared_rounding")))
    note = f"{int(off.max())} ulp from its declared rounding at most" if wrong else None
    if not path.timed and x.device.type == "cpu":
        note = "; ".join(filter(None, ("interpreter: correctness only", note)))
    status = "wrong" if wrong else "ok"
    return common | drift.figures() | {"status": status, "flags": flags, "note": note}


def _judge_quantised(quant, got, x, weight, eps: float, judged: torch.Tensor) -> dict:
    """As ``_judge``; ``share_correct`` counts bytes equal to those of float64 then quantised."""
    values = quantised.dequantise(quant, got)[judged]
    reference = quantised.reference(quant, x, weight, eps)
    ideal = quantised.dequantise(quant, reference)
    want = oracle(x, weight, eps)
    drift, floor = compare(values, want), compare(ideal, want)
    figures = drift.figures() | {"max_ulp": None, "ulp_p999": None}
    same = got.values.view(torch.uint8)[judged] == reference.values.view(torch.uint8)
    figures["share_correct"] = float(same.double().mean())
    wrong = not drift.rel_l2 <= 1.5 * floor.rel_l2
    return figures | {
        "reference": f"float64, then {quant}",
        "status": "wrong" if wrong else "ok",
        "flags": _flags(drift),
        "note": f"rel_l2 of quantising alone: {floor.rel_l2:.3g}",
    }


def _flags(drift: Drift) -> str | None:
    flags = ["nonfinite"] * bool(drift.nonfinite_mismatch) + ["biased"] * drift.biased
    return ",".join(flags) or None


def emulated_rows(cell: Cell) -> list[dict]:
    """AITER's dual norm on ``cell.arch`` by a rounding formula: another card's arithmetic, here.

    AITER stores BF16 by truncation on gfx942 and older, and by the hardware's rounding convert on
    gfx950, gfx12 and gfx1250, in its fused and split kernels alike (read in its source, see
    ``_AITER_SOURCE``; nothing of AMD's was run). Empty for archs that AITER doesn't serve.

    Rows carry evidence ``emulated``; formulas take statistics in float64, so that a card's
    reduction order is not in them.
    """
    if archs.vendor_of(cell.arch) != "amd" or cell.arch.startswith(("gfx10", "gfx11")):
        return []
    path = registry.get("aiter_fused")
    rounding = path.rounding_on(cell.arch, cell.dtype)
    base = _identity(cell, None) | {"source": _AITER_SOURCE}
    small = replace(cell, m=min(cell.m, MAX_ROWS), layout="contiguous")
    note = f"by a rounding formula ({rounding}), not run on {cell.arch}"
    rows = []
    for family in FAMILIES:
        given, judged = _inputs(small, family, "cpu")
        formula, kind = ROUNDINGS[rounding], TORCH_DTYPES[cell.dtype]
        q_out, k_out = (
            formula(x, weight, cell.eps).to(kind) if x.shape[-1] else x
            for x, weight in ((given.q, given.q_weight), (given.k, given.k_weight))
        )
        more = _not_here(cell, family, note)
        rows += _output_rows(base, path, small, given, (q_out, k_out), judged, **more)
    return rows


def _not_here(cell: Cell, family: str, note: str) -> dict:
    reason = f"no {cell.arch} here: emulated"
    return {"evidence": "emulated", "reason": reason, "note": note, "input_family": family}


def executed_rows(cell: Cell, families: tuple[str, ...] = FAMILIES) -> list[dict]:
    """``triton_fused`` on ``cell.arch`` by executing that arch's machine code on numpy.

    Evidence ``emulated``: instruction semantics, with idealised rsqrt and reciprocal (hardware may
    differ by an ulp of float32); no timing, and no missing wait or race would be seen.
    """
    from mlakit.codegen import compile as compiler
    from mlakit.codegen import execute, shipped
    from mlakit.codegen.isa.parse import EmulationError

    base = _identity(cell, None) | {"evidence": "emulated", "source": "mlakit.codegen.execute"}
    why = compiler.why_not()
    if why or cell.arch not in execute.ARCHS:
        why = why or f"no emulator for {cell.arch}"
        return [_row(base, "triton_fused", status="skipped", reason=f"not emulated: {why}")]
    path, small = registry.get("triton_fused"), replace(cell, m=min(cell.m, _EXECUTED_ROWS))
    note = f"by executing {cell.arch} machine code on numpy, M = {small.m}"
    compiled = None
    rows: list[dict] = []
    for family in families:
        given, judged = _inputs(small, family, "cpu")
        try:
            done = shipped.emulate_qk_rmsnorm(cell.arch, given, compiled=compiled)
        except (EmulationError, MisuseError) as error:
            return [*rows, _row(base, "triton_fused", status="failed", reason=one_line(error))]
        compiled = done.compiled
        more = _not_here(cell, family, note)
        rows += _output_rows(base, path, small, given, (done.q, done.k), judged, **more)
    return rows
