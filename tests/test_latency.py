"""The latency model: launches as paths work, terms by hand, errors beside every figure."""

import csv
import math

import pytest

from mlakit import archs, latency
from mlakit.datafiles import data_dir
from mlakit.errors import MisuseError
from mlakit.paths import registry, triton_config
from mlakit.records import Cell
from mlakit.shapes import Widths
from mlakit.timing.buffers import bytes_moved

V3 = Widths(1536, 512)
MODELLED_ARCHS = [a for a in archs.known() if a != "cpu"]


@pytest.mark.parametrize("path", [p for p in latency.MODELLED if p in registry.names()])
def test_plan_has_the_launches_that_the_path_declares(path):
    launches = latency.plan(path, V3, 64, arch="sm_90", into_out=False, contiguous=True)
    declared = registry.get(path).launches
    # torch_rms_norm_copied's copies are of views; contiguous parts need none.
    assert len(launches) == (declared - 2 if registry.get(path).copies else declared)


def test_views_cost_f_rms_norm_a_copy_only_when_they_have_more_than_one_row():
    counts = [
        len(latency.plan("torch_rms_norm", V3, m, arch="sm_90", into_out=False)) for m in (1, 2)
    ]
    assert counts == [2, 4]


def test_no_q_latent_halves_the_launches_of_a_pair():
    one = latency.plan("quack_rms_norm", Widths(0, 512), 8, arch="sm_90", into_out=False)
    assert len(one) == 1
    assert one[0].tasks == 8


@pytest.mark.parametrize("m", [1, 64, 4096])
def test_fused_bytes_are_what_a_cell_counts(m):
    cell = Cell("sm_90", m, 1536, 512, ("triton_fused",), clock="graph")
    (launch,) = latency.plan("triton_fused", V3, m, arch="sm_90")
    assert launch.bytes_moved == bytes_moved(cell)


@pytest.mark.parametrize("arch", MODELLED_ARCHS)
def test_early_launches_are_where_the_heuristic_asks_for_them(arch):
    for m in (1, 127, 128, 129, 4096):
        (launch,) = latency.plan("triton_fused", V3, m, arch=arch)
        asked = triton_config.heuristic(arch, m, 1536, 512).pdl
        assert (launch.starts == 0) == asked, (arch, m)


def parameters(**changes):
    p = {"launch_us": 0.5, "loaded_us": 0.2, "gbps": 1000.0, "unit_gbps": 20.0}
    p |= {f"chain_us:{k}": 1.0 for k in latency.KINDS}
    return p | changes


def test_terms_of_one_launch_by_hand():
    # 100 pieces on 100 units: each unit has 1 of 100 pieces; 2 MB at 1 TB/s are 2 us, and 20 kB
    # at 20 GB/s are 1 us; the 4-norm of the two is (16 + 1) ** 0.25.
    got = latency.terms(parameters(), 100, "row", 100, 1, 2e6, 1)
    assert float(got["launch"]) == 0.5
    assert float(got["chain"]) == 1.0
    assert float(got["loaded"]) == pytest.approx(0.1)
    work = sum(float(got[k]) for k in ("bandwidth", "waves", "kernel rate"))
    assert work == pytest.approx(17**0.25)
    assert float(got["waves"]) == pytest.approx(work / 17)


def test_a_second_wave_costs_when_one_piece_more_than_the_units_arrives():
    busy = [
        float(latency.terms(parameters(gbps=1e9), 100, "row", n, 0, n * 1e4, 1)["waves"])
        for n in (100, 101, 200)
    ]
    assert busy == pytest.approx([0.5, 1.0, 1.0])


def test_an_empty_launch_costs_its_start_and_nothing_else():
    (floor,) = latency.plan("launch_floor", V3, 64, arch="sm_90")
    got = latency.terms(
        parameters(), 100, floor.kind, floor.tasks, floor.elements, floor.bytes_moved, 1
    )
    assert sum(float(v) for v in got.values()) == 0.5


@pytest.mark.parametrize("arch", archs.known())
def test_every_arch_has_figures_with_an_error_or_says_that_it_is_unknown(arch):
    path = "cpu_fused" if arch == "cpu" else "triton_fused"
    before = 0.0
    for m in (1, 64, 1024, 65536):
        e = latency.estimate(path, arch, V3, m)
        assert e.evidence == "modelled"
        assert math.isclose(sum(e.parts.values()), e.us)
        assert all(v >= 0 for v in e.parts.values())
        assert e.us >= before * 0.99 or m <= 1024
        before = e.us
        assert ("error unknown" in str(e)) == (e.error_pct is None)
        assert (e.error_pct is None) == (e.worst_pct is None)


@pytest.mark.parametrize("arch", MODELLED_ARCHS)
def test_no_figure_is_faster_than_the_cards_memory(arch):
    e = latency.estimate("triton_fused", arch, V3, 65536)
    peak = max(p.hbm_gbps or 0 for p in archs.products() if p.name == arch)
    assert e.us >= (2 * 65536 + 1) * 2048 * 2 / peak / 1e3


def test_cards_nobody_scored_have_an_unknown_error_and_say_they_are_extrapolated():
    e = latency.estimate("triton_fused", "gfx90a", V3, 64)
    assert e.error_pct is None
    assert "card not calibrated" in e.outside
    assert "unknown" in str(e)
    assert "extrapolated" in str(e)


def test_a_published_single_norm_scores_norms_and_not_eager_operations():
    assert latency.known_error("gfx950", "triton_fused")[0] is not None
    median, worst, scored = latency.known_error("gfx950", "torch_native")
    assert median is None
    assert worst is None
    assert "nothing" in scored


def test_outside_the_calibrated_range_is_marked():
    assert latency.estimate("triton_fused", "sm_90", V3, 64).outside == ()
    far = latency.estimate("triton_fused", "sm_90", Widths(16384, 512), 2**20)
    assert [x.split()[0] for x in far.outside] == ["M", "width"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dual_stream", "sm_90", V3, 64), "unknown path to model 'dual_stream'"),
        (("triton_fused", "gfx955", V3, 64), "did you mean 'gfx950'"),
        (("triton_fused", "sm_90", V3, 0), "1 or more"),
        (("triton_fused", "sm_90", V3, 64, "fp8"), "unknown dtype"),
    ],
)
def test_what_cannot_be_modelled_is_refused_in_a_line(arguments, words):
    with pytest.raises(MisuseError, match=words):
        latency.estimate(*arguments)


@pytest.mark.parametrize("arch", ["sm_90", "gfx950", "gfx942", "cpu"])
def test_fusing_saves_about_a_launch_and_matters_less_as_rows_grow(arch):
    frame = latency.fusion(arch, V3, [256, 4096, 65536])
    assert (frame["saved_us"] > 0).all()
    assert frame["slack_pct"].is_monotonic_decreasing
    assert (frame["evidence"] == "modelled").all()


def test_every_line_of_the_table_has_a_source_and_a_known_name():
    with open(data_dir() / "latency.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    names = {*latency.PARAMETERS, "units", "m_from", "m_to", "width_from", "width_to"}
    for line in lines:
        assert line["source"]
        assert float(line["value"]) >= 0
        assert line["what"] != "parameter" or line["name"] in names
    assert {"sm_90", "gfx950", "gfx942", "cpu"} <= {line["arch"] for line in lines}
