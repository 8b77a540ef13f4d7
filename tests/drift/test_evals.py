"""The judge against published figures, scipy and hand counts."""

import json
import math

import pytest
from scipy.stats import chi2_contingency

from mlakit.drift.evals import detectable, read_results, significance, throughput
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
