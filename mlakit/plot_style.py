"""The one style of every figure: colours, markers of evidence, axes, legends.

Colours are Okabe and Ito's eight (safe for the common colour-blindnesses); the marker says the
evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlakit.records import CONTROLS

if TYPE_CHECKING:
    import pandas as pd

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = {
    "measured": "o", "recorded": "s", "published": "D", "modelled": "^", "compiled": "P",
    "emulated": "X",
}  # fmt: skip
_LINES = ("-", "--", ":")
_CONTROL_STYLE = {"color": "#777777", "linewidth": 1.0, "linestyle": ":"}
_CONTROL_LABELS = {
    "copy_limit": "same-traffic copy (control)",
    "launch_floor": "launch floor (control)",
    "no_step": "no step at all (control)",
    "copy_plain": "same-traffic copy, launches apart (control)",
    "fused_plain": "fused, launches apart (control)",
    "fused_early": "fused, launches overlapping (control)",
    "pair_plain": "pair, launches apart (control)",
    "pair_early": "pair, launches overlapping (control)",
}
_CONTROL_LINES = {"fused": "--", "pair": "-."}
LEVEL = {"color": "#777777", "linewidth": 1}
BATCH = "batch M (rows)"
INTERVAL = "times as fast (paired median, 95 % interval)"


def new(title: str, xlabel: str, ylabel: str, height: float = 4.0):
    """An empty figure in the one style; no pyplot, so no backend and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), dpi=110)
    axes = figure.add_subplot()
    axes.grid(True, alpha=0.25)
    axes.set_axisbelow(True)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def path_style(name: str) -> dict:
    """Colour and line of a path: it looks the same in every figure of a report."""
    from mlakit.paths.registry import names

    if name in _CONTROL_LABELS:
        line = _CONTROL_LINES.get(name.partition("_")[0])
        return _CONTROL_STYLE | ({"linestyle": line} if line else {})
    order = [*names(), name]
    at = order.index(name)
    return {
        "color": COLOURS[at % len(COLOURS)],
        "linestyle": _LINES[at // len(COLOURS) % len(_LINES)],
    }


def lines(axes, rows: pd.DataFrame, x: str, y: str, *, band=(), bars=(), by="path_ran") -> None:
    """A line a path, its evidence as the marker; ``band`` or ``bars``: columns of low and high."""
    for name, part in rows.groupby(by, sort=False):
        part = part.sort_values(x)
        label, control = _CONTROL_LABELS.get(name, name), name in CONTROLS
        look = path_style(name) | {"label": label}
        look |= {} if control else {"marker": MARKERS[part["evidence"].iloc[0]]}
        if bars:
            apart = [part[y] - part[bars[0]], part[bars[1]] - part[y]]
            yerr = [side.clip(lower=0) for side in apart]
            axes.errorbar(part[x], part[y], yerr=yerr, capsize=3, **look)
            continue
        axes.plot(part[x], part[y], **look)
        if band and not control:
            axes.fill_between(part[x], *(part[b] for b in band), alpha=0.15, color=look["color"])


def ticks(axes, labels: list, side: str = "y") -> None:
    """One label a row, the first on top (or a column, the first at the left)."""
    getattr(axes, f"set_{side}ticks")(range(len(labels)), labels, fontsize=8)
    if side == "y":
        axes.invert_yaxis()


def legend(axes, beside: bool = True, **what) -> None:
    """The legend, beside the axes or in them; an empty figure says that it is empty."""
    if not what and not axes.get_legend_handles_labels()[0]:
        axes.text(0.5, 0.5, "no figures to show", transform=axes.transAxes, ha="center")
        return
    outside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if beside else {}
    axes.legend(fontsize=8, **outside, **what)


def finish(axes, log_y: bool = False, base: int = 2) -> None:
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
    legend(axes)


def squares(axes, columns: list, rows: list) -> None:
    """An empty grid of squares; ``square`` fills one."""
    axes.set_xlim(-0.5, max(1, len(columns)) - 0.5)
    ticks(axes, columns, "x")
    ticks(axes, rows)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.grid(False)


def square(axes, x: int, y: int, tint, text: str, size: float, up: float = 0.0) -> None:
    """One tinted square of a grid with its text."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=tint))
    axes.text(x, y - up, text, ha="center", va="center", fontsize=size, color="black")
