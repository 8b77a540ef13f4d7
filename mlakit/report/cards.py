"""What 04_codegen says: a card that is not here, compiled for, modelled and emulated."""

from __future__ import annotations

import pandas as pd
import torch

from mlakit import archs, latency, launches
from mlakit.codegen import resources
from mlakit.codegen.compile import ARCHS, Compiled, compile_many
from mlakit.codegen.shipped import emulate_qk_rmsnorm, emulate_quantised, request
from mlakit.context import Context
from mlakit.drift.ulp import compare
from mlakit.errors import MisuseError
from mlakit.inputs import make
from mlakit.paths import quantised
from mlakit.report import chapters
from mlakit.rounding import oracle
from mlakit.shapes import Widths, parse_hidden

STORY = ("gfx942", "gfx950")
RESOURCE_COLUMNS = (
    "arch vgprs sgprs vgpr_spills lds_bytes warps waves_per_simd limited_by wide_share "
    "bf16_convert instructions code_bytes triton evidence"
).split()


def compiled_archs(arch: str) -> tuple[str, ...]:
    """The asked arch first where it can be compiled for, then the story's two, then the rest."""
    return tuple(a for a in dict.fromkeys((arch, *STORY, *ARCHS)) if a in ARCHS)


def compile_for(arch: str, model: str, dtype: str) -> dict[str, Compiled]:
    """The fused kernel for the asked arch and the story's two, by arch; empty without Triton."""
    from mlakit.codegen.compile import why_not

    if why_not():
        return {}
    wanted = compiled_archs(arch)[: 3 if arch in ARCHS and arch not in STORY else 2]
    made = compile_many([request(a, parse_hidden(model), dtype) for a in wanted])
    return {c.arch: c for c in made}


def isa_excerpt(compiled: Compiled) -> pd.DataFrame:
    """The instructions about the first reciprocal root: place in the kernel, text."""
    lines = resources.isa(compiled)
    root = next((i for i, x in enumerate(lines) if "v_rsq" in x or "rsqrt" in x), 0)
    first = max(0, root - 6)
    rows = enumerate(lines[first : first + 24], first)
    return pd.DataFrame(rows, columns=["line", "instruction"])


def difference(a: Compiled, b: Compiled) -> pd.DataFrame:
    """Lines of ``resources.diff``: what one has and the other not, register numbers masked."""
    lines = [x for x in resources.diff(a, b)[2:] if not x.startswith("@@")]
    rows = [({"-": a.arch, "+": b.arch}.get(x[0], "both"), x[1:]) for x in lines]
    return pd.DataFrame(rows, columns=["in", "instruction"])


def change(a: Compiled, b: Compiled) -> pd.DataFrame:
    """Instructions by name in two binaries that differ in number: name, count in each."""
    counts = []
    for compiled in (a, b):
        names = [x.split()[0] for x in resources.isa(compiled) if not x.endswith(":")]
        counts.append(pd.Series(names).value_counts())
    frame = pd.concat(counts, axis=1, keys=[a.arch, b.arch]).fillna(0).astype(int)
    frame["difference"] = frame[b.arch] - frame[a.arch]
    frame = frame[frame["difference"] != 0]
    order = frame["difference"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order].rename_axis("instruction").reset_index()


def modelled_paths(arch: str, widths: Widths, dtype: str = "bf16") -> list[str]:
    """Paths the model can speak of that could run on ``arch``."""
    from mlakit.paths import registry

    context = Context(arch=arch, m=64, q_lora_rank=widths.q_lora_rank, dtype=dtype,
                      norm_weight_dtype=dtype, kv_lora_rank=widths.kv_lora_rank)  # fmt: skip
    known = [registry.get(n) for n in registry.names() if n in launches.MODELLED]
    here = [p for p in known if p.timed or arch != "cpu"]
    return [p.name for p in here if p.supports(context) is None]


def error_words(arch: str, path: str) -> str:
    """The model's error for one path on one arch, in words."""
    return latency.error_words(*latency.known_error(arch, path)[:2])


