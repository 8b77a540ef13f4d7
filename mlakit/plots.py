"""Every figure: a function from a frame of rows to a matplotlib figure. One style for all.

Colours are Okabe and Ito's eight (safe for the common colour-blindnesses); the marker says the
evidence; bands and bars are 20-80 % quantiles or 95 % intervals, and the axis label says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlakit.records import CONTROLS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = {
    "measured": "o",
    "recorded": "s",
    "published": "D",
    "modelled": "^",
    "compiled": "P",
    "emulated": "X",
}
LINES = ("-", "--", ":")
CONTROL_STYLE = {"color": "#777777", "linewidth": 1.0, "linestyle": ":"}

STYLE = {
    "figure.figsize": (7.2, 4.0),
    "figure.dpi": 110,
    "savefig.bbox": "tight",
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "mlakit",
}


def _new(title: str, xlabel: str, ylabel: str):
    """An empty figure in the one style; no pyplot, so no backend and no global state."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=STYLE["figure.figsize"], dpi=STYLE["figure.dpi"])
        axes = figure.add_subplot()
    axes.grid(True, alpha=0.25)
    axes.set_axisbelow(True)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _styles(names: list[str]) -> dict[str, dict]:
    """Colour and line per path: the same path looks the same in every figure of a report."""
    from mlakit.paths.registry import names as path_names

    order = [*path_names(), *(n for n in names if n not in path_names())]
    return {
        n: {
            "color": COLOURS[order.index(n) % len(COLOURS)],
            "linestyle": LINES[order.index(n) // len(COLOURS) % len(LINES)],
        }
        for n in names
    }


def _usable(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame["status"] == "ok") & frame["p50_us"].notna()]


def latency(frame: pd.DataFrame, title: str = "Time of one call") -> Figure:
    """p50_us against m, a line a path, 20-80 % band; controls are thin grey lines.

    ``frame``: timing rows of one device, one pair of widths, one clock and one cache.
    """
    rows = _usable(frame)
    figure, axes = _new(title, "batch M (rows)", "µs per call (median, 20-80 % band)")
    peers = rows[~rows["path_ran"].isin(CONTROLS)]
    styles = _styles(list(dict.fromkeys(peers["path_ran"])))
    for name, part in peers.groupby("path_ran", sort=False):
        part = part.sort_values("m")
        marker = MARKERS[part["evidence"].iloc[0]]
        axes.plot(part["m"], part["p50_us"], marker=marker, label=name, **styles[name])
        axes.fill_between(
            part["m"], part["p20_us"], part["p80_us"], alpha=0.15, color=styles[name]["color"]
        )
    for name, text in (("copy_limit", "same-traffic copy"), ("launch_floor", "launch floor")):
        part = rows[rows["path_ran"] == name].sort_values("m")
        if len(part):
            axes.plot(part["m"], part["p50_us"], label=f"{text} (control)", **CONTROL_STYLE)
    _finish(axes, log_y=True)
    return figure


def speedup(frame: pd.DataFrame, title: str = "Against the best unfused path") -> Figure:
    """ratio against m with its 95 % interval; above 1 is faster than the best unfused path."""
    rows = _usable(frame)
    rows = rows[rows["ratio"].notna() & ~rows["path_ran"].isin(CONTROLS)]
    figure, axes = _new(title, "batch M (rows)", "times as fast (paired median, 95 % interval)")
    styles = _styles(list(dict.fromkeys(rows["path_ran"])))
    for name, part in rows.groupby("path_ran", sort=False):
        part = part.sort_values("m")
        spread = [
            (part["ratio"] - part["ratio_lo"]).clip(lower=0),
            (part["ratio_hi"] - part["ratio"]).clip(lower=0),
        ]
        axes.errorbar(
            part["m"],
            part["ratio"],
            yerr=spread,
            marker=MARKERS[part["evidence"].iloc[0]],
            capsize=3,
            label=name,
            **styles[name],
        )
    axes.axhline(1.0, color="#777777", linewidth=1)
    _finish(axes, log_y=True)
    return figure


