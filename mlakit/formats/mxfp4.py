"""MXFP4: groups of 32 E2M1 values, packed two a byte, sharing one E8M0 scale byte.

E2M1 holds 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; E8M0 holds 2^(byte - 127), NaN at 255.
How the byte follows from a group's largest magnitude is no part of the format: three rules are in
use, the same model gives different bytes under each, and none of them is a fault.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from mlakit.errors import MisuseError, unknown

GROUP = 32
"""elements that share one scale"""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""magnitude of each code 0 to 7; code + 8 is its negative"""
_NAN_SCALE = 255

RULES = {"ocp_floor": 0, "round_up": 0x3FFFFF, "quark_even": 0x200000}
"""Scale rule -> what is added to the float32 bits of amax before its exponent is taken, less 2.

``ocp_floor``: floor(log2 amax) - 2 (the OCP MX specification); amax above 6 * scale clips.
``round_up``: ceil(log2(amax / 6)), exactly; never clips (AITER's HIP kernel from v0.1.16).
``quark_even``: amax rounded half up to two significant bits first, then floor - 2 (Quark, torchao
and AITER's Triton kernel, which SGLang's MXFP4 branch calls); clips between the other two.
"""
DEFAULT_RULE = "quark_even"
SCALE_LAYOUTS = ("plain", "shuffled")


def refusal(width: int) -> str | None:
    """Why rows of ``width`` elements cannot be quantised, or None."""
    if width and width % GROUP == 0:
        return None
    return f"q is {width} wide: MXFP4 groups need a width of {GROUP}, {2 * GROUP}, ..."


def scale_of(amax: torch.Tensor, rule: str = DEFAULT_RULE) -> torch.Tensor:
    """E8M0 byte (uint8) for float32 ``amax``; amax 0 gives byte 0 (2^-127), NaN and inf give 255.

    Raises:
        MisuseError: unknown rule.
    """
    if rule not in RULES:
        raise unknown("E8M0 scale rule", rule, RULES)
    bits = amax.float().abs().view(torch.int32)
    byte = (((bits + RULES[rule]) >> 23) - 2).clamp_min(0)
    return torch.where(bits >= 0x7F800000, _NAN_SCALE, byte).to(torch.uint8)


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """Float32 value of E8M0 bytes: 2^(byte - 127), NaN for 255."""
    bits = torch.where(scale == 0, 0x00400000, scale.int() << 23)
    return torch.where(scale == _NAN_SCALE, torch.nan, bits.view(torch.float32))


def encode(values: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0 to 15 (uint8) of float32 ``values``: to nearest, ties to even, clamped at 6.

    The sign is kept, of zero too. E2M1 has no NaN: what a NaN becomes is not defined (its group's
    scale is NaN already).
    """
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for low, (below, above) in enumerate(pairwise(E2M1)):
        middle = (below + above) / 2
        code += magnitude >= middle if low % 2 else magnitude > middle
    return code | (values.signbit().to(torch.uint8) << 3)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """(M, N) codes to (M, N/2) bytes; the element of even index is the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """(M, N/2) bytes to (M, N) codes."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantise(values: torch.Tensor, rule: str = DEFAULT_RULE) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows in groups of 32.

    Args:
        values: (M, N) float32.
        rule: a name of ``RULES``.

    Returns:
        packed values (M, N/2) uint8 and scale bytes (M, N/32) uint8, plain layout.

    Raises:
        MisuseError: N is no multiple of 32, or the rule is unknown.
    """
    m, n = values.shape
    reason = refusal(n)
    if reason:
        raise MisuseError(reason)
    grouped = values.float().view(m, n // GROUP, GROUP)
    scale = scale_of(grouped.abs().amax(-1), rule)
    codes = encode(torch.ldexp(grouped, 127 - scale.int().unsqueeze(-1)))
    return pack(codes.view(m, n)), scale


def dequantise(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(M, N) float32 of (M, N/2) packed values and (M, N/32) plain scale bytes."""
    m, groups = scale.shape
    codes = unpack(packed).int()
    table = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=torch.float32, device=packed.device)
    return (table[codes].view(m, groups, GROUP) * decode_scale(scale).unsqueeze(-1)).view(m, -1)


def shuffled_shape(m: int, groups: int) -> tuple[int, int]:
    """Rows and columns of the shuffled layout: padded to whole tiles of 256 x 8."""
    return -(-m // 256) * 256, -(-groups // 8) * 8


def shuffle_scale(scale: torch.Tensor) -> torch.Tensor:
    """Plain (M, G) scale bytes in the tiled order that AITER's FP4 matrix kernels read.

    Padded with zeros to (SM, SG), whole multiples of 256 rows and 8 columns. A 32 x 8 tile is 256
    consecutive bytes, tiles follow each other along the columns first, and inside a tile byte
    [row, column] lies at ``(column % 4) * 64 + (row % 16) * 4 + (column // 4) * 2 + row // 16``:
    viewed as (SM/32, 2, 16, SG/8, 2, 4), the axes are reordered to (0, 3, 5, 2, 4, 1).
    """
    sm, sg = shuffled_shape(*scale.shape)
    padded = scale.new_zeros(sm, sg)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    tiles = padded.view(sm // 32, 2, 16, sg // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(sm, sg)


def unshuffle_scale(shuffled: torch.Tensor, m: int, groups: int) -> torch.Tensor:
    """The plain (m, groups) scale bytes of a shuffled (SM, SG) tensor."""
    sm, sg = shuffled.shape
    tiles = shuffled.reshape(sm // 32, sg // 8, 4, 16, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(sm, sg)[:m, :groups]
