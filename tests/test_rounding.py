"""The oracle and the roundings against numpy, fractions and the field's literal figures."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from mlakit.rounding import ROUNDINGS, Recipe, oracle, round_to, truncate_to


def _values(seed, shape, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def test_oracle_agrees_with_long_double():
    x, w = _values(0, (5, 48)), _values(1, (48,))
    x_long, w_long = x.double().numpy().astype(np.longdouble), w.double().numpy()
    want = x_long / np.sqrt((x_long**2).mean(-1, keepdims=True) + np.longdouble(1e-6)) * w_long
    assert np.abs(oracle(x, w, 1e-6).numpy() / want.astype(np.float64) - 1).max() < 1e-15


@pytest.mark.parametrize(
    ("value", "width", "eps", "want"),
    [
        (0.001, 512, 1e-6, 0.707107),
        (0.001, 512, 1e-5, 0.301511),
        (0.0625, 32, 1e-6, 0.999872),
        (0.0625, 32, 1.1920929e-7, 0.999985),
        (0.0625, 32, 0.0078125, 0.577350),
        (0.0, 32, 1e-6, 0.0),
    ],
)
def test_eps_literals_of_the_field(value, width, eps, want):
    x = torch.full((1, width), value, dtype=torch.float64)
    assert float(oracle(x, torch.ones(width), eps)[0, 0]) == pytest.approx(want, abs=6e-7)


def _representable(dtype):
    """Every finite value of a 16-bit dtype, as exact fractions, sorted."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).double()
    return sorted({float(v) for v in values[values.isfinite()]})


