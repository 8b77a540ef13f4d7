"""The course: every lesson runs as given, every solution is right, every judge can say no."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LESSONS = Path(__file__).parents[2] / "notebooks" / "lessons"
NAMES = sorted(p.stem for p in LESSONS.glob("*.ipynb"))
WRONG = {
    "1.1": "128", "1.2": "lambda x, w, eps: x * w", "1.3": "524288",
    "2.1": "lambda q, qw, qe, k, kw, ke: (q, k)", "2.2": "2",
    "3.1": "Context(arch='gfx942', use_aiter=True, aiter_api='pair')",
    "3.2": "lambda arch, aiter: 'torch_native'", "3.3": "1024",
    "4.1": "lambda base, this: base.mean() / this.mean()", "4.2": "2.0", "4.3": "1",
    "5.1": "lambda x: x.bfloat16()", "5.2": "1", "5.3": "'truncate'",
    "6.1": "3200.0", "6.2": "88.0", "6.3": "True",
}  # fmt: skip


@pytest.fixture(scope="module")
def course():
    """The exercises' judges and solutions, importable as they are beside the notebooks."""
    pytest.importorskip("IPython")
    sys.path.insert(0, str(LESSONS))
    try:
        yield importlib.import_module("exercises"), importlib.import_module("solutions").SOLUTIONS
    finally:
        sys.path.remove(str(LESSONS))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What a lesson measures goes into a run's folder below this one, not into the checkout."""
    monkeypatch.chdir(tmp_path)


def cells(name: str) -> list[dict]:
    found = json.loads((LESSONS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [c for c in found if c["cell_type"] == "code"]


def number(cell: dict) -> str | None:
    tags = cell["metadata"].get("tags", [])
    return tags[1] if tags[:1] == ["exercise"] else None


def run(name: str, course, answers: dict[str, str], measured: list) -> dict:
    """Every code cell in one namespace, exercises answered by ``answers``; what the judges said."""
    exercises, _ = course
    exercises.results.clear()
    space: dict = {}
    for cell in cells(name):
        source, exercise = "".join(cell["source"]), number(cell)
        if exercise in answers:
            source = f"{answers[exercise]}\ncheck({exercise!r}, answer)"
        if "mlakit.measure(" in source and measured:
            continue  # once is enough: it takes the device for seconds
        measured += ["mlakit.measure("] if "mlakit.measure(" in source else []
        exec(compile(source, f"{name}, {cell['id']}", "exec"), space)
    return dict(exercises.results)


MEASURED: list = []


def test_there_are_six():
    assert [n[:2] for n in NAMES] == ["1_", "2_", "3_", "4_", "5_", "6_"]


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_runs_unanswered_and_every_solution_is_right(name, course):
    asked = [number(c) for c in cells(name) if number(c)]
    assert len(asked) >= 2
    assert run(name, course, {}, MEASURED) == dict.fromkeys(asked)
    assert run(name, course, course[1], ["skip"]) == dict.fromkeys(asked, True)


@pytest.mark.parametrize("name", NAMES)
def test_every_judge_can_say_no(name, course, capsys):
    asked = [number(c) for c in cells(name) if number(c)]
    wrong = {n: f"answer = {WRONG[n]}" for n in asked}
    assert run(name, course, wrong, ["skip"]) == dict.fromkeys(asked, False)
    assert capsys.readouterr().out.count("not yet: ") == len(asked)


def test_an_answer_that_raises_is_not_right_and_does_not_stop_the_lesson(course):
    course[0].check("1.2", lambda x, w, eps: x @ w @ w)
    assert course[0].results["1.2"] is False


def test_lessons_are_stripped_and_their_cells_short():
    for name in NAMES:
        for cell in cells(name):
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            assert len(cell["source"]) <= 12, (name, cell["id"])


# ---- the ladder


@pytest.fixture(scope="module")
def ladder():
    sys.path.insert(0, str(LESSONS / "rungs"))
    try:
        yield importlib.import_module("ladder")
    finally:
        sys.path.remove(str(LESSONS / "rungs"))


def test_every_rung_has_a_sentence_and_the_figures_are_the_recorded_ones(ladder):
    import pandas as pd

    assert len(ladder.RUNGS) == 7
    figures = ladder.figures()
    for rung in ladder.RUNGS:
        assert 30 < len(ladder.sentence(rung)) <= 100
        text = (ladder.FOLDER / f"{rung}.py").read_text()
        said = re.search(r"Figure: ([\d.]+) us at M = 64\b.*recorded on an NVIDIA H200", text)[1]
        known = [r for r in figures if (r["rung"], r["m"]) == (rung, "64")]
        known = [f"{float(r['p50_us']):.1f}" for r in known if r["device"] == "NVIDIA H200"]
        assert said in known, (rung, said, known)
    for row in figures:
        assert row["evidence"] in ("measured", "recorded")
        if "triton-search" not in row["source"]:
            continue
        file, stage = row["source"].split()
        frame = pd.read_csv(LESSONS.parents[1] / file)
        path, _, knobs = row["path"].partition(" ")
        here = (frame["path"] == path) & (frame["stage"] == stage) & (frame["m"] == int(row["m"]))
        here &= (frame["q_lora_rank"] == 1536) & (frame["kv_lora_rank"] == 512)
        here &= (frame["dtype"] == "bf16") & (frame["knobs"].fillna("") == knobs)
        assert list(frame.loc[here, "p50_us"].round(4)) == [float(row["p50_us"])], row


def test_every_rung_computes_the_step(ladder):
    pytest.importorskip("triton")
    rungs = [r for r in ladder.RUNGS if r != "rung3_compile"]
    done = subprocess.run(
        [sys.executable, LESSONS / "rungs" / "ladder.py", *rungs],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worst = {rung: float(error) for rung, error in map(str.split, done.stdout.splitlines())}
    assert list(worst) == rungs
    # bf16 keeps 8 bits and Triton's interpreter cuts; FP8 E4M3 keeps 4.
    assert all(v < (2**-3 if r == "rung7_quantised" else 2**-7) for r, v in worst.items()), worst


def test_the_compiled_rung_is_the_eager_one_compiled(ladder):
    """Without starting a compiler: what it compiles is rung 1."""
    import torch

    rung1, rung3 = (importlib.import_module(r) for r in ("rung1_eager", "rung3_compile"))
    assert rung3.compiled()._torchdynamo_orig_callable is rung1.call
    x, w = torch.randn(3, 8), torch.ones(8)
    torch.testing.assert_close(
        rung1.norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
    )
