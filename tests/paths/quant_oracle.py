"""How tests judge a quantised q: against the float64 norm and exact decoding, no sibling."""

import torch

from mlakit.formats import fp8, mxfp4
from mlakit.paths import quantised
from mlakit.rounding import oracle

NORM_ERROR = 4e-6
"""relative error allowed to a float32 norm before it is quantised (about 30 float32 ulps)"""


def assert_faithful(quant, got, q, weight, eps, options):
    """Each scale follows from the exact largest magnitude, each code is nearest to the exact norm.

    A code may be off where the exact value lies within ``NORM_ERROR`` of a rounding boundary.
    """
    exact = oracle(q, weight, eps).reshape(-1, q.shape[-1])
    want = quantised.reference(quant, q, weight, eps, options)
    got_back = quantised.dequantise(quant, got, options)
    want_back = quantised.dequantise(quant, want, options)
    assert torch.equal(got_back.isnan(), want_back.isnan())
    scale = quantised.plain_scale(quant, got, options)
    m, groups = scale.shape
    grouped = exact.view(m, groups, -1)
    finite = grouped.isfinite().all(-1)
    amax = grouped.abs().amax(-1)[finite]
    if quant == "mxfp4":
        low, high = (
            mxfp4.scale_of((amax * (1 + e)).float(), options.rule)
            for e in (-NORM_ERROR, NORM_ERROR)
        )
        assert ((scale[finite] >= low) & (scale[finite] <= high)).all()
        factor = mxfp4.decode_scale(scale).double()
        table = torch.tensor([*mxfp4.E2M1, *(-v for v in mxfp4.E2M1)], dtype=torch.float64)
        codes = mxfp4.unpack(got.values.reshape(m, -1)).int()
        decoded, limit, lowest, mantissa = table[codes], 6.0, 0, 1
    else:
        encoding = next(e for e in fp8.ENCODINGS.values() if e.dtype is got.values.dtype)
        expected = amax.clamp_min(fp8.MIN_AMAX) / encoding.maximum
        assert torch.allclose(scale[finite].double(), expected, rtol=NORM_ERROR, atol=0)
        factor, decoded = scale.double(), got.values.double()
        limit, lowest, mantissa = encoding.maximum, 1 - encoding.bias, 3
    target = (grouped / factor.unsqueeze(-1)).clamp(-limit, limit)[finite]
    decoded = decoded.reshape(m, groups, -1)[finite]
    exponent = target.abs().log2().floor().clamp_min(lowest)
    half_step = torch.exp2(exponent - mantissa - 1)
    assert ((decoded - target).abs() <= half_step + target.abs() * NORM_ERROR).all()
    worth_a_sign = (target.abs() > half_step * 1.01) & (target != 0)
    assert torch.equal(decoded.sign()[worth_a_sign], target.sign()[worth_a_sign])


def share_of_codes_changed(got, want):
    """Share of bytes that differ from the reference's."""
    return (got.values.view(torch.uint8) != want.values.view(torch.uint8)).double().mean().item()
