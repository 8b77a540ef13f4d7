"""A fused norm with faults that can be switched on, for the emulator's seeded-fault tests."""

import triton
import triton.language as tl


@triton.jit
def one_norm(
    x, stride, weight, out, row, m, eps, N: tl.constexpr, B: tl.constexpr, FAULT: tl.constexpr
):
    cols = tl.arange(0, B)
    inside = cols < N
    if FAULT == "no_mask":
        values = tl.load(x + row * stride + cols).to(tl.float32)
    else:
        values = tl.load(x + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(values * values, 0) * (1.0 / N) + eps)
    y = values * rstd * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if FAULT == "truncate":
        bits = y.to(tl.int32, bitcast=True) & -65536
        y = bits.to(tl.float32, bitcast=True)
    keep = inside & (row < m - 1) if FAULT == "drop_row" else inside
    tl.store(out + row * N + cols, y.to(out.dtype.element_ty), mask=keep)


@triton.jit
def two_norms(
    q, q_weight, q_out, k, k_weight, k_out, q_stride, k_stride, m, q_eps, k_eps,
    Q_N: tl.constexpr, K_N: tl.constexpr, Q_B: tl.constexpr, K_B: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        one_norm(q, q_stride, q_weight, q_out, row, m, q_eps, Q_N, Q_B, FAULT)
    else:
        one_norm(k, k_stride, k_weight, k_out, row, m, k_eps, K_N, K_B, FAULT)
