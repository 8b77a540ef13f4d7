"""FP8 bytes against ml_dtypes, a float64 search of the value table, and literal field cases."""

import ml_dtypes
import numpy as np
import pytest
import torch

from mlakit.errors import MisuseError
from mlakit.formats import fp8

OCP, FNUZ = fp8.encoding("fp8_ocp"), fp8.encoding("fp8_fnuz")
ML_DTYPES = {"fp8_ocp": ml_dtypes.float8_e4m3fn, "fp8_fnuz": ml_dtypes.float8_e4m3fnuz}


def every_bf16() -> torch.Tensor:
    """All 65,536 bf16 values as float32, and each nudged by one float32 step either way."""
    bits = torch.arange(65536, dtype=torch.int32) << 16
    return torch.cat([(bits + nudge).view(torch.float32) for nudge in (-1, 0, 1)])


@pytest.mark.parametrize("encoding", [OCP, FNUZ], ids=lambda e: e.name)
def test_every_bf16_value_encodes_as_ml_dtypes_does(encoding):
    x = every_bf16()
    got = fp8.encode(x, encoding).view(torch.uint8).numpy()
    clamped = np.clip(x.numpy(), -encoding.maximum, encoding.maximum)
    with np.errstate(invalid="ignore"):
        want = clamped.astype(ML_DTYPES[encoding.name]).view(np.uint8)
    nan = np.isnan(clamped)
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan(got[nan].view(ML_DTYPES[encoding.name]).astype(np.float32)).all()
    assert nan.any()


@pytest.mark.parametrize("encoding", [OCP, FNUZ], ids=lambda e: e.name)
def test_encoding_is_nearest_with_ties_to_the_even_code(encoding):
    codes = torch.arange(128, dtype=torch.uint8).view(encoding.dtype).double()
    table = codes[codes.isfinite()]
    assert table.max() == encoding.maximum
    middles = (table[1:] + table[:-1]) / 2
    got = fp8.encode(middles.float(), encoding).view(torch.uint8)
    assert torch.equal(got % 2, torch.zeros_like(got))
    above = fp8.encode(torch.nextafter(middles.float(), torch.tensor(1e9)), encoding)
    assert torch.equal(above.double(), table[1:])


@pytest.mark.parametrize(
    ("byte", "ocp", "fnuz"), [(0x38, 1.0, 0.5), (0x40, 2.0, 1.0), (0x7E, 448.0, 224.0)]
)
def test_a_byte_is_worth_twice_as_much_in_ocp(byte, ocp, fnuz):
    bits = torch.tensor([byte], dtype=torch.uint8)
    assert bits.view(OCP.dtype).float().item() == ocp
    assert bits.view(FNUZ.dtype).float().item() == fnuz


def test_0x80_is_minus_zero_in_ocp_and_nan_in_fnuz():
    bits = torch.tensor([0x80], dtype=torch.uint8)
    assert bits.view(OCP.dtype).float().signbit().item()
    assert bits.view(OCP.dtype).float().item() == 0
    assert bits.view(FNUZ.dtype).float().isnan().item()


def test_the_clamp_comes_before_the_cast_and_fnuz_has_no_minus_zero():
    assert torch.tensor([448.0]).to(FNUZ.dtype).float().isnan().item()
    assert fp8.encode(torch.tensor([448.0, -1e9]), FNUZ).float().tolist() == [240.0, -240.0]
    assert fp8.encode(torch.tensor([1e9, -1e9]), OCP).float().tolist() == [448.0, -448.0]
    tiny = torch.tensor([-1e-9])
    assert fp8.encode(tiny, OCP).view(torch.uint8).item() == 0x80
    assert fp8.encode(tiny, FNUZ).view(torch.uint8).item() == 0x00


def test_ocp_bytes_read_as_fnuz_are_half():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    values, scale = fp8.quantise(x, OCP)
    wrong = fp8.dequantise(values.view(FNUZ.dtype), scale)
    assert (wrong / x).nanmedian().item() == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize(("encoding", "scale"), [(OCP, 3 / 448), (FNUZ, 3 / 240)])
def test_scale_is_amax_over_the_maximum(encoding, scale):
    x = torch.zeros(1, 128)
    x[0, 5] = -3.0
    values, got = fp8.quantise(x, encoding)
    assert got.item() == pytest.approx(scale, rel=1e-6)
    assert values.float()[0, 5].item() == -encoding.maximum


@pytest.mark.parametrize("encoding", [OCP, FNUZ], ids=lambda e: e.name)
@pytest.mark.parametrize("group", [128, None])
def test_an_all_zero_group_has_a_finite_scale(encoding, group):
    values, scale = fp8.quantise(torch.zeros(2, 256), encoding, group)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert not values.view(torch.uint8).any()


@pytest.mark.parametrize("encoding", [OCP, FNUZ], ids=lambda e: e.name)
@pytest.mark.parametrize("group", [128, None])
def test_quantise_against_float64(encoding, group):
    x = torch.randn(37, 384, generator=torch.Generator().manual_seed(2)) * 17
    values, scale = fp8.quantise(x, encoding, group)
    grouped = x.double().view(37, -1, group or 384)
    amax = grouped.abs().amax(-1)
    assert torch.allclose(scale.double(), amax / encoding.maximum, rtol=2e-7, atol=0)
    exact = grouped / amax.unsqueeze(-1) * encoding.maximum
    half_step = torch.exp2(exact.abs().log2().floor().clamp_min(1 - encoding.bias) - 4)
    error = (values.double().view_as(grouped) - exact).abs()
    assert (error <= half_step * (1 + 1e-5)).all()


def test_scale_layouts_describe_the_same_bytes():
    logical = torch.arange(12.0).view(4, 3)
    memory = {}
    for layout in fp8.SCALE_LAYOUTS:
        scale = fp8.empty_scale(4, 3, layout)
        assert scale.shape == (4, 3)
        fp8.by_row(scale, layout).copy_(logical)
        assert torch.equal(fp8.by_row(scale, layout), logical)
        memory[layout] = torch.as_strided(scale, (12,), (1,)).tolist()
    assert memory["row_major"] == logical.flatten().tolist()
    assert memory["transposed"] == memory["strided"] == logical.t().flatten().tolist()
    assert fp8.empty_scale(4, 3, "transposed").stride() == (3, 1)
    assert fp8.empty_scale(4, 3, "strided").stride() == (1, 4)
    assert not torch.equal(fp8.empty_scale(4, 3, "transposed").copy_(logical).t(), logical)


def test_refusals_say_what_is_wanted():
    assert fp8.refusal(1536) is None
    with pytest.raises(MisuseError, match="200 wide: groups of 128 need"):
        fp8.quantise(torch.zeros(1, 200), OCP)
    with pytest.raises(MisuseError, match="did you mean 'fp8_fnuz'"):
        fp8.encoding("fnuz")
    with pytest.raises(MisuseError, match="unknown scale layout"):
        fp8.empty_scale(1, 1, "column")
