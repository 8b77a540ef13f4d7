"""Explorers for JupyterLab: turn a control, see what changes. Plain ipywidgets, nothing to build.

Each explorer is a function that makes its controls; what it shows is made by a *view*, a pure
function from the controls' values to HTML. The same figures stand in ``mlakit.plots``: every
explorer has a static twin, for a report or for a page without a kernel.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import pandas as pd

from mlakit import archs, plots, shapes
from mlakit.context import QUANTS, WEIGHT_DTYPES, Context
from mlakit.errors import MisuseError, RefusedError
from mlakit.records import CONTROLS, EVIDENCE, with_figure
from mlakit.report import chapters, show

if TYPE_CHECKING:
    from ipywidgets import VBox

_STYLE = """<style>.mlakit table{border-collapse:collapse}.mlakit td,.mlakit th{padding:.15em .6em;
text-align:left;border-bottom:1px solid #8888}.mlakit caption{text-align:left;font-weight:600}
.mlakit .bad{color:#b3261e}.mlakit img{max-width:100%;background:#fff}</style>"""


def _say(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{html.escape(text)}</p>'


def _explorer(key: str, title: str, controls: dict, view: Callable[..., str]) -> VBox:
    """Controls above, ``view(**their values)`` below; a refusal is one line, never a traceback."""
    import ipywidgets as w

    shown, turn = w.HTML(), threading.RLock()

    def refresh(_=None) -> None:
        # The lab may send each control's change to a thread of its own: whoever comes last must
        # read the values last, or an older view would overwrite the newer one.
        with turn:
            try:
                body = view(**{name: control.value for name, control in controls.items()})
            except (MisuseError, RefusedError) as error:
                body = _say(str(error), "bad")
            shown.value = f'{_STYLE}<div class="mlakit" role="status">{body}</div>'

    for name, control in controls.items():
        control.style.description_width = "initial"
        control.add_class(f"mlakit-{key}-{name}")
        control.observe(refresh, "value")
    refresh()
    flow = w.Layout(flex_flow="row wrap")
    heading = w.HTML(f"<h3>{html.escape(title)}</h3>")
    return w.VBox([heading, w.Box(list(controls.values()), layout=flow), shown])


def _choice(description: str, options, value=None):
    import ipywidgets as w

    options = list(options)
    return w.Dropdown(description=description, options=options, value=value or options[0])


def _models() -> list[str]:
    return [m.name for m in shapes.models() if m.q_lora_rank]


# ---- dispatch


def dispatch(arch: str = "gfx950") -> VBox:
    """Turn the flags of one call; two rules' paths and reasons stand side by side.

    Static twin: ``plots.dispatch_matrix``.
    """
    import ipywidgets as w

    from mlakit.dispatch.policies import ALIASES, POLICIES

    rules = [*ALIASES, *POLICIES]
    amd = archs.vendor_of(arch) == "amd"
    controls = {
        "arch": _choice("arch", archs.known(), arch),
        "m": w.SelectionSlider(description="rows M", options=[2**i for i in range(16)], value=64),
        "weight_dtype": _choice("weights", WEIGHT_DTYPES),
        "aiter": w.Checkbox(description="AITER in use", value=amd),
        "capture": w.Checkbox(description="graph capture"),
        "second_stream": w.Checkbox(description="second stream"),
        "before": _choice("rule", rules, "sglang_before_fix"),
        "after": _choice("against", rules, "sglang_after_fix"),
    }
    return _explorer("dispatch", "Which path, and why", controls, dispatch_view)


def dispatch_view(
    arch: str,
    m: int = 64,
    weight_dtype: str = "bf16",
    aiter: bool = False,
    capture: bool = False,
    second_stream: bool = False,
    before: str = "sglang_before_fix",
    after: str = "sglang_after_fix",
) -> str:
    """What both rules pick for one call, whether that differs, and every path's reason.

    Raises:
        MisuseError: a call that cannot be, such as AITER on an NVIDIA card.
    """
    from mlakit.dispatch.explain import explain

    streams = frozenset({"SGLANG_ROCM_USE_MULTI_STREAM"}) if second_stream else frozenset()
    given = {"arch": arch, "m": m, "weight_dtype": weight_dtype, "use_aiter": aiter}
    given |= {"aiter_api": "pair" if aiter else "", "capture": capture, "switches": streams}
    call = Context(**given)
    found = {rule: explain(call, rule) for rule in dict.fromkeys((before, after))}
    rows = [
        {"rule": r, "path": e.choice.path, "launches": e.choice.launches, "why": e.choice.reason}
        for r, e in found.items()
    ]
    old, new = found[before].choice, found[after].choice
    was, is_now = (f"{c.path} (launches: {c.launches})" for c in (old, new))
    said = f"{was} becomes {is_now}." if was != is_now else f"No difference: both take {was}."
    frame = pd.DataFrame([{"context": f"{arch}, M = {m}", "policy": r["rule"], **r} for r in rows])
    here = found[after].here
    return (
        f"<p><strong>{html.escape(said)}</strong></p>"
        + show.table_html(pd.DataFrame(rows), "The two rules on this call")
        + show.picture(plots.dispatch_matrix(frame), said)
        + _say(f"Runs on this machine: {'yes' if here is None else 'no, ' + here}.")
        + show.table_html(pd.DataFrame(found[after].to_rows()), f"Every path, under {after}")
    )


# ---- speed


_LANE = ["device", "dtype", "quant", "layout", "clock", "cache"]


def lanes(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows by what may share a figure: one device, dtype, quant, layout, clock and cache."""
    if not len(rows):
        return {}
    groups = with_figure(rows).groupby(_LANE, sort=False)
    return {" · ".join(k): part for k, part in groups}


VIEWS = ("heat map", "time", "crossover", "roofline")


def speed(rows: pd.DataFrame | None = None) -> VBox:
    """Arch, M and widths as a heat map; crossover and roofline; filtered by evidence.

    Args:
        rows: timing rows, such as ``mlakit.read_rows(run)``; the committed ones by default.

    Static twins: ``plots.heat``, ``plots.latency``, ``plots.speedup``, ``plots.roofline``.
    """
    import ipywidgets as w

    rows = chapters.recorded() if rows is None else rows
    found = lanes(rows)
    kinds = sorted(set(rows["evidence"])) if len(rows) else EVIDENCE[:2]
    pairs = sorted({_pair(r) for r in rows.itertuples()}) if len(rows) else ["1536+512"]
    fullest = max(found, key=lambda lane: len(found[lane]), default=None)
    controls = {
        "lane": _choice("measured on", found or ["nothing recorded"], fullest),
        "figure": w.ToggleButtons(options=VIEWS),
        "hidden": _choice("q + kv", pairs, "1536+512" if "1536+512" in pairs else None),
        "evidence": w.SelectMultiple(description="evidence", options=kinds, value=tuple(kinds)),
    }
    return _explorer("speed", "How fast", controls, lambda **given: speed_view(found, **given))


def _pair(row) -> str:
    return f"{row.q_lora_rank}+{row.kv_lora_rank}"


def speed_view(
    found: dict[str, pd.DataFrame], lane: str, figure: str, hidden: str, evidence: tuple[str, ...]
) -> str:
    """One figure of one lane, and the sentence that it shows."""
    if lane not in found:
        return _say(
            "No time is recorded here. Measure with `mlakit sweep`, then open "
            "speed(mlakit.read_rows(run)).",
            "bad",
        )
    rows = found[lane]
    rows = rows[rows["evidence"].isin(evidence)]
    if rows.empty:
        return _say("No row has the evidence asked for: choose another kind.", "bad")
    one = rows[[_pair(r) == hidden for r in rows.itertuples()]]
    arch = rows["arch"].iloc[0]
    if figure == "heat map":
        return show.picture(plots.heat(rows, lane), f"What fusing is worth by widths and M, {lane}")
    if figure == "time":
        return show.picture(plots.latency(one, f"{hidden}, {lane}"), f"Time against M at {hidden}")
    if figure == "crossover":
        said = crossover(one)
        return _say(said) + show.picture(plots.speedup(one, f"{hidden}, {lane}"), said)
    sheet = None if arch == "cpu" else archs.arch(arch).hbm_gbps
    return show.picture(
        plots.roofline(one, sheet, f"{hidden}, {lane}"), f"GB/s against bytes, {hidden}"
    )


def crossover(rows: pd.DataFrame) -> str:
    """Which path is fastest at each M, as one sentence of stretches."""
    peers = rows[~rows["path_ran"].isin(CONTROLS) & rows["p50_us"].notna()]
    if peers.empty:
        return "No path has a time at these widths."
    best = peers.loc[peers.groupby("m")["p50_us"].idxmin()].sort_values("m")
    said = chapters.stretches(zip(best["m"], best["path_ran"], strict=True))
    return f"Fastest ({best['evidence'].iloc[0]}): {said}."


# ---- drift


def drift() -> VBox:
    """Two orders of rounding, or paths on this CPU, held against float64 on one kind of input.

    Static twin: ``plots.error_histogram``.
    """
    import ipywidgets as w

    from mlakit.inputs import FAMILIES
    from mlakit.rounding import ROUNDINGS

    ways = ["path: torch_native", "path: torch_rms_norm", *(f"formula: {n}" for n in ROUNDINGS)]
    controls = {
        "one": _choice("way", ways, "formula: round_once"),
        "other": _choice("against", ways, "formula: truncate"),
        "family": _choice("inputs", [f for f in FAMILIES if f != "nonfinite"]),
        "dtype": _choice("dtype", ["bf16", "fp16"]),
        "model": _choice("model", _models(), "DeepSeek-V3"),
        "m": w.SelectionSlider(description="rows M", options=[16, 64, 256, 512], value=64),
    }
    return _explorer("drift", "How far from float64", controls, drift_view)


def drift_view(one: str, other: str, family: str, dtype: str, model: str, m: int) -> str:
    """Ulp histogram and figures of two ways, q's output; each with its evidence."""
    from mlakit.drift.ulp import compare
    from mlakit.inputs import make
    from mlakit.paths import registry
    from mlakit.rounding import ROUNDINGS, oracle

    given = make(m, shapes.parse_hidden(model), dtype, family=family)
    want = oracle(given.q, given.q_weight, given.q_eps)
    bars, lines = [], []
    for way in dict.fromkeys((one, other)):
        kind, name = way.split(": ")
        if kind == "path":
            got, evidence = registry.get(name).call(*given.args)[0], "measured"
        else:
            got = ROUNDINGS[name](given.q, given.q_weight, given.q_eps)
            evidence = "emulated"
        found = compare(got, want)
        bars += found.bars(name, evidence)
        keep = "share_correct max_ulp signed_bias bias_se rel_l2 elements".split()
        lines.append({"way": way, "evidence": evidence, **{k: getattr(found, k) for k in keep}})
    alt = f"Ulps from float64 rounded once, {one} and {other}, {family} inputs"
    figure = plots.error_histogram(pd.DataFrame(bars), f"{family} inputs, {dtype}, {model}")
    return show.picture(figure, alt) + show.table_html(pd.DataFrame(lines), "Against float64")


# ---- codegen


def codegen(arch: str = "gfx950", other: str = "gfx942") -> VBox:
    """The fused kernel on two arches: its config, and, once compiled, what it uses and differs in.

    Static twin: ``plots.kernel_resources``.
    """
    import ipywidgets as w

    from mlakit.codegen.compile import ARCHS

    controls = {
        "arch": _choice("arch", ARCHS, arch),
        "other": _choice("against", ARCHS, other),
        "model": _choice("model", _models(), "DeepSeek-V3"),
        "quant": _choice("deliver q as", QUANTS),
        "m": w.SelectionSlider(description="rows M", options=[1, 64, 1024, 8192], value=64),
        "build": w.ToggleButton(description="compile"),
    }
    return _explorer("codegen", "What the compiler makes of it", controls, codegen_view)


def codegen_view(arch: str, other: str, model: str, quant: str, m: int, build: bool) -> str:
    """Configs of both; with ``build``, resources and the diff of their instructions.

    Raises:
        MisuseError: nothing can be compiled here, or a kernel does not compile.
    """
    from mlakit.codegen import shipped

    widths = shapes.parse_hidden(model)
    both = tuple(dict.fromkeys((arch, other)))
    asked = [shipped.request(a, widths, m=m, quant=quant) for a in both]
    knobs = pd.DataFrame([{"arch": r.arch, **r.arguments["config"]} for r in asked])
    page = show.table_html(knobs, "The heuristic's config")
    return page + (_compiled(both, widths, quant, m) if build else "")


@cache
def _compiled(both: tuple[str, ...], widths: shapes.Widths, quant: str, m: int) -> str:
    from mlakit.codegen import compile as compiler
    from mlakit.codegen import resources, shipped

    frame = resources.table([widths], arch_names=both, quant=quant, m=m)
    keep = "arch vgprs sgprs lds_bytes waves_per_simd limited_by wide_share bf16_convert".split()
    page = show.picture(
        plots.kernel_resources(frame), f"Resources on {' and '.join(both)}, compiled"
    )
    page += show.table_html(frame[[*keep, "instructions", "evidence"]], "Read off the compiler")
    made = compiler.compile_many([shipped.request(a, widths, m=m, quant=quant) for a in both])
    lines = resources.diff(made[0], made[-1])
    text = html.escape("\n".join(lines[:400]))
    return (
        page + f"<details><summary>{len(lines)} lines differ</summary><pre>{text}</pre></details>"
    )


# ---- tokens


def tokens() -> VBox:
    """What microseconds saved in each layer are worth in token/s, and what a claim implies.

    Static twin: ``plots.amdahl``.
    """
    import ipywidgets as w

    wide = w.Layout(width="28em")
    controls = {
        "saved_us": w.FloatSlider(1.44, min=-2, max=10, step=0.01, description="us a layer saved"),
        "layers": w.IntSlider(61, min=1, max=128, description="layers with the step"),
        "tokens_per_s": w.FloatSlider(90.12, min=5, max=500, step=0.01, description="token/s"),
        "claimed": w.FloatSlider(90.84, min=5, max=500, step=0.01, description="claimed after"),
    }
    for slider in controls.values():
        slider.layout = wide
    return _explorer("tokens", "From microseconds to tokens", controls, tokens_view)


def tokens_view(saved_us: float, layers: int, tokens_per_s: float, claimed: float) -> str:
    """Both directions, modelled: the gain of a saving, and the saving behind a claim.

    Raises:
        MisuseError: a saving that is the whole step.
    """
    from mlakit.drift.evals import throughput
    from mlakit.models import amdahl

    gain = amdahl.tokens(saved_us, layers, 1e6 / tokens_per_s)
    implied = amdahl.saving(tokens_per_s, claimed, layers)
    return (
        _say(
            f"{saved_us:+.2f} us in each of {layers} layers: {tokens_per_s:.2f} to "
            f"{gain.after.value:.2f} token/s ({gain.ratio.value - 1:+.2%}), modelled."
        )
        + _say(
            f"{tokens_per_s:.2f} to {claimed:.2f} token/s would be "
            f"{implied.layer_us.value:+.2f} us a layer, {implied.step_us.value:+.0f} us a token."
        )
        + _say(f"The judge: {throughput(tokens_per_s, claimed).text}.")
    )
