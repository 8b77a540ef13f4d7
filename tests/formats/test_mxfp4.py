"""MXFP4 bytes against ml_dtypes' E2M1 and E8M0, exact rationals and literal field cases."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from mlakit.errors import MisuseError
from mlakit.formats import mxfp4


def every_bf16() -> torch.Tensor:
    """All 65,536 bf16 values as float32, and each nudged by one float32 step either way."""
    bits = torch.arange(65536, dtype=torch.int32) << 16
    return torch.cat([(bits + nudge).view(torch.float32) for nudge in (-1, 0, 1)])


def test_every_bf16_value_encodes_as_ml_dtypes_does():
    x = every_bf16()
    x = x[~x.isnan()]
    got = mxfp4.encode(x).numpy()
    want = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert np.array_equal(got, want)


def test_codes_decode_as_ml_dtypes_does():
    packed = mxfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 32))
    got = mxfp4.dequantise(packed, torch.tensor([[127]], dtype=torch.uint8))[0, :16]
    want = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(got.numpy(), want)


def test_scale_bytes_decode_as_ml_dtypes_does():
    got = mxfp4.decode_scale(torch.arange(256, dtype=torch.int32).to(torch.uint8)).numpy()
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "want"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4), (7.0, 6)],
)
def test_ties_go_to_even(value, want):
    codes = mxfp4.encode(torch.tensor([value, -value])).tolist()
    assert [mxfp4.E2M1[c & 7] for c in codes] == [want, want]
    assert [c >> 3 for c in codes] == [0, 1]


@pytest.mark.parametrize(
    ("amax", "ocp_floor", "round_up"),
    [(2.7, 126, 126), (5.5, 127, 127), (6.5, 127, 128), (8.0, 128, 128), (12.0, 128, 128)],
)
def test_scale_bytes_of_the_field_case(amax, ocp_floor, round_up):
    x = torch.tensor([amax])
    assert mxfp4.scale_of(x, "ocp_floor").item() == ocp_floor
    assert mxfp4.scale_of(x, "round_up").item() == round_up


@pytest.mark.parametrize(("amax", "byte"), [(6.99, 127), (7.0, 128), (8.0, 128), (1.0, 125)])
def test_quark_even_rounds_half_up_at_two_bits(amax, byte):
    assert mxfp4.scale_of(torch.tensor([amax]), "quark_even").item() == byte


def test_each_rule_is_its_formula_in_exact_arithmetic():
    x = every_bf16()
    x = x[x.isfinite() & (x >= 2.0**-120)][::7]
    got = {rule: mxfp4.scale_of(x, rule).tolist() for rule in mxfp4.RULES}
    for i, value in enumerate(x.tolist()):
        exact = Fraction(value)
        exponent = math.frexp(value)[1] - 1
        up = exponent - 3
        while Fraction(6) * Fraction(2) ** up < exact:
            up += 1
        carried = exact / Fraction(2) ** exponent >= Fraction(7, 4)
        assert got["ocp_floor"][i] == exponent - 2 + 127
        assert got["round_up"][i] == up + 127
        assert got["quark_even"][i] == exponent - 2 + 127 + carried


def test_clipped_groups_on_gaussian_data():
    x = torch.randn(20000, 32, generator=torch.Generator().manual_seed(3))
    share = {}
    for rule in mxfp4.RULES:
        _, scale = mxfp4.quantise(x, rule)
        limit = 6 * mxfp4.decode_scale(scale)
        share[rule] = (x.abs().amax(-1, keepdim=True) > limit).double().mean().item()
    assert share["ocp_floor"] == pytest.approx(0.294, abs=0.02)
    assert share["round_up"] == 0
    assert 0 < share["quark_even"] < share["ocp_floor"]


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_quantise_against_float64(rule):
    x = torch.randn(23, 96, generator=torch.Generator().manual_seed(4)) * 1e3
    packed, scale = mxfp4.quantise(x, rule)
    assert packed.shape == (23, 48)
    assert scale.shape == (23, 3)
    exact = x.double().view(23, 3, 32) / mxfp4.decode_scale(scale).double().unsqueeze(-1)
    table = torch.tensor([*mxfp4.E2M1, *(-v for v in mxfp4.E2M1)], dtype=torch.float64)
    got = table[mxfp4.unpack(packed).int()].view_as(exact)
    best = (exact.clamp(-6, 6).unsqueeze(-1) - table).abs().amin(-1)
    assert torch.equal((got - exact.clamp(-6, 6)).abs(), best)
    back = mxfp4.dequantise(packed, scale).double().view_as(exact)
    assert torch.equal(back, got * mxfp4.decode_scale(scale).double().unsqueeze(-1))


def test_low_nibble_is_the_even_element():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 6.0, -1.0
    packed, _ = mxfp4.quantise(x, "ocp_floor")
    assert packed[0, 0].item() == 0xA7


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_zero_tiny_and_nonfinite_groups(rule):
    x = torch.zeros(1, 128)
    x[0, 32] = 1e-45
    x[0, 64] = float("nan")
    x[0, 96] = float("inf")
    packed, scale = mxfp4.quantise(x, rule)
    assert scale.tolist() == [[0, 0, 255, 255]]
    back = mxfp4.dequantise(packed, scale)
    assert not back[0, :32].any()
    assert back[0, :64].isfinite().all()
    assert back[0, 64:].isnan().all()


def test_shuffle_puts_each_byte_where_the_docstring_says():
    m, groups = 300, 11
    plain = torch.randint(0, 255, (m, groups), generator=torch.Generator().manual_seed(5))
    plain = plain.to(torch.uint8)
    shuffled = mxfp4.shuffle_scale(plain)
    assert shuffled.shape == mxfp4.shuffled_shape(m, groups) == (512, 16)
    flat = shuffled.flatten()
    for row, column in [(0, 0), (0, 3), (0, 4), (15, 1), (16, 1), (31, 7), (32, 8), (299, 10)]:
        tile = (row // 32) * (16 // 8) + column // 8
        r, c = row % 32, column % 8
        inside = (c % 4) * 64 + (r % 16) * 4 + (c // 4) * 2 + r // 16
        assert flat[tile * 256 + inside] == plain[row, column]
    assert torch.equal(mxfp4.unshuffle_scale(shuffled, m, groups), plain)
    assert shuffled.int().sum() == plain.int().sum()


def test_refusals_say_what_is_wanted():
    with pytest.raises(MisuseError, match="33 wide: MXFP4 groups need a width of 32"):
        mxfp4.quantise(torch.zeros(1, 33))
    with pytest.raises(MisuseError, match="did you mean 'round_up'"):
        mxfp4.scale_of(torch.zeros(1), "roundup")
