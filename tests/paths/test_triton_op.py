"""The operator mlakit::qk_rmsnorm: gradients, tracing, and what a build for sm_90 looks like."""

import re

import pytest
import torch

from mlakit import inputs, rounding
from mlakit.errors import MisuseError
from mlakit.paths import checks, custom_op, triton_fused
from mlakit.paths.triton_config import heuristic
from mlakit.shapes import Widths

triton = pytest.importorskip("triton")


def leaves(args):
    return [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]


def test_gradient_is_the_derivative_in_float64():
    generator = torch.Generator().manual_seed(0)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return rounding.oracle(x, weight, 1e-5)

        @staticmethod
        def backward(ctx, grad):
            return custom_op.gradient(grad, *ctx.saved_tensors, 1e-5)

    x = torch.randn(2, 3, 17, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(17, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(Norm.apply, (x, weight))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_four_gradients_match_autograd_of_the_oracle(dtype):
    args = leaves(inputs.make(5, Widths(48, 16), dtype, eps=(1e-6, 1e-5)).args)
    out = triton_fused.call(*args)
    grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) for y in out]
    torch.autograd.backward(out, [g.to(y.dtype) for g, y in zip(grads, out, strict=True)])
    wide = [a.detach().double().requires_grad_() if torch.is_tensor(a) else a for a in args]
    exact = rounding.oracle(*wide[:3]), rounding.oracle(*wide[3:])
    torch.autograd.backward(exact, [g.to(out[0].dtype).double() for g in grads])
    for got, want in zip(args, wide, strict=True):
        if torch.is_tensor(got):
            error = (got.grad.double() - want.grad).norm() / want.grad.norm()
            assert error < (1e-6 if dtype == "fp32" else 4e-3)


def test_opcheck_is_clean():
    x = inputs.make(3, Widths(64, 32, 16), "fp32")
    for args in (x.args, tuple(leaves(x.args))):
        done = torch.library.opcheck(custom_op.qk_rmsnorm, args)
        assert set(done.values()) == {"SUCCESS"}


def test_compile_makes_no_graph_break_and_the_same_bits():
    compiled = torch.compile(
        lambda *a: triton_fused.call(*a), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for m in (3, 5):
        x = inputs.make(m, Widths(64, 32))
        for got, want in zip(compiled(*x.args), triton_fused.call(*x.args), strict=True):
            assert torch.equal(got, want)
            assert got.is_contiguous()


def test_tracers_see_the_operator_and_plain_calls_do_not():
    x = inputs.make(2, Widths(16, 8))
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda q: triton_fused.call(q, *x.args[1:]))
    assert "mlakit.qk_rmsnorm" in traced(x.q).code
    assert checks.plain(x.q, x.q_weight, x.k, x.k_weight)


def test_out_is_refused_where_a_gradient_is_wanted():
    args = leaves(inputs.make(2, Widths(16, 8)).args)
    out = tuple(torch.empty(2, n, dtype=torch.bfloat16) for n in (16, 8))
    with pytest.raises(MisuseError, match="gradient"):
        triton_fused.call(*args, out=out)


@pytest.mark.parametrize("q", [1536, 0])
def test_a_build_for_sm_90_loads_16_bytes_and_waits_once(q):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mlakit.paths.triton_kernels import kernel_signature

    config = heuristic("sm_90", 1024, q, 512)
    function, signature, constants, attrs, options = kernel_signature(config, "sm_90", q, 512)
    source = ASTSource(function, signature, constants, attrs)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    loads = re.findall(r"ld\.global\S*", ptx)
    assert len(loads) == (8 if q else 4)
    assert all(".v4.b32" in load for load in loads)
    assert ptx.count("bar.sync") == (1 if q else 0)
