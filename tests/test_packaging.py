"""The package's own promises: extras and environment agree, nobody is sent to a wrong package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from mlakit import versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TRACKED = [
    ROOT / p
    for p in subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    .stdout.rstrip("\0")
    .split("\0")
]


def requirements(lines):
    return {r.name.lower(): str(r.specifier) for r in map(Requirement, lines)}


def test_environment_mirrors_the_extras():
    deps = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = [d for d in deps if isinstance(d, str)]
    pip = [d for d in deps if isinstance(d, dict)]
    assert conda.index("pip") < deps.index(pip[0]), "pip comes before its section"
    wanted = requirements(PROJECT["dependencies"])
    wanted |= requirements(EXTRAS["cpu"] + EXTRAS["notebooks"] + EXTRAS["dask"])
    torch = wanted.pop("torch")  # by pip, through the package: conda's build is not ours to choose
    found = requirements(d for d in conda if d != "pip")
    assert re.sub(r"\s", "", found.pop("python")) in (
        PROJECT["requires-python"],
        ",".join(reversed(PROJECT["requires-python"].split(","))),
    )
    assert found == wanted
    assert torch.startswith(">=")
    assert pip == [{"pip": ["-e .[transformers,dev,docs]"]}]


def test_torch_has_no_build_and_triton_is_only_in_its_extra():
    assert "==" not in str(Requirement(PROJECT["dependencies"][0]).specifier)
    others = [r for name, extra in EXTRAS.items() if name != "triton" for r in extra]
    assert not any(Requirement(r).name == "triton" for r in PROJECT["dependencies"] + others)
    assert {Requirement(r).name for r in EXTRAS["triton"]} == {"triton"}


def test_constraints_pin_the_tested_torch_and_never_triton():
    pins = requirements(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert "triton" not in pins
    assert versions.torch_release(pins["torch"].removeprefix("==")) in versions.TESTED_PAIRS
    named = requirements(
        PROJECT["dependencies"] + [r for n, e in EXTRAS.items() if n != "peers" for r in e]
    )
    missing = set(named) - set(pins) - {"triton"}
    assert not missing, "every direct dependency is pinned in the tested set"


@pytest.mark.parametrize(
    ("torch", "needs", "present", "want"),
    [
        ("2.13.0+cpu", [], (), "triton==3.7.1"),
        ("2.13.0+cpu", [], ("triton",), ""),
        ("2.13.0", ["triton==3.7.1; platform_system == 'Linux'"], (), ""),
        ("2.11.0+rocm7.2", ["pytorch-triton-rocm==3.6.0"], (), ""),
        ("2.12.0+rocm7.2", [], (), ""),
        ("2.99.0", [], (), "triton"),
        (None, [], (), ""),
    ],
)
def test_triton_is_added_only_where_torch_brings_none(monkeypatch, torch, needs, present, want):
    monkeypatch.setattr(
        versions, "installed", lambda d: torch if d == "torch" else ("3" if d in present else None)
    )
    monkeypatch.setattr(versions.metadata, "requires", lambda _: needs)
    assert versions.triton_requirement() == want


def test_one_version_everywhere():
    import mlakit

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"]), "semantic"
    assert {mlakit.__version__, cited["version"], headings[0]} == {PROJECT["version"]}
    assert cited["license"] == PROJECT["license"]


def test_every_command_that_is_documented_is_a_target():
    makefile = (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md", "docs/install.md"):
        for target in re.findall(r"`?\bmake ([a-z-]+)`?", (ROOT / page).read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"


def test_hooks_run_what_is_installed_and_fetch_nothing():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [r["repo"] for r in hooks] == ["local"]
    for hook in hooks[0]["hooks"]:
        assert hook["language"] == "system"
        tool = Path(hook["entry"].split()[0])
        assert tool.parent == Path(".venv/bin")
        assert (Path(sys.executable).parent / tool.name).exists(), tool


def test_what_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch, capsys):
    from mlakit.cli import base

    assert versions.install_of("matplotlib") == "'mlakit[notebooks]'"
    assert versions.install_of("liger_kernel") == "'mlakit[peers]'"
    assert versions.install_of("nowhere") == "nowhere"

    @base.app.command("draws")
    def draws():
        import matplotlib.pyplot  # noqa: F401

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["mlakit", "draws"])
    with pytest.raises(SystemExit) as ended:
        base.main()
    base.app.registered_commands.pop()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "mlakit: matplotlib is not here: pip install 'mlakit[notebooks]'\n"
    )


def test_nobody_is_told_to_install_the_wrong_aiter():
    for path in TRACKED:
        # Tests name the wrong command in order to forbid it; nobody reads advice there.
        if path.suffix in {".md", ".py", ".ipynb", ".yml", ".toml", ".txt", ".j2"} and (
            path.relative_to(ROOT).parts[0] != "tests"
        ):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"pip install\s+(-\S+\s+)*aiter\b", text), path


def test_top_level_holds_what_the_design_lists():
    top = {p.relative_to(ROOT).parts[0] for p in TRACKED}
    allowed = {
        *("notebooks", "mlakit", "data", "tests", "docs", "environment.yml", "pyproject.toml"),
        *("Makefile", "README.md", "LICENSE", ".ci", ".gitignore", "constraints.txt"),
        *("CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", ".pre-commit-config.yaml"),
        "mkdocs.yml",
    }
    assert top <= allowed, f"litter: {sorted(top - allowed)}"


def test_notebooks_are_committed_without_outputs():
    import json

    for path in TRACKED:
        if path.suffix == ".ipynb":
            for cell in json.loads(path.read_text())["cells"]:
                assert not cell.get("outputs"), path
                assert cell.get("execution_count") is None, path


def test_data_is_found_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "from mlakit import shapes; print(len(shapes.models()))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) >= 24