def share_of_limit(frame: pd.DataFrame, title: str = "Share of a same-traffic copy") -> Figure:
    """pct_of_limit against m: 100 % is a kernel that moves the same bytes and computes nothing."""
    rows = _usable(frame)
    rows = rows[rows["pct_of_limit"].notna() & ~rows["path_ran"].isin(CONTROLS[:3])]
    figure, axes = _new(title, "batch M (rows)", "% of the copy's speed (median)")
    styles = _styles(list(dict.fromkeys(rows["path_ran"])))
    for name, part in rows.groupby("path_ran", sort=False):
        part = part.sort_values("m")
        axes.plot(
            part["m"],
            part["pct_of_limit"],
            marker=MARKERS[part["evidence"].iloc[0]],
            label=name,
            **styles[name],
        )
    axes.axhline(100, color="#777777", linewidth=1)
    _finish(axes)
    return figure


def bias(frame: pd.DataFrame, title: str = "Signed bias against float64") -> Figure:
    """signed_bias with two standard errors, one mark a path and family; 0 is unbiased."""
    rows = frame[frame["signed_bias"].notna()].reset_index(drop=True)
    figure, axes = _new(title, "mean relative bias of magnitude, 2 standard errors", "")
    labels = [f"{r.path_ran} · {r.output} · {r.input_family}" for r in rows.itertuples()]
    figure.set_size_inches(7.2, max(2.2, 0.24 * len(labels) + 1))
    for evidence, part in rows.groupby("evidence", sort=False):
        axes.errorbar(
            part["signed_bias"],
            part.index,
            xerr=2 * part["bias_se"].fillna(0),
            fmt=MARKERS[evidence],
            color=COLOURS[list(MARKERS).index(evidence)],
            capsize=2,
            label=evidence,
        )
    axes.axvline(0, color="#777777", linewidth=1)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return figure


def correct_share(frame: pd.DataFrame, title: str = "Correctly rounded elements") -> Figure:
    """share_correct in percent, a bar a path (worst family and output of each)."""
    rows = frame[frame["share_correct"].notna()]
    worst = rows.groupby("path_ran", sort=False)["share_correct"].min() * 100
    figure, axes = _new(title, "% of elements equal to float64 rounded once (worst family)", "")
    figure.set_size_inches(7.2, max(2.0, 0.32 * len(worst) + 1))
    axes.barh(list(worst.index), worst.values, color=COLOURS[0])
    for i, value in enumerate(worst.values):
        axes.text(value, i, f" {value:.3f} %", va="center", fontsize=8)
    axes.set_xlim(0, 118)
    axes.invert_yaxis()
    return figure


def dispatch_matrix(frame: pd.DataFrame, title: str = "Which path a rule picks") -> Figure:
    """One square a context (rows: ``context``) and policy (columns: ``policy``), text = path.

    ``frame`` columns: context, policy, path, launches. Colour is the number of launches.
    """
    contexts = list(dict.fromkeys(frame["context"]))
    policies = list(dict.fromkeys(frame["policy"]))
    figure, axes = _new(title, "", "")
    figure.set_size_inches(max(7.2, 1.5 * len(policies) + 2), 0.42 * len(contexts) + 1.4)
    tints = {1: "#CFE8DC", 2: "#FBE3C8"}
    for r in frame.itertuples():
        x, y = policies.index(r.policy), contexts.index(r.context)
        tint = tints.get(r.launches, "#F3C9BC")
        axes.add_patch(_square(x, y, tint))
        axes.text(x, y, r.path, ha="center", va="center", fontsize=7.5, color="black")
    axes.set_xlim(-0.5, len(policies) - 0.5)
    axes.set_ylim(len(contexts) - 0.5, -0.5)
    axes.set_xticks(range(len(policies)), policies, fontsize=8)
    axes.set_yticks(range(len(contexts)), contexts, fontsize=8)
    axes.grid(False)
    axes.set_xlabel("green: one launch · orange: two · red: more (eager operations)")
    return figure


