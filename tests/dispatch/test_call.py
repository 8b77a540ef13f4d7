"""The call: obeyed or refused, no fallback unsaid, and every call can tell what ran."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mlakit import inputs, rounding, shapes
from mlakit.dispatch import call, policies, probe
from mlakit.errors import MisuseError, RefusedError
from mlakit.paths import registry

W = shapes.Widths(96, 32, 16)


pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def without_numba(monkeypatch):
    monkeypatch.setattr(probe, "packages", lambda: frozenset({"cxx"}))


@pytest.fixture
def broken(monkeypatch):
    """``broken(name, error)``: the path of that name raises the error when called."""

    def breaks(name, error):
        def fail(*args, out=None):
            raise error

        real = registry.get
        path = replace(real(name), call=fail)
        monkeypatch.setattr(registry, "get", lambda n: path if n == name else real(n))

    return breaks


def expected(i):
    return [
        rounding.round_to(rounding.oracle(x, w, e), x.dtype)
        for x, w, e in ((i.q, i.q_weight, i.q_eps), (i.k, i.k_weight, i.k_eps))
    ]


def close(got, i):
    return all(
        torch.allclose(a.double(), b.double(), rtol=2**-7)
        for a, b in zip(got, expected(i), strict=True)
    )


@pytest.mark.parametrize("m", [0, 1, 3, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_it_gives_the_step(m, dtype):
    i = inputs.make(m, W, dtype, eps=(1e-6, 1e-5))
    assert close(call.qk_rmsnorm(*i.args), i)
    ran = call.last_call()
    assert (ran.path, ran.policy, ran.fallback) == ("cpu_fused", "mlakit", False)
    # float32 is in no table: the model decides there, or for no rows the safe order
    unmeasured = "latency model" if m else "one launch"
    assert (unmeasured if dtype == "fp32" else "fastest from") in ran.reason


def test_out_is_filled_and_returned():
    i = inputs.make(5, W)
    out = torch.full((5, 96), 7.0).bfloat16(), torch.full((5, 32), 7.0).bfloat16()
    got = call.qk_rmsnorm(*i.args, out=out)
    assert got[0] is out[0]
    assert close(out, i)


def test_calls_are_counted_by_path_and_reason():
    i = inputs.make(4, W)
    for _ in range(3):
        call.qk_rmsnorm(*i.args)
    call.qk_rmsnorm(*inputs.make(5, W).args)
    call.qk_rmsnorm(*i.args, path="torch_native")
    by_path = {ran.path: n for ran, n in call.counts().items()}
    assert by_path == {"cpu_fused": 4, "torch_native": 1}
    assert call.last_call().reason == "asked for by name"


def test_counts_outlive_the_memory_of_kinds(monkeypatch):
    monkeypatch.setattr(call, "_MOST_KINDS", 2)
    for m in (1, 2, 3, 4, 5):
        call.qk_rmsnorm(*inputs.make(m, W).args)
    assert sum(call.counts().values()) == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [("aiter_fused", "AMD cards only"), ("dual_stream", "stream"), ("triton_fp8_group128", "96")],
)
def test_a_request_is_refused_never_replaced(path, message):
    i = inputs.make(2, W)
    with pytest.raises(RefusedError, match=message) as caught:
        call.qk_rmsnorm(*i.args, path=path)
    assert "\n" not in str(caught.value)
    assert call.last_call() is None


def test_a_requested_path_that_fails_is_an_error(broken):
    broken("torch_native", RuntimeError("k must be 2D"))
    with pytest.raises(RuntimeError, match="k must be 2D"):
        call.qk_rmsnorm(*inputs.make(2, W).args, path="torch_native")


def test_a_failure_falls_back_says_so_once_and_remembers(broken):
    broken("cpu_fused", RuntimeError("k must be 2D"))
    i = inputs.make(2, W)
    with pytest.warns(call.FallbackWarning, match="instead of cpu_fused: it failed.*k must be 2D"):
        assert close(call.qk_rmsnorm(*i.args), i)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call.qk_rmsnorm(*i.args)
    ran = call.last_call()
    assert (ran.path, ran.fallback) == ("torch_rms_norm", True)
    assert "k must be 2D" in ran.reason
    assert call.counts() == {ran: 2}


def test_strict_turns_a_failure_into_an_error(broken):
    broken("cpu_fused", RuntimeError("k must be 2D"))
    with pytest.raises(RefusedError, match="strict: policy mlakit takes cpu_fused"):
        call.qk_rmsnorm(*inputs.make(2, W).args, strict=True)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_no_reason_to_fall_back(broken, error):
    broken("cpu_fused", error)
    with pytest.raises(type(error)):
        call.qk_rmsnorm(*inputs.make(2, W).args)


def test_every_path_failing_is_an_error_that_names_the_last_reason(broken):
    broken("cpu_fused", RuntimeError("one"))
    broken("torch_rms_norm", RuntimeError("two"))
    broken("torch_native", RuntimeError("three"))
    with (
        pytest.warns(call.FallbackWarning),
        pytest.raises(RefusedError, match=r"torch_native cannot run .*three.*no other path"),
    ):
        call.qk_rmsnorm(*inputs.make(2, W).args)


def test_no_fused_path_is_a_fallback(without_numba):
    i = inputs.make(2, W)
    with pytest.warns(call.FallbackWarning, match="cpu_fused: numba is not installed"):
        assert close(call.qk_rmsnorm(*i.args), i)
    assert call.last_call().fallback
    with pytest.raises(RefusedError, match="numba is not installed"):
        call.qk_rmsnorm(*i.args, strict=True)


def test_an_inner_stride_falls_back_with_the_reason():
    i = inputs.make(4, W)
    q = i.q.t().contiguous().t()
    with pytest.warns(call.FallbackWarning, match="inner stride"):
        got = call.qk_rmsnorm(q, *i.args[1:])
    assert close(got, i)


def test_a_gradient_falls_back_with_the_reason():
    i = inputs.make(4, W, "fp32")
    w = i.q_weight.clone().requires_grad_()
    with pytest.warns(call.FallbackWarning, match="gradient"):
        q, _ = call.qk_rmsnorm(i.q, w, *i.args[2:])
    q.sum().backward()
    assert w.grad is not None
    with torch.no_grad():
        call.qk_rmsnorm(i.q, w, *i.args[2:])
    assert call.last_call().path == "cpu_fused"


def test_an_engines_own_path_is_stood_in_for_and_said():
    i = inputs.make(4, W)
    with pytest.warns(call.FallbackWarning, match="torch_rms_norm ran instead of engine_split"):
        assert close(call.qk_rmsnorm(*i.args, policy="sglang_today"), i)
    with pytest.raises(RefusedError, match="strict: policy sglang_0_5_23 takes engine_split"):
        call.qk_rmsnorm(*i.args, policy="sglang_today", strict=True)
    with pytest.raises(RefusedError, match="AMD cards only"):
        call.qk_rmsnorm(*i.args, policy="atom")


@pytest.mark.parametrize("quant", ["fp8_group128", "fp8_token", "mxfp4"])
def test_a_quantised_q(quant):
    i = inputs.make(4, shapes.Widths(256, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", call.FallbackWarning)
        quantised, k = call.qk_rmsnorm(*i.args, quant=quant)
    assert registry.get(call.last_call().path).output == quant
    assert quantised.values.shape[0] == 4
    assert torch.allclose(k.double(), expected(i)[1].double(), rtol=2**-7)
    reference = f"torch_{quant}"
    same, _ = call.qk_rmsnorm(*i.args, path=reference)
    assert same.values.shape == quantised.values.shape
    assert call.last_call().path == reference


I2 = inputs.make(2, W)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((I2.q, I2.q_weight, 1e-6, I2.k[:1], I2.k_weight, 1e-6), {}, "rows"),
        ((I2.q, I2.q_weight, None, I2.k, I2.k_weight, 1e-6), {}, "eps"),
        ((I2.q, I2.q_weight, 1e-6, I2.k.to("meta"), I2.k_weight, 1e-6), {}, "device"),
        (([1.0], I2.q_weight, 1e-6, I2.k, I2.k_weight, 1e-6), {}, "must be tensors"),
        (I2.args, {"path": "cpu_fussed"}, "did you mean 'cpu_fused'"),
        (I2.args, {"policy": "sglang"}, "unknown policy"),
        (I2.args, {"quant": "fp8"}, "unknown quant"),
    ],
)
def test_bad_input_is_one_line_before_any_launch(args, options, message):
    with pytest.raises(MisuseError, match=message) as caught:
        call.qk_rmsnorm(*args, **options)
    assert "\n" not in str(caught.value)
    assert call.last_call() is None


def test_a_card_outside_the_table_still_runs(monkeypatch):
    monkeypatch.setattr(probe, "device_arch", lambda device: "sm_89")
    i = inputs.make(2, W)
    with pytest.warns(call.FallbackWarning, match="sm_89 is not in"):
        assert close(call.qk_rmsnorm(*i.args), i)
    with pytest.raises(RefusedError, match="sm_89"):
        call.qk_rmsnorm(*i.args, strict=True)


def test_traced_whole_it_is_the_same_step():
    i = inputs.make(3, W)
    traced = torch.compile(call.qk_rmsnorm, fullgraph=True, backend="eager")
    assert close(traced(*i.args), i)
    with pytest.raises(Exception, match="cpu_fused cannot be traced"):
        traced(*i.args, path="cpu_fused")


def test_symbolic_sizes_are_refused_as_such():
    i = inputs.make(3, W)
    trace = make_fx(lambda q: call.qk_rmsnorm(q, *i.args[1:]), tracing_mode="symbolic")
    with pytest.raises(MisuseError, match=r"symbolic shape \(s\d+, .*trace with torch.compile"):
        trace(i.q)


def test_a_choice_is_asked_for_once_a_kind(monkeypatch):
    asked = []
    real = policies.choose
    monkeypatch.setattr(policies, "choose", lambda c, p: asked.append(c) or real(c, p))
    for m in (1, 1, 2, 1, 2):
        call.qk_rmsnorm(*inputs.make(m, W).args)
    assert [c.m for c in asked] == [1, 2]


def test_a_callers_mistake_demotes_no_path():
    given = inputs.make(5, shapes.Widths(64, 32))
    with torch.no_grad():
        call.qk_rmsnorm(*given.args)
        path = call.last_call().path
        q, qw, qe, k, _, ke = given.args
        with pytest.raises(MisuseError, match="tensors"):
            call.qk_rmsnorm(q, qw, qe, k, None, ke)
        call.qk_rmsnorm(*given.args)
    assert call.last_call().path == path


def test_weights_of_two_dtypes_are_served_by_a_path_that_can():
    given = inputs.make(5, shapes.Widths(64, 32))
    q, qw, qe, k, kw, ke = given.args
    with torch.no_grad(), pytest.warns(call.FallbackWarning):
        got = call.qk_rmsnorm(q, qw.float(), qe, k, kw, ke)
    want = rounding.oracle(q, qw.float(), qe)
    assert (got[0].double() - want).abs().max() <= 0.02


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SGLANG_USE_AITER", "maybe", "SGLANG_USE_AITER='maybe': a yes-or-no switch; set it to"),
        ("GPU_ARCHS", "mi300", "'mi300' is no device arch; write e.g. gfx942"),
        ("HSA_OVERRIDE_GFX_VERSION", "nine", "write major.minor.stepping"),
    ],
)
def test_an_odd_switch_is_one_line_before_any_launch(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(MisuseError, match=message) as caught:
        call.qk_rmsnorm(*I2.args)
    assert "\n" not in str(caught.value)
    assert call.last_call() is None


def test_forward_mode_and_transforms_take_a_path_that_torch_follows():
    from torch.autograd import forward_ad

    q, w, eps, *rest = inputs.make(4, shapes.Widths(64, 32), "fp32").args
    call.qk_rmsnorm(q, w, eps, *rest)
    plain = call.last_call()

    def mine(x):
        return call.qk_rmsnorm(x, w, eps, *rest)[0]

    def theirs(x):
        return torch.nn.functional.rms_norm(x, w.shape, w, eps)

    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dual = forward_ad.make_dual(q, q.flip(0))
        got, want = (forward_ad.unpack_dual(f(dual)).tangent for f in (mine, theirs))
        batch = torch.stack((q, q.flip(1)))
        mapped = torch.vmap(mine)(batch)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mapped, theirs(batch))
    call.qk_rmsnorm(q, w, eps, *rest)
    assert call.last_call() == plain


@pytest.mark.parametrize("out", [(None, None), (1, 2)])
def test_an_out_of_no_tensors_is_one_line(out):
    with pytest.raises(MisuseError, match="must be a tensor"):
        call.qk_rmsnorm(*inputs.make(4, shapes.Widths(64, 32)).args, out=out)


def test_single_numbers_are_one_line():
    one = torch.tensor(1.0)
    with pytest.raises(MisuseError, match="single number"):
        call.qk_rmsnorm(one, one, 1e-6, one, one, 1e-6)


def _grad(a):
    return (a[0].clone().requires_grad_(), *a[1:])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: (a[0], a[1].repeat_interleave(2)[::2], *a[2:]), "not contiguous"),
        (lambda a: (a[0], a[1][:-1], *a[2:]), "weight has shape"),
        (lambda a: (a[0].repeat_interleave(2, 1)[:, ::2], *a[1:]), None),
        (lambda a: (*a[:2], -1.0, *a[3:]), "eps"),
        (lambda a: (*a[:4], a[4].double(), a[5]), "float64"),
        (_grad, None),
    ],
)
def test_what_passed_once_is_not_checked_again_and_all_else_is(spoil, message):
    i = inputs.make(3, W)
    for _ in range(3):
        assert close(call.qk_rmsnorm(*i.args), i)
    bad = spoil(i.args)
    for _ in range(2):
        if message:
            with pytest.raises(MisuseError, match=message):
                call.qk_rmsnorm(*bad)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", call.FallbackWarning)
            got = call.qk_rmsnorm(*bad)
        assert close([x.detach() for x in got], i)
        assert got[0].requires_grad == bad[0].requires_grad


def test_a_path_serves_like_calls_by_its_shortcut_alone(monkeypatch):
    real, taken = registry.get, []

    def again(*kind):
        def shortcut(*args):
            taken.append(args[0].shape[0])
            return None if args[0][0, 0] == 7 else path.call(*args)

        return shortcut

    path = replace(real("cpu_fused"), again=again)
    monkeypatch.setattr(registry, "get", lambda name: path if name == "cpu_fused" else real(name))
    i, other = inputs.make(5, W), inputs.make(6, W)
    for _ in range(3):
        assert close(call.qk_rmsnorm(*i.args), i)
    assert taken == [5]  # the first is decided, the second looked up
    assert close(call.qk_rmsnorm(*other.args), other)
    i.q[0, 0] = 7
    for _ in range(2):
        assert close(call.qk_rmsnorm(*i.args), i)
    out = torch.zeros_like(i.q), torch.zeros_like(i.k)
    call.qk_rmsnorm(*i.args, out=out)
    assert taken == [5, 5]
    assert sum(call.counts().values()) == 7
