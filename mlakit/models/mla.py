"""The attention-prepare block of DeepSeek's MLA as a clear reference, in every weight format.

One layer is qkv_a, split, the norm step through any path, q_b, the absorbed product with w_kc, and
RoPE; then latent attention and the way back to the residual. Weights are BF16 (or any float), FP8
with a scale a 128 x 128 block, or MXFP4, and the quantised step feeds the quantised product. FP8 on
an NVIDIA card of sm_90 is torch's own block-scaled product; elsewhere quantised products compute
what the hardware's would, with float32 sums: references, never timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import torch

from mlakit.errors import MisuseError, unknown
from mlakit.formats import fp8, mxfp4
from mlakit.paths import triton_quant
from mlakit.paths.quantised import Options, QuantisedQ, dequantise, empty
from mlakit.shapes import Widths, models

WEIGHT_FORMATS = ("float", "fp8_block128", "mxfp4")
QUANTS = {"fp8_block128": "fp8_group128", "mxfp4": "mxfp4"}
"""the step's quant whose q a weight's format reads"""
BLOCK = 128
"""rows and columns of weight that share a scale (DeepSeek-V3's ``weight_block_size``)"""
ROPE_THETA = 10000.0
"""DeepSeek-V3's ``rope_theta``"""


@dataclass(frozen=True)
class Dims:
    """The sizes of one MLA layer; ``scaling`` of scores is (nope + rope) ** -0.5, without YaRN."""

    hidden_size: int
    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope: int
    rope: int
    v: int
    eps: float = 1e-6

    @classmethod
    def of(cls, name: str) -> Dims:
        """The sizes of a model of ``data/models.csv``.

        Raises:
            MisuseError: unknown model, one without a q latent, or one whose sizes are not known.
        """
        known = {m.name: m for m in models()}
        if name not in known:
            raise unknown("model", name, known)
        m = known[name]
        given = (m.hidden_size, m.num_heads, m.q_lora_rank, m.kv_lora_rank, m.qk_nope_head_dim)
        sizes = [n for n in (*given, m.qk_rope_head_dim, m.v_head_dim) if n]
        if len(sizes) < 7:
            raise MisuseError(f"{name}: a size is missing or 0; take DeepSeek-V3 or Dims(...)")
        return replace(cls(*sizes), eps=m.eps)

    @property
    def widths(self) -> Widths:
        """The widths of the step."""
        return Widths(self.q_lora_rank, self.kv_lora_rank, self.rope)

    @property
    def scaling(self) -> float:
        """What scores are multiplied by."""
        return (self.nope + self.rope) ** -0.5


class Fp8Block(NamedTuple):
    """An (N, K) weight in FP8, one float32 scale for each block of 128 x 128."""

    values: torch.Tensor
    scale: torch.Tensor


class Mxfp4(NamedTuple):
    """An (N, K) weight in MXFP4: (N, K/2) packed, (N, K/32) E8M0 bytes."""

    values: torch.Tensor
    scale: torch.Tensor


Matrix = torch.Tensor | Fp8Block | Mxfp4


@dataclass
class Layer:
    """One layer's weights; ``qkv_a`` (q+kv+rope, hidden), ``q_b`` (heads*(nope+rope), q_lora_rank).

    ``w_kc`` (heads, nope, kv_lora_rank) and ``w_vc`` (heads, v, kv_lora_rank) are kv_b's halves;
    ``o`` (hidden, heads*v). ``input_norm`` weighs the residual before the layer.
    """

    qkv_a: Matrix
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    q_b: Matrix
    w_kc: torch.Tensor
    w_vc: torch.Tensor
    o: Matrix
    input_norm: torch.Tensor


class Prepared(NamedTuple):
    """What attention reads of M tokens: the absorbed queries and the latent cache's new rows."""

    q_latent: torch.Tensor
    """(M, heads, kv_lora_rank)"""
    q_rope: torch.Tensor
    """(M, heads, rope)"""
    kv: torch.Tensor
    """(M, kv_lora_rank), normalised"""
    k_rope: torch.Tensor
    """(M, rope)"""


def quantise_weight(weight: torch.Tensor, to: str, encoding: str = "fp8_ocp") -> Matrix:
    """An (N, K) float weight in a format of ``WEIGHT_FORMATS``.

    Blocks at the edge of the matrix may be smaller than 128 x 128.

    Raises:
        MisuseError: unknown format, or a K that MXFP4's groups of 32 do not divide.
    """
    if to == "float":
        return weight
    if to == "mxfp4":
        return Mxfp4(*mxfp4.quantise(weight.float()))
    if to != "fp8_block128":
        raise unknown("weight format", to, WEIGHT_FORMATS)
    n, k = weight.shape
    encoded = fp8.encoding(encoding)
    blocks = weight.new_zeros((-(-n // BLOCK) * BLOCK, -(-k // BLOCK) * BLOCK), dtype=torch.float32)
    blocks[:n, :k] = weight
    amax = blocks.view(-(-n // BLOCK), BLOCK, -1, BLOCK).abs().amax((1, 3))
    scale = fp8.scale_of(amax, encoded)
    return Fp8Block(fp8.encode(weight.float() / _spread(scale, n, k), encoded), scale)


def _spread(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def dense(weight: Matrix) -> torch.Tensor:
    """(N, K) of a weight: as it is, or dequantised to float32."""
    if isinstance(weight, Fp8Block):
        return weight.values.float() * _spread(weight.scale, *weight.values.shape)
    if isinstance(weight, Mxfp4):
        return mxfp4.dequantise(weight.values, weight.scale)
    return weight


def quantise_layer(layer: Layer, to: str) -> Layer:
    """A layer whose three large projections are in a format of ``WEIGHT_FORMATS``."""
    qkv_a, q_b, o = (quantise_weight(dense(w), to) for w in (layer.qkv_a, layer.q_b, layer.o))
    return replace(layer, qkv_a=qkv_a, q_b=q_b, o=o)


def product(x: torch.Tensor | QuantisedQ, weight: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """``x @ weight.T`` in ``dtype``: (M, K) by (N, K) to (M, N).

    A quantised ``x`` enters with the values it has; a plain one before a quantised weight is first
    quantised as engines do it: FP8 in groups of 128, MXFP4 in groups of 32.

    Raises:
        MisuseError: a quantised ``x`` before a weight of another format.
    """
    if isinstance(weight, torch.Tensor):
        if isinstance(x, QuantisedQ):
            raise MisuseError("a quantised q before a float weight: quantise q_b too")
        return torch.nn.functional.linear(x, weight)
    packed = isinstance(weight, Mxfp4)
    read = x if isinstance(x, QuantisedQ) else _quantised(x, weight)
    if (read.values.dtype is torch.uint8) != packed:
        raise MisuseError("q and q_b are quantised differently: give both FP8, or both MXFP4")
    if runs_block_scaled(weight) and read.scale.shape[-1] * BLOCK == weight.values.shape[1]:
        return _block_scaled(read, weight, dtype)
    left = dequantise("mxfp4" if packed else "fp8_group128", read)
    return (left @ dense(weight).t()).to(dtype)


def quantised_for(x: torch.Tensor | QuantisedQ, weight: Matrix) -> torch.Tensor | QuantisedQ:
    """``x`` as ``product`` reads it beside ``weight``; what is quantised already stays as it is."""
    if isinstance(weight, torch.Tensor) or isinstance(x, QuantisedQ):
        return x
    return _quantised(x, weight)


def _quantised(x: torch.Tensor, weight: Fp8Block | Mxfp4) -> QuantisedQ:
    rows = x.reshape(-1, x.shape[-1])
    if runs_block_scaled(weight):
        out = empty("fp8_group128", rows, BLOCK_SCALED)
        return triton_quant.quantise("fp8_group128", rows, out, BLOCK_SCALED)
    if isinstance(weight, Mxfp4):
        return QuantisedQ(*mxfp4.quantise(rows.float()))
    encoding = fp8.BY_DTYPE[weight.values.dtype]
    return QuantisedQ(*fp8.quantise(rows.float(), encoding))


BLOCK_SCALED = Options("fp8_ocp", "strided")
"""how torch's block-scaled product wants its activations: OCP, scales column by column"""


def runs_block_scaled(weight: Matrix) -> TypeGuard[Fp8Block]:
    """Whether ``product`` with ``weight`` is torch's own FP8 one, which it has for sm_90 alone."""
    if not isinstance(weight, Fp8Block) or not weight.values.is_cuda or torch.version.hip:
        return False
    # cuBLAS wants rows of scales to start on 16 bytes, and reads wrong ones without a word
    if weight.values.shape[1] % (4 * BLOCK):
        return False
    return torch.cuda.get_device_capability(weight.values.device) == (9, 0)


def _block_scaled(x: QuantisedQ, weight: Fp8Block, dtype: torch.dtype) -> torch.Tensor:
    m, coded = x.values.shape[0], x.values.dtype
    values, columns = x.values, x.scale.t().contiguous()
    if m % 4:
        # cuBLAS wants rows by 4: missing ones are added here and cut off again.
        pad, more = torch.nn.functional.pad, -m % 4
        values = pad(values.view(torch.uint8), (0, 0, 0, more)).view(coded)
        columns = pad(columns, (0, more))
    return torch._scaled_mm(
        values, weight.values.t(), scale_a=columns.t(), scale_b=weight.scale.t(), out_dtype=dtype
    )[:m]


def batched_a8w8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group: int = fp8.GROUP
) -> torch.Tensor:
    """The absorbed product in FP8: activations quantised here, weights with one scale for all.

    The order of AITER's Triton kernel (``batched_gemm_a8w8_a_per_token_group_prequant_w_per_
    batched_tensor_quant``): float32 products of each group times its scale are summed, and the sum
    is multiplied by the weight's scale once.

    Args:
        x: (heads, M, K) bf16, K a multiple of ``group``.
        weight: (heads, N, K) FP8.
        scale: one float32.
        group: elements of a token that share a scale.

    Returns:
        (heads, M, N) in x's dtype.
    """
    heads, m, k = x.shape
    encoding = fp8.BY_DTYPE[weight.dtype]
    values, a_scale = fp8.quantise(x.reshape(heads * m, k).float(), encoding, group)
    parts = values.float().view(heads, m, k // group, group)
    w = weight.float().view(heads, -1, k // group, group)
    sums = torch.einsum("hmgk,hngk->hmgn", parts, w) * a_scale.view(heads, m, k // group, 1)
    return (sums.sum(2) * scale).to(x.dtype)


def rope_tables(positions: torch.Tensor, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, (M, rope/2) float32, of integer ``positions`` (M,)."""
    steps = torch.arange(0, rope, 2, device=positions.device, dtype=torch.float32) / rope
    angles = positions.float().unsqueeze(-1) * ROPE_THETA**-steps
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """DeepSeek's interleaved RoPE: pairs (0, 1), (2, 3) ... of (..., rope); cos, sin (..., rope/2).

    The first halves of all pairs come out before the second halves, as transformers leaves them:
    scores do not depend on the order.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def prepare(
    hidden: torch.Tensor,
    layer: Layer,
    dims: Dims,
    tables: tuple[torch.Tensor, torch.Tensor],
    step: Callable,
    *,
    absorb: Callable = torch.bmm,
) -> Prepared:
    """The block: from (M, hidden_size), already input-normed, to what attention reads.

    Args:
        hidden: (M, hidden_size).
        layer: the weights.
        dims: their sizes.
        tables: ``rope_tables`` of the tokens' positions.
        step: a path's call; one that delivers a quantised q needs a quantised ``layer.q_b``.
        absorb: the product of (heads, M, nope) and ``layer.w_kc``; with an FP8 ``w_kc`` of (heads,
            kv_lora_rank, nope), ``batched_a8w8`` or AITER's with their ``scale`` given.
    """
    m, dtype = hidden.shape[0], hidden.dtype
    qkv = product(hidden, layer.qkv_a, dtype)
    q, kv, k_rope = qkv.split([dims.q_lora_rank, dims.kv_lora_rank, dims.rope], -1)
    q, kv = step(q, layer.q_norm, dims.eps, kv, layer.k_norm, dims.eps)
    q = product(q, layer.q_b, dtype).view(m, dims.heads, dims.nope + dims.rope)
    q_nope, q_rope = q.split([dims.nope, dims.rope], -1)
    q_latent = absorb(q_nope.transpose(0, 1), layer.w_kc)
    cos, sin = tables
    q_rope = rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
    return Prepared(q_latent.transpose(0, 1), q_rope, kv, rotate(k_rope, cos, sin))


def finish(latent: torch.Tensor, layer: Layer, dtype: torch.dtype) -> torch.Tensor:
    """(M, heads, kv_lora_rank) attention output to (M, hidden_size), through w_vc and o."""
    values = torch.bmm(latent.transpose(0, 1), layer.w_vc.transpose(1, 2)).transpose(0, 1)
    return product(values.reshape(latent.shape[0], -1), layer.o, dtype)


def attend_causal(prepared: Prepared, scaling: float) -> torch.Tensor:
    """Latent attention of one sequence to itself: (T, heads, kv_lora_rank); softmax in float32."""
    t = prepared.kv.shape[0]
    scores = torch.einsum("thc,sc->hts", prepared.q_latent, prepared.kv)
    scores = (scores + torch.einsum("thr,sr->hts", prepared.q_rope, prepared.k_rope)) * scaling
    hidden = torch.ones(t, t, dtype=torch.bool, device=scores.device).triu(1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=wide)
    return torch.einsum("hts,sc->thc", weights.to(scores.dtype), prepared.kv)


def random_layer(
    dims: Dims, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16, gain: float = 1.0
) -> Layer:
    """Seeded weights on the generator's device: fan-in scaled normals; norms 1 + 0.25 N(0, 1).

    ``gain`` scales ``o``, hence what a layer adds to the residual. Scores come out of unit size.
    """
    device = generator.device

    def normal(*shape: int, fan_in: int, times: float = 1.0) -> torch.Tensor:
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(0, times * fan_in**-0.5, generator=generator)

    def norm(n: int) -> torch.Tensor:
        return (
            1 + 0.25 * torch.randn(n, generator=generator, device=device, dtype=torch.float32)
        ).to(dtype)

    d = dims
    return Layer(
        qkv_a=normal(d.widths.row_stride, d.hidden_size, fan_in=d.hidden_size),
        q_norm=norm(d.q_lora_rank),
        k_norm=norm(d.kv_lora_rank),
        q_b=normal(d.heads * (d.nope + d.rope), d.q_lora_rank, fan_in=d.q_lora_rank),
        w_kc=normal(d.heads, d.nope, d.kv_lora_rank, fan_in=d.kv_lora_rank),
        w_vc=normal(d.heads, d.v, d.kv_lora_rank, fan_in=d.kv_lora_rank),
        o=normal(d.hidden_size, d.heads * d.v, fan_in=d.heads * d.v, times=gain),
        input_norm=norm(d.hidden_size),
    )