def heat(frame: pd.DataFrame, title: str = "What fusing is worth") -> Figure:
    """Widths by M: the fastest fused path against the best unfused one, its 95 % interval below.

    ``frame``: timing rows of one device, one clock and one cache. The mark says the evidence.
    """
    from matplotlib.colors import TwoSlopeNorm

    from mlakit.paths.registry import all_paths

    rows = _usable(frame)
    fused = [p.name for p in all_paths() if p.fused]
    rows = rows[rows["path_ran"].isin(fused) & rows["ratio"].notna()].reset_index(drop=True)
    figure, axes = _new(title, "batch M (rows)", "q + kv widths (elements)")
    shape = ["q_lora_rank", "kv_lora_rank", "m"]
    best = rows.loc[rows.groupby(shape)["p50_us"].idxmin()] if len(rows) else rows
    widths = sorted({(r.q_lora_rank, r.kv_lora_rank) for r in best.itertuples()}, key=sum)
    batches = sorted(set(best["m"]))
    figure.set_size_inches(max(7.2, 1.0 * len(batches) + 2), 0.62 * max(2, len(widths)) + 1.4)
    colour, tints = TwoSlopeNorm(1.0, 0.25, 4.0), _colormap("PuOr")
    for r in best.itertuples():
        x, y = batches.index(r.m), widths.index((r.q_lora_rank, r.kv_lora_rank))
        axes.add_patch(_square(x, y, tints(0.2 + 0.6 * (1 - float(colour(r.ratio))))))
        interval = f"{r.ratio_lo:.2f} to {r.ratio_hi:.2f}"
        axes.text(x, y - 0.1, f"{r.ratio:.2f}x", ha="center", va="center", fontsize=9)
        axes.text(x, y + 0.25, interval, ha="center", va="center", fontsize=6.5)
        axes.plot(x - 0.38, y - 0.32, MARKERS[r.evidence], color="black", markersize=4)
    axes.set_xlim(-0.5, max(1, len(batches)) - 0.5)
    axes.set_ylim(max(1, len(widths)) - 0.5, -0.5)
    axes.set_xticks(range(len(batches)), batches, fontsize=8)
    axes.set_yticks(range(len(widths)), [f"{q}+{kv}" for q, kv in widths], fontsize=8)
    axes.grid(False)
    _evidence_legend(axes, best)
    return figure


def roofline(frame: pd.DataFrame, hbm_gbps: float | None = None, title: str = "Roofline") -> Figure:
    """Bytes of one call against GB/s; roofs are the measured copy and the data sheet's memory.

    ``frame``: timing rows of one device, clock and cache. The step computes so little that memory
    is its only roof, and the launch floor the wall to its left.
    """
    rows = _usable(frame)
    rows = rows[rows["gbps"].notna() & ~rows["path_ran"].isin(CONTROLS[1:])]
    figure, axes = _new(title, "megabytes moved by one call", "GB/s (20-80 % band, log scale)")
    styles = _styles(list(dict.fromkeys(rows["path_ran"])))
    for name, part in rows.groupby("path_ran", sort=False):
        part = part.sort_values("bytes_moved")
        size = part["bytes_moved"].astype(float) / 1e6
        if name == "copy_limit":
            axes.plot(size, part["gbps"], label="same-traffic copy (control)", **CONTROL_STYLE)
            continue
        marker = MARKERS[part["evidence"].iloc[0]]
        axes.plot(size, part["gbps"], marker=marker, label=name, **styles[name])
        low, high = (
            part["bytes_moved"].astype(float) / part[c] / 1e3 for c in ("p80_us", "p20_us")
        )
        axes.fill_between(size, low, high, alpha=0.15, color=styles[name]["color"])
    if hbm_gbps:
        axes.axhline(hbm_gbps, color="black", linewidth=1, label="memory, data sheet (published)")
    _finish(axes, log_y=True, base=10)
    return figure


