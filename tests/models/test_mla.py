"""The MLA block against transformers' DeepseekV3 attention with the same weights."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mlakit import rounding
from mlakit.errors import MisuseError
from mlakit.formats import fp8
from mlakit.models import mla
from mlakit.paths import registry
from mlakit.paths.quantised import QuantisedQ, dequantise, eager

DIMS = mla.Dims(hidden_size=96, heads=3, q_lora_rank=128, kv_lora_rank=64, nope=32, rope=16, v=24)


def exact_step(q, q_weight, q_eps, k, k_weight, k_eps):
    return rounding.oracle(q, q_weight, q_eps), rounding.oracle(k, k_weight, k_eps)


def layer(dtype=torch.float64, seed=0):
    return mla.random_layer(DIMS, torch.Generator().manual_seed(seed), dtype)


def deepseek(weights):
    """transformers' attention holding ``weights``, and its rotary embedding, in their dtype."""
    v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=96, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=128,
        kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24,
        num_hidden_layers=1, attn_implementation="eager", attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": mla.ROPE_THETA},
    )  # fmt: skip
    module = v3.DeepseekV3Attention(config, 0).to(weights.o.dtype)
    kv_b = torch.cat((weights.w_kc, weights.w_vc), 1).flatten(0, 1)
    pairs = {
        module.q_a_proj: weights.qkv_a[:128],
        module.kv_a_proj_with_mqa: weights.qkv_a[128:],
        module.q_a_layernorm: weights.q_norm,
        module.kv_a_layernorm: weights.k_norm,
        module.q_b_proj: weights.q_b,
        module.kv_b_proj: kv_b,
        module.o_proj: weights.o,
    }
    with torch.no_grad():
        for target, weight in pairs.items():
            target.weight.copy_(weight)
    return module, v3.DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_block_is_transformers_attention(dtype, tolerance):
    """float64: transformers' norm and cos/sin stay float32, hence 1e-6; bf16: its own noise."""
    weights = layer(dtype)
    module, rotary = deepseek(weights)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 9, 96, generator=generator, dtype=torch.float64).to(dtype)
    positions = torch.arange(9)
    mask = torch.full((9, 9), float("-inf"), dtype=dtype).triu(1)[None, None]
    with torch.no_grad():
        want = module(hidden, rotary(hidden, positions[None]), mask)[0][0]
    step = exact_step if dtype is torch.float64 else registry.get("torch_rms_norm").call
    ready = mla.prepare(hidden[0], weights, DIMS, mla.rope_tables(positions, 16), step)
    got = mla.finish(mla.attend_causal(ready, DIMS.scaling), weights, dtype)
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < tolerance
    swapped = mla.rope_tables(positions.flip(0), 16)
    ready = mla.prepare(hidden[0], weights, DIMS, swapped, step)
    other = mla.finish(mla.attend_causal(ready, DIMS.scaling), weights, dtype)
    assert (other.double() - want.double()).norm() / want.double().norm() > 2 * tolerance


