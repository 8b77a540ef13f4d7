"""Every path that runs on a CPU, against float64 and against numbers worked out by hand."""

import itertools
import math

import pytest
import torch

from mlakit import inputs
from mlakit.context import Context
from mlakit.dispatch import probe
from mlakit.drift.ulp import ulps
from mlakit.errors import MisuseError
from mlakit.paths import registry
from mlakit.rounding import ROUNDINGS, oracle, round_to
from mlakit.shapes import Widths

NAMES = ("torch_native", "torch_rms_norm", "torch_rms_norm_copied", "inductor", "cpu_fused")
WIDTHS = Widths(1536, 512)


@pytest.fixture(params=NAMES)
def path(request):
    found = registry.get(request.param)
    refused = found.supports(Context(packages=probe.packages()))
    if refused:
        pytest.skip(refused)
    with torch.no_grad():
        yield found


def assert_rounded_once(result, made):
    """At least 99.99 % equal to the once-rounded oracle and never over 1 ulp.

    fp16 keeps 11 bits of float32's 24, so two of ten thousand float32 results lie near enough to
    a tie to fall on the other side; float32 itself gathers its own operations' roundings.
    """
    far = []
    for y, (x, weight, eps) in zip(result, (made.args[:3], made.args[3:]), strict=True):
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert y.is_contiguous()
        far.append(ulps(y, oracle(x, weight, eps)).abs().flatten())
    far = torch.cat(far)
    if not far.numel():
        return
    if result[1].dtype == torch.float32:
        assert far.max() <= 4
        return
    differing = (far > 0).sum().item()
    share = 1e-4 if result[1].dtype == torch.bfloat16 else 2e-4
    # Too few elements to speak of a share: allow what chance allows.
    assert differing <= share * far.numel() + 3 * math.sqrt(share * far.numel())
    assert far.max() <= 1


@pytest.mark.parametrize("family", inputs.FAMILIES)
def test_every_family_against_the_oracle(path, family):
    made = inputs.make(65, WIDTHS, family=family, eps=(1e-6, 1e-5), seed=1)
    before = made.buffer.clone()
    assert_rounded_once(path.call(*made.args), made)
    bits = torch.int16
    assert torch.equal(made.buffer.view(bits), before.view(bits)), "inputs or rope were written"


@pytest.mark.parametrize("m", [0, 1, 2, 3, 255, 256, 257])
def test_every_row_count(path, m):
    made = inputs.make(m, WIDTHS, family="heavy", seed=m)
    assert_rounded_once(path.call(*made.args), made)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("family", ["normal", "tiny", "nonfinite"])
def test_other_dtypes(path, dtype, family):
    made = inputs.make(33, WIDTHS, dtype, family=family, seed=2)
    assert_rounded_once(path.call(*made.args), made)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_float32_weights_are_never_cast_down(path, dtype):
    made = inputs.make(64, WIDTHS, dtype, weight_dtype="fp32", seed=3)
    result = path.call(*made.args)
    assert_rounded_once(result, made)
    low = made.q_weight.to(made.q.dtype)
    cut = round_to(oracle(made.q, low, made.q_eps), made.q.dtype)
    assert (result[0] != cut).float().mean() > 0.1


def test_contiguous_inputs_give_the_same_bits(path):
    for m in (1, 2, 3, 64):
        split = inputs.make(m, WIDTHS, seed=4)
        alone = inputs.make(m, WIDTHS, seed=4, layout="contiguous")
        for a, b in zip(path.call(*split.args), path.call(*alone.args), strict=True):
            assert torch.equal(a, b)


def test_the_named_rounding_is_the_one_taken(path):
    made = inputs.make(64, WIDTHS, seed=5)
    q_out, _ = path.call(*made.args)
    same = {
        name: (q_out == r(made.q, made.q_weight, made.q_eps)).float().mean().item()
        for name, r in ROUNDINGS.items()
    }
    assert same.pop(path.rounding) >= 0.9999
    assert max(same[n] for n in ("cast_then_weight", "truncate")) < 0.9


def test_the_known_answers_of_a_split_buffer(path):
    """Row stride ignored would give q row 1 = .758 .910 ..., rope included k row 0 = .758 .910."""
    buffer = torch.arange(1.0, 17).reshape(2, 8)
    q, k, _ = buffer.split([4, 2, 2], -1)
    q_out, k_out = path.call(q, torch.ones(4), 1e-6, k, torch.ones(2), 1e-6)
    want_q = [[0.365148, 0.730297, 1.095445, 1.460593], [0.852325, 0.947027, 1.041730, 1.136433]]
    want_k = [[0.905357, 1.086429], [0.962303, 1.036326]]
    torch.testing.assert_close(q_out, torch.tensor(want_q), atol=2e-6, rtol=0)
    torch.testing.assert_close(k_out, torch.tensor(want_k), atol=2e-6, rtol=0)