def error_histogram(
    frame: pd.DataFrame, title: str = "Distance from float64 rounded once"
) -> Figure:
    """Share of elements in each bin of ulps, a bar a way; + is away from zero.

    ``frame`` columns: way, bin, share, se (its standard error), evidence.
    """
    figure, axes = _new(title, "ulps from the nearest value", "% of elements (bars: 2 std. errors)")
    ways, bins = list(dict.fromkeys(frame["way"])), list(dict.fromkeys(frame["bin"]))
    width = 0.8 / max(1, len(ways))
    for i, way in enumerate(ways):
        part = frame[frame["way"] == way]
        at = [bins.index(b) + (i - (len(ways) - 1) / 2) * width for b in part["bin"]]
        bars = {"yerr": 200 * part["se"], "capsize": 2, "width": width, "color": COLOURS[i]}
        label = f"{way} ({part['evidence'].iloc[0]})"
        axes.bar(at, 100 * part["share"], label=label, hatch=("", "//", "..")[i % 3], **bars)
    axes.set_xticks(range(len(bins)), bins)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


def growth(frame: pd.DataFrame, title: str = "Divergence of the residual by layer") -> Figure:
    """rel_l2 against layer, a line a ``way``; dotted: the floor of reordered sums.

    ``frame`` columns: way, layer, rel_l2, floor, evidence.
    """
    figure, axes = _new(title, "layers run", "% of the residual's size (relative L2)")
    for i, (way, part) in enumerate(frame.groupby("way", sort=False)):
        style = {"color": COLOURS[i % len(COLOURS)]}
        label = f"{way} ({part['evidence'].iloc[0]})"
        axes.plot(part["layer"], 100 * part["rel_l2"], label=label, **style)
        axes.plot(part["layer"], 100 * part["floor"], linestyle=":", **style)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


def flips(frame: pd.DataFrame, title: str = "Answers of the small model") -> Figure:
    """Difference in accuracy with its 95 % interval, a mark a side; colour is the kind.

    ``frame``: rows of ``drift.flips``. Beside each: answers lost and won.
    """
    figure, axes = _new(title, "% of questions, 95 % interval", "questions lost, won")
    figure.set_size_inches(7.2, max(2.2, 0.24 * len(frame) + 1))
    rows = frame.reset_index(drop=True)
    for i, (kind, part) in enumerate(rows.groupby("kind", sort=False)):
        middle, half = 100 * part["difference"], 50 * (part["high"] - part["low"])
        style = {"color": COLOURS[i % len(COLOURS)], "capsize": 2, "fmt": "os^D"[i % 4]}
        axes.errorbar(middle, part.index, xerr=half, label=kind, **style)
    names = [f"{r.side}  -{r.lost} +{r.won}" for r in rows.itertuples()]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.axvline(0, color="#777777", linewidth=1)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return figure


