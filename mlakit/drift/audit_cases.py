"""The cases of an audit: each holds a fused QK norm to one promise, with the least input it takes.

A case returns its verdict, or raises ``Failed``; what else the callable raises is a refusal where
a case allows one, and a failure where it doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from mlakit.drift.fingerprint import fingerprint, first_of_pair, second_of_pair
from mlakit.drift.ulp import compare, ulps
from mlakit.inputs import TORCH_DTYPES, Inputs, make
from mlakit.paths.aiter_api import one_line
from mlakit.rounding import oracle
from mlakit.shapes import Widths

PASS, FAIL, CONVENTION, REFUSED, NOT_APPLICABLE = (
    "pass",
    "fail",
    "convention difference",
    "refused",
    "not applicable",
)
Verdict = tuple[str, str]
"""(one of the five, detail)"""

LIMIT_ULPS = {"bf16": 8, "fp16": 8, "fp32": 1024}
"""Ulps from float64 beyond which an element is wrong, not rounded otherwise: every named rounding
but those that round a sum stays within 4."""

ROWS = (1, 2, 255, 256, 257, 4095, 4096, 4097, 16383, 16384, 16385, 65535, 65536, 65537)
"""Batches around the edges of known launch tables: AITER's 4096 and 16384, a grid's 65535."""

ODD_WIDTHS = (1, 2, 511, 512, 513, 769, 1535, 1536, 8192, 8193, 16384)

REAL, SMALL, TINY = Widths(1536, 512, 64), Widths(96, 32, 16), Widths(4, 2, 2)


class Failed(Exception):
    """A broken promise: what is wrong, and the smallest input found that shows it."""

    def __init__(self, detail: str, smallest: str = "") -> None:
        super().__init__(detail)
        self.smallest = smallest


@dataclass(frozen=True)
class Subject:
    """The callable under audit: ``call(q, q_weight, q_eps, k, k_weight, k_eps)`` -> a pair."""

    call: Callable
    device: str = "cpu"
    dtype: str = "bf16"
    takes_out: bool = False
    max_m: int | None = None
    """largest batch to try, for what is too slow for more (an interpreter)"""

    def inputs(self, m: int, widths: Widths = REAL, **more) -> Inputs:
        """Seeded split views with non-unit weights on the subject's device."""
        more = {"dtype": self.dtype, "device": self.device, "seed": m, "eps": (1e-6, 1e-5)} | more
        return make(m, widths, **more)

    def rows(self, limit: int | None = None) -> list[int]:
        """Batches of ``ROWS`` within the subject's limit."""
        limits = [v for v in (limit, self.max_m) if v is not None]
        return [m for m in ROWS if not limits or m <= min(limits)]

    def widths(self, m: int) -> Widths:
        """Real widths; small ones on a CPU from 4095 rows on, to stay cheap."""
        return REAL if self.device != "cpu" or m < 4095 else SMALL

    def check(self, given: Inputs, got: tuple | None = None) -> tuple:
        """The outputs for ``given``, if both are right.

        Raises:
            Failed: with the first wrong element and the smallest input that shows one.
        """
        got = self.call(*given.args) if got is None else got
        problem = wrong(given, got, self.dtype)
        if problem:
            smaller = self._shrink(given)
            raise Failed(problem if smaller is None else smaller[0], describe(given, smaller))
        return got

    def _shrink(self, given: Inputs) -> tuple[str, str] | None:
        """The first smaller input of the same kind that is wrong too: (problem, description)."""
        size = given.q.shape[0] * given.q.shape[1]
        for widths in (TINY, SMALL, REAL):
            for m in (1, 2, 3, 64, 256, 4096):
                if m * widths.q_lora_rank >= size or m > (self.max_m or m):
                    continue
                tried = self.inputs(m, widths, eps=(given.q_eps, given.k_eps))
                try:
                    problem = wrong(tried, self.call(*tried.args), self.dtype)
                except Exception:
                    # a smaller input may be refused; then it is not the one to print
                    continue
                if problem:
                    return problem, describe(tried)
        return None


