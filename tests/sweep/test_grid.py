"""The grid: ids that never move, presets, and refusals in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlakit.context import QUANTS
from mlakit.errors import MisuseError
from mlakit.paths import registry
from mlakit.sweep.grid import PRESETS, accuracy_cells, expand


def test_ids_are_stable_across_processes_and_versions():
    (cell,) = expand(batches=[64], paths=["torch_native"])
    assert cell.id == "bde5e8c117894274"
    code = (
        "from mlakit.sweep.grid import expand;"
        "print(expand(batches=[64], paths=['torch_native'])[0].id)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == cell.id


def test_order_is_fixed_and_each_cell_once():
    cells = expand(batches=[8, 1, 8], dtypes=["bf16", "fp16"], archs=["cpu", "sm_90", "sm_90a"])
    assert [(c.arch, c.dtype, c.m) for c in cells] == [
        (arch, dtype, m) for arch in ("cpu", "sm_90") for dtype in ("bf16", "fp16") for m in (8, 1)
    ]
    assert {(c.arch, c.clock) for c in cells} == {("cpu", "cpu"), ("sm_90", "graph")}


def test_qk_norm_is_the_whole_comparison():
    cells = expand(preset="qk-norm", archs=["sm_90"])
    assert len(cells) == 15 * 5 * 2
    widths = {str(c.widths) for c in cells}
    assert widths == {"1536+512", "768+256", "2048+512", "1024+512", "0+512"}
    assert {c.dtype for c in cells} == {"bf16", "fp16"}
    assert {(c.clock, c.cache) for c in cells} == {("graph", "cold")}
    assert {c.clock for c in expand(preset="qk-norm")} == {"cpu"}


def test_what_is_given_wins_over_the_preset():
    cells = expand(preset="qk-norm", hidden=["MiniCPM3"], batches=[3], dtypes=["fp32"])
    (cell,) = cells
    assert (cell.q_lora_rank, cell.kv_lora_rank, cell.qk_rope_head_dim) == (768, 256, 32)
    assert (cell.m, cell.dtype, cell.budget_s) == (3, "fp32", PRESETS["qk-norm"]["budget_s"])


def test_a_model_brings_its_name_widths_and_eps():
    kimi, pair = expand(models=["kimi-k2.5"], hidden=[(1536, 512)], batches=[1])
    assert (kimi.model, kimi.eps) == ("Kimi-K2", 1e-5)
    assert (pair.model, pair.eps, pair.widths) == ("", 1e-6, kimi.widths)


def test_default_paths_are_those_that_deliver_the_quant():
    for cell in expand(batches=[1], quants=QUANTS):
        assert cell.paths == tuple(
            n for n in registry.names() if registry.get(n).output == cell.quant
        )
        assert cell.paths


def test_accuracy_does_not_depend_on_how_time_is_taken():
    cells = expand(archs=["sm_90"], clocks=["graph", "kernel"], caches=["cold", "hot"])
    assert len(cells) == 12
    assert accuracy_cells(cells) == [c for c in cells if (c.clock, c.cache) == ("graph", "cold")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batches": [0]}, "whole number of rows"),
        ({"batches": [1.5]}, "whole number of rows"),
        ({"batches": [True]}, "whole number of rows"),
        ({"batches": []}, "batches is empty"),
        ({"batches": "64"}, "give a list"),
        ({"batch": [1]}, "did you mean 'batches'"),
        ({"models": ["DeepSeek-V33"]}, "did you mean 'DeepSeek-V3'"),
        ({"hidden": ["1536+"]}, "unknown model"),
        ({"archs": ["gfx951"]}, "did you mean 'gfx950'"),
        ({"archs": ["gfx9-4-generic"]}, "generic compile target"),
        ({"dtypes": ["bf61"]}, "did you mean 'bf16'"),
        ({"paths": ["torch_nativ"]}, "did you mean 'torch_native'"),
        ({"clocks": ["graph"]}, "does not exist on cpu"),
        ({"clocks": ["grph"]}, "did you mean 'graph'"),
        ({"preset": "qk-norms"}, "did you mean 'qk-norm'"),
        ({"budget_s": 0}, "seconds above 0"),
        ({"budget_s": float("inf")}, "seconds above 0"),
    ],
)
def test_refusals_are_one_line(given, message):
    with pytest.raises(MisuseError, match=message) as refused:
        expand(**given)
    assert "\n" not in str(refused.value)
