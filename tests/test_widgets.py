"""The explorers' views: what a control changes, what is refused, and that nothing is hidden."""

import threading
import time

import pandas as pd
import pytest
from timing_rows import ON_H200, ROW, row

from mlakit import widgets
from mlakit.context import Context
from mlakit.dispatch import policies
from mlakit.drift.ulp import compare
from mlakit.errors import MisuseError
from mlakit.inputs import make
from mlakit.rounding import ROUNDINGS, oracle
from mlakit.shapes import parse_hidden


def rows(times: dict[str, list[float]], batches=(1, 64, 4096), **more) -> pd.DataFrame:
    """Timing rows of one lane: a path's times in microseconds, one a batch."""
    return pd.DataFrame(
        row(path, us, base_us / us, **ON_H200 | {"m": m, "bytes_moved": m * 8192} | more)
        for path, values in times.items()
        for m, us, base_us in zip(batches, values, times["torch_rms_norm"], strict=True)
    )


TIMES = {"torch_rms_norm": [4.0, 4.0, 40.0], "triton_fused": [5.0, 3.0, 20.0]}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_dispatch_shows_what_the_rules_say(arch):
    page = widgets.dispatch_view(arch, aiter=True)
    call = Context(arch=arch, use_aiter=True, aiter_api="pair")
    for rule in ("sglang_before_fix", "sglang_after_fix"):
        choice = policies.choose(call, rule)
        assert f"{choice.path} (launches: {choice.launches})" in page


def test_a_second_stream_changes_the_answer():
    rule = {"before": "sglang_after_fix", "after": "sglang_0_5_12"}
    calm = widgets.dispatch_view("gfx950", aiter=True, **rule)
    split = widgets.dispatch_view("gfx950", aiter=True, capture=True, second_stream=True, **rule)
    assert "No difference" in calm
    assert "becomes" in split


def test_a_call_that_cannot_be_is_refused():
    with pytest.raises(MisuseError, match="AITER runs on AMD cards only"):
        widgets.dispatch_view("sm_90", aiter=True)


def test_an_explorer_shows_a_refusal_as_one_line():
    pytest.importorskip("ipywidgets")
    box = widgets.dispatch()
    controls = {c.description: c for c in box.children[1].children}
    assert "Every path" in box.children[2].value
    controls["arch"].value = "sm_90"
    assert "AITER runs on AMD cards only" in box.children[2].value
    assert "Traceback" not in box.children[2].value
    controls["AITER in use"].value = False
    assert "Every path" in box.children[2].value


def test_crossover_is_a_sentence_of_stretches():
    said = widgets.crossover(rows(TIMES))
    assert said == "Fastest (recorded): torch_rms_norm from M = 1, triton_fused from M = 64."


def test_nothing_of_different_devices_or_clocks_shares_a_figure():
    both = pd.concat([rows(TIMES), rows(TIMES, clock="eager"), rows(TIMES, device="another")])
    found = widgets.lanes(both)
    assert len(found) == 3
    assert all(part["device"].nunique() == part["clock"].nunique() == 1 for part in found.values())


def test_evidence_is_a_filter():
    found = widgets.lanes(rows(TIMES))
    (lane,) = found
    page = widgets.speed_view(found, lane, "heat map", "1536+512", ("recorded",))
    assert "<img alt=" in page
    page = widgets.speed_view(found, lane, "heat map", "1536+512", ("measured",))
    assert "<img" not in page
    assert "No row has the evidence" in page


@pytest.mark.parametrize("figure", widgets.VIEWS)
def test_every_speed_figure_draws(figure):
    found = widgets.lanes(rows(TIMES))
    page = widgets.speed_view(found, next(iter(found)), figure, "1536+512", ("recorded",))
    assert 'alt="' in page


def test_without_rows_the_speed_explorer_says_how_to_get_them():
    pytest.importorskip("ipywidgets")
    box = widgets.speed(pd.DataFrame(columns=list(ROW)))
    assert "mlakit sweep" in box.children[2].value


def test_drift_figures_are_those_of_the_oracle():
    given = make(16, parse_hidden("DeepSeek-V3"), "bf16", family="outlier")
    got = ROUNDINGS["truncate"](given.q, given.q_weight, given.q_eps)
    want = compare(got, oracle(given.q, given.q_weight, given.q_eps))
    ways = ("path: torch_native", "formula: truncate")
    page = widgets.drift_view(*ways, "outlier", "bf16", "DeepSeek-V3", 16)
    assert f"{want.signed_bias:.4g}" in page
    assert "measured" in page
    assert "emulated" in page


def test_codegen_compiles_only_when_asked():
    given = {"model": "DeepSeek-V3", "quant": "none", "m": 64}
    page = widgets.codegen_view("gfx950", "gfx942", build=False, **given)
    assert "heuristic" in page
    assert "lines differ" not in page
    pytest.importorskip("triton")
    page = widgets.codegen_view("gfx950", "gfx942", build=True, **given)
    assert "hardware" in page  # gfx950 converts to bf16 in hardware, gfx942 does not
    assert "software" in page
    assert "lines differ" in page


def test_first_paint_needs_no_measurement_and_no_compiler(monkeypatch):
    """Neither may be started by opening the explorers: that is what would make them slow."""
    pytest.importorskip("ipywidgets")
    from mlakit.codegen import compile as compiler
    from mlakit.timing import measure

    def refuse(*_, **__):
        raise AssertionError("opening an explorer started work")

    monkeypatch.setattr(compiler, "compile_many", refuse)
    monkeypatch.setattr(measure, "measure_cell", refuse)
    for explorer in (widgets.dispatch, widgets.speed, widgets.drift, widgets.codegen):
        assert len(explorer().children[2].value) > 100


def test_changes_from_two_threads_end_with_the_newest_values():
    """JupyterLab may handle each control's messages in a thread of its own."""
    w = pytest.importorskip("ipywidgets")
    slow, fast = w.IntText(0, description="slow"), w.IntText(0, description="fast")
    started = threading.Event()

    def view(slow: int, fast: int) -> str:
        if slow and not fast:
            started.set()
            time.sleep(0.3)
        return f"slow={slow} fast={fast}"

    box = widgets._explorer("test", "A test", {"slow": slow, "fast": fast}, view)
    first = threading.Thread(target=lambda: setattr(slow, "value", 1))
    first.start()
    assert started.wait(10)
    fast.value = 1
    first.join()
    assert "slow=1 fast=1" in box.children[2].value
