"""Sizes that keep a file readable, public names that somebody uses; an exception has a reason."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "mlakit").rglob("*.py"))
MOST_LINES = 400
MOST_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}
"""longer than a screen, and why it has to be"""
NAMED_FOR_OTHERS = {
    "models/engines.py": "the signatures of serving engines' own entries, called by them",
}
"""files whose public names nobody in mlakit has to use"""


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT / "mlakit"))


def functions(file: Path):
    """(name, lines) of every function's body behind its docstring."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            told = ast.get_docstring(node) is not None
            begin = node.body[0].end_lineno + 1 if told else node.lineno
            yield node.name, node.end_lineno - begin + 1


@pytest.mark.parametrize("file", LIBRARY, ids=relative)
def test_no_file_and_no_function_is_longer_than_agreed(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    long = {f"{relative(file)}: {name}" for name, n in functions(file) if n > MOST_FUNCTION_LINES}
    assert long <= set(LONG_FUNCTIONS)


def test_every_listed_exception_is_still_one():
    long = {
        f"{relative(file)}: {name}"
        for file in LIBRARY
        for name, lines in functions(file)
        if lines > MOST_FUNCTION_LINES
    }
    assert set(LONG_FUNCTIONS) <= long


def test_every_public_name_is_used_outside_the_tests():
    """Anywhere in the library (its own file counts), the notebooks, or as a command."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "mlakit", "notebooks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    files = [ROOT / f for f in listed if f.endswith((".py", ".ipynb"))] or LIBRARY
    words: dict[str, int] = {}
    for file in files:
        if file.exists():
            for word in re.findall(r"\w+", file.read_text(encoding="utf-8")):
                words[word] = words.get(word, 0) + 1
    unused = []
    for file in LIBRARY:
        if relative(file) in NAMED_FOR_OTHERS:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list
            names = [node.name] if named else []
            if isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            unused += [
                f"{relative(file)}: {n}" for n in names if not n.startswith("_") and words[n] < 2
            ]
    assert not unused


TAKE_THE_DEFAULT_DTYPE = {"empty", "zeros", "ones", "randn", "rand", "linspace", "tensor"}


def test_no_tensor_takes_the_default_dtype():
    """Engines change it while they load a model; figures and scales must not change with it."""
    bare = []
    for file in LIBRARY:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
                continue
            given = {keyword.arg for keyword in node.keywords} & {"dtype", None}
            if node.func.attr in TAKE_THE_DEFAULT_DTYPE and not given:
                bare.append(f"{relative(file)}:{node.lineno}: {ast.unparse(node)[:70]}")
    assert not bare