def bars(arch: str, parts: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Rows of ``latency.breakdown`` of the first fused and the first unfused path, each with its
    error beside it."""
    fused = [n for n in names if n in launches.ONE_LAUNCH]
    pairs = [n for n in (*launches.ROW_PAIRS, "inductor") if n in names]
    some = parts[parts["path"].isin([*fused[:1], *pairs[:1]])]
    return some.assign(path=[f"{p} ({error_words(arch, p)})" for p in some["path"]])


def fusion_title(arch: str) -> str:
    """Title of the fusion figure: the arch, and the error of what is modelled."""
    return f"What the launch saved buys on {arch} ({error_words(arch, latency.fused_path(arch))})"


def emulated(made: dict[str, Compiled], widths: Widths, dtype: str, seed: int) -> pd.DataFrame:
    """Drift of each AMD binary, executed on numpy over 8 rows, against float64; a row an output."""
    inputs = make(8, widths, dtype, seed=seed)
    rows = []
    for arch, compiled in made.items():
        if not compiled.amd:
            continue
        done = emulate_qk_rmsnorm(arch, inputs, compiled=compiled)
        for output, got, x, weight, eps in (
            ("q", done.q, inputs.q, inputs.q_weight, inputs.q_eps),
            ("k", done.k, inputs.k, inputs.k_weight, inputs.k_eps),
        ):
            if x.shape[1] and isinstance(got, torch.Tensor):
                drift = compare(got, oracle(x, weight, eps))
                rows.append(
                    {"arch": arch, "output": output, "elements": drift.elements}
                    | {"share_correct": drift.share_correct, "max_ulp": drift.max_ulp}
                    | {"signed_bias": drift.signed_bias, "evidence": done.run.evidence}
                )
    return pd.DataFrame(rows)


def emulated_fp8(widths: Widths, dtype: str, seed: int) -> pd.DataFrame:
    """fnuz (gfx942) against OCP (gfx950): q as FP8 by groups of 128, by each card's own code.

    Executed on numpy over 8 rows. ``rel_l2``: the dequantised q against float64's norm;
    ``codes_equal``: the share of bytes equal to float64's norm quantised in that encoding.
    """
    if quantised.refusal("fp8_group128", widths.q_lora_rank) or not widths.q_lora_rank:
        return pd.DataFrame()
    inputs = make(8, widths, dtype, seed=seed)
    want = oracle(inputs.q, inputs.q_weight, inputs.q_eps)
    rows = []
    for arch in STORY:
        encoding = archs.fp8_format(arch)
        options = quantised.Options(encoding=encoding)
        done = emulate_quantised("fp8_group128", arch, inputs, options=options)
        got = quantised.dequantise("fp8_group128", done.q, options).double()
        exact = quantised.reference(
            "fp8_group128", inputs.q, inputs.q_weight, inputs.q_eps, options
        )
        same = done.q.values.view(torch.uint8) == exact.values.view(torch.uint8)
        rows.append(
            {"arch": arch, "encoding": encoding, "elements": want.numel()}
            | {"rel_l2": float((got - want).norm() / want.norm())}
            | {"codes_equal": float(same.double().mean()), "evidence": done.run.evidence}
        )
    return pd.DataFrame(rows)


def verdict(arch: str, model: str, batches: list[int], dtype: str) -> list[str]:
    """What the model says of one arch, with its error; or why it says nothing."""
    widths = parse_hidden(model)
    try:
        frame = latency.fusion(arch, widths, batches, dtype)
    except MisuseError as reason:
        return [f"No time is modelled for {arch}: {reason}."]
    median, worst, scored = latency.known_error(arch, latency.fused_path(arch))
    first, last = frame.iloc[0], frame.iloc[-1]
    words = latency.error_words(median, worst)
    here = "" if arch in archs.here() else ", which nobody ran here"
    sentences = [
        f"Modelled for {arch}{here}, {words}, scored on {scored}: one launch instead of two saves "
        f"{first['saved_us']:.2g} us ({first['saved_pct']:.0f} %) at M={first['m']} and "
        f"{last['saved_us']:.2g} us ({last['saved_pct']:.1f} %) at M={last['m']}.",
        f"At M={last['m']} a fused kernel that is {last['slack_pct']:.1f} % slower in the rest "
        "than two tuned kernels has lost what the launch saved.",
    ]
    if (meet := latency.meeting_m(arch, widths, dtype)) is not None:
        sentences.append(
            f"Fused and two good kernels meet, within {latency.LEVEL_PCT:g} %, from M={meet} on."
        )
    if last["outside"]:
        sentences.append(f"Extrapolated: {last['outside']}.")
    return sentences


def fusion_checked(
    arch: str, widths: Widths, batches: list[int], dtype: str = "bf16"
) -> pd.DataFrame:
    """``latency.fusion``, with what recorded rows of the arch say: best pair minus fused.

    Raises:
        MisuseError: no model for the arch.
    """
    from mlakit.sweep.calibrate import measured_fusion

    frame = latency.fusion(arch, widths, batches, dtype)
    rows = chapters.recorded(arch)
    if rows.empty:
        return frame
    found = measured_fusion(rows, widths, dtype)
    return frame.merge(found, on="m", how="left") if len(found) else frame


def errors() -> pd.DataFrame:
    """Every known error of the model: arch, device, path, median and ninth decile, scored on."""
    rows = []
    for arch in ("cpu", "sm_90", *STORY):
        for line in latency.error_lines(arch):
            rows.append({"arch": arch} | line)
    others = [a for a in archs.known() if a not in {r["arch"] for r in rows}]
    rows += [
        {"arch": a, "path": "all", "scored_on": "unknown: nothing to score on"} for a in others
    ]
    return pd.DataFrame(rows)


def against_published(arch: str) -> pd.DataFrame:
    """Published single norms of an AMD arch beside the model's figures; empty where none are."""
    from mlakit.sweep.published import score_published

    scored = score_published()
    columns = "device op kv_lora_rank m p50_us modelled_us error_pct source".split()
    return scored.loc[scored["arch"] == archs.base_name(arch), columns].reset_index(drop=True)


def fusion_everywhere(widths: Widths, batches: list[int], dtype: str = "bf16") -> pd.DataFrame:
    """What one launch saved buys on every arch: us and % at each M, where the two meet, error."""
    rows = []
    for arch in archs.known():
        try:
            frame = latency.fusion(arch, widths, batches, dtype)
        except MisuseError as reason:
            rows.append({"arch": arch, "note": str(reason)})
            continue
        row: dict = {"arch": arch}
        for r in frame.itertuples():
            row[f"M={r.m}"] = f"{r.saved_us:.2g} us ({r.saved_pct:.0f} %)"
        row["level_from_m"] = latency.meeting_m(arch, widths, dtype)
        row |= {"error_pct": frame["error_pct"].iloc[0], "note": frame["outside"].iloc[-1]}
        rows.append(row | {"evidence": "modelled"})
    return pd.DataFrame(rows)
