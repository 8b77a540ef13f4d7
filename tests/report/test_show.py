"""Tables escape, figures carry a text alternative, sentences state only what was measured."""

import pandas as pd
import pytest
from timing_rows import row

from mlakit.errors import MisuseError
from mlakit.report import build, chapters, show


def test_tables_escape_what_they_print():
    text = show.table_html(pd.DataFrame({"<i>": ["<script>x</script>"]}), "a & b")
    assert "<script>" not in text
    assert "&lt;i&gt;" in text
    assert "a &amp; b" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("nan"), "–"), (pd.NA, "–"), (1.23456, "1.235"), (16384, "16,384")],
)
def test_numbers(value, text):
    assert show.number(value) == text


def test_a_figure_needs_a_text_alternative():
    from matplotlib.figure import Figure

    with pytest.raises(MisuseError, match="text alternative"):
        show.figure(Figure(), "  ")


def test_no_speedup_is_stated_where_no_fused_path_ran():
    refused = {"path_ran": None, "status": "skipped", "reason": "triton is not installed"}
    rows = [row("torch_native", 5.0), row("triton_fused", **refused)]
    text = " ".join(chapters.speed_verdict(pd.DataFrame(rows), "cpu"))
    assert "No fused path ran (triton is not installed)" in text
    assert "times (" not in text


def test_launches_that_overlap_are_told_of_where_the_config_says_so():
    configs = {64: '{"pdl": true}', 1024: '{"pdl": false}', 4096: '{"pdl": true}'}
    rows = [row("triton_fused", 5.0, 1.5, m=m, config=config) for m, config in configs.items()]
    said = chapters.speed_verdict(pd.DataFrame(rows), "sm_90")
    assert any(s.startswith("At M=64, M=4096 triton_fused overlaps") for s in said)


def test_an_absent_arch_gets_a_reason_instead_of_a_number():
    absent = {"path_ran": None, "status": "skipped"}
    absent |= {"reason": "gfx950 is not on this machine (here: cpu)"}
    frame = pd.DataFrame([row("torch_native", arch="gfx950", **absent)])
    assert chapters.speed_verdict(frame, "gfx950") == [
        "No time is stated for gfx950: gfx950 is not on this machine (here: cpu)."
    ]


def test_paths_that_drift_alike_share_a_sentence():
    base = {"input_family": "normal", "evidence": "measured", "signed_bias": 0.0, "bias_se": 1e-6}
    base |= {"elements": 200_000, "max_ulp": 1, "note": None}
    shares = {"a": 1.0, "b": 0.5, "c": 1.0}
    rows = pd.DataFrame([base | {"path_ran": p, "share_correct": s} for p, s in shares.items()])
    said = chapters.drift_verdict(rows, "cpu")
    assert [s.split(" (measured)")[0] for s in said] == ["a, c", "b"]
    assert "50.00 %" in said[1]


def test_how_a_card_was_emulated_is_said_with_what_it_gave():
    base = {"input_family": "normal", "evidence": "emulated", "signed_bias": 0.0, "bias_se": 1e-6}
    base |= {"elements": 200_000, "max_ulp": 1, "share_correct": 1.0}
    notes = {"a": "by a rounding formula", "b": "by executing its machine code, M = 64"}
    rows = pd.DataFrame([base | {"path_ran": p, "note": n} for p, n in notes.items()])
    said = chapters.drift_verdict(rows, "gfx950")
    assert [s.split(":")[0] for s in said] == [f"{p} (emulated {n})" for p, n in notes.items()]


def test_published_figures_match_the_arch_whole():
    assert chapters.published("gfx950")["source_url"].str.startswith("http").all()
    assert len(chapters.published("gfx950"))
    assert chapters.published("cpu").empty
    assert chapters.published("gfx95" + "9").empty


def test_paths_of_one_reason_share_a_row():
    rows = pd.DataFrame(
        row(p, m=m, path_ran="", status=s, reason=r)
        for m in (64, 257)
        for p, s, r in (
            ("torch_native", "skipped", "no gfx950 device here"),
            ("inductor", "skipped", "no gfx950 device here"),
            ("cpu_fused", "ok", ""),
            ("dual_stream", "skipped", "a CPU has no second stream"),
        )
    )
    assert chapters.not_run(rows).values.tolist() == [
        ["torch_native, inductor", "skipped", "no gfx950 device here", "64, 257"],
        ["dual_stream", "skipped", "a CPU has no second stream", "64, 257"],
    ]


def test_what_was_emulated_is_not_listed_as_not_judged():
    skipped = {"path_ran": "", "status": "skipped", "reason": "no gfx950 device here"}
    given = {"arch": "gfx950", "evidence": "measured"}
    rows = [row(p, **skipped, **given) for p in ("torch_native", "triton_fused")]
    rows.append(row("triton_fused", arch="gfx950", evidence="emulated", reason="emulated"))
    left = build._unjudged({"accuracy": pd.DataFrame(rows)})
    assert left["path"].tolist() == ["torch_native"]
