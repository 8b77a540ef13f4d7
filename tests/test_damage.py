"""Every kind of file that mlakit reads, damaged at random: one line, nothing lost, nothing run."""

import json
import random
import shutil
import warnings
from functools import partial

import pytest
import timing_rows

from mlakit import archs, datafiles, inputs, latency, shapes
from mlakit.dispatch import table
from mlakit.drift import evals
from mlakit.errors import MisuseError
from mlakit.models import hf
from mlakit.report import build, chapters, contribute, history, runbook, tokens
from mlakit.report.compare import load
from mlakit.sweep import grid, store
from mlakit.sweep.spec import SweepSpec

PLANTED = (
    b"-1 1e999 null [ { nan 99999999999999999999 true 1_000 0x1f \xff \x00 \n , \" ' : # = --- | * "
    b"&a 2026-01-01 !!python/object/apply:os.system &a[*a]"
).split(b" ")


def damaged(raw: bytes, seed: int) -> bytes:
    """``raw`` cut short, with bits turned, bytes removed, repeated, or others planted."""
    chance = random.Random(seed)
    data = bytearray(raw)
    for _ in range(chance.choice([1, 1, 1, 3])):
        at, some = chance.randrange(len(data) + 1), chance.randrange(1, 12)
        kind = chance.randrange(6)
        if kind == 0:
            data[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del data[at : at + some]
        elif kind == 2:
            data[at:at] = data[at : at + some]
        elif kind == 3:
            data[at : at + 1] = chance.choice(PLANTED)
        elif kind == 4 and chance.random() < 0.3:
            del data[at:]
        elif at < len(data):
            data[at] ^= 1 << chance.randrange(8)
    return bytes(data)


EXTREMES = (b"", b"\x00" * 40, b"[" * 1200, b'{"a":' * 1200, b"\xff\xfe" * 9, b"null", b"[]", b"{}")


def survives(file, read, seeds=60) -> None:
    """``read()`` of the damaged file returns, or refuses it in one line; the file stays."""
    raw = file.read_bytes()
    for data in (*EXTREMES, *(damaged(raw, seed) for seed in range(seeds))):
        file.write_bytes(data)
        said = refusal(read)
        assert "\n" not in said
        assert len(said) < 700, said
        assert file.read_bytes() == data, "what was read was changed"
    file.write_bytes(raw)
    assert refusal(read) == ""


def refusal(read) -> str:
    try:
        read()
    except MisuseError as error:
        return str(error) or "no reason given"
    return ""


# ---- Parquet: a figure is the one that was written, or the file is named as damaged


@pytest.fixture
def run_dir(tmp_path):
    cells = grid.expand(batches=[1, 64])
    run = store.create_run(tmp_path / "run", cells, measure=["timing"])
    for cell in cells:
        rows = [timing_rows.row(p, 1.5, cell_id=cell.id) for p in "xyz"]
        store.write_part(run.path, "timing", cell.id, rows, {"x": [1.0, 2.0] * 40})
    run.save(status="ok", ended_at=store.now())
    run.close()
    return run.path


@pytest.mark.parametrize("kind", ["parts", "samples"])
def test_parquet_figures_are_those_written_or_the_file_is_set_aside(run_dir, kind):
    read = store.read_rows if kind == "parts" else store.read_samples
    want = read(run_dir)
    file = sorted((run_dir / kind).iterdir())[0]
    raw = file.read_bytes()
    aside = file.with_name(file.name + ".damaged")
    found = 0
    for data in (b"", raw[:300], *(damaged(raw, seed) for seed in range(80))):
        file.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = read(run_dir)
        if got.attrs["damaged"]:
            found += 1
            assert got.attrs["damaged"] == [file.name]
            assert aside.read_bytes() == data, "the damaged file is kept"
            assert len(got) == len(want) // 2, "the other part is read"
        else:
            assert got.equals(want)
    assert found > 30


@pytest.mark.parametrize("part", ["rows", "samples"])
def test_a_recorded_file_is_refused_in_one_line_and_left_as_it_is(run_dir, tmp_path, part):
    file = store.export(run_dir, tmp_path / "kept.parquet", recorded=True)
    beside = file if part == "rows" else file.with_name("kept-samples.parquet")
    survives(beside, lambda: load(file))


def test_contributions(run_dir, tmp_path):
    file = store.export(run_dir, tmp_path / "card.parquet", recorded=True)
    raw = file.read_bytes()
    for seed in range(40):
        file.write_bytes(damaged(raw, seed))
        assert "\n" not in refusal(lambda: contribute.validate(file))


# ---- JSON: a run's record, a report's summary, the pinned baseline


def test_run_records(run_dir):
    survives(run_dir / "run.json", lambda: store.show_run(run_dir))
    file = run_dir / "run.json"
    raw = file.read_bytes()
    for seed in range(40):
        file.write_bytes(damaged(raw, seed))
        store.list_runs(run_dir.parent)
        assert "\n" not in refusal(lambda: store.open_run(run_dir).close())


def test_summaries_and_the_pin(run_dir, tmp_path):
    (run_dir / "summary.json").write_text(json.dumps({"status": "ok", "notebooks": []}))
    pin = history.pin(tmp_path, "run")
    survives(run_dir / "summary.json", lambda: history.entries(tmp_path))
    survives(pin, lambda: history.history(tmp_path), seeds=6)


def test_stack_records(tmp_path, monkeypatch):
    folder = tmp_path / "recorded" / "card"
    folder.mkdir(parents=True)
    kept = next((datafiles.data_dir() / "recorded").glob("*/*stack*.json"))
    shutil.copy(kept, folder)
    monkeypatch.setattr(tokens, "data_dir", lambda: tmp_path)
    survives(folder / kept.name, tokens.recorded)


# ---- CSV data


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("models.csv", shapes.models.__wrapped__),
        ("archs.csv", archs.products.__wrapped__),
        ("latency.csv", latency._lines.__wrapped__),
        ("published.csv", lambda: chapters.published("gfx942")),
        ("dispatch/cpu.csv", lambda: table.ladders.__wrapped__("cpu")),
    ],
)
def test_data_files(tmp_path, monkeypatch, name, read):
    (tmp_path / "dispatch").mkdir()
    for each in ("models.csv", name):
        shutil.copy(datafiles.data_dir() / each, tmp_path / each)
    monkeypatch.setenv("MLAKIT_DATA", str(tmp_path))
    survives(tmp_path / name, read)