def describe(given: Inputs, smaller: tuple[str, str] | None = None) -> str:
    """One line that names an input well enough to make it again."""
    if smaller:
        return smaller[1]
    return (
        f"M={given.q.shape[0]}, q {given.q.shape[-1]} + k {given.k.shape[-1]}, strides "
        f"{given.q.stride()} and {given.k.stride()}, eps {given.q_eps:g} and {given.k_eps:g}"
    )


def wrong(given: Inputs, got: object, dtype: str) -> str | None:
    """None if both outputs are right within ``LIMIT_ULPS``, else the first thing that isn't."""
    if not isinstance(got, tuple | list) or len(got) < 2:
        return f"returned {type(got).__name__}, wanted a pair"
    parts = (("q", got[0], given.q, given.q_weight, given.q_eps),) * bool(given.q.shape[-1])
    parts += (("k", got[1], given.k, given.k_weight, given.k_eps),)
    for name, y, x, weight, eps in parts:
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            return f"{name}: returned {getattr(y, 'shape', type(y))}, wanted {tuple(x.shape)}"
        if y.dtype != TORCH_DTYPES[dtype]:
            return f"{name}: returned {y.dtype}, wanted {TORCH_DTYPES[dtype]}"
        want = oracle(x, weight, eps)
        bad = ulps(y, want).abs() > LIMIT_ULPS[dtype]
        if bool(bad.any()):
            at = tuple(int(i) for i in bad.nonzero()[0])
            return (
                f"{name}: row {at[0]} column {at[-1]} is {float(y[at]):.6g}, "
                f"float64 says {float(want[at]):.6g}; {int(bad.sum())} of {bad.numel()} are wrong"
            )
    return None


def same(a: tuple, b: tuple) -> bool:
    """Bit equality of two pairs."""
    return all(_bits(x, y) for x, y in zip(a, b, strict=True))


def _bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    kind = torch.int32 if x.element_size() == 4 else torch.int16
    return x.shape == y.shape and torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))


def _require(condition: bool, detail: str, given: Inputs) -> None:
    if not condition:
        raise Failed(detail, describe(given))


def _counting(subject: Subject) -> Inputs:
    """1 to 16 as two rows of q 4, k 2, rope 2, unit weights: answers known by hand."""
    buffer = torch.arange(1.0, 17.0).view(2, 8).to(TORCH_DTYPES[subject.dtype]).to(subject.device)
    q, k, _ = buffer.split([4, 2, 2], -1)
    ones = torch.ones_like(buffer[0])
    return Inputs(buffer, q, ones[:4].clone(), 1e-6, k, ones[:2].clone(), 1e-6)


# ---- what is read


def known_answer(subject: Subject) -> Verdict:
    """Two rows of a split view by hand; the usual wrong answers are recognised by their values."""
    given = _counting(subject)
    got = subject.call(*given.args)
    problem = wrong(given, got, subject.dtype)
    if problem is None:
        return PASS, "1 to 16 as q 4, k 2, rope 2: as by hand"
    looks = ""
    if isinstance(got[0], torch.Tensor) and got[0].shape == (2, 4) and got[1].shape == (2, 2):
        seen = {"q": float(got[0][1, 0]), "k": float(got[1][1, 0]), "k0": float(got[1][0, 0])}
        if abs(seen["q"] - 0.758098) < 0.004 or abs(seen["k"] - 0.931266) < 0.004:
            looks = "; the row stride is ignored"
        elif abs(seen["k0"] - 0.758098) < 0.004:
            looks = "; the rope columns are in k's mean"
    raise Failed(problem + looks, describe(given))


def split_views(subject: Subject) -> Verdict:
    """Views of one buffer give the bits of contiguous copies, and the rope part is not in them."""
    for m in (1, 2, 3, 64):
        given = subject.inputs(m)
        strided = subject.check(given)
        packed = replace(given, q=given.q.contiguous(), k=given.k.contiguous())
        _require(
            same(strided, subject.call(*packed.args)),
            "split views and contiguous copies give other bits",
            given,
        )
    return PASS, "bits of contiguous copies at M = 1, 2, 3, 64"


