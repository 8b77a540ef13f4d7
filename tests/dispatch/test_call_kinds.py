"""One kind of call is not taken for another, whatever came before it or comes beside it."""

import itertools
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mlakit import inputs, shapes
from mlakit.dispatch import call
from mlakit.errors import MisuseError
from mlakit.paths import checks

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