def kernel_resources(frame: pd.DataFrame, title: str = "What the compiled kernel uses") -> Figure:
    """Registers, waves and instructions, a bar an arch; evidence is ``compiled``, no speed.

    ``frame``: rows of ``mlakit.codegen.resources.table``.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = (
        ("vgprs", "registers a lane"),
        ("waves_per_simd", "waves a SIMD holds"),
        ("instructions", "instructions (static)"),
    )
    names = [f"{r.arch} {r.hidden}" for r in frame.itertuples()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.34 * len(names) + 1.5), dpi=STYLE["figure.dpi"])
        for i, (column, label) in enumerate(panels):
            axes = figure.add_subplot(1, 3, i + 1)
            axes.barh(
                names, frame[column], color=COLOURS[i], hatch="" if column != "vgprs" else "//"
            )
            axes.set_xlabel(f"{label}\n(compiled)")
            axes.invert_yaxis()
            if i:
                axes.set_yticklabels([])
        figure.suptitle(title)
    return figure


def trend(frame: pd.DataFrame, title: str = "Against the pinned baseline") -> Figure:
    """Geometric mean of time ratios of each run against the baseline, over time.

    ``frame`` columns: at (a date), ratio, lo, hi (95 % interval; NaN where there is none), status.
    A run without a figure stands as a cross; there, and where runs are missing, the line breaks.
    """
    import numpy as np

    figure, axes = _new(
        title, "start of the run (UTC)", "time over the baseline's\n(geometric mean, 95 % interval)"
    )
    known = frame["ratio"].notna()
    good = frame[known]
    spread = [good["ratio"] - good["lo"], good["hi"] - good["ratio"]]
    apart = frame["at"].diff()
    breaks = ~known | ~known.shift(fill_value=True) | (apart > 2 * apart.median())
    for _, part in frame.groupby(breaks.cumsum()):
        axes.plot(part["at"], part["ratio"], color=COLOURS[0], linewidth=1)
    bars = {"fmt": MARKERS["measured"], "color": COLOURS[0], "capsize": 3, "label": "measured"}
    axes.errorbar(good["at"], good["ratio"], yerr=np.clip(spread, 0, None), **bars)
    if (~known).any():
        missing = frame[~known]
        at_bottom = axes.get_xaxis_transform()
        bad = {"color": COLOURS[1], "marker": "x", "linestyle": "", "label": "no figure"}
        axes.plot(missing["at"], [0.03] * len(missing), transform=at_bottom, **bad)
        for r in missing.itertuples():
            axes.axvline(r.at, color=COLOURS[1], linewidth=0.8, linestyle=":")
    axes.axhline(1.0, color="#777777", linewidth=1)
    figure.autofmt_xdate(rotation=30)
    axes.legend(fontsize=8)
    return figure


def _colormap(name: str):
    import matplotlib

    return matplotlib.colormaps[name]


def _evidence_legend(axes, rows: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    kinds = list(dict.fromkeys(rows["evidence"])) if len(rows) else []
    if not kinds:
        axes.text(0.5, 0.5, "no figures to show", transform=axes.transAxes, ha="center")
        return
    marks = [Line2D([], [], color="black", linestyle="", marker=MARKERS[k], label=k) for k in kinds]
    axes.legend(handles=marks, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _square(x: int, y: int, tint: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=tint)


def _finish(axes, log_y: bool = False, base: int = 2) -> None:
    """Powers of ``base`` along x, plain numbers on both axes, legend outside the data."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    if log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: ""))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.text(0.5, 0.5, "no figures to show", transform=axes.transAxes, ha="center")


def token_gain(frame: pd.DataFrame, title: str = "Decode speed against two F.rms_norm") -> Figure:
    """gain against batch with its 95 % interval, a line a lane: 1 is the base, grey has no step."""
    rows = frame[frame["gain"].notna() & ~frame["lane"].str.startswith("twice:")]
    figure, axes = _new(
        title, "batch (sequences decoding together)", "times as fast (paired median, 95 % interval)"
    )
    styles = _styles(list(dict.fromkeys(rows["lane"]))) | {"no_step": CONTROL_STYLE}
    for name, part in rows.groupby("lane", sort=False):
        part = part.sort_values("batch")
        spread = [
            (part["gain"] - part["gain_lo"]).clip(lower=0),
            (part["gain_hi"] - part["gain"]).clip(lower=0),
        ]
        axes.errorbar(
            part["batch"],
            part["gain"],
            yerr=spread,
            marker=MARKERS[part["evidence"].iloc[0]],
            capsize=3,
            label="no step at all (control)" if name == "no_step" else name,
            **styles[name],
        )
    _finish(axes)
    return figure


def amdahl(frames: dict[str, pd.DataFrame], title: str = "What a saving is worth") -> Figure:
    """Gain in % against token/s of one sequence, a band (95 % interval) a named saving."""
    figure, axes = _new(title, "token/s of one sequence before", "more token/s (%, modelled)")
    for n, (name, part) in enumerate(frames.items()):
        colour, x = COLOURS[n % len(COLOURS)], part["tokens_per_s"]
        axes.plot(x, 100 * (part["gain"] - 1), marker=MARKERS["modelled"], color=colour, label=name)
        low, high = 100 * (part["gain_lo"] - 1), 100 * (part["gain_hi"] - 1)
        axes.fill_between(x, low, high, color=colour, alpha=0.15)
    _finish(axes)
    return figure


