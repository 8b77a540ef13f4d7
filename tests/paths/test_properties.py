"""Properties of every path over drawn shapes, strides, dtypes, magnitudes, eps and outputs.

The oracle is float64. The file runs on this machine's GPU where there is one, else on the CPU
(where Triton's kernels run in its interpreter). Examples are drawn from a fixed seed.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quant_oracle import assert_faithful, share_of_codes_changed

from mlakit.dispatch import probe
from mlakit.errors import MisuseError
from mlakit.formats import fp8, mxfp4
from mlakit.inputs import TORCH_DTYPES
from mlakit.paths import quantised, registry
from mlakit.rounding import oracle, round_to

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OTHERS = ("aiter", "liger", "quack", "flashinfer")
"""other projects' kernels: `mlakit audit` judges them, and they run on no CPU"""
NAMES = [n for n in registry.names() if not n.startswith(OTHERS)]
PLAIN = [n for n in NAMES if registry.get(n).output == "none"]
QUANTISED = [n for n in NAMES if registry.get(n).output != "none"]
COMPILED = ("inductor", "triton_", "unfused_")
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


def examples(path):
    """As many as a path's cost allows: each new kind of arguments may be compiled."""
    few = 8 if DEVICE == "cuda" else 3
    return settings(
        max_examples=2 if path.name == "inductor" else few if compiles(path) else 16,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def path(request):
    found = registry.get(request.param)
    refused = found.supports(replace(probe.here(DEVICE), quant=found.output))
    if refused:
        pytest.skip(refused)
    with torch.no_grad():
        yield found


def compiles(path) -> bool:
    """Each new kind of arguments costs a compilation (or, on a CPU, the slow interpreter)."""
    return path.name.startswith(COMPILED)


def widths(path):
    if path.name == "inductor":
        return st.just((48, 16))
    if path.output in ("fp8_group128", "mxfp4"):
        return st.sampled_from([(128, 64), (384, 33)])
    if compiles(path):
        return st.sampled_from([(1536, 512), (33, 7), (0, 64)][: 3 if path.output == "none" else 2])
    return st.tuples(st.integers(0, 80), st.integers(1, 80)) | st.sampled_from(
        [(1536, 512), (1535, 513), (769, 2), (0, 2048), (4097, 1)]
    )


def row_counts(path):
    small = st.integers(0, 9)
    if DEVICE == "cuda":
        return small | st.sampled_from([127, 128, 1025, 4097])
    return small if compiles(path) else small | st.just(17)


def rows(draw, m, width, dtype, *, layout, exponent, seed):
    """(M, width) of values about 2**exponent, and the memory that they lie in.

    ``padded``: any row stride and start; ``fixed``: one; ``rank3``: (M/3, 3, width) of one stride;
    ``turned``: rank 3 whose rows have no one stride; ``inner``: every second element;
    ``repeated``: one row, M times, by a stride of 0.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(m, width, generator=generator)
    values *= torch.rand(m, width, generator=generator).clamp_min(2**-6)
    values = (values * 2.0**exponent).to(TORCH_DTYPES[dtype])
    start, gap = (
        (0, 8) if layout == "fixed" else draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    )
    step = 1 + (layout == "inner")
    stride = step * width + gap
    memory = torch.full((start + m * stride + 8,), 7.0, dtype=values.dtype)
    shape, strides = (m, width), (stride, step)
    if layout == "repeated":
        strides = (0, 1)
    elif layout in ("rank3", "turned") and m % 3 == 0:
        shape, strides = (m // 3, 3, width), (3 * stride, stride, 1)
        if layout == "turned":
            shape, strides = (3, m // 3, width), (stride, 3 * stride, 1)
    memory = memory.to(DEVICE)
    x = memory.as_strided(shape, strides, start)
    if layout == "repeated":
        x[:1].copy_(values[:1])
    else:
        x.copy_(values.view(shape))
    return x, memory


class Made(tuple):
    """(arguments, memories); told by shapes where an example fails."""

    def __repr__(self) -> str:
        q, w, q_eps, k, _, k_eps = self[0]
        sizes = f"q {tuple(q.shape)} {q.stride()}, k {tuple(k.shape)} {k.stride()}"
        span = f"|q| <= {q.abs().max() if q.numel() else 0:.3g}"
        return f"<{q.dtype} {sizes}, weights {w.dtype}, eps {q_eps} {k_eps}, {span}>"


@st.composite
def calls(draw, path, layouts=("padded",), planted=False):
    """A call's six arguments and the tensors whose bits it may not change."""
    q_width, k_width = draw(widths(path))
    m = draw(row_counts(path))
    dtype = "bf16" if path.name == "inductor" else draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    own = path.name == "inductor" or draw(st.booleans())
    layout = "fixed" if path.name == "inductor" else draw(st.sampled_from(layouts))
    weight_dtype = TORCH_DTYPES[dtype] if own else torch.float32
    # Squares stay inside float32, and values inside fp16.
    exponent = draw(st.integers(*((-10, 12) if dtype == "fp16" else (-45, 45))))
    arguments, memories = [], []
    for width in (q_width, k_width):
        seed = draw(st.integers(0, 99))
        x, memory = rows(draw, m, width, dtype, layout=layout, exponent=exponent, seed=seed)
        if planted and x.numel():
            at = draw(st.integers(0, x.numel() - 1))
            value = draw(st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 6e-8, 1e-40]))
            x.view(-1, width)[at // width, at % width] = value
        generator = torch.Generator().manual_seed(seed + 1)
        weight = 1 + 0.25 * torch.randn(width, generator=generator)
        eps = (
            1e-6
            if path.name == "inductor"
            else draw(st.sampled_from([0.0, 1e-12, 1e-6, 1e-5, 0.5]))
        )
        arguments += [x, weight.to(weight_dtype).to(DEVICE), eps]
        memories += [memory, arguments[-2]]
    return Made((arguments, memories))


def bits(x):
    return x.detach().contiguous().view(BITS[x.dtype])


def same(a, b):
    """Bit for bit, but one NaN is as good as another."""
    return bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all())