def test_both_eps_are_honoured(path):
    q, k = torch.full((3, 512), 0.001), torch.full((3, 512), 0.001)
    weight = torch.ones(512)
    q_out, k_out = path.call(q, weight, 1e-6, k, weight, 1e-5)
    torch.testing.assert_close(q_out, torch.full((3, 512), 0.707107), atol=1e-6, rtol=0)
    torch.testing.assert_close(k_out, torch.full((3, 512), 0.301511), atol=1e-6, rtol=0)


def test_no_q_latent(path):
    made = inputs.make(5, Widths(0, 512), seed=6)
    q_out, k_out = path.call(*made.args)
    assert q_out.shape == (5, 0)
    assert torch.equal(k_out, round_to(oracle(made.k, made.k_weight, 1e-6), torch.bfloat16))


def test_out_is_written_and_nothing_beside_it(path):
    made = inputs.make(7, WIDTHS, seed=7)
    want = path.call(*made.args)
    for poison in (math.nan, 1e30):
        big = torch.full((9, 4096), poison, dtype=torch.bfloat16)
        before = big.clone()
        out = big[1:8, 3:1539], big[1:8, 1539:2051]
        result = path.call(*made.args, out=out)
        assert result[0] is out[0]
        assert result[1] is out[1]
        assert torch.equal(out[0], want[0])
        assert torch.equal(out[1], want[1])
        before[1:8, 3:2051] = big[1:8, 3:2051]
        assert torch.equal(big.view(torch.int16), before.view(torch.int16))


def test_rank_3_where_rows_have_one_stride(path):
    flat = inputs.make(6, WIDTHS, seed=8)
    want = path.call(*flat.args)
    buffer = flat.buffer.view(2, 3, -1)
    q, k, _ = buffer.split([1536, 512, 64], -1)
    got = path.call(q, flat.q_weight, 1e-6, k, flat.k_weight, 1e-6)
    for y, w, x in zip(got, want, (q, k), strict=True):
        assert y.shape == x.shape
        assert torch.equal(y.flatten(0, 1), w)


def test_odd_layouts_are_served_or_refused_by_name(path):
    x = torch.tensor([[1.0, 2, 3], [4, 5, 6]]).T
    weight = torch.ones(2)
    turned = torch.randn(3, 2, 8).transpose(0, 1)
    if path.name == "cpu_fused":
        with pytest.raises(MisuseError, match="inner stride 3"):
            path.call(x, weight, 1e-6, x, weight, 1e-6)
        with pytest.raises(MisuseError, match="no single row stride"):
            path.call(turned, torch.ones(8), 1e-6, turned, torch.ones(8), 1e-6)
        return
    got, _ = path.call(x, weight, 1e-6, x, weight, 1e-6)
    want = torch.tensor([[0.342997, 1.371989], [0.525226, 1.313064], [0.632456, 1.264911]])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    got, _ = path.call(turned, torch.ones(8), 1e-6, turned, torch.ones(8), 1e-6)
    torch.testing.assert_close(got.double(), oracle(turned, torch.ones(8), 1e-6), rtol=1e-6, atol=0)


def misuses():
    """(what is wrong, what is said of it) of a call of q 8 and k 4 wide in a row of 16."""
    made = inputs.make(4, Widths(8, 4, 4), "fp32")
    buffer, fresh = made.buffer, (torch.zeros(4, 8), torch.zeros(4, 4))
    yield {"k": buffer[:3, 8:12]}, "same tokens"
    yield {"k": buffer[:, 8:12].double()}, "one dtype"
    integers = {"q": buffer[:, :8].int(), "k": buffer[:, 8:12].int()}
    yield integers, "give bfloat16, float16 or float32"
    yield {"k_weight": torch.ones(3)}, r"k's weight has shape \(3,\)"
    yield {"q_eps": None}, "q's eps is None"
    yield {"k_eps": -1e-6}, "k's eps is -1e-06"
    yield {"q": buffer[:, :8], "out": (buffer[:, :8], fresh[1])}, r"out\[0\] overlaps q "
    over_k = {"k": buffer[:, 8:12], "out": (fresh[0], buffer[:, 9:13])}
    yield over_k, r"out\[1\] overlaps k "
    yield {"out": (fresh[0], fresh[0][:, 2:6])}, r"out\[1\] overlaps out\[0\]"
    yield {"out": (fresh[1], fresh[1])}, r"out\[0\] is \(4, 4\)"
    yield {"out": fresh[0]}, "tuple of two"


