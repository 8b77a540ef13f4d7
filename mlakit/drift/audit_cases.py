"""The cases of an audit: each holds a fused QK norm to one promise, with the least input it takes.

A case returns its verdict, or raises ``Failed``; what else the callable raises is a refusal where
a case allows one, and a failure where it doesn't. Here: what is read and what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mlakit.drift import audit_launch as launch
from mlakit.drift.audit_subject import (
    CONVENTION,
    NOT_APPLICABLE,
    ODD_WIDTHS,
    PASS,
    REAL,
    REFUSED,
    SMALL,
    Failed,
    Subject,
    Verdict,
    bits,
    describe,
    require,
    same,
    wrong,
)
from mlakit.drift.fingerprint import fingerprint, first_of_pair, second_of_pair
from mlakit.drift.ulp import compare
from mlakit.errors import one_line
from mlakit.inputs import TORCH_DTYPES, Inputs
from mlakit.rounding import oracle
from mlakit.shapes import Widths


def _counting(subject: Subject) -> Inputs:
    """1 to 16 as two rows of q 4, k 2, rope 2, unit weights: answers known by hand."""
    buffer = torch.arange(1.0, 17.0).view(2, 8).to(TORCH_DTYPES[subject.dtype]).to(subject.device)
    q, k, _ = buffer.split([4, 2, 2], -1)
    ones = torch.ones_like(buffer[0])
    return Inputs(buffer, q, ones[:4].clone(), 1e-6, k, ones[:2].clone(), 1e-6)


# ---- what is read


def _known_answer(subject: Subject) -> Verdict:
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


def _split_views(subject: Subject) -> Verdict:
    """Views of one buffer give the bits of contiguous copies, and the rope part is not in them."""
    for m in (1, 2, 3, 64):
        given = subject.inputs(m)
        strided = subject.check(given)
        packed = replace(given, q=given.q.contiguous(), k=given.k.contiguous())
        require(
            same(strided, subject.call(*packed.args)),
            "split views and contiguous copies give other bits",
            given,
        )
    return PASS, "bits of contiguous copies at M = 1, 2, 3, 64"


def _inner_stride(subject: Subject) -> Verdict:
    """Columns that are not neighbours in memory: right, or refused."""
    given = subject.inputs(3, SMALL)
    odd = replace(given, q=given.q.t().contiguous().t(), k=given.k.t().contiguous().t())
    problem = wrong(odd, subject.call(*odd.args), subject.dtype)
    require(problem is None, f"inner stride not honoured: {problem}", odd)
    return PASS, "right"


def _unequal_rows(subject: Subject) -> Verdict:
    """q of 4 rows beside k of 3: refused, or each right by itself."""
    given = subject.inputs(4, SMALL)
    odd = replace(given, k=given.k[:3])
    problem = wrong(odd, subject.call(*odd.args), subject.dtype)
    require(problem is None, f"taken without a word, and wrong: {problem}", odd)
    return PASS, "each right by itself"


def _no_rows(subject: Subject) -> Verdict:
    """M = 0 gives empty outputs, and leaves the next call working."""
    given = subject.inputs(0)
    problem = wrong(given, subject.call(*given.args), subject.dtype)
    require(problem is None, problem or "", given)
    subject.check(subject.inputs(2))
    return PASS, "empty outputs of the right shape; M = 2 right after it"


def _batches(subject: Subject) -> Verdict:
    """Every element right at the batches where launch tables and grids change."""
    for m in subject.rows():
        subject.check(subject.inputs(m, subject.widths(m)))
    tried = subject.rows()
    return PASS, f"right at {len(tried)} batches from M = {tried[0]} to {tried[-1]}"


def _odd_widths(subject: Subject) -> Verdict:
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
        require(bits(given.buffer, before), "wrote into its input's buffer", given)
        for _ in range(3):
            require(same(got, subject.call(*given.args)), "repeats differ", given)
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
    require(intact, "wrote outside its output", given)


def _rank_3(subject: Subject) -> Verdict:
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
        for y, x in zip(got, (q3, k3), strict=True):
            require(y.shape == x.shape, f"{name}: shape {tuple(y.shape)}", given)
        flattened = tuple(y.reshape(x.shape) for y, x in zip(got, want, strict=True))
        require(same(flattened, want), f"{name}: not the bits of the flattened call", given)
        notes.append(f"{name} right")
    return (REFUSED if all("refused" in n for n in notes) else PASS), "; ".join(notes)


# ---- what is computed


def _mixed_weights(subject: Subject) -> Verdict:
    """float32 weights beside 16-bit inputs."""
    if subject.dtype == "fp32":
        return NOT_APPLICABLE, "the inputs are float32 themselves"
    given = subject.inputs(5, weight_dtype="fp32")
    got = subject.call(*given.args)
    if all(y.dtype == torch.float32 for y in got):
        return CONVENTION, "float32 weights make the outputs float32"
    rounded = replace(
        given, q_weight=given.q_weight.to(given.q.dtype), k_weight=given.k_weight.to(given.q.dtype)
    )
    subject.check(given, got)
    if same(got, subject.call(*rounded.args)):
        return CONVENTION, "float32 weights are rounded to the input's dtype first"
    return PASS, "right, weights kept in float32"


def _two_eps(subject: Subject) -> Verdict:
    """q's eps and k's are both honoured, on rows small enough to show it."""
    for eps in ((1e-6, 1e-2), (1e-2, 1e-6)):
        subject.check(subject.inputs(3, family="tiny", eps=eps))
    return PASS, "both honoured"


def _small_rows(subject: Subject) -> Verdict:
    """Rows of 0.001: 0.707107 with eps 1e-6, 0.301511 with 1e-5; unit weights, by hand."""
    for eps in (1e-6, 1e-5):
        given = subject.inputs(2, eps=eps)
        given.buffer.fill_(0.001)
        given = replace(given, q_weight=torch.ones_like(given.q_weight))
        subject.check(given)
    return PASS, "rows of 0.001 right with eps 1e-6 and 1e-5"


def _zero_rows(subject: Subject) -> Verdict:
    """A row of zeros is exactly zero."""
    given = subject.inputs(4, family="zero_rows")
    got = subject.check(given)
    require(not bool(got[0][0].any() or got[1][0].any()), "a row of zeros is not zero", given)
    return PASS, "exactly zero"


def _nan_rows(subject: Subject) -> Verdict:
    """A NaN makes its own row NaN, and no other, and is never hidden."""
    for side, name in enumerate("qk"):
        given = subject.inputs(4)
        (given.q, given.k)[side][1, 7] = float("nan")
        got = subject.call(*given.args)
        own, other = got[side], got[1 - side]
        require(bool(own[1].isnan().all()), f"{name}: a NaN in the row is hidden", given)
        clean = torch.cat([own[:1].flatten(), own[2:].flatten(), other.flatten()])
        spread = f"a NaN in {name} spread to other rows or to {'kq'[side]}"
        require(not bool(clean.isnan().any()), spread, given)
    return PASS, "its own row, all of it, and no other"


def _overflow(subject: Subject) -> Verdict:
    """Squares beyond float32 (bf16, fp32), and magnitudes whose squares float16 can't hold."""
    overflowed = False
    for side, name in enumerate("qk"):
        given = subject.inputs(3)
        subject.check(_scaled(given, name, 1e3 if subject.dtype == "fp16" else 1e15))
        if subject.dtype == "fp16":
            continue
        huge = _scaled(given, name, 1e20)
        got = subject.call(*huge.args)
        problem = wrong(huge, got, subject.dtype)
        if problem is None:
            continue
        nan = f"{name}: NaN where squares overflow float32"
        require(not bool(got[side].isnan().any()), nan, huge)
        require(not bool(got[side].any()), f"neither right nor zeros: {problem}", huge)
        overflowed = True
    if overflowed:
        return CONVENTION, "zeros from 1e19 on: the float32 sum of squares overflows"
    if subject.dtype == "fp16":
        return PASS, "fp16 squares fit in float32"
    return PASS, "right at 1e20, where float32 squares overflow"


