"""The one Triton kernel of the step, and what it takes to compile it for a card that is not here.

Import this only where triton is. One launch normalises the rows of q and of kv. A row is taken in
chunks of ``WARPS * LANES * VEC`` elements, of which each thread holds VEC neighbours (16 bytes).
The row's sum has one fixed tree: chunks in order, then neighbours in pairs, then lanes, then warps.
Which other rows share the program or the launch does not enter into it, nor how many warps hold
the row, nor whether rows start on 16 bytes (else they are read piece by piece).
"""

# Triton compiles these functions: it knows no tuple unpacking.
# ruff: noqa: RUF005, SIM102, SIM300
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.paths.triton_config import Config, constants


@triton.jit
def _halve(values):
    """(R, C) -> (R, C / 2): neighbours added in pairs."""
    left, right = tl.split(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)))
    return left + right


@triton.jit
def _warp_totals(pieces, WARPS: tl.constexpr, LANES: tl.constexpr):
    """Tuple of (R, C) with C * len(pieces) = WARPS * LANES * VEC -> (R, WARPS)."""
    for _ in tl.static_range(3):
        if len(pieces) > 1:
            halved = ()
            for i in tl.static_range(len(pieces) // 2):
                halved = halved + (pieces[2 * i] + pieces[2 * i + 1],)
            pieces = halved
    total = pieces[0]
    for _ in tl.static_range(3):
        if total.shape[1] > WARPS * LANES:
            total = _halve(total)
    # Two lanes at a time, so that the tree says which ones meet. A sum over all lanes goes by the
    # layout that Triton chose: with several rows a program that did not start on 16 bytes, another.
    for _ in tl.static_range(6):
        if total.shape[1] > WARPS:
            pairs = tl.reshape(total, (total.shape[0], WARPS, 2, total.shape[1] // WARPS // 2))
            total = tl.sum(pairs, axis=2)
            total = tl.reshape(total, (total.shape[0], WARPS * total.shape[2]))
    return total


@triton.jit
def _row_total(parts):
    """Tuple of (R, WARPS) -> (R,): the tree's warps, of which WARPS at a time are side by side.

    tl.sum over a whole row takes two barriers; splitting what the warps leave takes one.
    """
    ROWS: tl.constexpr = parts[0].shape[0]
    WARPS: tl.constexpr = parts[0].shape[1]
    TREE: tl.constexpr = WARPS * len(parts)
    # All parts into one tensor first, so that the warps meet only once.
    for _ in tl.static_range(3):
        if len(parts) > 1:
            joined = ()
            for i in tl.static_range(len(parts) // 2):
                both = tl.join(parts[i], parts[i + len(parts) // 2])
                joined = joined + (tl.reshape(both, (ROWS, WARPS, both.numel // ROWS // WARPS)),)
            parts = joined
    total = parts[0]
    if TREE > WARPS:
        total = tl.reshape(tl.permute(total, (0, 2, 1)), (ROWS, TREE))
    for _ in tl.static_range(5):
        if total.shape[1] > 1:
            total = _halve(total)
    return tl.reshape(total, (ROWS,))


@triton.jit
def _reciprocal_root(mean, DTYPE: tl.constexpr):
    """1 / sqrt(mean) in float32, as exact as an output of DTYPE can show."""
    root = tl.rsqrt(mean)
    if DTYPE == tl.float16:
        # The card's rsqrt is up to 2 float32 ulps off, which shows in 1 of 5,000 fp16 elements
        # (bf16: 1 of 40,000). One Newton step; an infinite mean keeps its 0.
        missing = tl.fma(-mean * root, root, 1.0)
        root = tl.where(mean < float("inf"), tl.fma(root * 0.5, missing, root), root)
    return root.to(tl.float32)


@triton.jit
def sums_of(
    pieces, TREE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    DTYPE: tl.constexpr, PIECES: tl.constexpr = 1,
):  # fmt: skip
    """Tuple of (R, WARPS): sums of squares of rows held as chunks of PIECES pieces.

    Each chunk is (R, WARPS * LANES * VEC); the tree's TREE warps are held by WARPS, which do
    several each. DTYPE: of the rows; pieces of them may be float32 already.
    """
    # float32 results must match a float64 statistic; for 16-bit ones a float32 sum is enough.
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float32 else tl.float32
    WARPS: tl.constexpr = pieces[0].shape[1] * PIECES // (LANES * VEC)
    STEP: tl.constexpr = TREE // WARPS * PIECES
    parts = ()
    for first in tl.static_range(0, STEP, PIECES):
        sums = ()
        for p in tl.static_range(PIECES):
            squares = tl.zeros(pieces[0].shape, WIDE)
            for i in tl.static_range(first + p, len(pieces), STEP):
                value = pieces[i].to(WIDE)
                squares += value * value
            sums = sums + (squares,)
        parts = parts + (_warp_totals(sums, WARPS, LANES),)
    return parts


@triton.jit
def rstd_of(parts, eps, N: tl.constexpr, DTYPE: tl.constexpr):
    """(R, 1) float32: 1/rms of rows of N whose squares have the sums ``parts``."""
    mean = _row_total(parts) * (1.0 / N) + tl.cast(eps, parts[0].dtype)
    return _reciprocal_root(mean, DTYPE)[:, None]


@triton.jit
def _pointers(start, at, PIECES: tl.constexpr):
    """Pointers to elements ``at`` (2-D) after ``start``; whole chunks start on 16 bytes."""
    pointers = start + at
    if PIECES == 1:
        pointers = tl.multiple_of(pointers, (1, 16))
    return pointers


@triton.jit
def _load_weight(
    weight, N: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr = 1
):
    """The weight as it lies in memory: its chunks' pieces, each ROWS times the same."""
    cols = tl.zeros((ROWS, 1), tl.int32) + tl.arange(0, CHUNK // PIECES)[None, :] * PIECES
    pieces = ()
    for start in tl.static_range(0, N, CHUNK):
        for p in tl.static_range(PIECES):
            at = cols + (start + p)
            if start + CHUNK > N:
                pieces = pieces + (tl.load(_pointers(weight, at, PIECES), mask=at < N, other=0.0),)
            else:
                pieces = pieces + (tl.load(_pointers(weight, at, PIECES)),)
    return pieces


@triton.jit
def prefetch(weight, N: tl.constexpr):
    """Bring a weight into the L2, without reading it: what is written there later still counts."""
    PER_LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    for start in tl.static_range(0, N, 32 * PER_LINE):
        at = tl.minimum(start + tl.arange(0, 32) * PER_LINE, N - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + at],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _normalise(
    x, x_stride, weight, held_weight, out, out_stride, first_row, m, eps,
    N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, TREE: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr, NUM_WARPS: tl.constexpr, HOIST: tl.constexpr,
    EVICT: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows of x from first_row on into out; rows from m on are not touched.

    Rows that may start anywhere are loaded an element at a time, as VEC pieces of stride VEC:
    each thread then holds the same elements as with 16-byte loads, and the tree stays the same.
    """
    CHUNK: tl.constexpr = WARPS * LANES * VEC
    PIECES: tl.constexpr = 1 if ALIGNED else VEC
    # With rows side by side in a program the weight is laid out like them: broadcasting one row
    # of it would move it through shared memory (8 barriers a call instead of 1).
    WEIGHT_ROWS: tl.constexpr = 1 if NUM_WARPS == WARPS else ROWS
    rows = first_row + tl.arange(0, ROWS)
    cols = tl.arange(0, CHUNK // PIECES)[None, :] * PIECES
    here = (rows < m)[:, None]
    # An int32 offset overflows at row 1,016,801 of a 2112-wide buffer.
    source = x + rows.to(tl.int64)[:, None] * x_stride
    target = out + rows.to(tl.int64)[:, None] * out_stride
    # Nothing is read before the wait: the kernel before may have written rows or weights. What
    # needs no memory comes before it: waiting first thing cost 4 to 9 % up to M = 64.
    if PDL != "":
        gdc_wait()
    if PDL == "after":
        gdc_launch_dependents()
    pieces = ()
    for start in tl.static_range(0, N, CHUNK):
        for p in tl.static_range(PIECES):
            at = cols + (start + p)
            inside = here & (at < N) if start + CHUNK > N else here
            held = tl.load(
                _pointers(source, at, PIECES), mask=inside, other=0.0, eviction_policy=EVICT
            )
            pieces = pieces + (held,)
    if len(held_weight):
        scale = held_weight
    elif HOIST:
        scale = _load_weight(weight, N, CHUNK, WEIGHT_ROWS, PIECES)
    parts = sums_of(pieces, TREE, LANES, VEC, x.dtype.element_ty, PIECES)
    rstd = rstd_of(parts, eps, N, x.dtype.element_ty)
    if not len(held_weight) and not HOIST:
        scale = _load_weight(weight, N, CHUNK, WEIGHT_ROWS, PIECES)
    for i in tl.static_range(len(pieces)):
        at = cols + (i // PIECES * CHUNK + i % PIECES)
        inside = here & (at < N) if (i // PIECES + 1) * CHUNK > N else here
        y = (pieces[i].to(tl.float32) * rstd) * scale[i].to(tl.float32)
        tl.store(_pointers(target, at, PIECES), y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def qk_rmsnorm_kernel(
    q, q_weight, q_out, k, k_weight, k_out,
    q_stride, k_stride, q_out_stride, k_out_stride, m, q_eps: tl.float64, k_eps: tl.float64,
    Q_N: tl.constexpr, K_N: tl.constexpr, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr,
    Q_WARPS: tl.constexpr, K_WARPS: tl.constexpr, Q_TREE: tl.constexpr, K_TREE: tl.constexpr,
    NUM_WARPS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, SEPARATE: tl.constexpr,
    PERSISTENT: tl.constexpr, HOIST: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
    Q_ALIGNED: tl.constexpr, K_ALIGNED: tl.constexpr,
):  # fmt: skip
    """q: (m, Q_N), k: (m, K_N) of any row strides; Q_N may be 0.

    A side is aligned when all its pointers and rows start on 16 bytes.
    """
    if PDL == "before":
        gdc_launch_dependents()
    program = tl.program_id(0)
    if PDL != "":
        if program == 0:
            if Q_N > 0:
                prefetch(q_weight, Q_N)
            prefetch(k_weight, K_N)
    if SEPARATE and Q_N > 0:
        # The kv programs hold more rows, so they go first: 0.2 to 2 % at every M.
        k_programs = (m + K_ROWS - 1) // K_ROWS
        if program < k_programs:
            _normalise(
                k, k_stride, k_weight, (), k_out, k_out_stride, program * K_ROWS, m, k_eps,
                K_N, K_ROWS, K_WARPS, K_TREE, LANES, VEC, NUM_WARPS, HOIST, EVICT, K_ALIGNED, PDL,
            )  # fmt: skip
        else:
            _normalise(
                q, q_stride, q_weight, (), q_out, q_out_stride, (program - k_programs) * Q_ROWS,
                m, q_eps,
                Q_N, Q_ROWS, Q_WARPS, Q_TREE, LANES, VEC, NUM_WARPS, HOIST, EVICT, Q_ALIGNED, PDL,
            )  # fmt: skip
        return
    if PDL != "":
        gdc_wait()
    if PDL == "after":
        gdc_launch_dependents()
    q_held = ()
    k_held = ()
    if PERSISTENT:
        if Q_N > 0:
            q_held = _load_weight(
                q_weight, Q_N, Q_WARPS * LANES * VEC,
                1 if NUM_WARPS == Q_WARPS else K_ROWS, 1 if Q_ALIGNED else VEC,
            )  # fmt: skip
        k_held = _load_weight(
            k_weight, K_N, K_WARPS * LANES * VEC,
            1 if NUM_WARPS == K_WARPS else K_ROWS, 1 if K_ALIGNED else VEC,
        )  # fmt: skip
        for tile in range(program, (m + K_ROWS - 1) // K_ROWS, tl.num_programs(0)):
            if Q_N > 0:
                _normalise(
                    q, q_stride, q_weight, q_held, q_out, q_out_stride, tile * K_ROWS, m, q_eps,
                    Q_N, K_ROWS, Q_WARPS, Q_TREE, LANES, VEC, NUM_WARPS, HOIST, EVICT, Q_ALIGNED,
                    "",
                )  # fmt: skip
            _normalise(
                k, k_stride, k_weight, k_held, k_out, k_out_stride, tile * K_ROWS, m, k_eps,
                K_N, K_ROWS, K_WARPS, K_TREE, LANES, VEC, NUM_WARPS, HOIST, EVICT, K_ALIGNED, "",
            )  # fmt: skip
        return
    if Q_N > 0:
        _normalise(
            q, q_stride, q_weight, (), q_out, q_out_stride, program * K_ROWS, m, q_eps,
            Q_N, K_ROWS, Q_WARPS, Q_TREE, LANES, VEC, NUM_WARPS, HOIST, EVICT, Q_ALIGNED, "",
        )  # fmt: skip
    _normalise(
        k, k_stride, k_weight, (), k_out, k_out_stride, program * K_ROWS, m, k_eps,
        K_N, K_ROWS, K_WARPS, K_TREE, LANES, VEC, NUM_WARPS, HOIST, EVICT, K_ALIGNED, "",
    )  # fmt: skip


def options(config: Config) -> dict[str, object]:
    """The compiler's options for ``config``."""
    pdl = {"launch_pdl": True} if config.pdl else {}
    # Told that registers may be used, ptxas asks for the weights before the row's sum, as written;
    # left to itself it moves them behind it in some kernels: 26.7 us against 26.0 (1024 + 512) and
    # 10.8 against 10.1 (kv alone) at M = 16384.
    most = min(255, 65536 // (32 * config.num_warps))
    return {"num_warps": config.num_warps, "maxnreg": most, **pdl}


def kernel_signature(
    config: Config,
    arch: str,
    q_width: int,
    k_width: int,
    dtype: str = "bf16",
    weight_dtype: str | tuple[str, str] | None = None,
    *,
    aligned: bool | tuple[bool, bool] = True,
    strides_of_16: bool | None = None,
) -> tuple[object, dict[str, str], dict[str, object], dict, dict[str, object]]:
    """What ``triton.compile`` needs to build the kernel for ``arch``, with or without a card there.

    Returns ``(fn, signature, constexprs, attrs, options)``, used as
    ``triton.compile(ASTSource(fn, signature, constexprs, attrs), target=GPUTarget(...),
    options=options)``. ``weight_dtype``: of both weights, or of q's and k's; None is ``dtype``.
    ``aligned``: all pointers and rows of both sides, or of q's and k's, start on 16 bytes, as in
    the split views of a qkv_a projection. ``strides_of_16``: so are the strides in elements, which
    Triton 3.6 wants told for wide loads on AMD; None is ``aligned``.
    """
    q_aligned, k_aligned = aligned if isinstance(aligned, tuple) else (aligned, aligned)
    q_weight, k_weight = (
        weight_dtype if isinstance(weight_dtype, tuple) else (weight_dtype or dtype,) * 2
    )
    chosen = constants(
        config, arch, q_width, k_width, dtype, q_aligned=q_aligned, k_aligned=k_aligned
    )
    # float32 results want eps in float64; for others its conversion would only lengthen the wait
    # between the row's sum and its first output.
    eps = "fp64" if dtype == "fp32" else "fp32"
    signature = {
        "q": f"*{dtype}",
        "q_weight": f"*{q_weight}",
        "q_out": f"*{dtype}",
        "k": f"*{dtype}",
        "k_weight": f"*{k_weight}",
        "k_out": f"*{dtype}",
        "q_stride": "i64",
        "k_stride": "i64",
        "q_out_stride": "i64",
        "k_out_stride": "i64",
        "m": "i32",
        "q_eps": eps,
        "k_eps": eps,
        **dict.fromkeys(chosen, "constexpr"),
    }
    if strides_of_16 is None:
        strides_of_16 = q_aligned and k_aligned
    divisible = [0, 1, 2] * q_aligned + [3, 4, 5] * k_aligned + [6, 7, 8, 9] * strides_of_16
    attrs = {(i,): [["tt.divisibility", 16]] for i in divisible}
    return qk_rmsnorm_kernel, signature, chosen, attrs, options(config)
