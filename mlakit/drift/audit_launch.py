"""Cases of an audit: memory, and what the rest of a launch or another launch may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from mlakit.drift.audit_subject import (
    CONVENTION,
    NOT_APPLICABLE,
    PASS,
    REAL,
    Subject,
    Verdict,
    bits,
    require,
    same,
    wrong,
)
from mlakit.errors import one_line
from mlakit.inputs import TORCH_DTYPES

# ---- memory


def new_outputs(subject: Subject) -> Verdict:
    """Outputs share no memory with the inputs, with each other, or with an earlier call."""
    given = subject.inputs(4)
    first = subject.call(*given.args)
    kept = tuple(y.clone() for y in first)
    second = subject.call(*subject.inputs(4, seed=99).args)
    tensors = (given.buffer, given.q_weight, given.k_weight)
    for y in first:
        require(all(not _share(y, x) for x in tensors), "an output is a view of an input", given)
    require(not _share(*first), "the two outputs share memory", given)
    require(same(first, kept), "a second call overwrote the first call's outputs", given)
    require(all(y.is_contiguous() for y in second), "an output is not contiguous", given)
    return PASS, "new, contiguous, apart"


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not a.numel():
        return False
    a_end, b_end = (
        t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        for t in (a, b)
    )
    return a.storage_offset() <= b_end and b.storage_offset() <= a_end


@contextmanager
def _poisoned() -> Iterator[None]:
    """torch fills what it allocates with NaN inside."""
    deterministic: Any = torch.utils.deterministic
    was, warn = (
        torch.are_deterministic_algorithms_enabled(),
        (torch.is_deterministic_algorithms_warn_only_enabled()),
    )
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        deterministic.fill_uninitialized_memory = filled


def uninitialised(subject: Subject) -> Verdict:
    """Fresh memory full of NaN, then freed memory full of 1e30, changes no bit."""
    for m in (1, 2, 65):
        given = subject.inputs(m)
        base = subject.check(given)
        with _poisoned():
            poisoned = subject.call(*given.args)
        require(same(poisoned, base), "some outputs are never written (NaN showed)", given)
        waste = [torch.full_like(y, 1e30 if subject.dtype != "fp16" else 6e4) for y in base * 4]
        del waste
        require(same(subject.call(*given.args), base), "some outputs are never written", given)
    return PASS, "NaN and 1e30 in fresh memory change nothing"


def given_outputs(subject: Subject) -> Verdict:
    """``out=`` is filled whatever it held, and refused where it overlaps an input."""
    if not subject.takes_out:
        return NOT_APPLICABLE, "takes no out"
    given = subject.inputs(5)
    base = subject.call(*given.args)
    for poison in (float("nan"), 3e4):
        out = tuple(torch.full_like(y, poison) for y in base)
        got = subject.call(*given.args, out=out)
        require(same(out, base) and same(got, base), f"out full of {poison:g} shows", given)
    before = given.buffer.clone()
    try:
        got = subject.call(*given.args, out=(given.q, base[1]))
    except Exception as error:
        require(bits(given.buffer, before), "refused out=q after writing to it", given)
        return PASS, f"filled; out=q refused ({one_line(error)})"
    right = wrong(replace(given, q=before[:, : given.q.shape[1]]), got, subject.dtype) is None
    require(right, "out=q is taken and the result is wrong", given)
    return PASS, "filled; out=q is right too"


def inputs_left_alone(subject: Subject) -> Verdict:
    """No bit of the buffer (rope part included) or of the weights changes."""
    for m in (1, 3, 64):
        given = subject.inputs(m)
        kept = [t.clone() for t in (given.buffer, given.q_weight, given.k_weight)]
        subject.call(*given.args)
        now = (given.buffer, given.q_weight, given.k_weight)
        intact = all(bits(a, b) for a, b in zip(now, kept, strict=True))
        require(intact, "an input was written to", given)
    return PASS, "buffer, rope part and weights unchanged"


# ---- what the rest of the launch changes


def batch_invariance(subject: Subject) -> Verdict:
    """A row's bits don't depend on how many rows share the launch; else the M where they change."""
    limit = 16385 if subject.device != "cpu" else 4097
    batches_ = [m for m in subject.rows(limit) if m > 1]
    widths = subject.widths(batches_[-1])
    given = subject.inputs(batches_[-1], widths)
    last = subject.call(*given.args)
    changes = []
    for m in (1, *batches_[:-1]):
        part = replace(given, q=given.q[:m], k=given.k[:m])
        got = subject.call(*part.args)
        differ = [int((a != b[:m]).any(-1).sum()) for a, b in zip(got, last, strict=True)]
        if any(differ):
            changes.append(f"M={m} ({sum(differ)} rows)")
    if changes:
        detail = f"changes against M={batches_[-1]} at {', '.join(changes)}"
        return CONVENTION, f"{detail}; widths {widths}"
    return PASS, f"bitwise, M = 1 to {batches_[-1]}, every row; widths {widths}"


def determinism(subject: Subject) -> Verdict:
    """Twenty calls, one answer."""
    for m in (2, 257):
        given = subject.inputs(m)
        base = subject.call(*given.args)
        for run in range(20):
            again = subject.call(*given.args)
            require(same(again, base), f"call {run + 2} differs from call 1", given)
    return PASS, "20 repeats, equal bits"


def graph_capture(subject: Subject) -> Verdict:
    """Captured once, replayed on new data: what eager gives."""
    if subject.device == "cpu":
        return NOT_APPLICABLE, "no graphs on a CPU"
    given, fresh = subject.inputs(64), subject.inputs(64, seed=5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        subject.call(*given.args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = subject.call(*given.args)
    given.buffer.copy_(fresh.buffer)
    graph.replay()
    torch.cuda.synchronize()
    require(same(got, subject.call(*given.args)), "replay on new data is not eager's", given)
    return PASS, "replay on new data equals eager"


def other_streams(subject: Subject) -> Verdict:
    """Launched on the caller's stream: ordered behind work that is still running there."""
    if subject.device == "cpu":
        return NOT_APPLICABLE, "no streams on a CPU"
    given, fresh = subject.inputs(64), subject.inputs(64, seed=6)
    subject.call(*given.args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # 1e8 cycles, some 50 ms: a launch on another stream would read the old data meanwhile
        torch.cuda._sleep(100_000_000)
        given.buffer.copy_(fresh.buffer)
        got = subject.call(*given.args)
    stream.synchronize()
    torch.cuda.synchronize()
    require(same(got, subject.call(*given.args)), "not ordered with the caller's stream", given)
    return PASS, "ordered with the caller's stream"


def fake_tensors(subject: Subject) -> Verdict:
    """Shapes, dtypes and strides without data, as torch.compile asks for them."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def no_address(tensor):
        raise RuntimeError("asks a tensor without data for its address")

    given = subject.inputs(3)
    want = subject.call(*given.args)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        # views go in as views: each tensor keeps its stride
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given.args]
        # torch hands out address 0 with a warning, and a kernel would then read there
        for tensor in fake:
            if isinstance(tensor, torch.Tensor):
                torch._C._set_throw_on_mutable_data_ptr(tensor)
        with patch.object(FakeTensor, "data_ptr", no_address):
            got = subject.call(*fake)
    for f, real in zip(got, want, strict=True):
        agree = f.shape == real.shape and f.dtype == real.dtype and f.stride() == real.stride()
        require(agree, f"fake {tuple(f.shape)} {f.stride()}, real {real.stride()}", given)
    return PASS, "shape, dtype and strides as the real call's"


def far_rows(subject: Subject) -> Verdict:
    """Row offsets beyond 2**31 - 1 elements: 1,016,801 rows of 2112."""
    m = (2**31 - 1) // REAL.row_stride + 2
    need = 2 * m * (REAL.row_stride + REAL.hidden) * TORCH_DTYPES[subject.dtype].itemsize
    if subject.device == "cpu":
        return NOT_APPLICABLE, f"not tried on a CPU: needs {need / 2**30:.1f} GiB"
    if (subject.max_m or m) < m:
        return NOT_APPLICABLE, f"not tried: batches up to {subject.max_m} were asked for"
    free = torch.cuda.mem_get_info()[0]
    if free < need:
        return NOT_APPLICABLE, f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    small = subject.inputs(64)
    buffer = small.buffer.repeat(-(-m // 64), 1)[:m]
    q, k, _ = buffer.split([REAL.q_lora_rank, REAL.kv_lora_rank, REAL.qk_rope_head_dim], -1)
    given = replace(small, buffer=buffer, q=q, k=k)
    got = tuple(y[-8:].clone() for y in subject.call(*given.args))
    tail = replace(given, q=q[-8:].clone(), k=k[-8:].clone())
    problem = wrong(tail, got, subject.dtype)
    require(problem is None, f"last 8 rows: {problem}", given)
    return PASS, f"last rows right at M = {m}"
