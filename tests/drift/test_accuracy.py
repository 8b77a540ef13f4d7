"""Accuracy rows: legal, complete, honest about what ran."""

import pytest
import torch

from mlakit.codegen import compile as compiler
from mlakit.drift import accuracy
from mlakit.paths import registry
from mlakit.records import ACCURACY_COLUMNS, Cell


def cell(**more):
    base = {"arch": "cpu", "m": 9, "q_lora_rank": 96, "kv_lora_rank": 32, "paths": ("cpu_fused",)}
    return Cell(**(base | more))


@pytest.fixture
def fake_path(monkeypatch):
    """Stands in for a path that is wrong, broken, or rounds as it likes."""

    def install(call, rounding="round_once", **more):
        path = registry.Path("cpu_fused", "a stand-in", call, lambda c: None, rounding, 1, **more)
        monkeypatch.setattr(registry, "get", lambda name: path)

    return install


def norm(name):
    from mlakit.rounding import ROUNDINGS

    formula = ROUNDINGS[name]

    def call(q, q_weight, q_eps, k, k_weight, k_eps, *, out=None):
        return formula(q, q_weight, q_eps), formula(k, k_weight, k_eps)

    return call


def test_a_row_per_family_and_output(fake_path):
    fake_path(norm("round_once"))
    rows = accuracy.accuracy_cell(cell(), run={"run_id": "r1"}).rows
    assert [(r["input_family"], r["output"]) for r in rows] == [
        (f, o) for f in accuracy.FAMILIES for o in ("q", "k")
    ]
    for row in rows:
        assert set(row) == set(ACCURACY_COLUMNS)
        assert (row["status"], row["evidence"], row["run_id"]) == ("ok", "measured", "r1")
        assert row["max_ulp"] <= 1
        assert row["elements"] == 9 * (96 if row["output"] == "q" else 32)


def test_no_q_latent_gives_k_rows_only(fake_path):
    fake_path(norm("round_once"))
    rows = accuracy.accuracy_cell(cell(q_lora_rank=0)).rows
    assert {r["output"] for r in rows} == {"k"}


def test_a_wrong_path_is_wrong(fake_path):
    def call(q, q_weight, q_eps, k, k_weight, k_eps):
        return torch.zeros_like(q), torch.full_like(k, float("nan"))

    fake_path(call)
    rows = accuracy.accuracy_cell(cell()).rows
    assert {r["status"] for r in rows} == {"wrong"}
    assert all("nonfinite" in r["flags"].split(",") for r in rows if r["output"] == "k")


def test_another_rounding_than_declared_is_flagged(fake_path):
    fake_path(norm("truncate"))
    rows = accuracy.accuracy_cell(cell(m=300, q_lora_rank=384)).rows
    normal_q = rows[0]
    assert normal_q["status"] == "ok"
    assert set(normal_q["flags"].split(",")) == {"biased", "unlike_declared_rounding"}
    fake_path(norm("cast_then_weight"), "cast_then_weight")
    assert accuracy.accuracy_cell(cell()).rows[0]["flags"] is None


def test_a_raising_path_is_a_failed_row_with_its_reason(fake_path):
    def call(*args):
        raise RuntimeError("boom\nsecond line")

    fake_path(call)
    rows = accuracy.accuracy_cell(cell()).rows
    assert {r["status"] for r in rows} == {"failed"}
    assert {r["reason"] for r in rows} == {"RuntimeError: boom"}


def test_a_large_batch_is_judged_at_both_ends(fake_path):
    def last_row_lost(q, q_weight, q_eps, k, k_weight, k_eps):
        q_out, k_out = norm("round_once")(q, q_weight, q_eps, k, k_weight, k_eps)
        q_out[-1] = 0
        assert q.shape[0] == 5000
        return q_out, k_out

    fake_path(last_row_lost)
    rows = accuracy.accuracy_cell(cell(m=5000)).rows
    assert rows[0]["status"] == "wrong"
    assert rows[0]["worst_row"] == accuracy.MAX_ROWS - 1
    assert rows[1]["status"] == "ok"


def test_an_absent_card_is_skipped_and_emulated_by_formula():
    rows = accuracy.accuracy_cell(cell(arch="gfx942", m=300, q_lora_rank=384)).rows
    assert rows[0]["status"] == "skipped"
    assert "no gfx942" in rows[0]["reason"]
    emulated = rows[1:]
    assert {r["evidence"] for r in emulated} == {"emulated"}
    assert {r["rounding"] for r in emulated} == {"truncate"}
    assert all("by a rounding formula" in r["note"] for r in emulated)
    assert emulated[0]["signed_bias"] == pytest.approx(-2.8e-3, rel=0.03)


def test_gfx950_rounds_and_nvidia_has_no_aiter():
    rows = accuracy.emulated_rows(cell(arch="gfx950"))
    assert {r["rounding"] for r in rows} == {"round_once"}
    assert accuracy.emulated_rows(cell(arch="sm_90")) == []
    assert accuracy.emulated_rows(cell(arch="gfx1100")) == []


def test_fp16_is_never_truncated():
    rows = accuracy.emulated_rows(cell(arch="gfx942", dtype="fp16"))
    assert {r["rounding"] for r in rows} == {"round_once"}


def test_quantised_outputs_are_held_against_quantising_alone():
    rows = accuracy.accuracy_cell(
        cell(q_lora_rank=256, quant="fp8_group128", paths=("torch_fp8_group128",))
    ).rows
    q_rows = [r for r in rows if r["output"] == "q"]
    assert {r["status"] for r in rows} == {"ok"}
    assert all(r["share_correct"] > 0.999 and r["max_ulp"] is None for r in q_rows)
    assert 0.01 < q_rows[0]["rel_l2"] < 0.05


def test_quantised_garbage_is_wrong(fake_path):
    def call(q, q_weight, q_eps, k, k_weight, k_eps):
        good = registry.importlib.import_module("mlakit.paths.torch_fp8_group128").PATH.call
        quantised, k_out = good(q, q_weight, q_eps, k, k_weight, k_eps)
        return quantised._replace(scale=quantised.scale * 2), k_out

    fake_path(call, output="fp8_group128")
    rows = accuracy.accuracy_cell(cell(q_lora_rank=256, quant="fp8_group128")).rows
    assert {r["status"] for r in rows if r["output"] == "q"} == {"wrong"}
    assert {r["status"] for r in rows if r["output"] == "k"} == {"ok"}


@pytest.mark.skipif(bool(compiler.why_not()), reason="needs triton to compile")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_an_absent_cards_own_binary_is_executed_and_judged(arch):
    rows = accuracy.executed_rows(cell(arch=arch, paths=("triton_fused",)), ("normal", "outlier"))
    assert len(rows) == 4
    for r in rows:
        assert (r["status"], r["evidence"], r["path_ran"]) == ("ok", "emulated", "triton_fused")
        assert r["share_correct"] >= 0.9999
        assert f"executing {arch} machine code" in r["note"]


def test_a_card_without_an_emulator_says_so():
    (row,) = accuracy.executed_rows(cell(arch="sm_80", paths=("triton_fused",)))
    assert row["status"] == "skipped"
    assert "no emulator for sm_80" in row["reason"]
