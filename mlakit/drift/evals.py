"""The judge: is the difference between two scores more than chance would give?"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, TypeGuard

from mlakit.drift import exact
from mlakit.errors import MisuseError, one_line, unknown

REAL, INCONCLUSIVE, NO_EVIDENCE = "real", "inconclusive", "no evidence"
_NO_BASELINE = "no baseline, no verdict"
_NO_SAMPLES = "no samples, no verdict"

Z_REAL, Z_INCONCLUSIVE = 1.96, 1.0
_NORMAL = NormalDist()
_DETECTED = Z_REAL + _NORMAL.inv_cdf(0.8)
"""standard errors that a true difference needs, to be called real in 80 % of tries"""
_EXPECTED = 5
"""of right and of wrong answers a side; under it z is far from normal and Fisher's test judges"""


@dataclass(frozen=True)
class Judgement:
    """A verdict and the figures behind it; figures that could not be had are None."""

    verdict: str
    text: str
    a: float | None = None
    b: float | None = None
    n_a: int | None = None
    n_b: int | None = None
    difference: float | None = None
    """b - a"""
    interval: tuple[float, float] | None = None
    """95 % interval of ``difference``; None where Fisher's exact test judged, which has none"""
    z: float | None = None
    p: float | None = None
    """two-sided"""
    power: float | None = None
    """chance that a true difference of this size is called real with this n"""
    smallest_detectable: float | None = None
    """difference called real in 80 % of tries with this n; None: this n can show none at all"""
    paired: bool = False
    flips: tuple[int, int] | None = None
    """paired questions: (only a right, only b right)"""
    test: str = ""

    def to_json(self) -> dict:
        """A plain dict."""
        return asdict(self)


def verdict_of(z: float) -> str:
    """``real`` from |z| 1.96 on, ``inconclusive`` from 1, else ``no evidence``."""
    size = abs(z)
    return REAL if size >= Z_REAL else INCONCLUSIVE if size >= Z_INCONCLUSIVE else NO_EVIDENCE


def z_of(p: float, sign: float = 1.0) -> float:
    """The z whose two-sided p this is, with the sign of ``sign``."""
    # 0.0 makes a -0.0 of a p of 1 a plain 0
    return math.copysign(_NORMAL.inv_cdf(max(p, 1e-300) / 2), sign) + 0.0


def detectable(accuracy: float, n: float) -> float:
    """The smallest difference near ``accuracy`` that two runs of n questions call real.

    ``(1.96 + 0.84) * sqrt(2 p (1 - p) / n)``, with 80 % power: 0.028 near 0.93 for n = 1319.
    An accuracy of 0 or 1 is taken half an answer off: n answers can't tell it from that.
    """
    accuracy = min(max(accuracy, 0.5 / n), 1 - 0.5 / n)
    return min(_DETECTED * math.sqrt(2 * accuracy * (1 - accuracy) / n), 1.0)


def _shown(smallest: float | None, by: str) -> str:
    if smallest is None:
        return f"{by} can show no change at all"
    return f"the smallest change {by} show is {100 * smallest:.1f} points"


def _judged(z: float, p: float, text: str, **figures: Any) -> Judgement:
    """The verdict of z, said before ``text``, and the power to see a true one of that size."""
    verdict, size = verdict_of(z), abs(z)
    power = _NORMAL.cdf(size - Z_REAL) + _NORMAL.cdf(-Z_REAL - size)
    return Judgement(verdict, f"{verdict}: {text}", z=z, p=p, power=power, **figures)