def _scaled(given: Inputs, name: str, scale: float) -> Inputs:
    """``given`` with its q or its k times ``scale``."""
    x = getattr(given, name)
    return replace(given, **{name: (x.float() * scale).to(x.dtype)})


def _independence(subject: Subject) -> Verdict:
    """q does not enter into k, nor k into q, nor a row into another."""
    given = subject.inputs(4)
    base = subject.call(*given.args)
    other_q = replace(given, q=given.q * 3, q_weight=given.q_weight * 2)
    require(bits(subject.call(*other_q.args)[1], base[1]), "k's output depends on q", given)
    other_k = replace(given, k=given.k * 3, k_weight=given.k_weight * 2)
    require(bits(subject.call(*other_k.args)[0], base[0]), "q's output depends on k", given)
    turned = replace(given, q=given.q.flip(0), k=given.k.flip(0))
    flipped = tuple(y.flip(0) for y in subject.call(*turned.args))
    require(same(flipped, base), "a row's output depends on the row's place", given)
    return PASS, "q, k and rows do not touch each other"


def _rounding_of_q(subject: Subject) -> Verdict:
    """The order of roundings of q, by fingerprint."""
    return _rounding(first_of_pair(subject.call), subject)


def _rounding_of_k(subject: Subject) -> Verdict:
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


