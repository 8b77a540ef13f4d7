"""Rung 5, dual row: one launch for both parts; a program is a row of q or a row of kv.

Figure: 2.4 us at M = 64 (recorded on an NVIDIA H200, mlakit's kernel with one row a program).
"""

import torch
import triton
import triton.language as tl


@triton.jit
def norm_row(x, weight, out, row, x_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + at, mask=at < N, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / N + eps)
    y = values * scale * tl.load(weight + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, y.to(out.dtype.element_ty), mask=at < N)


@triton.jit
def kernel(
    q, q_weight, q_out, k, k_weight, k_out, q_stride, k_stride, m, q_eps, k_eps,
    Q_N: tl.constexpr, K_N: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if program < m:
        norm_row(q, q_weight, q_out, program, q_stride, q_eps, Q_N, Q_BLOCK)
    else:
        norm_row(k, k_weight, k_out, program - m, k_stride, k_eps, K_N, K_BLOCK)


def call(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    m, q_n, k_n = len(q), q.shape[1], k.shape[1]
    blocks = triton.next_power_of_2(q_n), triton.next_power_of_2(k_n)
    kernel[(2 * m,)](
        q, q_weight, q_out, k, k_weight, k_out, q.stride(0), k.stride(0), m, q_eps, k_eps,
        q_n, k_n, *blocks,
    )  # fmt: skip
    return q_out, k_out