def significance(
    a: float | int | str | Path | None,
    b: float | int | str | Path | None,
    n: int | None = None,
) -> Judgement:
    """Judge a score ``a`` (the baseline) against a score ``b``.

    Each is an accuracy (a float, 0 to 1) with ``n`` questions, a count of right answers (an int)
    out of ``n``, or a file of per-question results (CSV or JSONL; see ``read_results``). Two files
    with the same questions are compared paired, by the exact McNemar test; two scores by the normal
    approximation, or by Fisher's exact test where a side expects under 5 right or wrong answers.

    Two figures above 1 without n are throughputs, see ``throughput``.

    Raises:
        MisuseError: no n, a score outside 0 to 1, a count above n, or files that don't match.
    """
    _check_finite(a, b)
    if a is None or b is None:
        given = b if a is None else a
        return Judgement(_NO_BASELINE, f"one score ({given}) and nothing to hold it against")
    if isinstance(a, str | Path) and isinstance(b, str | Path):
        return paired(read_results(a), read_results(b))
    if n is None and _is_fraction(a) and _is_fraction(b) and min(a, b) > 1:
        return throughput(float(a), float(b))
    p_a, n_a = _score(a, n)
    p_b, n_b = _score(b, n)
    return _two_proportions(p_a, n_a, p_b, n_b)


def _is_fraction(value: Any) -> TypeGuard[float]:
    """Whether it is a number and no count; numpy's own numbers are no Python ones."""
    return isinstance(value, Real) and not isinstance(value, Integral)


def _check_finite(*figures: Any) -> None:
    for value in figures:
        if isinstance(value, Real) and not math.isfinite(value):
            raise MisuseError(f"figure {value}: a run that gave no number; give finite figures")


def _score(value: float | int | str | Path, n: int | None) -> tuple[float, int]:
    if isinstance(value, str | Path):
        results = read_results(value)
        return sum(results.values()) / len(results), len(results)
    if n is None or not n >= 1:
        raise MisuseError(
            f"score {value} with n = {n}: a score says nothing without its number of questions; "
            "give n, for example n=1319"
        )
    if isinstance(value, Integral):
        if not 0 <= value <= n:
            raise MisuseError(f"count {value} of {n}: give a count from 0 to n")
        return int(value) / n, int(n)
    if not 0 <= value <= 1:
        raise MisuseError(
            f"score {value}: give an accuracy from 0 to 1 or a whole count; for a throughput "
            "use throughput() with samples"
        )
    return float(value), int(n)


def _two_proportions(p_a: float, n_a: int, p_b: float, n_b: int) -> Judgement:
    pooled = (p_a * n_a + p_b * n_b) / (n_a + n_b)
    difference = p_b - p_a
    n = 2 / (1 / n_a + 1 / n_b)
    few = exact.too_few(n_a, n_b)
    smallest = None if few else max(detectable(pooled, n), exact.least_shown(n))
    interval = None
    if min(pooled, 1 - pooled) * min(n_a, n_b) < _EXPECTED:
        p = exact.fisher(round(p_a * n_a), n_a, round(p_b * n_b), n_b)
        z, test, how = z_of(p, difference), "Fisher's exact, unpaired", " by Fisher's exact test"
    else:
        z = difference / math.sqrt(pooled * (1 - pooled) * (1 / n_a + 1 / n_b))
        p = math.erfc(abs(z) / math.sqrt(2))
        half = Z_REAL * math.sqrt(p_a * (1 - p_a) / n_a + p_b * (1 - p_b) / n_b)
        interval = (difference - half, difference + half)
        test, how = "two proportions, pooled, unpaired", ""
    both = f"{n_a}" if n_b == n_a else f"{n_a} and {n_b}"
    return _judged(
        z, p,
        f"{p_a:.4g} to {p_b:.4g} with n = {both} is z = {z:+.2f}, p = {p:.2g}{how}; "
        f"{_shown(smallest, 'these n')}",
        a=p_a, b=p_b, n_a=n_a, n_b=n_b, difference=difference, interval=interval,
        smallest_detectable=smallest, test=test,
    )  # fmt: skip