def inner_stride(subject: Subject) -> Verdict:
    """Columns that are not neighbours in memory: right, or refused."""
    given = subject.inputs(3, SMALL)
    odd = replace(given, q=given.q.t().contiguous().t(), k=given.k.t().contiguous().t())
    problem = wrong(odd, subject.call(*odd.args), subject.dtype)
    _require(problem is None, f"inner stride not honoured: {problem}", odd)
    return PASS, "right"


def unequal_rows(subject: Subject) -> Verdict:
    """q of 4 rows beside k of 3: refused, or each right by itself."""
    given = subject.inputs(4, SMALL)
    odd = replace(given, k=given.k[:3])
    problem = wrong(odd, subject.call(*odd.args), subject.dtype)
    _require(problem is None, f"taken without a word, and wrong: {problem}", odd)
    return PASS, "each right by itself"


def no_rows(subject: Subject) -> Verdict:
    """M = 0 gives empty outputs, and leaves the next call working."""
    given = subject.inputs(0)
    problem = wrong_empty(subject.call(*given.args), given)
    _require(problem is None, problem or "", given)
    subject.check(subject.inputs(2))
    return PASS, "empty outputs of the right shape; M = 2 right after it"


def wrong_empty(got: object, given: Inputs) -> str | None:
    """As ``wrong`` for outputs without elements."""
    for y, x in zip(got, (given.q, given.k), strict=False):
        if y.shape != x.shape or y.dtype != x.dtype:
            return f"returned {tuple(y.shape)} {y.dtype}, wanted {tuple(x.shape)} {x.dtype}"
    return None


def batches(subject: Subject) -> Verdict:
    """Every element right at the batches where launch tables and grids change."""
    for m in subject.rows():
        subject.check(subject.inputs(m, subject.widths(m)))
    tried = subject.rows()
    return PASS, f"right at {len(tried)} batches from M = {tried[0]} to {tried[-1]}"