def _nearest_even(value, grid):
    """By search among all representable values, with exact fractions; ties to the even one."""
    exact = Fraction(value)
    at = int(np.searchsorted(grid, value))
    near = [grid[i] for i in (at - 1, at) if 0 <= i < len(grid)]
    best = min(abs(Fraction(g) - exact) for g in near)
    tied = [g for g in near if abs(Fraction(g) - exact) == best]
    return tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_to_is_the_nearest_value(dtype):
    grid = _representable(dtype)
    generator = np.random.default_rng(3)
    values = list(generator.standard_normal(300) * 10.0 ** generator.integers(-3, 3, 300))
    midpoint = (grid[40000] + grid[40001]) / 2
    # a hair off a tie, lost by a cast through float32
    values += [midpoint * (1 + 2**-40), midpoint * (1 - 2**-40), -midpoint * (1 + 2**-40)]
    got = round_to(torch.tensor(values, dtype=torch.float64), dtype).double().tolist()
    for value, rounded in zip(values, got, strict=True):
        assert rounded in _nearest_even(value, grid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_go_to_even_and_specials_stay(dtype):
    step = torch.finfo(dtype).eps
    ties = torch.tensor([1 + step / 2, 1 + 3 * step / 2], dtype=torch.float64)
    assert round_to(ties, dtype).tolist() == [1.0, 1 + 2 * step]
    specials = round_to(torch.tensor([math.nan, math.inf, -math.inf, 0.0]).double(), dtype)
    assert specials[0].isnan()
    assert specials[1:].tolist() == [math.inf, -math.inf, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_truncation_never_grows_and_is_the_next_value_down(dtype):
    values = _values(4, (500,), torch.float32)
    cut = truncate_to(values, dtype).double()
    grid = np.array(_representable(dtype))
    for value, got in zip(values.double().tolist(), cut.tolist(), strict=True):
        below = grid[np.searchsorted(grid, abs(value), side="right") - 1]
        assert abs(got) == below


def test_bf16_truncation_keeps_the_top_sixteen_bits():
    values = _values(5, (1000,), torch.float32)
    cut = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert torch.equal(truncate_to(values, torch.bfloat16).float(), cut)


@pytest.fixture(scope="module")
def field_case():
    """The field's own inputs: numpy seed 0, randn (4096, 1536), weights in [0.5, 1.5)."""
    state = np.random.RandomState(0)
    x = torch.from_numpy(state.randn(4096, 1536)).to(torch.bfloat16)
    w = torch.from_numpy(state.rand(1536) + 0.5).to(torch.bfloat16)
    return x, w, ROUNDINGS["round_once"](x, w, 1e-6)


def test_hugging_face_order_differs_in_a_quarter(field_case):
    x, w, once = field_case
    cast = ROUNDINGS["cast_then_weight"](x, w, 1e-6)
    assert 100 * float((cast != once).double().mean()) == pytest.approx(26.0, abs=0.1)
    assert float((cast.double() - once.double()).abs().max()) == 0.03125
    assert int((cast.view(torch.int16) - once.view(torch.int16)).abs().max()) == 1


def test_truncation_is_one_sided(field_case):
    x, w, once = field_case
    cut = ROUNDINGS["truncate"](x, w, 1e-6)
    want = oracle(x, w, 1e-6)
    assert 100 * float((cut != once).double().mean()) == pytest.approx(49.9, abs=0.1)
    assert torch.allclose(cut.float(), want.float(), rtol=1e-2, atol=1e-2)
    assert float((cut.double() / want).mean()) == pytest.approx(0.99719, abs=1e-5)
    assert float((once.double() / want).mean()) == pytest.approx(0.999997, abs=1e-6)


def test_unit_weights_hide_the_order():
    x, ones = _values(6, (64, 256)), torch.ones(256, dtype=torch.bfloat16)
    once, cast = (ROUNDINGS[n](x, ones, 1e-6) for n in ("round_once", "cast_then_weight"))
    assert torch.equal(once, cast)


def test_bf16_rstd_size_of_effect():
    x, w = _values(7, (512, 1536), scale=0.7), (1 + 0.25 * _values(8, (1536,)).float()).bfloat16()
    once = ROUNDINGS["round_once"](x, w, 1e-6)
    rounded = Recipe(rstd="bf16_rstd", product="cast_then_weight")(x, w, 1e-6)
    want = oracle(x, w, 1e-6)
    assert float((rounded != once).double().mean()) == pytest.approx(0.34, abs=0.03)
    error = (rounded.double() - want).norm() / want.norm()
    assert float(error) == pytest.approx(2.8e-3, rel=0.1)


def test_cast_then_weight_is_the_hugging_face_module():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, w = _values(9, (33, 320)), _values(10, (320,))
    norm = modeling.LlamaRMSNorm(320, eps=1e-5)
    norm.weight.data = w
    differ = norm(x) != ROUNDINGS["cast_then_weight"](x, w, 1e-5)
    assert float(differ.double().mean()) < 1e-3


def test_all_bf16_is_torch_in_bf16():
    x, w = _values(11, (33, 256)), _values(12, (256,))
    mean = x.pow(2).mean(-1, keepdim=True)
    plain = x * torch.rsqrt(mean + 1e-4) * w
    name = "bf16_variance+bf16_rstd+cast_then_weight"
    same = (plain == ROUNDINGS[name](x, w, 1e-4)).all(-1)
    # torch's rsqrt may be an ulp of float32 off, and of 256 mantissas a few are that near a tie
    assert float(same.double().mean()) > 0.95


def test_eps_rules_by_hand():
    x, w = torch.tensor([[3.0, 4.0]]), torch.ones(2)
    mean = 12.5
    for rule, scale in (
        ("inside", 1 / math.sqrt(mean + 0.5)),
        ("eps_outside", 1 / (math.sqrt(mean) + 0.5)),
        ("eps_clamped", 1 / math.sqrt(mean)),
        ("eps_ignored", 1 / math.sqrt(mean)),
    ):
        got = Recipe(eps=rule)(x, w, 0.5)[0, 0]
        assert float(got) == pytest.approx(3 * scale, rel=1e-6)
    assert float(Recipe(eps="eps_clamped")(x, w, 50.0)[0, 0]) == pytest.approx(3 / math.sqrt(50))


def test_gemma_adds_one_and_approx_keeps_twelve_bits():
    x, w = _values(13, (9, 64), torch.float32), _values(14, (64,), torch.float32)
    assert torch.allclose(Recipe(offset=1)(x, w, 1e-6).double(), oracle(x, w + 1, 1e-6), rtol=1e-5)
    rough = Recipe(rstd="approx_rsqrt").scale(x, 1e-6).double()
    ratio = rough * (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() - 1
    assert 2**-15 < float(ratio.abs().max()) <= 2**-12 * 1.01


def test_weight_dtype_rounds_to_the_weights_dtype():
    x, w32 = _values(15, (40, 256)), _values(16, (256,), torch.float32)
    own = ROUNDINGS["weight_dtype"](x, w32, 1e-6)
    assert torch.equal(own, ROUNDINGS["round_once"](x, w32, 1e-6))
    w16 = w32.to(torch.bfloat16)
    own = ROUNDINGS["weight_dtype"](x, w16, 1e-6)
    assert torch.equal(own, ROUNDINGS["cast_then_weight"](x, w16, 1e-6))


def test_names_are_what_recipes_say():
    for name, rounding in ROUNDINGS.items():
        assert rounding.name == name