def paired(a: Mapping[Any, bool], b: Mapping[Any, bool]) -> Judgement:
    """Judge two runs of the same questions (question: right) by the exact McNemar test.

    Raises:
        MisuseError: the questions differ, or there are none.
    """
    if set(a) != set(b):
        only = sorted(set(a) ^ set(b))
        raise MisuseError(
            f"the files hold different questions ({len(only)} in one only, such as {only[0]!r}); "
            "compare two runs of the same questions"
        )
    if not a:
        raise MisuseError("no questions on either side: give two runs of at least one")
    n = len(a)
    lost = sum(a[k] and not b[k] for k in a)
    won = sum(b[k] and not a[k] for k in a)
    p, interval = exact.mcnemar(lost, won, n)
    z, difference, smallest = z_of(p, won - lost), (won - lost) / n, None
    if n >= exact.NEEDED:
        smallest = min(max(_DETECTED * math.sqrt(lost + won) / n, exact.least_shown(n)), 1.0)
    return _judged(
        z, p,
        f"of {n} questions {lost} were lost and {won} won, exact McNemar p = {p:.2g} "
        f"(z = {z:+.2f}); {_shown(smallest, f'{n} questions with this many flips')}",
        a=sum(a.values()) / n, b=sum(b.values()) / n, n_a=n, n_b=n, difference=difference,
        interval=interval, smallest_detectable=smallest,
        paired=True, flips=(lost, won), test="exact McNemar, paired",
    )  # fmt: skip


_ID_NAMES = ("id", "question_id", "doc_id", "question", "index")
_RIGHT_NAMES = ("correct", "right", "acc", "exact_match", "is_correct", "score", "passed")


def read_results(path: str | Path) -> dict[str, bool]:
    """Per-question results: question id to whether the answer was right.

    CSV with a header, or JSONL, lm-evaluation-harness's per-sample logs included: where one holds
    several filters, name one behind the file, ``samples.jsonl#strict-match``.
    The id column is one of id, question_id, doc_id, question, index
    (the line number where there is none); the result is one of correct, right, acc, exact_match,
    is_correct, score, passed, as 0/1 or true/false.

    Raises:
        MisuseError: no such file, no result column, a value that is neither, a repeated id, or
            several filters and none named.
    """
    name, _, wanted = str(path).partition("#") if not Path(path).is_file() else (path, "", "")
    path = Path(name)
    if not path.is_file():
        raise MisuseError(f"no file {path}: give a CSV or JSONL of per-question results")
    try:
        # -sig: Excel's byte-order mark would be taken for a part of the first column's name
        with open(path, newline="", encoding="utf-8-sig") as file:
            if path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
                rows = [json.loads(line) for line in file if line.strip()]
            else:
                rows = list(csv.DictReader(file))
    except (ValueError, RecursionError, csv.Error) as error:
        raise MisuseError(f"{path} does not read as CSV or JSONL: {one_line(error)}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise MisuseError(f"{path}: give one JSON object a line")
    filters = sorted({str(row["filter"]) for row in rows if "filter" in row})
    if wanted and wanted not in filters:
        raise unknown("filter", wanted, filters)
    if len(filters) > 1 and not wanted:
        raise MisuseError(f"{path} holds {', '.join(filters)}: give {path}#{filters[0]}, say")
    rows = [row for row in rows if not wanted or row.get("filter") == wanted]
    if not rows:
        raise MisuseError(f"{path} holds no questions")
    found = next((name for name in _RIGHT_NAMES if name in rows[0]), None)
    if found is None:
        raise MisuseError(f"{path} has no result column; one of {', '.join(_RIGHT_NAMES)}")
    key = next((name for name in _ID_NAMES if any(name in row for row in rows)), None)
    results: dict[str, bool] = {}
    for line, row in enumerate(rows, 1):
        if row.get(found) is None or (key and row.get(key) is None):
            raise MisuseError(f"{path} line {line} has no {found!r} or no {key!r}: complete it")
        name = str(row[key]) if key else str(line)
        if name in results:
            raise MisuseError(f"{path} line {line}: question {name!r} appears twice")
        results[name] = _right(row[found], path, line)
    return results


def _right(value: object, path: Path, line: int) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "1.0", "true", "yes"):
        return True
    if text in ("0", "0.0", "false", "no"):
        return False
    raise MisuseError(f"{path} line {line}: result {value!r} is neither right (1) nor wrong (0)")


