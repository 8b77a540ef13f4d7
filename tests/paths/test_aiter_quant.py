"""AITER's norm-and-quantise kernels: every arity of theirs ends in one shape of ours."""

import sys
import types

import pytest
import torch

from mlakit import inputs, rounding, shapes
from mlakit.context import Context
from mlakit.errors import MisuseError, RefusedError
from mlakit.paths import aiter_fp8_group128, aiter_mxfp4, aiter_quant, quantised, registry
from mlakit.paths.quantised import Options

W = shapes.Widths(256, 64)
EVEN = Options(rule="quark_even")


def norms(x1, w1, e1, x2, w2, e2):
    k = rounding.round_to(rounding.oracle(x2, w2, e2), x2.dtype)
    return rounding.oracle(x1, w1, e1).float(), k


def mx(y):
    empty = quantised.empty("mxfp4", y.to(torch.bfloat16))
    return tuple(quantised.fill("mxfp4", y, empty, EVEN)[:2])


def mxfp4_by_inputs(
    inp1, inp1_weight, inp1_epsilon, inp2=None, inp2_weight=None, inp2_epsilon=0.0, res1=None
):
    """v0.1.5 to v0.1.6.post1: what is returned depends on what was given."""
    y, k = norms(inp1, inp1_weight, inp1_epsilon, inp2, inp2_weight, inp2_epsilon)
    return mx(y), k


def mxfp4_of_three(
    x1, x1_weight, x1_epsilon, x2=None, x2_weight=None, x2_epsilon=0.0, res1=None,
    shuffle=False, scale_shuffle_padding=False,
):  # fmt: skip
    """v0.1.6.post3 to v0.1.7.post2, PyPI's wheel included: k is the second."""
    assert (res1, shuffle, scale_shuffle_padding) == (None, False, False)
    y, k = norms(x1, x1_weight, x1_epsilon, x2, x2_weight, x2_epsilon)
    return mx(y), k, None


def mxfp4_of_four(
    x1, x1_weight, x1_epsilon, x2=None, x2_weight=None, x2_epsilon=0.0, res1=None,
    shuffle=False, scale_shuffle_padding=False, output_unquantized_inp1=False,
):  # fmt: skip
    """v0.1.7.post3 on: k is the third."""
    y, k = norms(x1, x1_weight, x1_epsilon, x2, x2_weight, x2_epsilon)
    return mx(y), None, k, None


def mxfp4_unknown(x, w, eps):
    raise AssertionError("never called")


def mxfp4_swapped(x1, x1_weight, x1_epsilon, x2=None, x2_weight=None, x2_epsilon=0.0, res1=None):
    y, k = norms(x1, x1_weight, x1_epsilon, x2, x2_weight, x2_epsilon)
    values, scale = mx(y.flip(-1))
    return (values, scale), k, None


def fp8(
    inp1, inp1_weight, inp1_epsilon, inp2=None, inp2_weight=None, inp2_epsilon=None,
    group_size=128, dtype_quant=None, res1=None, output_unquantized_inp1=False,
    transpose_scale=False, is_x_scale_strided=False,
):  # fmt: skip
    assert (group_size, dtype_quant) == (128, torch.float8_e4m3fn)
    assert not transpose_scale
    y, k = norms(inp1, inp1_weight, inp1_epsilon, inp2, inp2_weight, inp2_epsilon)
    out = quantised.fill("fp8_group128", y, quantised.empty("fp8_group128", y))
    return (out.values, out.scale), None, k, None


@pytest.fixture
def fake(monkeypatch):
    def install(place="quant.", **functions):
        names = ["aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.quant"]
        modules = {n: types.ModuleType(n) for n in names}
        for module in modules.values():
            module.__path__ = []
        for name, function in functions.items():
            full = f"aiter.ops.triton.{place}fused_{name}_quant"
            modules[full] = types.ModuleType(full)
            public = {"mxfp4": "fused_rms_mxfp4_quant", "fp8": "fused_rms_fp8_group_quant"}
            setattr(modules[full], public[name], function)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    aiter_quant._trusted.cache_clear()
    yield install
    aiter_quant._trusted.cache_clear()


def check(path, quant, options, m=5):
    i = inputs.make(m, W, eps=(1e-6, 1e-5), family="tiny")
    got, k = path.call(*i.args)
    want = quantised.reference(quant, i.q, i.q_weight, 1e-6, options)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(k, rounding.round_to(rounding.oracle(i.k, i.k_weight, 1e-5), k.dtype))


@pytest.mark.parametrize("place", ["", "quant."])
@pytest.mark.parametrize("function", [mxfp4_by_inputs, mxfp4_of_three, mxfp4_of_four])
def test_every_arity_gives_the_step(fake, function, place):
    fake(place, mxfp4=function)
    check(aiter_mxfp4.PATH, "mxfp4", EVEN)


def test_fp8_by_groups(fake):
    fake(fp8=fp8)
    check(aiter_fp8_group128.PATH, "fp8_group128", Options())


def test_out_is_filled_and_returned(fake):
    fake(mxfp4=mxfp4_of_four)
    i = inputs.make(3, W)
    out = quantised.empty("mxfp4", i.q), torch.empty_like(i.k).contiguous()
    got = aiter_mxfp4.PATH.call(*i.args, out=out)
    assert got is out
    plain = aiter_mxfp4.PATH.call(*i.args)
    assert torch.equal(out[0].values, plain[0].values)
    assert torch.equal(out[1], plain[1])


def test_no_rows_means_no_call(fake):
    fake(mxfp4=mxfp4_unknown)
    i = inputs.make(0, W)
    got, k = aiter_mxfp4.PATH.call(*i.args)
    assert (got.values.shape, k.shape) == ((0, 128), (0, 64))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({}, "this AITER has no fused_rms_mxfp4_quant"),
        ({"mxfp4": mxfp4_unknown}, "unknown signature: x, w, eps"),
        ({"mxfp4": mxfp4_swapped}, "wrong known answer for q; not trusted"),
    ],
)
def test_what_is_not_trusted_is_refused(fake, functions, message):
    fake(**functions)
    with pytest.raises(RefusedError, match=message):
        aiter_mxfp4.PATH.call(*inputs.make(2, W).args)


def test_bad_arguments_never_reach_it(fake):
    fake(mxfp4=mxfp4_of_four)
    i = inputs.make(4, W)
    with pytest.raises(MisuseError, match="inner stride 4"):
        aiter_mxfp4.PATH.call(i.q.t().contiguous().t(), *i.args[1:])
    with pytest.raises(RefusedError, match="32"):
        aiter_mxfp4.PATH.call(i.q[:, :40], i.q_weight[:40], *i.args[2:])


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (Context(arch="gfx950", quant="mxfp4"), None),
        (Context(arch="sm_90", quant="mxfp4"), "AMD cards only"),
        (Context(arch="gfx950"), "none was asked for"),
        (Context(arch="gfx950", quant="mxfp4", q_lora_rank=40), "32"),
        (Context(arch="gfx950", quant="mxfp4", packages=frozenset()), "no usable AITER"),
    ],
)
def test_supports(context, reason):
    got = registry.get("aiter_mxfp4").supports(context)
    assert got is None if reason is None else reason in got
