"""Every figure: a function from a frame of rows to a matplotlib figure. One style for all.

Colours are Okabe and Ito's eight (safe for the common colour-blindnesses); the marker says the
evidence; bands and bars are 20-80 % quantiles or 95 % intervals, and the axis label says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    figure, axes = _new(
        title, "batch M (rows)", "microseconds per call (median, 20-80 % band, log scale)"
    )
    peers = rows[~rows["path_ran"].isin(["copy_limit", "launch_floor"])]
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
    rows = rows[rows["ratio"].notna() & ~rows["path_ran"].isin(["copy_limit", "launch_floor"])]
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
    rows = rows[rows["pct_of_limit"].notna() & (rows["path_ran"] != "copy_limit")]
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


def _square(x: int, y: int, tint: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=tint)


def _finish(axes, log_y: bool = False) -> None:
    """Powers of two along M, plain numbers on both axes, legend outside the data."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: ""))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.text(0.5, 0.5, "no figures to show", transform=axes.transAxes, ha="center")