_UNPATCHED = "unpatched"


def evaluate(
    folder: str | Path, questions: str | Path, a: str, b: str, out: str | Path
) -> Judgement:
    """Ask one transformers model the same questions twice, with two steps; judge the flips.

    Args:
        folder: the model's local folder; nothing is downloaded.
        questions: JSONL of ``id``, ``prompt`` and ``answer``.
        a: the baseline: ``unpatched``, a path's name, or a rounding's.
        b: the other.
        out: folder for ``a.jsonl`` and ``b.jsonl``, named after the sides: id, correct, text.

    Raises:
        MisuseError: no such folder or file, equal or unknown sides, or a model without MLA.
    """
    from mlakit.models import hf

    folder, out = Path(folder), Path(out)
    if not (folder / "config.json").is_file():
        raise MisuseError(f"{folder} holds no config.json: give a transformers model's folder")
    if a == b:
        raise MisuseError(f"both sides are {a}: give two, for example {_UNPATCHED} and truncate")
    asked = hf.read_questions(questions)
    plans = {n: None if n == _UNPATCHED else hf.step_of(n) for n in (a, b)}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise MisuseError(f"{folder} does not load: {str(error).splitlines()[0]}") from None
    model.eval()
    out.mkdir(parents=True, exist_ok=True)
    for name, step in plans.items():
        with hf.patch(model, step) if step else contextlib.nullcontext():
            rows = hf.answers(model, asked, tokenizer)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return significance(out / f"{a}.jsonl", out / f"{b}.jsonl")


def throughput(a: float | Sequence[float], b: float | Sequence[float]) -> Judgement:
    """Judge two throughputs (any unit, higher is better) from their samples.

    A pair of single figures can't be judged: nothing says how far either moves by itself.
    With two samples or more a side: Welch's test on the logarithms, so that ``difference`` and
    ``interval`` are relative (0.008 is +0.8 %). No verdict where no side's samples differ at all.

    Raises:
        MisuseError: a figure that is not above 0, or not finite.
    """
    a_all, b_all = (list(v) if isinstance(v, Sequence) else [float(v)] for v in (a, b))
    if not a_all or not b_all:
        return Judgement(_NO_BASELINE, "one side has no figure at all")
    _check_finite(*a_all, *b_all)
    if min(a_all + b_all) <= 0:
        raise MisuseError("a throughput of 0 or less: give figures above 0")
    logs_a, logs_b = ([math.log(v) for v in values] for values in (a_all, b_all))
    mean_a, mean_b = fmean(logs_a), fmean(logs_b)
    change = math.expm1(mean_b - mean_a)
    known: dict[str, Any] = dict(
        a=math.exp(mean_a), b=math.exp(mean_b), n_a=len(a_all), n_b=len(b_all), difference=change
    )
    if min(len(a_all), len(b_all)) < 2:
        text = (
            f"{known['a']:.4g} to {known['b']:.4g} is {change:+.2%}, but one figure a side has no "
            "spread: whether it is chance can't be said; give the samples of both runs"
        )
        return Judgement(_NO_SAMPLES, text, **known)
    if min(a_all) == max(a_all) and min(b_all) == max(b_all):
        text = "no sample differs from the others of its side; samples of a clock do"
        return Judgement(_NO_SAMPLES, text, **known)
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        # one side without a spread is the other's to judge: no reason for scipy's warning
        warnings.simplefilter("ignore", RuntimeWarning)
        result = ttest_ind(logs_b, logs_a, equal_var=False)
    low, high = (math.expm1(v) for v in result.confidence_interval(0.95))
    p = float(result.pvalue)
    z = z_of(p, float(result.statistic))
    text = f"{change:+.2%} (95 % interval {low:+.2%} to {high:+.2%}), z = {z:+.2f}, p = {p:.2g}"
    test = "Welch on log throughput, unpaired"
    return _judged(z, p, text, **known, interval=(low, high), test=test)
