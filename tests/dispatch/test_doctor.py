"""The doctor finds, wants and says what to do, in five environments; never a traceback."""

import json
import subprocess
import sys

import pytest

from mlakit.dispatch import doctor as module
from mlakit.dispatch import switches
from mlakit.dispatch.doctor import doctor


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in switches.KNOWN:
        monkeypatch.delenv(name, raising=False)


def by_subject(report):
    return {f.subject: f for f in report.findings}


def test_this_machine():
    report = doctor(deep=False)
    rows = report.to_rows()
    assert all(r["state"] in ("ok", "note", "missing", "error") for r in rows)
    assert {r["section"] for r in rows} >= {"machine", "devices", "packages", "switches", "caches"}
    assert all("\n" not in v for r in rows for v in r.values())
    assert all(r["todo"] for r in rows if r["state"] in ("missing", "error"))
    assert json.loads(json.dumps(report.to_json()))["ok"] == report.ok


def test_an_odd_switch_is_an_error_with_what_to_do(monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "maybe")
    report = doctor(deep=False)
    finding = by_subject(report)["VLLM_ROCM_USE_AITER"]
    assert (finding.state, finding.found) == ("error", "maybe from env")
    assert "set it to 1 or 0" in finding.todo
    assert not report.ok


def test_a_look_that_fails_is_a_finding(monkeypatch):
    def boom():
        raise OSError("disk gone\nsecond line")

    monkeypatch.setattr(module.archs, "devices", boom)
    report = doctor(deep=False)
    broken = [f for f in report.findings if "this look failed" in f.found]
    assert broken
    assert all("OSError: disk gone" in f.found and "\n" not in f.found for f in broken)


def test_reports_carry_no_home_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(module.Path, "home", lambda: tmp_path)
    (tmp_path / ".triton" / "cache" / "one").mkdir(parents=True)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    report = doctor(deep=False)
    assert by_subject(report)["Triton"].found == "~/.triton/cache: 1 entries"
    assert str(tmp_path) not in json.dumps(
        [f for f in report.to_rows() if f["section"] == "caches"]
    )


def test_versions_are_compared_as_numbers(monkeypatch):
    wanted = ["papermill>=2.6; extra == 'notebooks'", "nbclient>=0.10.2; extra == 'notebooks'",
              "dask>=1; extra == 'dask'"]  # fmt: skip
    monkeypatch.setattr(module.importlib.metadata, "requires", lambda name: wanted)
    found = {"papermill": "2.10.0", "nbclient": "0.9.9"}
    monkeypatch.setattr(module, "installed", found.get)
    states = {f.subject: f.state for f in module._notebooks()}
    assert states == {"papermill": "ok", "nbclient": "missing"}


def ask(tmp_path, setup=""):
    """The deep doctor's findings in a fresh interpreter, with ``tmp_path`` first on its path."""
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
{setup}
import json
from mlakit.dispatch.doctor import doctor
print(json.dumps(doctor().to_rows()))
"""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-800:]
    assert "Traceback" not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def pick(rows, subject, section="packages"):
    return next(r for r in rows if (r["section"], r["subject"]) == (section, subject))


def test_an_aiter_whose_import_raises(tmp_path):
    info = tmp_path / "amd_aiter-0.1.7.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.7\n")
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("raise RuntimeError('no ROCm\\nhere')\n")
    rows = ask(tmp_path)
    assert "amd-aiter 0.1.7 has no fused_qk_rmsnorm" in pick(rows, "aiter")["found"]
    imported = pick(rows, "aiter", "imports")
    assert imported["state"] == "note"  # no AMD card needs it here
    assert imported["found"] == "RuntimeError: no ROCm"


def test_an_unrelated_aiter(tmp_path):
    info = tmp_path / "aiter-0.13.20191203.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: aiter\nVersion: 0.13.20191203\n"
    info.joinpath("METADATA").write_text(metadata)
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("")
    row = pick(ask(tmp_path), "aiter")
    assert row["state"] == "missing"
    assert "aiter 0.13.20191203, an unrelated iterator helper" in row["found"]
    assert str(tmp_path / "aiter") in row["found"]
    assert row["wanted"].startswith("amd-aiter")


def test_an_import_that_hangs_or_dies_is_a_line(monkeypatch):
    monkeypatch.setattr(module, "_IMPORT_LIMIT_S", 0.001)
    assert module.import_error("torch") == "importing torch took over 0.001 s"
    monkeypatch.undo()
    assert module.import_error("json") is None
    assert module.import_error("no_such_module_at_all").startswith("ModuleNotFoundError: ")


def test_an_import_that_ends_the_process_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "fatal.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert module.import_error("fatal") == "importing fatal ended with exit status -6"