@pytest.mark.parametrize(("change", "says"), list(misuses()))
def test_misuse_is_refused_in_one_line(path, change, says):
    names = ("q", "q_weight", "q_eps", "k", "k_weight", "k_eps")
    made = inputs.make(4, Widths(8, 4, 4), "fp32")
    arguments = dict(zip(names, made.args, strict=True)) | change
    before = [t.clone() for t in arguments.values() if isinstance(t, torch.Tensor)]
    with pytest.raises(MisuseError, match=says) as caught:
        path.call(**arguments)
    assert "\n" not in str(caught.value)
    after = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_rope_columns_may_be_an_output(path):
    """Interleaved with q and k in memory, yet no byte is shared."""
    made = inputs.make(4, Widths(8, 4, 4), "fp32")
    want = path.call(*made.args)
    path.call(*made.args, out=(torch.empty(4, 8), made.buffer[:, 12:16]))
    assert torch.equal(made.buffer[:, 12:16], want[1])


def test_gradients_flow_or_are_refused():
    made = inputs.make(4, Widths(8, 4), "fp32")
    made.q_weight.requires_grad_()
    registry.get("torch_native").call(*made.args)[0].sum().backward()
    assert made.q_weight.grad.abs().sum() > 0
    with pytest.raises(MisuseError, match="no backward"):
        registry.get("cpu_fused").call(*made.args)


@pytest.mark.parametrize(
    ("name", "context", "says"),
    [
        ("dual_stream", Context(), "no second stream"),
        ("inductor", Context(packages=frozenset({"numba"})), "C++ compiler"),
        ("inductor", Context(arch="gfx942", packages=frozenset({"cxx"})), "triton"),
        ("cpu_fused", Context(packages=frozenset()), "numba is not installed"),
        ("cpu_fused", Context(arch="gfx950"), "on a CPU only"),
        ("cpu_fused", Context(layout="inner_strided"), "inner stride"),
        ("cpu_fused", Context(requires_grad=True), "no backward"),
        ("torch_native", Context(quant="fp8_token"), "unquantised"),
        ("dual_stream", Context(arch="gfx942"), None),
        ("torch_rms_norm", Context(layout="inner_strided"), None),
    ],
)
def test_supports_says_why_not(name, context, says):
    answer = registry.get(name).supports(context)
    if says is None:
        assert answer is None
    else:
        assert says in answer
        assert "\n" not in answer


def test_dual_stream_on_a_cpu_says_so():
    with pytest.raises(MisuseError, match="second stream"):
        registry.get("dual_stream").call(*inputs.make(2, Widths(8, 4)).args)


def graphs():
    """How many graphs dynamo has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("path", ["inductor"], indirect=True)
def test_a_sweep_over_m_compiles_once(path):
    widths = Widths(48, 16)
    path.call(*inputs.make(2, widths).args)
    compiled = graphs()
    for m, seed in itertools.product((2, 3, 17, 255, 600), (0, 1)):
        made = inputs.make(m, widths, seed=seed)
        assert_rounded_once(path.call(*made.args), made)
    assert graphs() == compiled


@pytest.mark.parametrize("path", ["inductor"], indirect=True)
def test_many_widths_never_end_in_eager_execution(path):
    """dynamo gives up after eight recompilations of one code object; each kind has its own."""
    start = graphs()
    for width in range(8, 17):
        path.call(*inputs.make(1, Widths(width, 4)).args)
    assert graphs() == start + 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_contiguous_whatever_the_inputs_are(path, dtype):
    if path.name == "cpu_fused":
        pytest.skip("it refuses rows of another inner stride than 1")
    weights = torch.ones(96, dtype=dtype), torch.ones(32, dtype=dtype)
    for q, k in (
        (torch.randn(2, 96, 3).transpose(1, 2), torch.randn(2, 32, 3).transpose(1, 2)),
        (torch.randn(96, 5).t(), torch.randn(32, 5).t()),
    ):
        result = path.call(q.to(dtype), weights[0], 1e-6, k.to(dtype), weights[1], 1e-6)
        assert all(y.is_contiguous() for y in result)
