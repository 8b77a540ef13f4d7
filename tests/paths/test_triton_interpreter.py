"""triton_fused in Triton's interpreter: the kernel's arithmetic, masks and refusals on a CPU."""

import dataclasses
import os

import pytest
import torch

from mlakit import inputs, rounding
from mlakit.errors import MisuseError
from mlakit.paths import interpreter, registry, triton_config, triton_fused
from mlakit.paths.triton_config import Config
from mlakit.shapes import Widths

pytest.importorskip("triton")
DTYPES = inputs.TORCH_DTYPES
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def bits(x):
    return x.contiguous().view(BITS[x.dtype])


def once(x, weight, eps):
    return rounding.ROUNDINGS["round_once"](x, weight, eps)


def ulps(x, y):
    a, b = (bits(t).to(torch.int64) for t in (x, y))
    top = 1 << (8 * x.element_size() - 1)
    a, b = (torch.where(t < 0, -(t + top), t) for t in (a, b))
    return (a - b).abs()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "widths", [(1536, 512, 64), (769, 33, 7), (0, 513, 3), (1, 2, 0), (1535, 16384, 1)]
)
def test_bits_are_round_onces_and_within_an_ulp_of_the_oracle(widths, dtype):
    differing = elements = 0
    for m, family in enumerate(("normal", "outlier", "tiny", "zero_rows", "sparse"), start=1):
        x = inputs.make(m, Widths(*widths), dtype, family=family, seed=m, eps=(1e-6, 1e-5))
        before = x.buffer.clone()
        for y, args in zip(triton_fused.call(*x.args), (x.args[:3], x.args[3:]), strict=True):
            exact = rounding.round_to(rounding.oracle(*args), DTYPES[dtype])
            differing += int((bits(y) != bits(once(*args))).sum())
            elements += y.numel()
            # In float32 round_once itself rounds rstd and two products.
            assert ulps(y, exact).max() <= (2 if dtype == "fp32" else 1) if y.numel() else True
        assert torch.equal(bits(before), bits(x.buffer))
    assert differing <= (0 if dtype == "fp32" else 1 + elements // 10_000)


def test_nan_and_inf_stay_in_their_rows():
    x = inputs.make(9, Widths(1536, 512), family="nonfinite")
    for y, args in zip(triton_fused.call(*x.args), (x.args[:3], x.args[3:]), strict=True):
        want = once(*args)
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(torch.nan_to_num(y), torch.nan_to_num(want))


def test_float32_weights_stay_float32():
    x = inputs.make(4, Widths(96, 32), "bf16", weight_dtype="fp32")
    q_out, _ = triton_fused.call(*x.args)
    assert torch.equal(q_out, once(x.q, x.q_weight, x.q_eps))
    assert not torch.equal(q_out, once(x.q, x.q_weight.bfloat16(), x.q_eps))


@pytest.mark.parametrize(
    ("q", "k", "rope", "dtype"),
    [
        (1536, 512, 64, "bf16"),
        (1536, 512, 7, "fp16"),
        (769, 33, 7, "bf16"),
        (769, 33, 7, "fp32"),
        (2049, 1025, 6, "fp16"),
    ],
)
def test_no_knob_changes_a_bit(q, k, rope, dtype):
    x = inputs.make(128, Widths(q, k, rope), dtype, family="heavy")
    want = triton_fused.call(*x.args)
    plain = triton_config.heuristic("cpu", 128, q, k, dtype)
    tree = plain.q_warps, plain.k_warps
    for change in (
        {"q_rows": 2, "k_rows": 8},
        {"q_rows": 16, "k_rows": 16, "separate": False},
        {"q_rows": 8, "k_rows": 8, "separate": False, "persistent": True},
        {"hoist_weight": False, "evict_first": True},
        *({"q_warps": min(w, tree[0]), "k_warps": min(w, tree[1])} for w in (1, 2, 4)),
    ):
        config = dataclasses.replace(plain, **change)
        if triton_config.check(config, "cpu", q, k, dtype):
            config = dataclasses.replace(config, q_rows=16, k_rows=16)
        got = triton_fused.call(*x.args, config=config)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True)), config
    if dtype == "fp16":  # so few rows show another tree in this dtype alone
        other = dataclasses.replace(plain, q_warps=1, k_warps=1, own_tree=True)
        assert not torch.equal(triton_fused.call(*x.args, config=other)[0], want[0])


