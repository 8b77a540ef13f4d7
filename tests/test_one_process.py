"""One notebook uses inductor, triton_fused and code generation in any order."""

import itertools

import nbformat
import pytest

from mlakit.dispatch import probe
from mlakit.report import runbook

SETUP = """
from mlakit import inputs
from mlakit.paths import registry
from mlakit.rounding import oracle, round_to
from mlakit.shapes import parse_hidden

given = inputs.make(3, parse_hidden("64+32+16"), "bf16")

def check(name):
    q, k = registry.get(name).call(*given.args)
    exact = round_to(oracle(given.q, given.q_weight, given.q_eps), q.dtype)
    assert (q.float() - exact.float()).abs().max() <= 0.02
"""
STEPS = {
    "inductor": 'check("inductor")',
    "triton_fused": 'check("triton_fused")',
    "codegen": (
        "from mlakit.codegen import compile, shipped\n"
        'asked = shipped.request("gfx942", parse_hidden("DeepSeek-V3"), "bf16")\n'
        'assert "s_endpgm" in compile.compile_many([asked])[0].text'
    ),
}


@pytest.mark.skipif(
    bool(probe.package_reason("cxx") or probe.package_reason("triton")),
    reason="needs a C++ compiler and triton",
)
@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids="-".join)
def test_any_order(tmp_path, order):
    nb = nbformat.v4.new_notebook()
    sources = ["arch = 'cpu'", SETUP, *(STEPS[s] for s in order)]
    sources.append("from mlakit.report import show\nshow.end()")
    nb.cells = [nbformat.v4.new_code_cell(s) for s in sources]
    nb.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(nb, tmp_path / "order.ipynb")
    done = runbook.run_notebook(tmp_path / "order.ipynb", tmp_path / "out.ipynb", {})
    assert (done.status, done.reason) == ("ok", "")