def ulps(y, want):
    a, b = (bits(t).long() for t in (y, want))
    a, b = (torch.where(t < 0, torch.iinfo(BITS[y.dtype]).min - t, t) for t in (a, b))
    far = (a - b).abs().double()
    # Where a format's subnormals are flushed, all below its smallest normal number is one value.
    flushed = (y.double() - want.double()).abs() <= 2 * torch.finfo(y.dtype).tiny
    far[flushed | (y.isnan() & want.isnan())] = 0
    return far


def assert_right(got, arguments):
    for y, (x, weight, eps) in zip(got, (arguments[:3], arguments[3:]), strict=True):
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        want = round_to(oracle(x, weight, eps), x.dtype)
        assert torch.equal(y.isnan(), want.isnan())
        limit = 4 if x.dtype == torch.float32 else 1
        assert not y.numel() or ulps(y, want).max() <= limit


def outcome(path, arguments):
    """(outputs, None) or (None, the refusal)."""
    try:
        return path.call(*arguments), None
    except MisuseError as error:
        return None, str(error)


def kept(memories):
    return [(m, m.clone()) for m in memories]


def assert_kept(before):
    assert all(same(m, copy) for m, copy in before), "an input was written"


@pytest.mark.parametrize("path", PLAIN, indirect=True)
def test_every_call_is_right_or_refused_in_one_line(path):
    layouts = ("padded", "padded", "rank3", "turned", "inner", "repeated")

    @examples(path)
    @given(calls(path, layouts))
    def holds(made):
        arguments, memories = made
        before = kept(memories)
        got, refusal = outcome(path, arguments)
        assert_kept(before)
        if refusal is None:
            assert_right(got, arguments)
            assert all(y.is_contiguous() for y in got)
            return
        assert "\n" not in refusal
        assert "stride" in refusal, "rows of one stride must be served"
        assert any(x.ndim == 3 or x.stride(-1) != 1 for x in (arguments[0], arguments[3]))

    holds()


@pytest.mark.parametrize("path", PLAIN, indirect=True)
def test_nan_and_inf_stay_in_their_rows(path):
    @examples(path)
    @given(calls(path, planted=True))
    def holds(made):
        assert_right(path.call(*made[0]), made[0])

    holds()


