"""The latency model: launches as paths work, terms by hand, errors beside every figure."""

import csv
import math
from dataclasses import replace

import pytest

from mlakit import archs, latency, launches
from mlakit.datafiles import data_dir
from mlakit.errors import MisuseError
from mlakit.paths import registry, triton_config
from mlakit.records import Cell
from mlakit.shapes import Widths
from mlakit.timing.buffers import bytes_moved

V3 = Widths(1536, 512)
MODELLED_ARCHS = [a for a in archs.known() if a != "cpu"]


@pytest.mark.parametrize("path", [p for p in launches.MODELLED if p in registry.names()])
def test_plan_has_the_launches_that_the_path_declares(path):
    made = launches.plan(path, V3, 64, arch="sm_90", contiguous=True)
    declared = registry.get(path).launches
    # torch_rms_norm_copied's copies are of views; contiguous parts need none.
    assert len(made) == (declared - 2 if registry.get(path).copies else declared)


def test_views_cost_f_rms_norm_a_copy_only_when_they_have_more_than_one_row():
    counts = [len(launches.plan("torch_rms_norm", V3, m, arch="sm_90")) for m in (1, 2)]
    assert counts == [2, 4]


def test_no_q_latent_halves_the_launches_of_a_pair():
    one = launches.plan("quack_rms_norm", Widths(0, 512), 8, arch="sm_90")
    assert len(one) == 1
    assert one[0].programs == 2  # QuACK's program is four rows of a warp each


@pytest.mark.parametrize("m", [1, 64, 4096])
def test_fused_bytes_are_what_a_cell_counts(m):
    cell = Cell("sm_90", m, 1536, 512, ("triton_fused",), clock="graph")
    (launch,) = launches.plan("triton_fused", V3, m, arch="sm_90")
    assert launch.moved == bytes_moved(cell)


@pytest.mark.parametrize("arch", MODELLED_ARCHS)
def test_early_launches_are_where_the_heuristic_asks_for_them(arch):
    for m in (1, 127, 128, 129, 4096):
        (launch,) = launches.plan("triton_fused", V3, m, arch=arch)
        asked = triton_config.heuristic(arch, m, 1536, 512).pdl
        assert (launch.starts == 0) == asked, (arch, m)


def test_aiter_fused_is_two_launches_from_its_own_limit_on():
    plans = [launches.plan("aiter_fused", V3, m, arch="gfx942") for m in (16383, 16384)]
    assert [len(made) for made in plans] == [1, 2]
    (one,), (q, k) = plans
    assert (q.programs, k.programs, one.programs) == (16384, 16384, 2 * 16383)
    assert q.moved == (2 * 16384 + 1) * 1536 * 2
    assert latency.estimate("aiter_fused", "gfx942", V3, 16384).launches == 2
    # kv alone was never a pair
    assert len(launches.plan("aiter_fused", Widths(0, 512), 65536, arch="gfx942")) == 1


P = {
    "launch_us": 0.5, "program_us": 0.3, "read_us": 0.6, "reread_us": 0.2, "meet_us": 0.1,
    "index_us": 0.7, "loaded_us": 0.2, "half_loaded": 1.0, "crowd": 2.0, "gbps": 1000.0,
    "cache_gbps": 4000.0,
}  # fmt: skip


def causes(*made, **changes):
    calls = latency.by_cause(P | changes, 100, 2048, latency.columns_of(made), [0] * len(made), 1)
    return {k: float(v[0]) for k, v in calls.items()}


def test_one_launch_by_hand():
    # 100 programs on 100 units are half loaded; 2 MB at 1 TB/s are 2 us; they fit the card at
    # once (100 x 256 of 204,800 threads), so there is no second turn.
    got = causes(launches.Launch("row", 100, 256, 1, 2e6, reads=2, rereads=1, meets=1))
    assert got["launch"] == 0.5
    assert got["chain"] == pytest.approx(0.3 + 2 * 0.6 + 0.2 + 0.1)
    assert got["loaded"] == pytest.approx(0.1)
    assert got["bandwidth"] == pytest.approx(2.0)
    assert got["waves"] == got["kernel rate"] == 0


def test_programs_that_do_not_fit_the_card_take_turns():
    # 2400 programs of 256 threads where 800 fit: two turns more of a chain of 0.9, twice as long.
    got = causes(launches.Launch("row", 2400, 256, 1, 0))
    assert got["waves"] == pytest.approx(2 * 0.9 * 2)
    level = causes(launches.Launch("row", 2400, 256, 1, 3.6e6))
    work = level["waves"] + level["bandwidth"]
    assert work == pytest.approx(3.6 * 2**0.25)
    assert level["waves"] == pytest.approx(work / 2)


