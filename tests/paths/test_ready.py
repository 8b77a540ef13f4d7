"""A call like the one before is launched at once, and nothing else is: on stand-ins for a card."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mlakit import inputs
from mlakit.errors import MisuseError
from mlakit.paths import checks, registry, triton_fused, triton_launch, triton_quant
from mlakit.shapes import Widths

M, W = 6, Widths(256, 128, 64)


@pytest.fixture
def started(monkeypatch):
    """The launches made, as lists of arguments; outputs are then on the CPU."""
    launches = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    for module in (triton_fused, triton_launch):
        monkeypatch.setattr(module, "start", lambda launch, *given: launches.append(given))
        monkeypatch.setattr(
            module,
            "empty",
            lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
        )
    return launches


@pytest.fixture
def fused(monkeypatch, started):
    x = inputs.make(M, W)
    strides = (x.q.stride(0), x.k.stride(0), 256, 128, M)
    ready = triton_fused._Ready(
        SimpleNamespace(device=0), strides, ((M, 256), (M, 128)), ((256, 1), (128, 1))
    )
    latest = checks.same_as(x.q, x.q_weight, x.k, x.k_weight), ready
    monkeypatch.setattr(triton_fused, "_latest", latest)
    monkeypatch.setattr(triton_fused, "run", lambda *given: "looked up")
    monkeypatch.setattr(triton_fused.custom_op, "qk_rmsnorm", lambda *given: "operator")
    return x.args


@pytest.fixture
def quantised(monkeypatch, started):
    x = inputs.make(M, W)
    like = ((M, 256), (256, 1), torch.uint8), ((M, 2), (2, 1), torch.float32)
    ready = triton_quant._Ready(
        checks.same_as(x.q, x.q_weight, x.k, x.k_weight), triton_quant.DEFAULT,
        SimpleNamespace(device=0), (x.q.stride(0), x.k.stride(0), 2, 1, M, M),
        (*like, ((M, 128), (128, 1), torch.bfloat16)),
    )  # fmt: skip
    monkeypatch.setitem(triton_quant._latest, "fp8_group128", ready)
    return x.args


def test_the_next_call_of_the_kind_is_a_launch(fused, started):
    q, q_weight, q_eps, k, k_weight, k_eps = fused
    again = (torch.empty_strided(q.shape, q.stride(), dtype=q.dtype), *fused[1:])
    q_out, k_out = triton_fused.call(*again)
    (given,) = started
    assert given[:3] == (again[0].data_ptr(), q_weight.data_ptr(), q_out.data_ptr())
    assert given[3:6] == (k.data_ptr(), k_weight.data_ptr(), k_out.data_ptr())
    assert given[6:] == (q.stride(0), k.stride(0), 256, 128, M, q_eps, k_eps)
    assert [(y.shape, y.is_contiguous(), y.dtype) for y in (q_out, k_out)] == [
        ((M, n), True, torch.bfloat16) for n in (256, 128)
    ]


def _elsewhere(x):
    """``x`` with its strides, two bytes off."""
    memory = torch.empty(x.stride(0) * len(x) + 1, dtype=x.dtype)
    return memory.as_strided(x.shape, x.stride(), 1)


OTHERS = {
    "fewer rows": lambda a: (a[0][:3], *a[1:3], a[3][:3], *a[4:]),
    "other strides": lambda a: (a[0].contiguous(), *a[1:]),
    "another dtype": lambda a: (a[0].half(), *a[1:]),
    "a float32 weight": lambda a: (a[0], a[1].float(), *a[2:]),
    "a strided weight": lambda a: (a[0], a[1].repeat_interleave(2)[::2], *a[2:]),
    "another address": lambda a: (_elsewhere(a[0]), *a[1:]),
    "an eps below 0": lambda a: (*a[:5], -1.0),
    "eps that is no number": lambda a: (*a[:2], float("nan"), *a[3:]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_of_another_kind_is_looked_up(fused, started, other):
    assert triton_fused.call(*OTHERS[other](fused)) == "looked up"
    assert not started


@pytest.mark.parametrize("other", OTHERS)
def test_a_quantised_call_of_another_kind_is_looked_up(quantised, started, monkeypatch, other):
    monkeypatch.setattr(triton_quant, "_launch", lambda *given, **more: None)
    try:
        triton_quant.fused("fp8_group128", *OTHERS[other](quantised))
    except MisuseError:
        assert "eps" in other or "dtype" in other or "weight" in other
    assert not started


def test_a_quantised_call_of_the_kind_is_a_launch(quantised, started):
    q, q_weight, q_eps, k, k_weight, k_eps = quantised
    got, k_out = triton_quant.fused("fp8_group128", *quantised)
    (given,) = started
    pointers = [t.data_ptr() for t in (q, q_weight, got.values, got.scale, q, k, k_weight, k_out)]
    assert list(given) == [*pointers, q.stride(0), k.stride(0), 2, 1, M, M, q_eps, k_eps]
    assert got.unquantised is None
    assert got.values.shape == (M, 256)


def test_what_must_see_an_operator_sees_it(fused, started):
    q, *rest = fused
    assert triton_fused.call(q.detach().requires_grad_(), *rest) == "operator"
    with FlopCounterMode(display=False):
        assert triton_fused.call(*fused) == "operator"
    with torch.autograd.forward_ad.dual_level():
        assert triton_fused.call(*fused) == "operator"
    seen = []
    torch.func.vmap(lambda x: seen.append(triton_fused.call(*fused)) or x)(torch.zeros(2))
    assert seen == ["operator"]
    assert not started


def test_what_another_thread_does_meanwhile_is_not_launched(fused, monkeypatch):
    kind, ready = triton_fused._latest
    others = SimpleNamespace(device=0), "another thread's"

    def same(*tensors):
        monkeypatch.setattr(triton_fused, "_latest", (lambda *given: False, others))
        return kind(*tensors)

    monkeypatch.setattr(triton_fused, "_latest", (same, ready))
    q, q_weight, _, k, k_weight, _ = fused
    assert triton_fused.again(q, q_weight, k, k_weight).args == (ready,)


def test_without_torchs_guards_the_facts_decide(monkeypatch):
    monkeypatch.setattr(checks, "_GUARDS", None)
    x = inputs.make(M, W)
    same = checks.same_as(x.q, x.q_weight, x.k, x.k_weight)
    assert same(x.q, x.q_weight, x.k, x.k_weight)
    assert not same(x.q[:3], x.q_weight, x.k[:3], x.k_weight)
    assert not same(x.q, x.q_weight, x.k, x.k_weight.float())


def tensors(results):
    return [x for x in torch.utils._pytree.tree_leaves(results) if x is not None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device")
@pytest.mark.parametrize("quant", ["none", "fp8_group128", "fp8_token", "mxfp4"])
def test_on_a_card_the_calls_after_the_first_give_what_the_first_would(quant):
    path = registry.get("triton_fused" if quant == "none" else f"triton_{quant}")
    for m, seed in ((5, 0), (5, 1), (5, 2), (7, 3), (5, 4), (5, 5)):
        args = inputs.make(m, W, seed=seed, device="cuda").args
        got = tensors(path.call(*args))
        triton_fused._latest = None
        triton_quant._latest.clear()
        want = tensors(path.call(*args))
        for y, expected in zip(got, want, strict=True):
            assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
        path.call(*args)  # the next call is then of the same kind, or of another
