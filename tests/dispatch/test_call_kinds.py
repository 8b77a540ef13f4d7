"""One kind of call is not taken for another, whatever came before it or comes beside it."""

import itertools
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mlakit import inputs, shapes
from mlakit.dispatch import call
from mlakit.errors import MisuseError
from mlakit.paths import checks, quantised

W = shapes.Widths(96, 32, 16)


pytestmark = pytest.mark.usefixtures("fresh")


class Named(torch.Tensor):
    """A class of its own with memory of its own."""


def _plain(a):
    return call.qk_rmsnorm(*a)


def _watched(a):
    with FlopCounterMode(display=False):
        return call.qk_rmsnorm(*a)


def _named(a):
    return call.qk_rmsnorm(a[0].as_subclass(Named), *a[1:])


def _inference(a):
    with torch.inference_mode():
        return call.qk_rmsnorm(*a)


def _gradient(a):
    return call.qk_rmsnorm(a[0].detach().requires_grad_(), *a[1:])


def _transformed(a):
    return torch.func.functionalize(lambda q: call.qk_rmsnorm(q, *a[1:]))(a[0])


KINDS = (_plain, _watched, _named, _inference, _gradient, _transformed)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(KINDS, 2)))
def test_what_ran_before_does_not_decide_for_another_kind(first, second):
    given = inputs.make(3, W).args
    want = call.qk_rmsnorm(*given, path="torch_native")
    call.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", call.FallbackWarning)
        for kind in (first, second, first, second):
            got = kind(given)
            assert got[0].requires_grad == (kind is _gradient)
            for y, expected in zip(got, want, strict=True):
                assert torch.allclose(y.detach().float(), expected.float(), rtol=2**-6)
    assert sum(call.counts().values()) == 4


def test_a_weight_without_memory_is_no_weight_of_the_kind():
    q, q_weight, q_eps, k, k_weight, k_eps = inputs.make(3, W).args
    fake = FakeTensorMode().from_tensor(q_weight)
    assert not checks.plain(q, fake, k, k_weight)
    for _ in range(2):
        with pytest.raises(MisuseError, match="FakeTensor has no memory"):
            call.qk_rmsnorm(q, fake, q_eps, k, k_weight, k_eps)
        call.qk_rmsnorm(q, q_weight, q_eps, k, k_weight, k_eps)


@pytest.mark.parametrize("eps", [torch.tensor([1e-6, 1e-6]), np.array([1e-6, 1e-6]), "1e-6", 1j])
def test_an_eps_that_is_no_number_is_said_each_time(eps):
    q, q_weight, q_eps, k, k_weight, k_eps = inputs.make(3, W).args
    for _ in range(2):
        with pytest.raises(MisuseError, match="q's eps"):
            call.qk_rmsnorm(q, q_weight, eps, k, k_weight, k_eps)
        call.qk_rmsnorm(q, q_weight, q_eps, k, k_weight, k_eps)


def test_a_kind_that_another_thread_still_held_is_decided_anew_after_reset():
    given = inputs.make(3, W).args
    for _ in range(3):
        call.qk_rmsnorm(*given)
    held = call._last
    call.reset()
    call._last = held  # the other thread ends its call
    for _ in range(2):
        call.qk_rmsnorm(*given)
    assert call._last is not held
    assert sum(call.counts().values()) == 2


def test_one_kind_decided_twice_at_once_loses_no_count():
    given = inputs.make(3, W).args
    call.qk_rmsnorm(*given)
    (key, held), again = *call._kinds.items(), call._last
    call._remember(key, call._Kind(held.ran, held.context, held.strict))
    call._last = again
    call.qk_rmsnorm(*given)
    assert sum(call.counts().values()) == 2


