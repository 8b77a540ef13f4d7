"""Explanations: the choice, one reason for every other path, and whether it runs here."""

import json

import pytest

from mlakit.context import Context
from mlakit.dispatch import probe
from mlakit.dispatch.explain import explain
from mlakit.errors import MisuseError, RefusedError
from mlakit.paths import registry

STORY = Context(arch="gfx950", use_aiter=True)


@pytest.mark.parametrize("policy", ["mlakit", "torch_only", "sglang_today", "vllm_today", "atom"])
@pytest.mark.parametrize("context", [Context(), STORY, Context(arch="sm_90", quant="fp8_token")])
def test_every_path_has_one_reason(policy, context):
    e = explain(context, policy)
    assert {v.path for v in e.verdicts} == {*registry.names(), e.choice.path}
    assert [v.path for v in e.verdicts if v.state == "chosen"] == [e.choice.path]
    assert e.verdicts[0].state == "chosen"
    assert all(v.reason and "\n" not in v.reason for v in e.verdicts)
    assert json.loads(json.dumps(e.to_json()))["paths"] == e.to_rows()


def test_the_story_in_two_lines():
    before, after = (explain(STORY, f"sglang_{w}_fix") for w in ("before", "after"))
    assert before.line.startswith("sglang_pr23186_before: torch_native (")
    assert after.line == (
        "sglang_0_5_11: aiter_fused (1 launch): AITER in use: one kernel for both norms"
    )
    assert after.here == "no gfx950 on this machine: it has cpu"


def test_reasons_are_the_paths_own_or_the_policys():
    rows = {r["path"]: r for r in explain(STORY, "sglang_after_fix").to_rows()}
    assert rows["cpu_fused"]["state"] == "cannot run"
    assert "CPU only" in rows["cpu_fused"]["reason"]
    assert (rows["torch_native"]["state"], rows["torch_native"]["reason"]) == (
        "could run", "the policy prefers aiter_fused",
    )  # fmt: skip
    here = {r["path"]: r for r in explain(Context()).to_rows()}
    assert "correctness only" in here["triton_fused"]["reason"]
    assert "AMD cards only" in here["aiter_fused"]["reason"]


def test_what_runs_here(monkeypatch):
    assert explain(Context()).here is None
    monkeypatch.setattr(probe, "packages", frozenset)
    assert "numba" in explain(Context()).here
    assert "belongs to the engine" in explain(Context(), "sglang_today").here
    assert explain(Context(), "atom").here == "nothing runs: the engine fails"


def test_errors():
    with pytest.raises(MisuseError, match="unknown policy"):
        explain(Context(), "sglang")
    with pytest.raises(RefusedError, match="AMD cards only"):
        explain(Context(requested="aiter_fused"))


def test_what_is_no_context_is_said():
    with pytest.raises(MisuseError, match="give a Context"):
        explain("gfx950")


def test_where_no_path_delivers_the_width_is_named():
    reason = explain(Context(quant="mxfp4", q_lora_rank=40)).choice.reason
    assert reason.startswith("no path delivers mxfp4 on cpu here (q is 40 wide")
