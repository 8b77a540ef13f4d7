"""Figures as images: each drawn from fixed rows and held against a small PNG, with a tolerance.

``MLAKIT_WRITE_IMAGES=1`` writes the baselines anew; look at them before they are committed.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from timing_rows import ON_H200, row

from mlakit import plot_style, plots

pytest.importorskip("matplotlib")
IMAGES = Path(__file__).parent / "images"
DPI = 50
TOLERANCE = 0.01
"""Mean difference of grey levels, as a share of white: fonts of another matplotlib stay under it,
a curve or a band that is missing does not."""


def timing() -> pd.DataFrame:
    rows = []
    for q, kv in ((1536, 512), (768, 256)):
        for m in (1, 64, 1024, 16384):
            moved = 4 * m * (q + kv)
            for path, factor in (("torch_rms_norm", 3.0), ("triton_fused", 1.1), ("copy_limit", 1)):
                us, more = factor * (1.5 + moved / 4e6), {"q_lora_rank": q, "kv_lora_rank": kv}
                more |= {"m": m, "bytes_moved": moved, "p80_us": 1.2 * us}
                more |= {"ratio_lo": 2.6 / factor, "ratio_hi": 3.4 / factor}
                rows.append(row(path, us, 3 / factor, **ON_H200 | more))
    return pd.DataFrame(rows)


def one_width() -> pd.DataFrame:
    rows = timing()
    return rows[rows["q_lora_rank"] == 1536]


def history() -> pd.DataFrame:
    at = pd.to_datetime(["2026-11-01", "2026-11-02", "2026-11-03", "2026-11-04", "2026-11-12"])
    ratio = np.array([1.0, 1.01, np.nan, 1.02, 1.1])
    frame = pd.DataFrame({"at": at, "ratio": ratio, "status": "ok"})
    return frame.assign(lo=ratio - 0.02, hi=ratio + 0.02)


def errors() -> pd.DataFrame:
    shares = {"round_once": (0.0, 1.0, 0.0), "truncate": (0.5, 0.5, 0.0)}
    return pd.DataFrame(
        dict(way=way, bin=b, share=s, se=0.01, evidence="emulated")
        for way, values in shares.items()
        for b, s in zip(("-1", "0", "+1"), values, strict=True)
    )


def depth() -> pd.DataFrame:
    layer = np.arange(1, 62)
    ways = (("truncate", 1.7), ("cast_then_weight", 1.3))
    parts = [
        dict(way=w, layer=layer, rel_l2=2e-3 * f * layer**0.5, floor=1.5e-3 * layer**0.5)
        for w, f in ways
    ]
    return pd.concat([pd.DataFrame(p) for p in parts]).assign(evidence="emulated")


def flips() -> pd.DataFrame:
    rows = [("truncate", "rounding", 31, 9), ("cpu_fused", "path", 0, 0)]
    frame = pd.DataFrame(rows, columns=["side", "kind", "lost", "won"])
    frame["difference"] = (frame["won"] - frame["lost"]) / 2000
    half = 1.96 * (frame["won"] + frame["lost"]) ** 0.5 / 2000
    return frame.assign(low=frame["difference"] - half, high=frame["difference"] + half)


FIGURES = {
    "growth": lambda: plots.growth(depth()),
    "flips": lambda: plots.flips(flips()),
    "heat": lambda: plots.heat(timing()),
    "latency": lambda: plots.latency(one_width()),
    "speedup": lambda: plots.speedup(one_width()),
    "roofline": lambda: plots.roofline(one_width(), 4800),
    "trend": lambda: plots.trend(history()),
    "error_histogram": lambda: plots.error_histogram(errors()),
}


def grey(figure, path: Path) -> np.ndarray:
    """The figure as (height, width) grey levels from 0 to 1, of a fixed canvas."""
    from PIL import Image

    figure.savefig(path, format="png", dpi=DPI, bbox_inches=None, metadata={"Software": None})
    with Image.open(path) as image:
        image.convert("L").quantize(16).save(path, optimize=True)
    return read(path)


def read(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("L"), dtype=float) / 255


def difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).mean())


@pytest.mark.parametrize("name", FIGURES)
def test_figure_looks_as_it_did(name, tmp_path):
    baseline = IMAGES / f"{name}.png"
    if os.environ.get("MLAKIT_WRITE_IMAGES"):
        IMAGES.mkdir(exist_ok=True)
        grey(FIGURES[name](), baseline)
    found = difference(grey(FIGURES[name](), tmp_path / "now.png"), read(baseline))
    assert found < TOLERANCE, f"{name} differs from {baseline.name} by {found:.3f} of white"


def test_baselines_are_small_and_each_is_used():
    assert {p.stem for p in IMAGES.glob("*.png")} == set(FIGURES)
    assert all(p.stat().st_size < 30_000 for p in IMAGES.glob("*.png"))


@pytest.mark.parametrize("name", ["latency", "speedup", "heat"])
def test_a_missing_part_is_seen(name, tmp_path):
    """The tolerance is not so wide that a whole path may vanish."""
    rows = timing() if name == "heat" else one_width()
    less = rows[rows["path_ran"] != "triton_fused"]
    drawn = grey(getattr(plots, name)(less), tmp_path / "less.png")
    baseline = read(IMAGES / f"{name}.png")
    assert drawn.shape != baseline.shape or difference(drawn, baseline) > TOLERANCE


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_says_its_unit(name):
    words = "rows elements microseconds times GB/s megabytes % ulps UTC interval layers questions"
    for axes in FIGURES[name]().axes:
        for label in (axes.get_xlabel(), axes.get_ylabel()):
            assert any(w in label for w in words.split()), label


def test_colours_differ_without_colour_vision():
    """In the sight of a deuteranope (Machado 2009, full severity) no two of the first six meet."""
    from matplotlib.colors import to_rgb

    machado = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    seen = [machado @ np.array(to_rgb(c)) for c in plots.COLOURS[:6]]
    apart = [np.abs(a - b).sum() for i, a in enumerate(seen) for b in seen[:i]]
    assert min(apart) > 0.2


def test_controls_are_labelled_and_the_launches_of_one_kind_are_told_from_the_other_s():
    from mlakit.plot_style import path_style
    from mlakit.records import CONTROLS

    _figure, axes = plot_style.new("", "", "")
    rows = timing()
    for name in CONTROLS:
        part = rows[rows["path_ran"] == "copy_limit"].assign(path_ran=name)
        plot_style.lines(axes, part, "m", "p50_us")
    labels = [line.get_label() for line in axes.get_lines()]
    assert len(set(labels)) == len(CONTROLS)
    assert all("control" in label for label in labels)
    assert path_style("fused_plain") != path_style("pair_plain") != path_style("copy_limit")
