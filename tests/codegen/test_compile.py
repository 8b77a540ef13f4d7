"""Compiling for cards that are not here, from any process."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlakit.codegen import compile as compiler
from mlakit.codegen import shipped
from mlakit.errors import MisuseError
from mlakit.shapes import Widths

V3 = Widths(1536, 512)
needs_triton = pytest.mark.skipif(compiler.why_not() is not None, reason="triton is not installed")


@needs_triton
def test_every_arch_compiles_and_says_what_it_is():
    made = compiler.compile_many([shipped.request(a, V3) for a in compiler.ARCHS])
    for arch, compiled in zip(compiler.ARCHS, made, strict=True):
        assert compiled.arch == arch
        assert compiled.binary[:4] == b"\x7fELF"
        assert compiled.amd == arch.startswith("gfx")
        assert compiled.code_matches == compiled.amd
        assert dict(compiled.signature)["q"] == "*bf16"
        assert arch in compiled.text
        with pytest.raises(dataclasses.FrozenInstanceError):
            compiled.arch = "gfx90a"


@needs_triton
def test_a_parent_under_the_interpreter_and_an_unwritable_home(tmp_path):
    code = (
        "from mlakit.codegen import shipped, compile as c; from mlakit.shapes import Widths;"
        "made = c.compile_one(shipped.request('gfx942', Widths(768, 512)));"
        "print(len(made.binary), c.cache_dir())"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
    # A home that is no folder cannot be written even by root.
    env |= {"TRITON_INTERPRET": "1", "HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, cache = done.stdout.split()
    assert int(size) > 1000
    assert cache.startswith(str(tmp_path))
    assert any(Path(cache).rglob("*.hsaco"))


@needs_triton
def test_a_second_compile_comes_from_the_cache():
    first, second = (compiler.compile_many([shipped.request("gfx90a", V3)])[0] for _ in range(2))
    assert first.binary == second.binary
    assert first.metadata["hash"] == second.metadata["hash"]


@needs_triton
def test_refusals_are_one_line():
    with pytest.raises(MisuseError, match="did you mean 'gfx942'"):
        compiler.compile_many([compiler.Request("a:b", "gfx941")])
    with pytest.raises(MisuseError, match="does not compile: ModuleNotFoundError") as caught:
        compiler.compile_one(compiler.Request("no_such_module:kernel", "gfx942"))
    assert "\n" not in str(caught.value)


def test_without_triton_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MisuseError, match="triton is not installed"):
        compiler.compile_many([compiler.Request("a:b", "gfx942")])


@needs_triton
def test_the_check_of_text_against_binary_can_fail(tmp_path):
    compiled = compiler.compile_one(shipped.request("gfx942", V3))
    code = (
        "import sys; from pathlib import Path;"
        "from mlakit.codegen.compile import _assembles_to as f;"
        "folder = Path(sys.argv[1]); binary = (folder / 'binary').read_bytes();"
        "text = (folder / 'text').read_text(); other = text.replace('row_shr:8', 'row_shr:7');"
        "print(f(text, 'gfx942', binary), f(other, 'gfx942', binary))"
    )
    (tmp_path / "binary").write_bytes(compiled.binary)
    (tmp_path / "text").write_text(compiled.text)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