def test_threads_with_shapes_of_their_own_get_their_own_results():
    made = [inputs.make(m, W, seed=m) for m in (1, 2, 3, 5)]
    want = [call.qk_rmsnorm(*i.args) for i in made]
    call.reset()
    wrong = []

    def serve(i, expected):
        for _ in range(200):
            got = call.qk_rmsnorm(*i.args)
            if not all(map(torch.equal, got, expected)):
                wrong.append(i.q.shape)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=serve, args=each) for each in zip(made, want, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


@pytest.mark.parametrize("which", [0, 1, 3, 4])
def test_a_negated_view_is_read_with_its_signs(which):
    args = list(inputs.make(4, W, seed=5).args)
    want = call.qk_rmsnorm(*args)
    args[which] = torch._neg_view(args[which])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", call.FallbackWarning)
        got = call.qk_rmsnorm(*args)
    signs = (-1, 1) if which < 3 else (1, -1)
    for g, w, sign in zip(got, want, signs, strict=True):
        torch.testing.assert_close(g, w * sign)
    with pytest.raises(MisuseError, match="resolve_neg"):
        call.qk_rmsnorm(*args, path="cpu_fused")


@pytest.mark.filterwarnings("ignore::mlakit.dispatch.call.FallbackWarning")
@pytest.mark.parametrize("which", [0, 1])
def test_a_zero_tensor_without_memory_ends_no_process(which):
    args = list(inputs.make(4, W, "fp32").args)
    call.qk_rmsnorm(*args)
    args[which] = torch._efficientzerotensor(args[which].shape)
    assert not call.qk_rmsnorm(*args)[0].any()
    with pytest.raises(MisuseError, match="no memory"):
        call.qk_rmsnorm(*args, path="cpu_fused")


def test_activation_checkpointing_works_and_demotes_no_path():
    q, *rest = inputs.make(4, W, "fp32").args
    want = torch.autograd.functional.vjp(lambda q: call.qk_rmsnorm(q, *rest)[0], q, q)[1]
    before = call.last_call()
    x = q.clone().requires_grad_()
    run = torch.utils.checkpoint.checkpoint(
        lambda x: call.qk_rmsnorm(x, *rest)[0], x, use_reentrant=False
    )
    run.backward(q)
    torch.testing.assert_close(x.grad, want)
    call.qk_rmsnorm(x, *rest)
    assert call.last_call() == before


def test_an_output_that_torch_would_not_write_is_refused_and_demotes_no_path():
    args = inputs.make(4, W, "fp32").args
    ran = (call.qk_rmsnorm(*args), call.last_call())[1]
    k_out = torch.zeros(4, 32)
    with torch.inference_mode():
        frozen = torch.zeros(4, 96)
    expanded = torch.zeros(1, 96).expand(4, 96)
    wanted = torch.zeros(4, 96, requires_grad=True)
    for y, why in ((frozen, "inference"), (expanded, "expanded"), (wanted, "gradient")):
        with pytest.raises(MisuseError, match=why):
            call.qk_rmsnorm(*args, out=(y, k_out))
    call.qk_rmsnorm(*args, out=(torch.zeros(4, 96), k_out))
    assert call.last_call() == ran


def test_autograd_sees_that_an_output_was_written():
    args = inputs.make(4, W, "fp32").args
    y = torch.zeros(4, 96)
    loss = (torch.ones(4, 96, requires_grad=True) * y).sum()
    call.qk_rmsnorm(*args, out=(y, torch.zeros(4, 32)))
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("out", [5, (None, None), "plain", "one"])
def test_a_quantised_call_s_out_of_another_kind_is_said(out):
    q, *rest = inputs.make(4, shapes.Widths(128, 32), seed=1).args
    given = {"plain": (q, rest[2]), "one": (quantised.empty("fp8_token", q),)}.get(out, out)
    with pytest.raises(MisuseError, match="out must be a pair"):
        call.qk_rmsnorm(q, *rest, quant="fp8_token", out=given)


def test_a_traced_call_refuses_what_an_eager_one_does():
    q, w, eps, _, *rest = inputs.make(4, W, "fp32").args
    compiled = torch.compile(call.qk_rmsnorm, backend="eager")
    try:
        with pytest.raises(MisuseError, match="same tokens"):
            compiled(q, w, eps, torch.zeros(5, 32), *rest)
    finally:
        torch._dynamo.reset()  # dynamo does not trace again what raised


@pytest.mark.parametrize("quant", ["none", "fp8_group128", "fp8_token", "mxfp4"])
def test_the_default_dtype_changes_no_input_and_no_scale(quant):
    widths = shapes.Widths(128, 32)
    want_in = inputs.make(3, widths, "fp32", family="heavy", seed=2)
    want = call.qk_rmsnorm(*want_in.args, quant=quant)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = inputs.make(3, widths, "fp32", family="heavy", seed=2)
        got = call.qk_rmsnorm(*made.args, quant=quant)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(made.buffer, want_in.buffer)
    assert torch.equal(made.q_weight, want_in.q_weight)
    parts = [(*y[0], y[1]) if quant != "none" else y for y in (got, want)]
    for g, w in zip(*parts, strict=True):
        if w is not None:
            assert g.dtype == w.dtype
            assert torch.equal(g.view(torch.uint8), w.view(torch.uint8))