def _bias(subject: Subject) -> Verdict:
    """Signed relative bias of each output over 1e5 elements: rounding to nearest has none."""
    given = subject.inputs(256, layout="contiguous")
    q_out, k_out = subject.call(*given.args)
    found = {
        "q": compare(q_out, oracle(given.q, given.q_weight, given.q_eps)),
        "k": compare(k_out, oracle(given.k, given.k_weight, given.k_eps)),
    }
    figures = {n: f"{n} {d.signed_bias:+.2e} +- {d.bias_se:.0e}" for n, d in found.items()}
    for name, drift in found.items():
        if drift.biased or not drift.signed_bias == drift.signed_bias:
            raise Failed(f"one-sided: {figures[name]} a step", describe(given))
    return PASS, ", ".join(figures.values())


CASES: tuple[tuple[str, Callable[[Subject], Verdict], bool], ...] = (
    ("known answer", _known_answer, True),
    ("split views", _split_views, False),
    ("inner stride", _inner_stride, True),
    ("unequal rows", _unequal_rows, True),
    ("M = 0", _no_rows, False),
    ("batches", _batches, False),
    ("odd widths", _odd_widths, False),
    ("rank 3", _rank_3, True),
    ("float32 weights", _mixed_weights, True),
    ("two eps", _two_eps, False),
    ("small rows", _small_rows, False),
    ("zero rows", _zero_rows, False),
    ("NaN rows", _nan_rows, False),
    ("overflow of squares", _overflow, False),
    ("q, k, rows apart", _independence, False),
    ("rounding of q", _rounding_of_q, False),
    ("rounding of k", _rounding_of_k, False),
    ("signed bias", _bias, False),
    ("new outputs", launch.new_outputs, False),
    ("uninitialised memory", launch.uninitialised, False),
    ("given outputs", launch.given_outputs, False),
    ("inputs left alone", launch.inputs_left_alone, False),
    ("batch invariance", launch.batch_invariance, False),
    ("determinism", launch.determinism, False),
    ("graph capture", launch.graph_capture, True),
    ("other streams", launch.other_streams, False),
    ("far rows", launch.far_rows, False),
    ("fake tensors", launch.fake_tensors, True),
)
"""Name, case, and whether raising is a fair refusal."""