def microsecond(frame: pd.DataFrame, title: str = "What a microsecond is made of") -> Figure:
    """Modelled time by cause, one stacked bar a row of ``latency.breakdown``; the bar is 100 %."""
    causes = ("launch", "chain", "loaded", "waves", "kernel rate", "bandwidth")
    figure, axes = _new(title, "% of the modelled time", "")
    figure.set_size_inches(7.2, max(2.2, 0.3 * len(frame) + 1.2))
    left = [0.0] * len(frame)
    for cause, colour in zip(causes, COLOURS, strict=False):
        share = list(100 * frame[cause] / frame["us"])
        axes.barh(range(len(frame)), share, left=left, color=colour, label=cause)
        left = [a + b for a, b in zip(left, share, strict=True)]
    labels = [f"{r.path} · M={r.m}: {r.us:.3g} us" for r in frame.itertuples()]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def fusion(frame: pd.DataFrame, title: str = "What the launch saved buys") -> Figure:
    """saved_us against m: modelled, and measured where the frame has ``measured_saved_us``."""
    figure, axes = _new(title, "batch M (rows)", "microseconds saved by one launch instead of two")
    style = {"marker": MARKERS["modelled"], "color": COLOURS[0], "label": "modelled"}
    axes.plot(frame["m"], frame["saved_us"], **style)
    if "measured_saved_us" in frame:
        axes.plot(
            frame["m"],
            frame["measured_saved_us"],
            marker=MARKERS["recorded"],
            color=COLOURS[1],
            label="recorded (best pair)",
        )
    axes.axhline(0, color="#777777", linewidth=1)
    _finish(axes)
    return figure


def model_error(frame: pd.DataFrame, title: str = "The model on cells it never saw") -> Figure:
    """modelled_us over p50_us against p50_us, a colour a path; the band is 25 % either way."""
    figure, axes = _new(title, "microseconds measured or published (log)", "modelled / that")
    styles = _styles(list(dict.fromkeys(frame["path_ran"])))
    for name, part in frame.groupby("path_ran", sort=False):
        axes.plot(
            part["p50_us"],
            part["modelled_us"] / part["p50_us"],
            marker=MARKERS["modelled"],
            linestyle="",
            color=styles[name]["color"],
            label=name,
        )
    axes.axhspan(0.75, 1.25, color="#777777", alpha=0.12)
    axes.axhline(1, color="#777777", linewidth=1)
    _finish(axes, base=10)
    axes.xaxis.set_minor_formatter(axes.xaxis.get_major_formatter())
    return figure


def lane_strip(lanes, title: str = "What each instruction wrote, lane by lane") -> Figure:
    """A row an instruction, a column a lane; colour is the lane's rank within its register.

    ``lanes``: (steps, lanes) float32, NaN where nothing was written. Ranks, not values: a register
    may hold addresses in one step and a sum of squares in the next.
    """
    import numpy as np

    wrote = lanes[~np.isnan(lanes).all(axis=1)]
    order = np.argsort(np.argsort(np.where(np.isnan(wrote), np.inf, wrote), axis=1), axis=1)
    equal = (wrote == wrote[:, :1]) | (np.isnan(wrote) & np.isnan(wrote[:, :1]))
    rank = np.where(equal.all(axis=1, keepdims=True), 0.0, order / max(1, order.shape[1] - 1))
    figure, axes = _new(title, "lane of the wave", "instructions that wrote a vector register")
    figure.set_size_inches(7.2, 5.0)
    image = axes.imshow(np.where(np.isnan(wrote), np.nan, rank), aspect="auto", cmap="cividis")
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="rank within the register (0: all lanes equal)")
    return figure