def test_what_the_launch_before_wrote_is_read_from_a_cache():
    got = causes(launches.Launch("map", 1, 128, 1, 1e6, cached=4e6))
    assert got["bandwidth"] == pytest.approx(1 + 1)
    big, small = (
        launches.plan("liger_rms_norm", V3, m, arch="sm_90", into_out=True)[1] for m in (65536, 64)
    )
    assert (big.cached, big.reads) == (0, 1)
    assert (small.cached, small.reads, small.rereads) == (64 * 1536 * 2, 0, 1)


def test_two_streams_wait_for_the_longer_and_add_their_work():
    long, short = (launches.Launch("row", 1, 32, 1, 1e6, reads=n) for n in (5, 1))
    both = causes(long, replace(short, side=1))
    assert both["chain"] == pytest.approx(causes(long)["chain"])
    assert both["launch"] == 1.0  # one start, and the join
    assert both["bandwidth"] == pytest.approx(2.0)


def test_a_cpu_has_calls_and_rates_by_kind_and_shares_elements_among_threads():
    cpu = {"launch_us": 0.1, "gbps": 1e9, "call_us:gather": 3.0, "rate:gather": 2.0}
    made = latency.columns_of([launches.Launch("gather", 9, 1, 65536, 1)])
    got = latency.by_cause(cpu, 2, 2048, made, [0], 1)
    assert float(got["chain"][0]) == 3.0
    assert float(got["kernel rate"][0]) == pytest.approx(65536 / 2 / 2 / 1e3)


def test_an_empty_launch_costs_its_start_and_nothing_else():
    (floor,) = launches.plan("launch_floor", V3, 64, arch="sm_90")
    assert sum(causes(floor).values()) == 0.5


# The sum's blocks are written out from torch's own rule: 512 threads, a warp a row from 16 on.
@pytest.mark.parametrize(
    ("m", "threads", "programs", "reads"),
    [(1, 256, 1, 2), (2, 512, 1, 2), (4, 512, 1, 3), (16, 512, 1, 12), (64, 512, 4, 12)],
)
def test_torchs_sum_gives_a_row_fewer_threads_as_rows_grow(m, threads, programs, reads):
    mean = launches.plan("torch_native", Widths(1536, 512), m, arch="sm_90")[2]
    assert (mean.threads, mean.programs, mean.reads + mean.rereads) == (threads, programs, reads)


def test_inductor_keeps_a_row_in_registers_up_to_1024_lanes():
    q, k = launches.plan("inductor", Widths(1536, 768), 64, arch="sm_90")
    assert (q.kind, q.threads, q.programs) == ("loop", 512, 32)
    assert (k.kind, k.threads, k.programs) == ("row", 256, 64)


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
        (("triton_mxfp4", "sm_90", V3, 64), "unknown path to model 'triton_mxfp4'"),
        (("triton_fused", "gfx955", V3, 64), "did you mean 'gfx950'"),
        (("triton_fused", "sm_90", V3, 0), "1 or more"),
        (("triton_fused", "sm_90", V3, 64, "fp8"), "unknown dtype"),
        (("aiter_fused", "sm_90", V3, 64), "no time of aiter_fused on sm_90: .* AMD cards only"),
        (("aiter_fused", "cpu", V3, 64), "AMD cards only, not on cpu"),
        (("cpu_fused", "sm_90", V3, 64), "on a CPU only, not on sm_90"),
        (("quack_rms_norm", "gfx950", V3, 64), "NVIDIA cards from sm_90 on, not gfx950"),
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


@pytest.mark.parametrize("arch", ["sm_90", "gfx950", "cpu"])
def test_kv_alone_has_no_launch_to_save(arch):
    frame = latency.fusion(arch, Widths(0, 512), [1, 4096])
    assert (frame["saved_us"] == 0).all()
    assert latency.meeting_m(arch, Widths(0, 512)) == 1


def test_every_line_of_the_table_has_a_source_and_a_known_name():
    with open(data_dir() / "latency.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    names = {*latency.PARAMETERS, "units", "m_from", "m_to", "width_from", "width_to"}
    for line in lines:
        assert line["source"]
        assert float(line["value"]) >= 0
        assert line["what"] != "parameter" or line["name"] in names
    assert {"sm_90", "gfx950", "gfx942", "cpu"} <= {line["arch"] for line in lines}
