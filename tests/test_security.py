"""What we run: no pickle from disk, no evaluated text, no shell; reports escape what they print."""

import ast
import html
import json
import re
from pathlib import Path

import pandas as pd
import pytest

import mlakit
from mlakit.errors import MisuseError, RefusedError
from mlakit.report import page, show
from mlakit.report.runbook import NotebookRun

ROOT = Path(mlakit.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PICKLES_IN = "paths/interpreter.py"
"""both ends of a pipe to a child of our own, never a file"""
BANNED_CALLS = {
    "eval": "evaluates text",
    "exec": "runs text",
    "compile": "compiles text",
    "__import__": "imports by text",
    "os.system": "a shell",
    "os.popen": "a shell",
    "subprocess.getoutput": "a shell",
    "subprocess.getstatusoutput": "a shell",
    "pickle.load": "pickle from a file",
    "torch.save": "writes pickle",
    "pd.read_pickle": "pickle from a file",
    "pandas.read_pickle": "pickle from a file",
    "yaml.load": "YAML that can build objects",
    "yaml.unsafe_load": "YAML that can build objects",
    "yaml.full_load": "YAML that can build objects",
    "tempfile.mktemp": "a name that others can take first",
}


def calls(tree):
    """(dotted name, call) of every call whose function is a plain dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


def faults(source: str, name: str = "x.py") -> list[str]:
    found = []
    for called, keywords in calls(ast.parse(source)):
        if called in BANNED_CALLS:
            found.append(f"{called}: {BANNED_CALLS[called]}")
        if keywords.get("shell", "False") != "False":
            found.append(f"{called}: a shell")
        if called.endswith("torch.load") and keywords.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if called.endswith("np.load") and keywords.get("allow_pickle", "False") != "False":
            found.append("np.load of pickles")
        if called == "pickle.loads" and name != PICKLES_IN:
            found.append("pickle.loads outside the interpreter's pipe")
        if (
            called.endswith("from_pretrained")
            and keywords.get("trust_remote_code", "False") != "False"
        ):
            found.append("a model's own code")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_text_becomes_code(file):
    assert faults(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT))) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "os.system(f'rm {x}')",
        "subprocess.run(text, shell=True)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "pickle.loads(data)",
        "yaml.load(text, Loader=yaml.Loader)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
    ],
)
def test_the_search_finds_each_kind(source):
    assert len(faults(source)) == 1


def test_a_notebook_cell_runs_no_shell_and_no_evaluated_text():
    for file in (ROOT.parent / "notebooks").rglob("*.ipynb"):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            code = "".join(cell["source"])
            if cell["cell_type"] == "code":
                assert not re.search(r"^\s*[!%]", code, re.MULTILINE), f"{file.name}: {code[:80]}"
                assert faults(code, file.name) == []


# ---- reports escape what they print

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


def escaped(text: str) -> None:
    assert "<script>alert" not in text
    assert "<img src=x" not in text


def test_tables_notes_and_verdicts_escape(monkeypatch):
    shown = []
    monkeypatch.setattr(show, "_display", lambda data, metadata=None: shown.append(data))
    frame = pd.DataFrame({EVIL: [EVIL, EVIL], "n": [1, 2]})
    show.table(frame, EVIL, head=1)
    show.note(EVIL, EVIL)
    show.verdict(EVIL)
    assert len(shown) == 3
    for data in shown:
        escaped(data["text/html"])
        assert "&lt;script&gt;" in data["text/html"]


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_a_run_s_error_parameters_and_names_are_escaped_in_its_page(tmp_path, status):
    nbformat = pytest.importorskip("nbformat")
    nb = nbformat.v4.new_notebook()
    error = nbformat.v4.new_output("error", ename=EVIL, evalue=EVIL, traceback=[EVIL])
    stream = nbformat.v4.new_output("stream", text=EVIL)
    plain = nbformat.v4.new_output("execute_result", data={"text/plain": EVIL})
    figure = nbformat.v4.new_output(
        "display_data",
        data={"image/png": "iVBORw0KGgo=", "text/plain": EVIL},
        metadata={"image/png": {"alt": EVIL}},
    )
    cell = nbformat.v4.new_code_cell(f"x = {EVIL!r}", outputs=[stream, plain, figure, error])
    nb.cells = [cell]
    file = tmp_path / "n.ipynb"
    nbformat.write(nb, file)
    run = NotebookRun(EVIL, {"model": EVIL, "arch": EVIL}, status, EVIL, 1.0, "n.ipynb")
    for source in (file, tmp_path / "none.ipynb"):
        text = page.write_notebook(tmp_path / "n.html", source, run, EVIL).read_text("utf-8")
        escaped(text)
        assert "&lt;script&gt;" in text


def test_a_history_page_escapes_run_names_and_notes(tmp_path):
    from mlakit.report import history
    from mlakit.sweep import grid, store

    name = "<img src=x onerror=alert(1)>"
    for run_name in ("a", name):
        run = store.create_run(tmp_path / run_name, grid.expand(batches=[1]), measure=["timing"])
        run.save(status="ok" if run_name == "a" else f"failed {EVIL}", ended_at=store.now())
        run.close()
    text = history.write(tmp_path).read_text(encoding="utf-8")
    escaped(text)
    assert html.escape(name) in text


def test_markdown_cannot_open_a_tag():
    """GitHub and notebooks render HTML inside Markdown."""
    from mlakit.report.compare import Comparison

    pinned = Comparison(EVIL, EVIL, 0.03, [], missing=[EVIL])
    text = Comparison(EVIL, EVIL, 0.03, [], broken=[EVIL], pinned=pinned).to_markdown()
    assert not re.search(r"(?<!\\)<", text)
    assert text.count("\\<script") == text.count("<script") == 6


def test_errors_of_a_user_s_text_stay_one_line():
    from mlakit.errors import one_line, unknown

    for error in (MisuseError("a\nb"), RefusedError("x\r\ny"), ValueError(EVIL)):
        assert "\n" not in one_line(error)
    assert "\n" not in str(unknown("model", "a\nb", ["c"]))
