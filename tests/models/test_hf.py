"""The norm step of every MLA family that transformers ships: swapped, fused, restored exactly."""

import copy
import importlib
import inspect

import pytest
import torch

from mlakit.errors import MisuseError
from mlakit.models import hf
from mlakit.paths import registry

pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "vocab_size": 97, "first_k_dense_replace": 1,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
OWN = {
    "bailing_hybrid": HYBRID,
    "kimi_linear": HYBRID,
    "glm5_next": {
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full"],
    },
    "hy_v4_vl": {
        "qk_rope_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    },
    "longcat_flash": {
        "num_layers": 1, "head_dim": 8, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96,
        "zero_expert_num": 1, "moe_topk": 2,
    },
}  # fmt: skip
PAIRS = {"bailing_hybrid": 1, "kimi_linear": 1, "glm5_next": 1, "mistral_large4": 0}
IDS = torch.tensor([[5, 9, 33, 60, 7, 96, 12, 3, 41, 18]])


def build(family, dtype=torch.bfloat16, **changes):
    """A small randomly initialised model of a family; norm weights are not ones."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    here = [
        c for c in vars(module).values()
        if inspect.isclass(c) and c.__module__ == module.__name__
    ]  # fmt: skip
    causal = [c for c in here if c.__name__.endswith("ForCausalLM")]
    kind = (causal or [c for c in here if c.__name__.endswith("TextModel")])[0]
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES | OWN.get(family, {}) | changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("a_layernorm.weight"):
                weight.copy_(1 + 0.25 * torch.randn_like(weight))
    return model.to(dtype)


@torch.no_grad()
def logits(model, ids=IDS, **more):
    return model(input_ids=ids, **more)[0]


def test_families_are_listed():
    found = hf.families()
    assert {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash",
            "minicpm3", "mistral4", "youtu"} <= set(found)  # fmt: skip
    assert "llama" not in found


@pytest.mark.parametrize("family", hf.families())
def test_every_family_is_bit_equal_and_restored(family):
    model = build(family)
    before, classes = logits(model), [type(m) for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    # Three families come as text models, without a head to generate with.
    ask = lambda: model.generate(IDS, max_new_tokens=3, do_sample=False)  # noqa: E731
    said = ask() if type(model).__name__.endswith("CausalLM") else None
    with hf.patch(model, rounding="cast_then_weight") as done:
        assert torch.equal(logits(model), before)
        assert said is None or torch.equal(ask(), said)
        assert done.fused == PAIRS.get(family, 2)
        assert done.separate == (2 if family == "mistral_large4" else 0)
    with hf.patch(model, rounding="truncate"):
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any("forward" in m.__dict__ or "_mlakit" in m.__dict__ for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_a_path_runs_once_a_layer_on_views(family):
    model, seen = build(family), []
    native = registry.get("torch_native").call

    def counting(*args):
        seen.append(args)
        return native(*args)

    before = logits(model)
    with hf.patch(model, counting) as done:
        after = logits(model)
    assert done.path == "counting"
    assert len(seen) == 2
    q, _, q_eps, k, _, k_eps = seen[0]
    assert (q.shape[-1], k.shape[-1], q_eps, k_eps) == (48, 32, 1e-6, 1e-6)
    assert k.stride(-2) == 40, "kv is the split view, not a copy"
    assert not torch.equal(after, before)
    assert (after - before).float().norm() / before.float().norm() < 0.05


@pytest.mark.parametrize("path", ["torch_native", "torch_rms_norm", None])
def test_generation_through_a_path(path):
    model = build("deepseek_v3", torch.float32)
    plain = model.generate(IDS, max_new_tokens=8, do_sample=False)
    with hf.patch(model, path) as done:
        got = model.generate(IDS, max_new_tokens=8, do_sample=False)
    assert done.fused == 2
    # Float32 leaves no near-ties to flip in a model with random weights.
    assert torch.equal(got, plain)
    assert got.shape[1] > IDS.shape[1]


def test_without_a_q_latent_kv_is_done_alone():
    model = build("deepseek_v2", q_lora_rank=None)
    before = logits(model)
    with hf.patch(model, rounding="cast_then_weight") as done:
        assert torch.equal(logits(model), before)
    assert (done.fused, done.separate) == (0, 2)
    with hf.patch(model, "torch_native"):
        assert (logits(model) - before).float().norm() / before.float().norm() < 0.05


@pytest.mark.parametrize(
    ("step", "sizes"),
    [
        ({"rounding": "cast_then_weight"}, {}),
        ({"path": "torch_rms_norm"}, {}),
        ({"path": "torch_rms_norm"}, {"q_lora_rank": None}),
    ],
)
def test_a_patched_model_compiles_whole(step, sizes):
    torch._dynamo.reset()
    model = build("deepseek_v2" if sizes else "deepseek_v3", **sizes)
    with hf.patch(model, **step):
        eager = logits(model, use_cache=False)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(logits(compiled, use_cache=False), eager)
        assert torch.equal(logits(compiled, use_cache=False), eager)


def test_an_earlier_forward_comes_back():
    """accelerate and others put a forward on the instance; restoring keeps theirs."""
    model = build("youtu")
    norm = model.model.layers[0].self_attn.q_a_layernorm
    theirs = type(norm).forward.__get__(norm)
    norm.forward = theirs
    hf.patch(model, rounding="truncate").restore()
    assert norm.__dict__["forward"] is theirs


def test_an_error_inside_does_not_spoil_the_next_call():
    model = build("deepseek_v3")
    before, fails = logits(model), [True]

    def once(*args):
        if fails.pop() if fails else False:
            raise RuntimeError("boom")
        return hf.cast_then_weight(*args)

    with hf.patch(model, once):
        with pytest.raises(RuntimeError, match="boom"):
            logits(model)
        assert torch.equal(logits(model), before)


def test_refusals():
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=32,
                    num_attention_heads=2)
    )  # fmt: skip
    with pytest.raises(MisuseError, match="LlamaForCausalLM has no MLA attention"):
        hf.patch(llama)
    model = build("deepseek_v3")
    with pytest.raises(MisuseError, match="did you mean 'torch_native'"):
        hf.patch(model, "torch_nativ")
    with pytest.raises(MisuseError, match="unknown rounding"):
        hf.patch(model, rounding="round_twice")
    with pytest.raises(MisuseError, match="give one"):
        hf.patch(model, "torch_native", rounding="truncate")
    with pytest.raises(MisuseError, match="quantised q"):
        hf.patch(model, "torch_fp8_group128")
    with hf.patch(model), pytest.raises(MisuseError, match="patched already"):
        hf.patch(model)


def test_a_model_that_cannot_be_patched_whole_is_left_as_it_was():
    model = build("deepseek_v3")
    first, last = (m for m in model.modules() if hasattr(m, "kv_a_layernorm"))
    last.kv_a_layernorm = torch.nn.Identity()
    with pytest.raises(MisuseError, match="Identity has no eps"):
        hf.patch(model, "torch_native")
    assert "forward" not in vars(first.q_a_layernorm)
    assert not first._forward_pre_hooks


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_whatever_stops_a_patch_leaves_the_model_as_it_was(error, monkeypatch):
    model = build("deepseek_v3")
    first, last = (m for m in model.modules() if hasattr(m, "kv_a_layernorm"))
    if error is TypeError:
        last.kv_a_layernorm.variance_epsilon = None
    else:
        eps = hf._eps

        def interrupted(norm):
            if norm is last.kv_a_layernorm:
                raise KeyboardInterrupt
            return eps(norm)

        monkeypatch.setattr(hf, "_eps", interrupted)
    with pytest.raises(error):
        hf.patch(model, "torch_native")
    assert not any("forward" in vars(m) or "_mlakit" in vars(m) for m in model.modules())
    assert not first._forward_pre_hooks


@pytest.mark.parametrize("sizes", [{}, {"q_lora_rank": None}])
def test_a_patched_model_is_not_copied(sizes):
    model = build("deepseek_v2" if sizes else "deepseek_v3", **sizes)
    attention = next(m for m in model.modules() if hasattr(m, "kv_a_layernorm"))
    with hf.patch(model, "torch_native"):
        for given in (model, attention, attention.kv_a_layernorm):
            with pytest.raises(MisuseError, match="patched"):
                copy.deepcopy(given)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    with hf.patch(twin, "torch_native"):
        assert not logits(twin).any()
    assert logits(model).any()


def test_questions_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('\ufeff{"id": 1, "prompt": "2+2=", "answer": "4"}\n', encoding="utf-8")
    assert hf.read_questions(file)[0]["id"] == 1