# ---- sweep files


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_sweep_files(tmp_path, suffix):
    values = {"preset": "quick", "models": ["DeepSeek-V3"], "hidden": ["1536+512"], "seed": 7}
    values |= {"batches": [1, 64], "budget_s": 1.5, "measure": ["timing"]}
    text = "\n".join(f"{k} = {json.dumps(v)}" for k, v in values.items())
    text = json.dumps(values) if suffix == "json" else text
    file = tmp_path / f"sweep.{suffix}"
    file.write_text(text)
    survives(file, lambda: SweepSpec.load(file), seeds=40)


def test_a_sweep_file_is_data_and_never_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ('models = ["$(touch ran)"]', "models = [`touch ran`]", "models = ['`touch ran`']"):
        (tmp_path / "s.toml").write_text(text)
        assert "\n" not in refusal(lambda: SweepSpec.load("s.toml")) != ""
    assert [p.name for p in tmp_path.iterdir()] == ["s.toml"]


# ---- notebooks and their parameters


def test_notebooks(tmp_path):
    source = runbook.notebooks_dir() / f"{build.NOTEBOOKS[0]}.ipynb"
    nb = json.loads(source.read_text(encoding="utf-8"))
    nb["cells"] = [c for c in nb["cells"] if "parameters" in c["metadata"].get("tags", [])]
    file = tmp_path / "n.ipynb"
    file.write_text(json.dumps(nb))
    survives(file, lambda: runbook.declared_parameters(file))


def test_parameters_are_values_and_never_code(tmp_path, monkeypatch):
    """What papermill writes into the cell reads back as the very value."""
    import ast

    from papermill.translators import translate_parameters

    monkeypatch.chdir(tmp_path)
    chance = random.Random(5)
    hostile = ['"; import os; os.system("touch ran") #', "'''", '"""', "\\", '\\"', "\n%run x"]
    hostile += ["{x}", "a", "\r", "\u2028", "🙂"]
    for _ in range(40):
        text = "".join(chance.choice(hostile) for _ in range(6))
        values = {"run_dir": text, "batches": [1, 64], "families": [text]}
        code = translate_parameters("mlakit-here", "python", values, "parameters")
        body = ast.parse(code).body
        assert {n.targets[0].id: ast.literal_eval(n.value) for n in body} == values
    source = runbook.notebooks_dir() / f"{build.NOTEBOOKS[0]}.ipynb"
    for bad in ({"arch": "h100\nx"}, {"batches": ["1"]}, {"seed": 1.5}, {"model": {"a": 1}}):
        assert "\n" not in refusal(partial(runbook.check_parameters, source, bad)) != ""
    assert list(tmp_path.iterdir()) == []


# ---- results of evaluations, and questions


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_per_question_results(tmp_path, suffix):
    lines = [json.dumps({"id": i, "correct": i % 2}) for i in range(9)]
    if suffix == "csv":
        lines = ["id,correct", *(f"{i},{i % 2}" for i in range(9))]
    file = tmp_path / f"r.{suffix}"
    file.write_text("\n".join(lines))
    survives(file, lambda: evals.read_results(file), seeds=100)


def test_questions(tmp_path):
    file = tmp_path / "q.jsonl"
    lines = [json.dumps({"id": i, "prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(5)]
    file.write_text("\n".join(lines))
    survives(file, lambda: hf.read_questions(file), seeds=100)


def test_inputs_of_no_known_kind_are_one_line():
    for change in ({"dtype": "bf61"}, {"family": "heavyy"}, {"layout": "splt"}):
        said = refusal(partial(inputs.make, 2, shapes.Widths(8, 4), **change))
        assert "did you mean" in said
