"""Every figure: a function from a frame of rows to a matplotlib figure.

Bands and bars are 20-80 % quantiles or 95 % intervals, and the axis label says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlakit.plot_style import (
    BATCH,
    COLOURS,
    INTERVAL,
    LEVEL,
    MARKERS,
    finish,
    legend,
    lines,
    new,
    path_style,
    square,
    squares,
    ticks,
)
from mlakit.records import CONTROLS, with_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# ---- time


def latency(frame: pd.DataFrame, title: str = "Time of one call") -> Figure:
    """p50_us against m, a line a path, 20-80 % band; controls are thin grey lines.

    ``frame``: timing rows of one device, one pair of widths, one clock and one cache.
    """
    rows = with_figure(frame)
    figure, axes = new(title, BATCH, "µs per call (median, 20-80 % band)")
    rows = rows[~rows["path_ran"].isin(CONTROLS[2:])]
    lines(axes, rows, "m", "p50_us", band=("p20_us", "p80_us"))
    finish(axes, log_y=True)
    return figure


def speedup(frame: pd.DataFrame, title: str = "Against the best unfused path") -> Figure:
    """ratio against m with its 95 % interval; above 1 is faster than the best unfused path."""
    rows = with_figure(frame)
    rows = rows[rows["ratio"].notna() & ~rows["path_ran"].isin(CONTROLS)]
    figure, axes = new(title, BATCH, INTERVAL)
    lines(axes, rows, "m", "ratio", bars=("ratio_lo", "ratio_hi"))
    axes.axhline(1.0, **LEVEL)
    finish(axes, log_y=True)
    return figure


def share_of_limit(frame: pd.DataFrame, title: str = "Share of a same-traffic copy") -> Figure:
    """pct_of_limit against m: 100 % is a kernel that moves the same bytes and computes nothing."""
    rows = with_figure(frame)
    rows = rows[rows["pct_of_limit"].notna() & ~rows["path_ran"].isin(CONTROLS[:3])]
    figure, axes = new(title, BATCH, "% of the copy's speed (median)")
    lines(axes, rows, "m", "pct_of_limit")
    axes.axhline(100, **LEVEL)
    finish(axes)
    return figure


def heat(frame: pd.DataFrame, title: str = "What fusing is worth") -> Figure:
    """Widths by M: the fastest fused path against the best unfused one, its 95 % interval below.

    ``frame``: timing rows of one device, one clock and one cache. The mark says the evidence.
    """
    import matplotlib
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.lines import Line2D

    from mlakit.paths.registry import all_paths

    rows = with_figure(frame)
    fused = [p.name for p in all_paths() if p.fused]
    rows = rows[rows["path_ran"].isin(fused) & rows["ratio"].notna()].reset_index(drop=True)
    shape = ["q_lora_rank", "kv_lora_rank", "m"]
    best = rows.loc[rows.groupby(shape)["p50_us"].idxmin()] if len(rows) else rows
    widths = sorted({(r.q_lora_rank, r.kv_lora_rank) for r in best.itertuples()}, key=sum)
    batches = sorted(set(best["m"]))
    height = 0.62 * max(2, len(widths)) + 1.4
    figure, axes = new(title, BATCH, "q + kv widths (elements)", height)
    figure.set_figwidth(max(7.2, 1.0 * len(batches) + 2))
    squares(axes, batches, [f"{q}+{kv}" for q, kv in widths])
    colour, tints = TwoSlopeNorm(1.0, 0.25, 4.0), matplotlib.colormaps["PuOr"]
    for r in best.itertuples():
        x, y = batches.index(r.m), widths.index((r.q_lora_rank, r.kv_lora_rank))
        tint = tints(0.2 + 0.6 * (1 - float(colour(r.ratio))))
        square(axes, x, y, tint, f"{r.ratio:.2f}x", 9, up=0.1)
        interval = f"{r.ratio_lo:.2f} to {r.ratio_hi:.2f}"
        axes.text(x, y + 0.25, interval, ha="center", va="center", fontsize=6.5)
        axes.plot(x - 0.38, y - 0.32, MARKERS[r.evidence], color="black", markersize=4)
    black = {"color": "black", "linestyle": ""}
    kinds = dict.fromkeys(best["evidence"])
    marks = [Line2D([], [], marker=MARKERS[k], label=k, **black) for k in kinds]
    legend(axes, **({"handles": marks} if marks else {}))
    return figure


def roofline(frame: pd.DataFrame, hbm_gbps: float | None = None, title: str = "Roofline") -> Figure:
    """Bytes of one call against GB/s; roofs are the measured copy and the data sheet's memory.

    ``frame``: timing rows of one device, clock and cache. The step computes so little that memory
    is its only roof, and the launch floor the wall to its left.
    """
    rows = with_figure(frame)
    rows = rows[rows["gbps"].notna() & ~rows["path_ran"].isin(CONTROLS[1:])]
    moved = rows["bytes_moved"].astype(float)
    rows = rows.assign(mb=moved / 1e6, low=moved / rows["p80_us"] / 1e3)
    rows = rows.assign(high=moved / rows["p20_us"] / 1e3)
    figure, axes = new(title, "megabytes moved by one call", "GB/s (20-80 % band, log scale)")
    lines(axes, rows, "mb", "gbps", band=("low", "high"))
    if hbm_gbps:
        axes.axhline(hbm_gbps, color="black", linewidth=1, label="memory, data sheet (published)")
    finish(axes, log_y=True, base=10)
    return figure


def trend(frame: pd.DataFrame, title: str = "Against the pinned baseline") -> Figure:
    """Geometric mean of time ratios of each run against the baseline, over time.

    ``frame`` columns: at (a date), ratio, lo, hi (95 % interval; NaN where there is none), status.
    A run without a figure stands as a cross; there, and where runs are missing, the line breaks.
    """
    import numpy as np

    label = "time over the baseline's\n(geometric mean, 95 % interval)"
    figure, axes = new(title, "start of the run (UTC)", label)
    known = frame["ratio"].notna()
    good, missing = frame[known], frame[~known]
    apart = frame["at"].diff()
    breaks = ~known | ~known.shift(fill_value=True) | (apart > 2 * apart.median())
    for _, part in frame.groupby(breaks.cumsum()):
        axes.plot(part["at"], part["ratio"], color=COLOURS[0], linewidth=1)
    spread = np.clip([good["ratio"] - good["lo"], good["hi"] - good["ratio"]], 0, None)
    bars = {"fmt": MARKERS["measured"], "color": COLOURS[0], "capsize": 3, "label": "measured"}
    axes.errorbar(good["at"], good["ratio"], yerr=spread, **bars)
    if len(missing):
        bad = {"color": COLOURS[1], "marker": "x", "linestyle": "", "label": "no figure"}
        axes.plot(missing["at"], [0.03] * len(missing), transform=axes.get_xaxis_transform(), **bad)
    for at in missing["at"]:
        axes.axvline(at, color=COLOURS[1], linewidth=0.8, linestyle=":")
    axes.axhline(1.0, **LEVEL)
    figure.autofmt_xdate(rotation=30)
    legend(axes, beside=False)
    return figure


# ---- drift


def bias(frame: pd.DataFrame, title: str = "Signed bias against float64") -> Figure:
    """signed_bias with two standard errors, one mark a path and family; 0 is unbiased."""
    rows = frame[frame["signed_bias"].notna()].reset_index(drop=True)
    labels = [f"{r.path_ran} · {r.output} · {r.input_family}" for r in rows.itertuples()]
    height = max(2.2, 0.24 * len(labels) + 1)
    figure, axes = new(title, "mean relative bias of magnitude, 2 standard errors", "", height)
    for evidence, part in rows.groupby("evidence", sort=False):
        error = 2 * part["bias_se"].fillna(0)
        look = {"fmt": MARKERS[evidence], "color": COLOURS[list(MARKERS).index(evidence)]}
        look |= {"capsize": 2, "label": evidence}
        axes.errorbar(part["signed_bias"], part.index, xerr=error, **look)
    axes.axvline(0, **LEVEL)
    ticks(axes, labels)
    legend(axes, beside=False)
    return figure


def correct_share(frame: pd.DataFrame, title: str = "Correctly rounded elements") -> Figure:
    """share_correct in percent, a bar a path (worst family and output of each)."""
    rows = frame[frame["share_correct"].notna()]
    worst = rows.groupby("path_ran", sort=False)["share_correct"].min() * 100
    height = max(2.0, 0.32 * len(worst) + 1)
    label = "% of elements equal to float64 rounded once (worst family)"
    figure, axes = new(title, label, "", height)
    axes.barh(range(len(worst)), worst.values, color=COLOURS[0])
    for i, value in enumerate(worst.values):
        axes.text(value, i, f" {value:.3f} %", va="center", fontsize=8)
    axes.set_xlim(0, 118)
    ticks(axes, list(worst.index))
    return figure


def error_histogram(
    frame: pd.DataFrame, title: str = "Distance from float64 rounded once"
) -> Figure:
    """Share of elements in each bin of ulps, a bar a way; + is away from zero.

    ``frame`` columns: way, bin, share, se (its standard error), evidence.
    """
    figure, axes = new(title, "ulps from the nearest value", "% of elements (bars: 2 std. errors)")
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
    legend(axes, beside=False)
    return figure


def growth(frame: pd.DataFrame, title: str = "Divergence of the residual by layer") -> Figure:
    """rel_l2 against layer, a line a ``way``; dotted: the floor of reordered sums.

    ``frame`` columns: way, layer, rel_l2, floor, evidence.
    """
    figure, axes = new(title, "layers run", "% of the residual's size (relative L2)")
    for i, (way, part) in enumerate(frame.groupby("way", sort=False)):
        style = {"color": COLOURS[i % len(COLOURS)]}
        label = f"{way} ({part['evidence'].iloc[0]})"
        axes.plot(part["layer"], 100 * part["rel_l2"], label=label, **style)
        axes.plot(part["layer"], 100 * part["floor"], linestyle=":", **style)
    axes.set_ylim(bottom=0)
    legend(axes, beside=False)
    return figure


def flips(frame: pd.DataFrame, title: str = "Answers of the small model") -> Figure:
    """Difference in accuracy with its 95 % interval, a mark a side; colour is the kind.

    ``frame``: rows of ``drift.flips``. Beside each: answers lost and won.
    """
    height = max(2.2, 0.24 * len(frame) + 1)
    figure, axes = new(title, "% of questions, 95 % interval", "questions lost, won", height)
    rows = frame.reset_index(drop=True)
    for i, (kind, part) in enumerate(rows.groupby("kind", sort=False)):
        middle, half = 100 * part["difference"], 50 * (part["high"] - part["low"])
        style = {"color": COLOURS[i % len(COLOURS)], "capsize": 2, "fmt": "os^D"[i % 4]}
        axes.errorbar(middle, part.index, xerr=half, label=kind, **style)
    axes.axvline(0, **LEVEL)
    ticks(axes, [f"{r.side}  -{r.lost} +{r.won}" for r in rows.itertuples()])
    legend(axes, beside=False)
    return figure


# ---- dispatch and code


def dispatch_matrix(frame: pd.DataFrame, title: str = "Which path a rule picks") -> Figure:
    """One square a context (rows: ``context``) and policy (columns: ``policy``), text = path.

    ``frame`` columns: context, policy, path, launches. Colour is the number of launches.
    """
    contexts = list(dict.fromkeys(frame["context"]))
    policies = list(dict.fromkeys(frame["policy"]))
    label = "green: one launch · orange: two · red: more (eager operations)"
    figure, axes = new(title, label, "", 0.42 * len(contexts) + 1.4)
    figure.set_figwidth(max(7.2, 1.5 * len(policies) + 2))
    squares(axes, policies, contexts)
    tints = {1: "#CFE8DC", 2: "#FBE3C8"}
    for r in frame.itertuples():
        tint = tints.get(r.launches, "#F3C9BC")
        square(axes, policies.index(r.policy), contexts.index(r.context), tint, r.path, 7.5)
    return figure


def kernel_resources(frame: pd.DataFrame, title: str = "What the compiled kernel uses") -> Figure:
    """Registers, waves and instructions, a bar an arch; evidence is ``compiled``, no speed.

    ``frame``: rows of ``mlakit.codegen.resources.table``.
    """
    figure, first = new("", "", "", 0.34 * len(frame) + 1.5)
    first.remove()
    names = [f"{r.arch} {r.hidden}" for r in frame.itertuples()]
    panels = (
        ("vgprs", "registers a lane"),
        ("waves_per_simd", "waves a SIMD holds"),
        ("instructions", "instructions (static)"),
    )
    for i, (column, label) in enumerate(panels):
        axes = figure.add_subplot(1, 3, i + 1)
        axes.barh(range(len(names)), frame[column], color=COLOURS[i], hatch="" if i else "//")
        axes.set_xlabel(f"{label}\n(compiled)")
        ticks(axes, [""] * len(names) if i else names)
    figure.suptitle(title)
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
    label = "instructions that wrote a vector register"
    figure, axes = new(title, "lane of the wave", label, 5.0)
    image = axes.imshow(np.where(np.isnan(wrote), np.nan, rank), aspect="auto", cmap="cividis")
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="rank within the register (0: all lanes equal)")
    return figure


# ---- the model, and tokens


def token_gain(frame: pd.DataFrame, title: str = "Decode speed against two F.rms_norm") -> Figure:
    """gain against batch with its 95 % interval, a line a lane: 1 is the base, grey has no step."""
    rows = frame[frame["gain"].notna() & ~frame["lane"].str.startswith("twice:")]
    figure, axes = new(title, "batch (sequences decoding together)", INTERVAL)
    lines(axes, rows, "batch", "gain", bars=("gain_lo", "gain_hi"), by="lane")
    finish(axes)
    return figure


def amdahl(frames: dict[str, pd.DataFrame], title: str = "What a saving is worth") -> Figure:
    """Gain in % against token/s of one sequence, a band (95 % interval) a named saving."""
    figure, axes = new(title, "token/s of one sequence before", "more token/s (%, modelled)")
    for n, (name, part) in enumerate(frames.items()):
        colour, x = COLOURS[n % len(COLOURS)], part["tokens_per_s"]
        gain, low, high = (100 * (part[c] - 1) for c in ("gain", "gain_lo", "gain_hi"))
        axes.plot(x, gain, marker=MARKERS["modelled"], color=colour, label=name)
        axes.fill_between(x, low, high, color=colour, alpha=0.15)
    finish(axes)
    return figure


def microsecond(frame: pd.DataFrame, title: str = "What a microsecond is made of") -> Figure:
    """Modelled time by cause, one stacked bar a row of ``latency.breakdown``; the bar is 100 %."""
    causes = ("launch", "chain", "loaded", "waves", "kernel rate", "bandwidth")
    figure, axes = new(title, "% of the modelled time", "", max(2.2, 0.3 * len(frame) + 1.2))
    share = frame[list(causes)].div(frame["us"], axis=0) * 100
    left = share.cumsum(axis=1) - share
    for cause, colour in zip(causes, COLOURS, strict=False):
        look = {"left": left[cause], "color": colour, "label": cause}
        axes.barh(range(len(frame)), share[cause], **look)
    ticks(axes, [f"{r.path} · M={r.m}: {r.us:.3g} us" for r in frame.itertuples()])
    legend(axes)
    return figure


def fusion(frame: pd.DataFrame, title: str = "What the launch saved buys") -> Figure:
    """saved_us against m: modelled, and measured where the frame has ``measured_saved_us``."""
    figure, axes = new(title, BATCH, "microseconds saved by one launch instead of two")
    kinds = (
        ("saved_us", "modelled", "modelled"),
        ("measured_saved_us", "recorded", "recorded (best pair)"),
    )
    for colour, (column, evidence, label) in zip(COLOURS, kinds, strict=False):
        if column in frame:
            look = {"marker": MARKERS[evidence], "color": colour, "label": label}
            axes.plot(frame["m"], frame[column], **look)
    axes.axhline(0, **LEVEL)
    finish(axes)
    return figure


def model_error(frame: pd.DataFrame, title: str = "The model on cells it never saw") -> Figure:
    """modelled_us over p50_us against p50_us, a colour a path; the band is 25 % either way."""
    figure, axes = new(title, "microseconds measured or published (log)", "modelled / that")
    for name, part in frame.groupby("path_ran", sort=False):
        look = path_style(name) | {"linestyle": "", "marker": MARKERS["modelled"], "label": name}
        axes.plot(part["p50_us"], part["modelled_us"] / part["p50_us"], **look)
    axes.axhspan(0.75, 1.25, color="#777777", alpha=0.12)
    axes.axhline(1, **LEVEL)
    finish(axes, base=10)
    axes.xaxis.set_minor_formatter(axes.xaxis.get_major_formatter())
    return figure
