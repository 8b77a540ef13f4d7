"""One schema: the same cells from keywords, files and comma lists; one line for what is wrong."""

from __future__ import annotations

import json

import pytest

from mlakit.errors import MisuseError
from mlakit.sweep import store
from mlakit.sweep.grid import expand
from mlakit.sweep.run import sweep
from mlakit.sweep.spec import SweepSpec

VALUES = {"archs": ["cpu"], "models": ["DeepSeek-V3"], "hidden": ["768+256"], "batches": [1, 64]}
VALUES |= {"seed": 3, "measure": ["timing", "accuracy"]}


def test_every_source_gives_the_same_cells(tmp_path):
    expected = expand(**{k: v for k, v in VALUES.items() if k != "measure"})
    texts = {
        "s.json": json.dumps(VALUES),
        "s.toml": "\n".join(f"{k} = {json.dumps(v)}" for k, v in VALUES.items()),
    }
    specs = [SweepSpec.parse(VALUES)]
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        specs.append(SweepSpec.load(tmp_path / name))
    command_line = {
        k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in VALUES.items()
    }
    specs.append(SweepSpec.parse(command_line))
    for spec in specs:
        assert spec == specs[0]
        assert spec.cells("cpu") == expected
    assert SweepSpec.load(tmp_path / "s.toml", batches=[2]).batches == [2]


def test_a_pair_of_numbers_is_one_width():
    for hidden in ((1536, 512), [(1536, 512)], "1536+512", ["1536+512"]):
        assert SweepSpec.parse({"hidden": hidden}).hidden == ["1536+512"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": [1]}, "did you mean 'batches'"),
        ({"batches": "1,2.5"}, "batch is '2.5'"),
        ({"batches": {"a": 1}}, "batches is|batch is"),
        ({"archs": [3]}, "archs.0 is 3"),
        ({"budget_s": -1}, "budget_s is -1: Input should be greater than 0"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
        ({"time_limit_s": 0}, "time_limit_s is 0"),
        ({"measure": ["timings"]}, "did you mean 'timing'"),
        ({"measure": []}, "measure is empty"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"archs": "cpu", "clocks": "graph"}, "does not exist on cpu"),
    ],
)
def test_refusals_are_one_line(values, message):
    with pytest.raises(MisuseError, match=message) as refused:
        SweepSpec.parse(values)
    assert "\n" not in str(refused.value)


def test_files_that_do_not_read(tmp_path):
    for name, text, message in (
        ("a.toml", "batches = [", "does not read as toml"),
        ("a.json", "{", "does not read as json"),
        ("b.json", "[1]", "holds no table"),
        ("a.yaml", "a: 1", "ends in .toml or .json"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(MisuseError, match=message):
            SweepSpec.load(tmp_path / name)
    with pytest.raises(MisuseError, match="cannot read"):
        SweepSpec.load(tmp_path / "none.toml")


def test_sweep_in_a_notebook(tmp_path, doubles_log, monkeypatch):
    from mlakit.sweep import run

    monkeypatch.setitem(run.FUNCTIONS, "timing", "doubles:measure")
    rows = sweep(out=tmp_path, batches=[1, 2], hidden=(768, 256), paths="cpu_fused")
    assert rows[["m", "arch", "status"]].values.tolist() == [[1, "cpu", "ok"], [2, "cpu", "ok"]]
    assert store.show_run(rows.attrs["run_dir"])["spec"]["hidden"] == ["768+256"]
    assert "2 of 2 cells" in rows.attrs["summary"]
    with pytest.raises(MisuseError, match="does not exist on cpu"):
        sweep(out=tmp_path / "none", clocks="kernel")
    assert not (tmp_path / "none").exists()