@pytest.mark.parametrize("path", ["torch_native", "torch_rms_norm", "torch_rms_norm_copied"])
def test_any_path_runs_the_step(path):
    weights = layer(torch.bfloat16)
    hidden = torch.randn(5, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    tables = mla.rope_tables(torch.arange(5), 16)
    got = mla.prepare(hidden, weights, DIMS, tables, registry.get(path).call)
    qkv = torch.nn.functional.linear(hidden, weights.qkv_a)
    kv = rounding.oracle(qkv[:, 128:192], weights.k_norm, DIMS.eps)
    assert torch.allclose(got.kv.double(), kv, rtol=2**-8, atol=0)


def test_weight_formats_keep_what_their_bits_can():
    weight = torch.randn(130, 192, generator=torch.Generator().manual_seed(3))
    weight[0, 0] = 50.0
    block = mla.quantise_weight(weight, "fp8_block128")
    assert block.scale.shape == (2, 2)
    # E4M3 has 3 mantissa bits; below 2^-6 of the scale its steps are absolute.
    step = (weight.abs() * 2**-4).clamp_min(float(block.scale.max()) * 2**-10)
    assert ((mla.dense(block) - weight).abs() <= step * 1.0001).all()
    assert float(block.scale[0, 0]) == pytest.approx(50 / 448)
    four = mla.quantise_weight(weight, "mxfp4")
    assert (mla.dense(four) - weight).norm() / weight.norm() < 0.25
    with pytest.raises(MisuseError, match="unknown weight format"):
        mla.quantise_weight(weight, "int4")


@pytest.mark.parametrize(("quant", "to"), [("fp8_group128", "fp8_block128"), ("mxfp4", "mxfp4")])
def test_the_quantised_step_feeds_the_quantised_product(quant, to):
    """Held against the float block: quantisation error only, not a wrong scale or order."""
    weights = layer(torch.bfloat16)
    hidden = torch.randn(33, 96, generator=torch.Generator().manual_seed(4)).bfloat16()
    tables = mla.rope_tables(torch.arange(33), 16)
    plain = mla.prepare(hidden, weights, DIMS, tables, registry.get("torch_native").call)
    weights.q_b = mla.quantise_weight(weights.q_b, to)
    fed = mla.prepare(hidden, weights, DIMS, tables, partial(eager, quant))
    error = (fed.q_latent.float() - plain.q_latent.float()).norm() / plain.q_latent.float().norm()
    assert 1e-3 < error < (0.06 if quant == "fp8_group128" else 0.3)
    assert torch.equal(fed.kv, plain.kv)
    unfused = mla.prepare(hidden, weights, DIMS, tables, registry.get("torch_native").call)
    gap = (unfused.q_latent.float() - fed.q_latent.float()).norm() / fed.q_latent.float().norm()
    assert gap < 0.02 if quant == "fp8_group128" else gap < 0.15


def test_a_quantised_q_before_the_wrong_weight_is_refused():
    weights = layer(torch.bfloat16)
    q = eager("fp8_group128", torch.ones(2, 128).bfloat16(), weights.q_norm, 1e-6,
              torch.ones(2, 64).bfloat16(), weights.k_norm, 1e-6)[0]  # fmt: skip
    with pytest.raises(MisuseError, match="before a float weight"):
        mla.product(q, weights.q_b, torch.bfloat16)
    with pytest.raises(MisuseError, match="quantised differently"):
        mla.product(q, mla.quantise_weight(weights.q_b, "mxfp4"), torch.bfloat16)


@pytest.mark.parametrize("to", ["fp8_block128", "mxfp4"])
@pytest.mark.parametrize("quantised", [True, False])
def test_quantised_products_are_float64s_of_the_values_they_get(to, quantised):
    generator = torch.Generator().manual_seed(6)
    weight = mla.quantise_weight(torch.randn(200, 256, generator=generator), to)
    x = torch.randn(5, 256, generator=generator).bfloat16()
    read = mla.quantised_for(x, weight)
    want = dequantise(mla.QUANTS[to], read).double() @ mla.dense(weight).double().t()
    got = mla.product(read if quantised else x, weight, torch.float32)
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)
    assert mla.quantised_for(read, weight) is read


