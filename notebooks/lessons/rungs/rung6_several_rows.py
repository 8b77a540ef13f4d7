"""Rung 6, several rows: a kv row is a third of a q row, so its programs take four of them.

Figure: 2.4 us at M = 64, 18.8 at 8192 where rung 5 takes 19.0 (recorded on an NVIDIA H200,
mlakit's kernel with four kv rows a program).
"""

import torch
import triton
import triton.language as tl

K_ROWS = 4


@triton.jit
def norm_rows(
    x, weight, out, first, m, x_stride, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, at = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (rows < m) & (at < N)
    values = tl.load(x + rows * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / N + eps)[:, None]
    y = values * scale * tl.load(weight + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(out + rows * N + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def kernel(
    q, q_weight, q_out, k, k_weight, k_out, q_stride, k_stride, m, q_eps, k_eps,
    Q_N: tl.constexpr, K_N: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    K_ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if program < m:
        norm_rows(q, q_weight, q_out, program, m, q_stride, q_eps, Q_N, Q_BLOCK, 1)
    else:
        first = (program - m) * K_ROWS
        norm_rows(k, k_weight, k_out, first, m, k_stride, k_eps, K_N, K_BLOCK, K_ROWS)


def call(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    m, q_n, k_n = len(q), q.shape[1], k.shape[1]
    blocks = triton.next_power_of_2(q_n), triton.next_power_of_2(k_n)
    kernel[(m + triton.cdiv(m, K_ROWS),)](
        q, q_weight, q_out, k, k_weight, k_out, q.stride(0), k.stride(0), m, q_eps, k_eps,
        q_n, k_n, *blocks, K_ROWS,
    )  # fmt: skip
    return q_out, k_out
