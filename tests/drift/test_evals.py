"""The judge against published figures, scipy and hand counts."""

import json
import math

import numpy as np
import pytest
from scipy.stats import barnard_exact, binom, chi2_contingency

from mlakit.drift import exact
from mlakit.drift.evals import (
    detectable,
    paired,
    read_results,
    significance,
    throughput,
    verdict_of,
    z_of,
)
from mlakit.errors import MisuseError


@pytest.mark.parametrize(
    ("a", "b", "n", "z", "verdict"),
    [
        (0.8893, 0.8863, 1319, 0.24, "no evidence"),
        (0.9447, 0.8947, 1319, 4.8, "real"),
        (0.925, 0.912, 1319, 1.2, "inconclusive"),
        (0.934, 0.930, 500, 0.25, "no evidence"),
        (0.928, 0.935, 1319, 0.71, "no evidence"),
        (0.928, 0.935, 200, 0.28, "no evidence"),
    ],
)
def test_published_pairs(a, b, n, z, verdict):
    judged = significance(a, b, n)
    # field notes give one decimal at 4.8; pooled gives 4.73, the arcsine form 4.78
    assert abs(judged.z) == pytest.approx(z, abs=0.08 if z > 4 else 0.03)
    assert judged.verdict == verdict
    assert judged.interval[0] < judged.difference < judged.interval[1]


@pytest.mark.parametrize(("n", "points"), [(100, 10.1), (200, 7.1), (500, 4.5), (1319, 2.8)])
def test_smallest_detectable_change(n, points):
    assert 100 * detectable(0.93, n) == pytest.approx(points, abs=0.06)


def test_z_agrees_with_chi_squared():
    table = [[1180, 139], [1240, 79]]
    chi2 = chi2_contingency(table, correction=False)
    judged = significance(1180, 1240, 1319)
    assert judged.z**2 == pytest.approx(chi2.statistic)
    assert judged.p == pytest.approx(chi2.pvalue)


def test_counts_and_accuracies_agree():
    assert significance(1224, 1233, 1319).z == pytest.approx(
        significance(1224 / 1319, 1233 / 1319, 1319).z
    )


def test_one_score_gets_no_verdict():
    assert significance(None, 0.934, 500).verdict == "no baseline, no verdict"
    assert significance(0.934, None, 500).verdict == "no baseline, no verdict"


@pytest.mark.parametrize("bad", [(0.9, 0.8, None), (1.4, 0.8, 10), (12, 3, 10), (-0.1, 0.5, 10)])
def test_nonsense_is_refused_in_one_line(bad):
    with pytest.raises(MisuseError) as error:
        significance(*bad)
    assert "\n" not in str(error.value)


def _write(path, results):
    if path.suffix == ".csv":
        path.write_text("id,correct\n" + "".join(f"q{i},{int(r)}\n" for i, r in enumerate(results)))
    else:
        path.write_text(
            "".join(
                json.dumps({"id": f"q{i}", "correct": bool(r)}) + "\n"
                for i, r in enumerate(results)
            )
        )
    return path


def test_paired_files_use_the_exact_mcnemar_test(tmp_path):
    a = [True] * 90 + [False] * 10
    b = [True] * 82 + [False] * 8 + [True] * 2 + [False] * 8
    judged = significance(_write(tmp_path / "a.csv", a), _write(tmp_path / "b.jsonl", b))
    assert judged.paired
    assert judged.flips == (8, 2)
    exact = 2 * sum(math.comb(10, k) for k in range(3)) / 2**10
    assert judged.p == pytest.approx(exact)
    assert judged.difference == pytest.approx(-0.06)
    assert judged.verdict == "inconclusive"


def test_pairing_sees_what_two_accuracies_cannot(tmp_path):
    a = [True] * 900 + [False] * 100
    b = [True] * 900 + [True] * 12 + [False] * 88
    paired = significance(_write(tmp_path / "a.csv", a), _write(tmp_path / "b.csv", b))
    assert paired.verdict == "real"
    assert significance(0.900, 0.912, 1000).verdict == "no evidence"


def test_files_of_different_questions_are_refused(tmp_path):
    a = _write(tmp_path / "a.csv", [True, False])
    b = _write(tmp_path / "b.csv", [True, False, True])
    with pytest.raises(MisuseError, match="different questions"):
        significance(a, b)