@pytest.mark.parametrize("path", PLAIN, indirect=True)
def test_outputs_are_written_and_nothing_beside_them(path):
    @examples(path)
    @given(calls(path), st.data(), st.sampled_from([math.nan, 1e30, 0.0]))
    def holds(made, data, poison):
        arguments, memories = made
        layout = "fixed" if path.name == "inductor" else "padded"
        outputs, around = [], []
        for x in (arguments[0], arguments[3]):
            out, memory = rows(data.draw, *x.shape, "fp32", layout=layout, exponent=0, seed=0)
            start, strides = out.storage_offset(), out.stride()
            memory = torch.full_like(memory, poison).to(x.dtype)
            outputs.append(memory.as_strided(x.shape, strides, start))
            around.append(memory)
        want = path.call(*arguments)
        before = kept(memories)
        expected = [m.clone() for m in around]
        got = path.call(*arguments, out=tuple(outputs))
        assert got[0] is outputs[0]
        assert got[1] is outputs[1]
        for memory, was, out, y in zip(around, expected, outputs, want, strict=True):
            was.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(y)
            assert same(memory, was)
        assert_kept(before)

    holds()


@pytest.mark.parametrize("path", PLAIN, indirect=True)
def test_powers_of_two_and_signs_go_through_exactly(path):
    """Scaling x by 2**n and eps by 4**n changes no bit; a sign of x is the sign of y."""

    @examples(path)
    @given(calls(path), st.integers(-3, 3), st.booleans())
    def holds(made, power, negate):
        q, q_weight, q_eps, k, k_weight, k_eps = made[0]
        factor = 2.0**power * (-1 if negate else 1)
        if path.name == "inductor":
            factor = math.copysign(1, factor)  # eps is a part of its kind: it would compile anew
        if q.dtype == torch.float16:
            # fp16's subnormals and its top would round; powers of two there only within 1.
            q, k = (torch.where(x.abs() < 2**-10, 0, x).clamp(-4096, 4096) for x in (q, k))
        square = factor * factor
        got = path.call(q * factor, q_weight, q_eps * square, k * factor, k_weight, k_eps * square)
        for y, plain in zip(got, path.call(q, q_weight, q_eps, k, k_weight, k_eps), strict=True):
            assert same(y, -plain if factor < 0 else plain)

    holds()


@pytest.mark.parametrize("path", ["cpu_fused", "triton_fused"], indirect=True)
def test_a_row_has_the_same_bits_whatever_its_company_place_and_memory(path):
    @examples(path)
    @given(calls(path), st.data())
    def holds(made, data):
        q, q_weight, q_eps, k, k_weight, k_eps = made[0]
        if not q.shape[0]:
            return
        whole = path.call(*made[0])
        i = data.draw(st.integers(0, q.shape[0] - 1))
        start = data.draw(st.integers(0, i))
        cut = (slice(start, i + 1), slice(i, i + 1))[data.draw(st.integers(0, 1))]
        some = path.call(q[cut].clone(), q_weight, q_eps, k[cut].clone(), k_weight, k_eps)
        for y, part in zip(whole, some, strict=True):
            assert same(y[i], part[-1])

    holds()


@pytest.mark.parametrize("path", QUANTISED, indirect=True)
def test_quantised_calls_are_faithful_to_float64(path):
    layouts = mxfp4.SCALE_LAYOUTS if path.output == "mxfp4" else fp8.SCALE_LAYOUTS
    choices = st.builds(
        quantised.Options,
        encoding=st.sampled_from(["fp8_ocp"] if DEVICE == "cuda" else sorted(fp8.ENCODINGS)),
        scale_layout=st.sampled_from(layouts if path.output != "fp8_token" else ("row_major",)),
        rule=st.sampled_from(sorted(mxfp4.RULES)),
    )

    @examples(path)
    @given(calls(path), choices)
    def holds(made, options):
        arguments, memories = made
        if not arguments[0].numel():
            return
        before = kept(memories)
        got, k_out = path.call(*arguments, options=options)
        assert_kept(before)
        there = quantised.QuantisedQ(*(None if t is None else t.cpu() for t in got))
        q, q_weight, q_eps = (a.cpu() if torch.is_tensor(a) else a for a in arguments[:3])
        if path.name.startswith("unfused"):
            # Its second launch reads q as the first rounded it.
            q = round_to(oracle(q, q_weight, q_eps), q.dtype)
            want = quantised.fill(
                path.output, q.float(), quantised.empty(path.output, q, options), options
            )
            changed = share_of_codes_changed(there, want)
            assert changed <= 0.02 + 2 / q.numel()
        else:
            assert_faithful(path.output, there, q, q_weight, q_eps, options)
        want = oracle(*arguments[3:])
        step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[k_out.dtype]
        assert torch.allclose(
            k_out.double(),
            want,
            rtol=1.01 * step,
            atol=2 * torch.finfo(k_out.dtype).tiny,
            equal_nan=True,
        )

    holds()
