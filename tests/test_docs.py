"""The documentation holds: examples run, commands parse, quoted errors exist, pages build."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {"two-gpus.md": "dask_jobqueue: a Slurm cluster", "engines.md": "transformers, an extra"}
"""pages with a block that imports what may be absent; it is run where that is there"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def importable(code: str) -> bool:
    """Whether every top package that a block imports is here; what cannot parse is not Python."""
    from importlib.util import find_spec

    names = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(code))
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom) and node.module
            else []
        )
    }
    return all(find_spec(n) for n in names)


def test_every_python_example_runs(tmp_path):
    """In one process, each page with names of its own; a sweep's cells get little time."""
    code = [
        "from mlakit.sweep import grid",
        "grid.DEFAULTS |= {'budget_s': 0.05, 'paths': ('torch_native', 'torch_rms_norm')}",
    ]
    run = 0
    for page in PAGES:
        names = f"names_{page.stem.replace('-', '_')}"
        code.append(f"{names} = {{'__name__': {names!r}}}")
        for number, block in enumerate(blocks(page, "python"), 1):
            if not importable(block):
                assert page.name in NOT_RUN, f"{page.name} example {number}: nothing may be skipped"
                continue
            where = f"{page.name} example {number}"
            code.append(f"exec(compile({block!r}, {where!r}, 'exec'), {names})")
            run += 1
    assert run >= 8
    script = tmp_path / "examples.py"
    script.write_text("if __name__ == '__main__':\n    " + "\n    ".join(code))
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.name, line) for line in lines if line.startswith("mlakit ")]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_parses(page, line):
    import typer

    import mlakit.cli  # noqa: F401  (its modules add their commands)
    from mlakit.cli.base import app

    name, *arguments = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app)
    assert name in group.commands, f"{page}: {line}"
    group.commands[name].make_context(name, arguments)


def sources() -> list[str]:
    """Every string of the library, what varies in it as a null."""
    found = []
    for path in (ROOT / "mlakit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_quoted_error_is_one_of_ours():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^`(.+)`\n:  ", text, re.MULTILINE)
    assert len(quoted) >= 30
    strings = sources()
    for message in quoted:
        fixed = [re.escape(part) for part in message.split("…") if part.strip()]
        pattern = re.compile(".*".join(fixed), re.DOTALL)
        assert any(pattern.search(s) for s in strings), f"no longer said: {message}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_the_site_refers_to_nothing_outside(site):
    pages = sorted(set(site.glob("*.html")) - {site / "404.html"})
    assert {p.stem for p in PAGES[1:]} <= {p.stem for p in pages}
    for page in pages:
        html = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"([^\"]+)\"", html)
        loaded += re.findall(r"<link[^>]*\bhref=\"([^\"]+)\"", html)
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page.name
        for link in re.findall(r"<a[^>]*\bhref=\"([^\"#]+)", html):
            if not re.match(r"[a-z]+:|//", link):
                assert (page.parent / link).exists(), f"{page.name} points to {link}"
    api = (site / "api.html").read_text()
    assert "RMSNorm of q and of k by the path that" in api


@pytest.mark.browser
def test_the_site_is_clicked_through(site, tmp_path):
    from devtools import browser

    with browser(tmp_path / "profile") as page:
        page.open((site / "index.html").as_uri())
        entries = page.run(
            "[...document.querySelectorAll('.wy-menu a')].map(a => a.getAttribute('href'))"
            ".filter(h => !h.includes('#'))"
        )
        assert len(entries) >= 17
        for entry in entries:
            page.click(f".wy-menu a[href={entry!r}]")
            there = (
                f"location.pathname.endsWith({'/' + entry!r}) && document.readyState === 'complete'"
                " && !!document.querySelector('[role=main]')"
            )
            for _ in range(300):
                with contextlib.suppress(AssertionError):  # a page on its way out answers nothing
                    if page.run(there):
                        break
                time.sleep(0.1)
            assert page.run("document.querySelector('[role=main]').innerText.length > 300"), entry
            outside = page.run(
                "performance.getEntriesByType('resource').map(r => r.name)"
                ".filter(n => !n.startsWith('file:') && !n.startsWith('data:'))"
            )
            assert outside == [], entry
        assert page.errors == []