def test_unreadable_results_are_refused(tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_text("id,correct\n1,maybe\n")
    with pytest.raises(MisuseError, match="line 1"):
        read_results(bad)
    bad.write_text("id,colour\n1,red\n")
    with pytest.raises(MisuseError, match="no result column"):
        read_results(bad)
    with pytest.raises(MisuseError, match="no file"):
        read_results(tmp_path / "absent.csv")


def test_a_pair_of_throughputs_cannot_be_judged():
    judged = throughput(90.12, 90.84)
    assert judged.verdict == "no samples, no verdict"
    assert judged.z is None
    assert judged.difference == pytest.approx(0.00799, abs=1e-5)
    assert significance(90.12, 90.84) == judged
    assert json.loads(json.dumps(judged.to_json()))["verdict"] == judged.verdict


def test_throughput_samples_are_judged():
    same = [100, 101, 99, 100.5, 99.5, 100.2]
    assert throughput(same, [v * 1.0005 for v in same]).verdict == "no evidence"
    faster = throughput(same, [v * 1.05 for v in same])
    assert faster.verdict == "real"
    assert faster.interval[0] < 0.05 < faster.interval[1]


# ---- few answers


def flipped(lost, won, n):
    a = {i: i < lost for i in range(n)}
    return paired(a, {i: lost <= i < lost + won for i in range(n)})


def test_the_published_pair_stays_as_it_is():
    judged = significance(0.928, 0.935, 1319)
    assert judged.z == pytest.approx(0.7117, abs=1e-4)
    assert judged.p == pytest.approx(0.4767, abs=1e-4)
    assert judged.test == "two proportions, pooled, unpaired"
    assert judged.text.endswith("the smallest change these n show is 2.8 points")


@pytest.mark.parametrize("n", range(1, 9))
def test_two_scores_of_few_questions_are_real_only_by_an_exact_test(n):
    for a in range(n + 1):
        for b in range(n + 1):
            judged = significance(a, b, n)
            if judged.verdict == "real":
                assert barnard_exact([[a, b], [n - a, n - b]]).pvalue < 0.05
            assert judged.verdict == verdict_of(judged.z)
    ends = significance(0, n, n)
    assert (ends.verdict == "real") == (ends.smallest_detectable is not None) == (n >= 4)


def test_scores_without_a_wrong_answer_show_some_smallest_change():
    for n in (5, 100, 1319):
        judged = significance(1.0, 1.0, n)
        wrong = round(n * (1 - judged.smallest_detectable))
        assert judged.verdict == "no evidence"
        assert judged.smallest_detectable >= detectable(1.0, n) > 0
        assert significance(n, wrong, n).verdict == "real"
        assert "is 0.0 points" not in judged.text
    assert "can show no change at all" in significance(1.0, 1.0, 2).text


def test_too_few_is_told_from_enough_by_fishers_test():
    for n in range(1, 12):
        assert exact.too_few(n, n) == (exact.fisher(0, n, n, n) > 0.05)


@pytest.mark.parametrize("n", [6, 40, 2000])
def test_a_pair_of_runs_without_flips_shows_what_six_of_them_would(n):
    judged = flipped(0, 0, n)
    assert binom.sf(5, n, judged.smallest_detectable) == pytest.approx(0.8)
    assert flipped(0, 6, n).verdict == "real"
    assert flipped(0, 5, n).verdict == "inconclusive"
    low, high = judged.interval
    assert low < 0 < high


def test_five_pairs_show_nothing():
    judged = flipped(5, 0, 5)
    assert judged.smallest_detectable is None
    assert "5 questions with this many flips can show no change at all" in judged.text
    with pytest.raises(MisuseError, match="no questions"):
        paired({}, {})


@pytest.mark.parametrize("n", [20, 1319])
def test_a_paired_interval_leaves_out_zero_exactly_where_the_test_says_real(n):
    for lost in range(8):
        for won in range(12):
            judged = flipped(lost, won, n)
            low, high = judged.interval
            assert low <= judged.difference <= high
            assert (low > 0 or high < 0) == (judged.p < 0.05) == (judged.verdict == "real")


def test_z_of_no_evidence_is_no_negative_zero():
    assert math.copysign(1, z_of(1.0, -1)) == 1


# ---- what is read


def test_a_byte_order_mark_does_not_hide_the_first_column(tmp_path):
    rows = [f"q{i},{i % 2}\n" for i in range(12)]
    for name, order in (("a.csv", rows), ("b.csv", rows[::-1])):
        (tmp_path / name).write_text("\ufeffid,correct\n" + "".join(order), encoding="utf-8")
    assert significance(tmp_path / "a.csv", tmp_path / "b.csv").flips == (0, 0)
    log = tmp_path / "c.jsonl"
    log.write_text('\ufeff{"id": "q", "correct": 1}\n', encoding="utf-8")
    assert read_results(log) == {"q": True}


@pytest.mark.parametrize("first", ['{"correct": 1}', '{"id": null, "correct": 1}'])
def test_rows_without_the_id_that_others_have_are_refused(tmp_path, first):
    log = tmp_path / "a.jsonl"
    log.write_text(first + '\n{"id": 1, "correct": 1}\n')
    with pytest.raises(MisuseError, match="line 1 has no 'correct' or no 'id'"):
        read_results(log)


# ---- figures


def test_throughputs_without_any_spread_get_no_verdict():
    judged = throughput([90.12] * 3, [90.84] * 3)
    assert judged.verdict == "no samples, no verdict"
    assert judged.z is None


@pytest.mark.filterwarnings("error")
def test_one_side_without_spread_is_judged_by_the_other():
    assert throughput([90.12] * 3, [90.0, 90.1, 90.3]).verdict == "no evidence"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_figure_that_is_no_number_is_refused_as_such(bad):
    for ask in (
        lambda: significance(bad, 0.9, 100),
        lambda: significance(bad, 6.0),
        lambda: throughput([bad, 100], [100, 101]),
    ):
        with pytest.raises(MisuseError, match="finite"):
            ask()


def test_numpys_integers_are_counts():
    judged = significance(np.int64(1224), np.int64(1233), np.int64(1319))
    assert judged == significance(1224, 1233, 1319)
    assert json.loads(json.dumps(judged.to_json()))["n_a"] == 1319
    assert significance(np.int64(1), np.int64(0), 1319).verdict == "no evidence"