@pytest.mark.parametrize("m", [1, 4, 6])
@pytest.mark.parametrize("layout", ["row_major", "strided"])
def test_torchs_block_scaled_product_gets_what_cublas_wants(m, layout, monkeypatch):
    """A stand-in that insists on cuBLAS's layouts: rows by 4, K's blocks by 4, scales by column."""

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype):
        rows, k = a.shape
        assert rows % 4 == 0
        assert (scale_a.shape, scale_a.stride()) == ((rows, k // 128), (1, rows))
        assert scale_b.stride() == (1, k // 128)
        assert k % 512 == 0
        w = mla.dense(mla.Fp8Block(b.t(), scale_b.t()))
        return (fp8.dequantise(a, scale_a).double() @ w.double().t()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(mla, "runs_block_scaled", lambda weight: True)
    generator = torch.Generator().manual_seed(6)
    weight = mla.quantise_weight(torch.randn(144, 512, generator=generator), "fp8_block128")
    values, scale = fp8.quantise(torch.randn(m, 512, generator=generator), fp8.encoding("fp8_ocp"))
    if layout == "strided":
        scale = scale.t().contiguous().t()
    x = QuantisedQ(values, scale)
    want = dequantise("fp8_group128", x).double() @ mla.dense(weight).double().t()
    assert torch.allclose(mla.product(x, weight, torch.float64), want)


def test_scales_that_cublas_would_misread_never_reach_it(monkeypatch):
    """On an H200 a K of 256 gave silently wrong products: the small model lost half its answers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for k, runs in ((256, False), (768, False), (1536, True), (7168, True)):
        values = SimpleNamespace(is_cuda=True, shape=(192, k), device="cuda")
        assert mla.runs_block_scaled(mla.Fp8Block(values, None)) is runs


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="torch has the block-scaled product on sm_90 alone",
)
@pytest.mark.parametrize(("m", "k"), [(1, 1536), (8, 1536), (70, 1536), (70, 256), (70, 768)])
def test_the_cards_block_scaled_product_is_float64s(m, k):
    generator = torch.Generator("cuda").manual_seed(6)
    made = torch.randn(2112, k, generator=generator, device="cuda")
    weight = mla.quantise_weight(made, "fp8_block128")
    x = torch.randn(m, k, generator=generator, device="cuda").bfloat16()
    read = mla.quantised_for(x, weight)
    want = dequantise("fp8_group128", read).double() @ mla.dense(weight).double().t()
    got = mla.product(x, weight, torch.bfloat16)
    assert float((got.double() - want).norm() / want.norm()) < 2**-8


def test_batched_a8w8_is_dequantise_and_multiply():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 7, 256, generator=generator).bfloat16()
    weight = torch.randn(3, 40, 256, generator=generator)
    to = fp8.encoding("fp8_ocp")
    scale = fp8.scale_of(weight.abs().amax(), to)
    coded = fp8.encode(weight / scale, to)
    got = mla.batched_a8w8(x, coded, scale)
    values, a_scale = fp8.quantise(x.reshape(21, 256).float(), to)
    left = fp8.dequantise(values, a_scale).double().view(3, 7, 256)
    want = left @ (coded.double() * scale.double()).transpose(1, 2)
    # Float32 sums of 256 products, and one bf16 rounding.
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=1e-4)
    exact = x.double() @ weight.double().transpose(1, 2)
    assert (got.double() - exact).norm() / exact.norm() < 0.06


def test_the_absorbed_product_may_be_fp8():
    dims = mla.Dims(96, 3, 128, 64, nope=128, rope=16, v=24)
    weights = mla.random_layer(dims, torch.Generator().manual_seed(7))
    hidden = torch.randn(9, 96, generator=torch.Generator().manual_seed(8)).bfloat16()
    given = (dims, mla.rope_tables(torch.arange(9), 16), registry.get("torch_native").call)
    plain = mla.prepare(hidden, weights, *given)
    to, w = fp8.encoding("fp8_ocp"), weights.w_kc.float().transpose(1, 2)
    scale = fp8.scale_of(w.abs().amax(), to)
    weights.w_kc = fp8.encode(w / scale, to)
    coded = mla.prepare(hidden, weights, *given, absorb=partial(mla.batched_a8w8, scale=scale))
    error = (coded.q_latent.float() - plain.q_latent.float()).norm()
    assert 1e-3 < error / plain.q_latent.float().norm() < 0.06


def test_dims_come_from_the_table():
    v3 = mla.Dims.of("DeepSeek-V3")
    assert v3 == mla.Dims(7168, 128, 1536, 512, 128, 64, 128)
    with pytest.raises(MisuseError, match="a size is missing"):
        mla.Dims.of("DeepSeek-V2-Lite")
    with pytest.raises(MisuseError, match="did you mean 'DeepSeek-V3'"):
        mla.Dims.of("DeepSeekV3")