def test_a_row_alone_in_other_memory_has_the_same_bits():
    # The row stride is odd, so these rows go element by element; their copies are aligned.
    x = inputs.make(13, Widths(768, 256, 1), "bf16", family="heavy")
    q_out, k_out = triton_fused.call(*x.args)
    for i in range(13):
        q, k = x.q[i : i + 1].clone(), x.k[i : i + 1].clone()
        alone = triton_fused.call(q, x.q_weight, x.q_eps, k, x.k_weight, x.k_eps)
        assert torch.equal(alone[0][0], q_out[i])
        assert torch.equal(alone[1][0], k_out[i])


def test_out_is_written_and_its_neighbours_are_not():
    x = inputs.make(7, Widths(769, 33, 5), "fp16")
    around = [torch.full((9, n + 6), 7.0, dtype=torch.float16) for n in (769, 33)]
    out = tuple(t[1:8, 2:-4] for t in around)
    got = triton_fused.call(*x.args, out=out)
    assert got[0].data_ptr() == out[0].data_ptr()
    for y, want, t in zip(out, triton_fused.call(*x.args), around, strict=True):
        assert torch.equal(y, want)
        y.fill_(7.0)
        assert (t == 7.0).all()


def test_no_rows_and_three_dimensions():
    x = inputs.make(6, Widths(64, 32))
    q_out, k_out = triton_fused.call(*x.args)
    none = triton_fused.call(x.q[:0], x.q_weight, 1e-6, x.k[:0], x.k_weight, 1e-6)
    assert [y.shape for y in none] == [(0, 64), (0, 32)]
    buffer = x.buffer.view(2, 3, -1)
    q, k, _ = buffer.split([64, 32, 64], -1)
    cubes = triton_fused.call(q, x.q_weight, x.q_eps, k, x.k_weight, x.k_eps)
    assert torch.equal(cubes[0], q_out.view(2, 3, 64))
    assert torch.equal(cubes[1], k_out.view(2, 3, 32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: {"q": a["q"][:3]}, "same tokens"),
        (lambda a: {"q": a["q"].t().contiguous().t()}, "inner stride"),
        (lambda a: {"q_eps": None}, "eps"),
        (lambda a: {"out": (a["q"], torch.empty(4, 32, dtype=torch.bfloat16))}, "overlaps"),
        (lambda a: {"config": Config(3, 3, 1, 1, 1)}, "powers of two"),
        (lambda a: {"q": a["q"].view(2, 2, 64).transpose(0, 1)}, "same tokens"),
        (
            lambda a: {n: a[n].view(2, 2, -1).transpose(0, 1) for n in ("q", "k")},
            "no single row stride",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_launch(change, reason, monkeypatch):
    monkeypatch.setattr(interpreter, "launch", lambda *a: pytest.fail("launched"))
    names = ("q", "q_weight", "q_eps", "k", "k_weight", "k_eps")
    arguments = dict(zip(names, inputs.make(4, Widths(64, 32)).args, strict=True))
    with pytest.raises(MisuseError, match=reason):
        triton_fused.call(**(arguments | change(arguments)))


def test_widths_beyond_the_kernel_are_refused():
    x = inputs.make(1, Widths(16385, 32))
    with pytest.raises(MisuseError, match="16384"):
        triton_fused.call(*x.args)


def test_the_interpreter_lives_in_a_child_and_says_what_went_wrong():
    triton_fused.call(*inputs.make(1, Widths(8, 8)).args)
    child = interpreter._CHILDREN[os.getpid()]
    assert child.poll() is None
    assert os.environ.get("TRITON_INTERPRET") is None
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        interpreter.launch("mlakit.paths.triton_kernels:no_such_kernel", 1, {}, set())
    child.kill()
    child.wait()
    triton_fused.call(*inputs.make(1, Widths(8, 8)).args)
    assert not registry.get("triton_fused").timed


def test_two_outputs_may_be_columns_of_one_buffer():
    given = inputs.make(3, Widths(8, 4), "bf16")
    both = torch.full((3, 14), 7.0, dtype=torch.bfloat16)
    out = both[:, :8], both[:, 8:12]
    q, k = triton_fused.call(*given.args, out=out)
    fresh = triton_fused.call(*given.args)
    assert torch.equal(q, fresh[0])
    assert torch.equal(k, fresh[1])
    assert (both[:, 12:] == 7).all()