def odd_widths(subject: Subject) -> Verdict:
    """Widths from 1 to 16384, 7 rows, neighbours in the buffer and repeats unharmed."""
    refusals = {}
    for width in ODD_WIDTHS:
        given = subject.inputs(7, Widths(width, max(1, width // 3), 5))
        before = given.buffer.clone()
        try:
            got = subject.call(*given.args)
        except Exception as error:
            # a width limit is a fair refusal as long as it is spoken
            refusals[width] = one_line(error)
            continue
        subject.check(given, got)
        _require(_bits(given.buffer, before), "wrote into its input's buffer", given)
        for _ in range(3):
            _require(same(got, subject.call(*given.args)), "repeats differ", given)
        if subject.takes_out:
            _sentinels(subject, given)
    why = next(iter(refusals.values()), "")
    if len(refusals) == len(ODD_WIDTHS):
        return REFUSED, why
    note = f"; refused: {', '.join(map(str, refusals))} ({why})" if refusals else ""
    return PASS, f"right at {len(ODD_WIDTHS) - len(refusals)} widths{note}"


def _sentinels(subject: Subject, given: Inputs) -> None:
    """Outputs inside larger buffers: what lies around them keeps its value."""
    frames, outs = [], []
    for x in (given.q, given.k):
        frame = torch.full((x.numel() + 128,), 12345.0, dtype=x.dtype, device=x.device)
        frames.append(frame)
        outs.append(frame[64 : 64 + x.numel()].view(x.shape))
    subject.check(given, subject.call(*given.args, out=tuple(outs)))
    mark = frames[0][0]
    intact = all(bool((f[:64] == mark).all() and (f[-64:] == mark).all()) for f in frames)
    _require(intact, "wrote outside its output", given)


def rank_3(subject: Subject) -> Verdict:
    """(B, T, N): contiguous, a slice, and a transpose that is no single row stride."""
    flat = subject.inputs(6)
    want = subject.call(*flat.args)
    wide = flat.buffer.view(2, 3, -1)
    q, k, _ = wide.split([REAL.q_lora_rank, REAL.kv_lora_rank, REAL.qk_rope_head_dim], -1)
    turned = wide.transpose(0, 1).contiguous().transpose(0, 1)
    forms = {"a slice": (q, k), "contiguous": (q.contiguous(), k.contiguous())}
    forms["a transpose"] = (
        turned[..., : q.shape[-1]],
        turned[..., q.shape[-1] :][..., : k.shape[-1]],
    )
    notes = []
    for name, (q3, k3) in forms.items():
        given = replace(flat, q=q3, k=k3)
        try:
            got = subject.call(*given.args)
        except Exception as error:
            # rank 3 may be refused, if it is said
            notes.append(f"{name} refused ({one_line(error)})")
            continue
        _require(got[0].shape == q3.shape, f"{name}: shape {tuple(got[0].shape)}", given)
        flattened = tuple(y.reshape(x.shape) for y, x in zip(got, want, strict=True))
        _require(same(flattened, want), f"{name}: not the bits of the flattened call", given)
        notes.append(f"{name} right")
    return (REFUSED if all("refused" in n for n in notes) else PASS), "; ".join(notes)


# ---- what is computed


def mixed_weights(subject: Subject) -> Verdict:
    """float32 weights beside 16-bit inputs."""
    if subject.dtype == "fp32":
        return NOT_APPLICABLE, "the inputs are float32 themselves"
    given = subject.inputs(5, weight_dtype="fp32")
    got = subject.call(*given.args)
    if got[0].dtype == torch.float32:
        return CONVENTION, "float32 weights make the outputs float32"
    rounded = replace(
        given, q_weight=given.q_weight.to(given.q.dtype), k_weight=given.k_weight.to(given.q.dtype)
    )
    subject.check(given, got)
    if same(got, subject.call(*rounded.args)):
        return CONVENTION, "float32 weights are rounded to the input's dtype first"
    return PASS, "right, weights kept in float32"


def two_eps(subject: Subject) -> Verdict:
    """q's eps and k's are both honoured, on rows small enough to show it."""
    for eps in ((1e-6, 1e-2), (1e-2, 1e-6)):
        subject.check(subject.inputs(3, family="tiny", eps=eps))
    return PASS, "both honoured"


def small_rows(subject: Subject) -> Verdict:
    """Rows of 0.001: 0.707107 with eps 1e-6, 0.301511 with 1e-5; unit weights, by hand."""
    for eps in (1e-6, 1e-5):
        given = subject.inputs(2, eps=eps)
        given.buffer.fill_(0.001)
        given = replace(given, q_weight=torch.ones_like(given.q_weight))
        subject.check(given)
    return PASS, "rows of 0.001 right with eps 1e-6 and 1e-5"


def zero_rows(subject: Subject) -> Verdict:
    """A row of zeros is exactly zero."""
    given = subject.inputs(4, family="zero_rows")
    got = subject.check(given)
    _require(not bool(got[0][0].any() or got[1][0].any()), "a row of zeros is not zero", given)
    return PASS, "exactly zero"


def nan_rows(subject: Subject) -> Verdict:
    """A NaN makes its own row NaN, and no other, and is never hidden."""
    given = subject.inputs(4)
    given.q[1, 7] = float("nan")
    q_out, k_out = subject.call(*given.args)
    _require(bool(q_out[1].isnan().all()), "a NaN in the row is hidden", given)
    clean = torch.cat([q_out[:1].flatten(), q_out[2:].flatten(), k_out.flatten()])
    _require(not bool(clean.isnan().any()), "a NaN spread to other rows or to k", given)
    return PASS, "its own row, all of it, and no other"


def overflow(subject: Subject) -> Verdict:
    """Squares beyond float32 (bf16, fp32), and magnitudes whose squares float16 can't hold."""
    given = subject.inputs(3)
    scale = 1e3 if subject.dtype == "fp16" else 1e15
    big = replace(given, q=(given.q.float() * scale).to(given.q.dtype))
    subject.check(big)
    if subject.dtype == "fp16":
        return PASS, "fp16 squares fit in float32"
    huge = replace(given, q=(given.q.float() * 1e20).to(given.q.dtype))
    q_out = subject.call(*huge.args)[0]
    if wrong(huge, (q_out, subject.call(*huge.args)[1]), subject.dtype) is None:
        return PASS, "right at 1e20, where float32 squares overflow"
    _require(not bool(q_out.isnan().any()), "NaN where squares overflow float32", huge)
    return CONVENTION, "zeros from 1e19 on: the float32 sum of squares overflows"


def independence(subject: Subject) -> Verdict:
    """q does not enter into k, nor k into q, nor a row into another."""
    given = subject.inputs(4)
    base = subject.call(*given.args)
    other_q = replace(given, q=given.q * 3, q_weight=given.q_weight * 2)
    _require(_bits(subject.call(*other_q.args)[1], base[1]), "k's output depends on q", given)
    other_k = replace(given, k=given.k * 3, k_weight=given.k_weight * 2)
    _require(_bits(subject.call(*other_k.args)[0], base[0]), "q's output depends on k", given)
    turned = replace(given, q=given.q.flip(0), k=given.k.flip(0))
    flipped = tuple(y.flip(0) for y in subject.call(*turned.args))
    _require(same(flipped, base), "a row's output depends on the row's place", given)
    return PASS, "q, k and rows do not touch each other"


def rounding_of_q(subject: Subject) -> Verdict:
    """The order of roundings of q, by fingerprint."""
    return _rounding(first_of_pair(subject.call), subject)


def rounding_of_k(subject: Subject) -> Verdict:
    """The order of roundings of k, by fingerprint."""
    return _rounding(second_of_pair(subject.call), subject)


def _rounding(norm: Callable, subject: Subject) -> Verdict:
    found = fingerprint(norm, device=subject.device, dtype=subject.dtype)
    if "round_once" in found.names:
        return PASS, found.name if len(found.names) < 3 else "float32 throughout"
    bad = [n for n in found.names if "truncate" in n or "eps_" in n]
    if bad:
        why = "one-sided bias" if "truncate" in bad[0] else "not the eps it was given"
        raise Failed(f"{found.name}: {why}", "the fingerprint's probe, 48 rows of 128")
    return CONVENTION, found.name if found.names else found.text


def bias(subject: Subject) -> Verdict:
    """Signed relative bias over 4e5 elements: rounding to nearest has none."""
    given = subject.inputs(256, layout="contiguous")
    q_out = subject.call(*given.args)[0]
    drift = compare(q_out, oracle(given.q, given.q_weight, given.q_eps))
    figures = f"{drift.signed_bias:+.2e} +- {drift.bias_se:.0e}"
    if drift.biased or not drift.signed_bias == drift.signed_bias:
        raise Failed(f"one-sided: {figures} a step", describe(given))
    return PASS, figures


# ---- memory


def new_outputs(subject: Subject) -> Verdict:
    """Outputs share no memory with the inputs, with each other, or with an earlier call."""
    given = subject.inputs(4)
    first = subject.call(*given.args)
    kept = tuple(y.clone() for y in first)
    second = subject.call(*subject.inputs(4, seed=99).args)
    tensors = (given.buffer, given.q_weight, given.k_weight)
    for y in first:
        _require(all(not _share(y, x) for x in tensors), "an output is a view of an input", given)
    _require(not _share(*first), "the two outputs share memory", given)
    _require(same(first, kept), "a second call overwrote the first call's outputs", given)
    _require(all(y.is_contiguous() for y in second), "an output is not contiguous", given)
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
def _poisoned() -> Iterable[None]:
    """torch fills what it allocates with NaN inside."""
    was, warn = (
        torch.are_deterministic_algorithms_enabled(),
        (torch.is_deterministic_algorithms_warn_only_enabled()),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def uninitialised(subject: Subject) -> Verdict:
    """Fresh memory full of NaN, then freed memory full of 1e30, changes no bit."""
    for m in (1, 2, 65):
        given = subject.inputs(m)
        base = subject.check(given)
        with _poisoned():
            poisoned = subject.call(*given.args)
        _require(same(poisoned, base), "some outputs are never written (NaN showed)", given)
        waste = [torch.full_like(y, 1e30 if subject.dtype != "fp16" else 6e4) for y in base * 4]
        del waste
        _require(same(subject.call(*given.args), base), "some outputs are never written", given)
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
        _require(same(out, base) and same(got, base), f"out full of {poison:g} shows", given)
    before = given.buffer.clone()
    try:
        got = subject.call(*given.args, out=(given.q, base[1]))
    except Exception as error:
        _require(_bits(given.buffer, before), "refused out=q after writing to it", given)
        return PASS, f"filled; out=q refused ({one_line(error)})"
    right = wrong(replace(given, q=before[:, : given.q.shape[1]]), got, subject.dtype) is None
    _require(right, "out=q is taken and the result is wrong", given)
    return PASS, "filled; out=q is right too"


def inputs_left_alone(subject: Subject) -> Verdict:
    """No bit of the buffer (rope part included) or of the weights changes."""
    for m in (1, 3, 64):
        given = subject.inputs(m)
        kept = [t.clone() for t in (given.buffer, given.q_weight, given.k_weight)]
        subject.call(*given.args)
        now = (given.buffer, given.q_weight, given.k_weight)
        intact = all(_bits(a, b) for a, b in zip(now, kept, strict=True))
        _require(intact, "an input was written to", given)
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
            _require(same(again, base), f"call {run + 2} differs from call 1", given)
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
    _require(same(got, subject.call(*given.args)), "replay on new data is not eager's", given)
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
    _require(same(got, subject.call(*given.args)), "not ordered with the caller's stream", given)
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
        # torch hands out address 0 with a warning, and a kernel would then write there
        with patch.object(FakeTensor, "data_ptr", no_address):
            got = subject.call(*fake)
    for f, real in zip(got, want, strict=True):
        agree = f.shape == real.shape and f.dtype == real.dtype and f.stride() == real.stride()
        _require(agree, f"fake {tuple(f.shape)} {f.stride()}, real {real.stride()}", given)
    return PASS, "shape, dtype and strides as the real call's"


def far_rows(subject: Subject) -> Verdict:
    """Row offsets beyond 2**31 - 1 elements: 1,016,801 rows of 2112."""
    m = (2**31 - 1) // REAL.row_stride + 2
    need = 2 * m * (REAL.row_stride + REAL.hidden) * TORCH_DTYPES[subject.dtype].itemsize
    if subject.device == "cpu":
        return NOT_APPLICABLE, f"not tried on a CPU: needs {need / 2**30:.1f} GiB"
    free = torch.cuda.mem_get_info()[0]
    if free < need or (subject.max_m or m) < m:
        return NOT_APPLICABLE, f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    small = subject.inputs(64)
    buffer = small.buffer.repeat(-(-m // 64), 1)[:m]
    q, k, _ = buffer.split([REAL.q_lora_rank, REAL.kv_lora_rank, REAL.qk_rope_head_dim], -1)
    given = replace(small, buffer=buffer, q=q, k=k)
    got = tuple(y[-8:].clone() for y in subject.call(*given.args))
    tail = replace(given, q=q[-8:].clone(), k=k[-8:].clone())
    problem = wrong(tail, got, subject.dtype)
    _require(problem is None, f"last 8 rows: {problem}", given)
    return PASS, f"last rows right at M = {m}"


CASES: tuple[tuple[str, Callable[[Subject], Verdict], bool], ...] = (
    ("known answer", known_answer, True),
    ("split views", split_views, False),
    ("inner stride", inner_stride, True),
    ("unequal rows", unequal_rows, True),
    ("M = 0", no_rows, False),
    ("batches", batches, False),
    ("odd widths", odd_widths, False),
    ("rank 3", rank_3, True),
    ("float32 weights", mixed_weights, True),
    ("two eps", two_eps, False),
    ("small rows", small_rows, False),
    ("zero rows", zero_rows, False),
    ("NaN rows", nan_rows, False),
    ("overflow of squares", overflow, False),
    ("q, k, rows apart", independence, False),
    ("rounding of q", rounding_of_q, False),
    ("rounding of k", rounding_of_k, False),
    ("signed bias", bias, False),
    ("new outputs", new_outputs, False),
    ("uninitialised memory", uninitialised, False),
    ("given outputs", given_outputs, False),
    ("inputs left alone", inputs_left_alone, False),
    ("batch invariance", batch_invariance, False),
    ("determinism", determinism, False),
    ("graph capture", graph_capture, True),
    ("other streams", other_streams, False),
    ("fake tensors", fake_tensors, True),
    ("far rows", far_rows, False),
)
"""Name, case, and whether raising is a fair refusal."""
