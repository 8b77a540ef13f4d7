"""The quantised kernels on a real card: bytes, options, dtypes, big M, graphs, every shape."""

import pytest
import torch
from quant_oracle import assert_faithful

from mlakit import archs, inputs
from mlakit.formats import fp8, mxfp4
from mlakit.paths import quantised, registry, triton_fused, triton_quant, triton_quant_config
from mlakit.paths.quantised import Options, QuantisedQ
from mlakit.shapes import Widths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
DEEPSEEK = Widths(1536, 512)
QUANTS = ("fp8_group128", "fp8_token", "mxfp4")
CASES = [
    ("fp8_group128", Options()),
    ("fp8_group128", Options(unquantised=True, scale_layout="transposed")),
    ("fp8_group128", Options(encoding="fp8_fnuz", scale_layout="strided")),
    ("fp8_token", Options()),
    ("fp8_token", Options(encoding="fp8_fnuz", unquantised=True)),
    ("mxfp4", Options()),
    ("mxfp4", Options(rule="ocp_floor", unquantised=True)),
    ("mxfp4", Options(rule="round_up", scale_layout="shuffled")),
]


ENCODED = {q: Options(encoding=None if q == "mxfp4" else "fp8_ocp") for q in QUANTS}


def on_cpu(got):
    return QuantisedQ(*(None if t is None else t.cpu() for t in got))


def same(a, b):
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip((*a[0][:2], a[1]), (*b[0][:2], b[1]), strict=True)
    )


@pytest.mark.parametrize(("quant", "options"), CASES)
@pytest.mark.parametrize(
    ("dtype", "family"),
    [("bf16", "outlier"), ("fp16", "normal"), ("fp32", "zero_rows"), ("bf16", "nonfinite")],
)
def test_faithful_to_float64(quant, options, dtype, family):
    if archs.fp8_format(archs.devices()[0].arch) is None and options.encoding is None:
        options = Options(encoding="fp8_ocp")
    x = inputs.make(130, DEEPSEEK, dtype, family=family, seed=3)
    card = inputs.make(130, DEEPSEEK, dtype, family=family, seed=3, device="cuda")
    got, k_out = registry.get(f"triton_{quant}").call(*card.args, options=options)
    assert_faithful(quant, on_cpu(got), x.q, x.q_weight, x.q_eps, options)
    plain = triton_fused.call(*card.args)[1]
    assert torch.equal(plain.view(torch.uint8), k_out.view(torch.uint8))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("q_width", [128, 3072, 16384])
@pytest.mark.parametrize("m", [3, 600, 5000])
def test_other_widths_are_faithful(quant, q_width, m):
    x = inputs.make(m, Widths(q_width, 96), seed=m)
    card = [a.cuda() if torch.is_tensor(a) else a for a in x.args]
    got, _ = registry.get(f"triton_{quant}").call(*card, options=ENCODED[quant])
    few = slice(max(0, m - 60), m)
    part = QuantisedQ(got.values[few].cpu(), got.scale[few].cpu(), None)
    assert_faithful(quant, part, x.q[few], x.q_weight, x.q_eps, ENCODED[quant])


@pytest.mark.parametrize("q_width", [96, 1568])
def test_padding_of_shuffled_scales_is_zero_beside_a_row_of_nan(q_width):
    x = inputs.make(33, Widths(q_width, 96), seed=4, device="cuda")
    x.buffer[[2, 32]] = float("nan")
    options = Options(scale_layout="shuffled")
    got, _ = triton_quant.fused("mxfp4", *x.args, options=options)
    plain = quantised.plain_scale("mxfp4", got, options)
    assert torch.equal(got.scale, mxfp4.shuffle_scale(plain))
    assert (plain == 255).all(1).nonzero().flatten().tolist() == [2, 32]


@pytest.mark.parametrize("quant", QUANTS)
def test_no_shape_and_no_neighbour_changes_a_byte(quant):
    """Every config worth timing, every batch the heuristic tells apart: the same rows' bytes."""
    arch = archs.devices()[0].arch
    x = inputs.make(70000, DEEPSEEK, seed=5, device="cuda").args
    first = [a[:130] if torch.is_tensor(a) and a.ndim == 2 else a for a in x]
    want = triton_quant.fused(quant, *first)
    space = triton_quant_config.search_space(quant, arch, 4096, 1536, 512)
    for config in space[:: max(1, len(space) // 24)]:
        assert same(triton_quant.fused(quant, *first, config=config), want), config
    for m in (1, 2, 33, 64, 129, 193, 1024, 4096, 8193, 65537):
        part = [a[:m] if torch.is_tensor(a) and a.ndim == 2 else a for a in x]
        got = triton_quant.fused(quant, *part)
        n = min(m, 130)
        cut = [(QuantisedQ(g[0].values[:n], g[0].scale[:n]), g[1][:n]) for g in (got, want)]
        assert same(*cut), m


@pytest.mark.parametrize("quant", QUANTS)
def test_launches_that_overlap_see_what_was_written_before(quant):
    """Replayed in a graph, each call on what the call before it in the stream wrote."""
    x = inputs.make(64, DEEPSEEK, seed=7, device="cuda")
    source = [torch.randn_like(x.buffer) for _ in range(8)]
    want = []
    for data in source:
        x.buffer.copy_(data)
        want.append(triton_quant.fused(quant, *x.args))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = []
        for data in source:
            x.buffer.copy_(data)
            got.append(triton_quant.fused(quant, *x.args))
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("quant", QUANTS)
def test_the_pair_reads_what_its_first_launch_wrote(quant):
    x = inputs.make(64, DEEPSEEK, seed=8, device="cuda")
    normed, k_out = triton_fused.call(*x.args)
    want = triton_quant.quantise(quant, normed, quantised.empty(quant, x.q))
    for _ in range(50):
        assert same(triton_quant.unfused(quant, *x.args), (want, k_out))


def test_the_cards_own_cast_is_the_encoders():
    """Every bf16 value in range, by the card's FP8 cast and by the kernel's own arithmetic."""
    encoding = fp8.encoding(archs.fp8_format(archs.devices()[0].arch) or "fp8_ocp")
    values = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    values = values[values.abs() <= encoding.maximum]
    values = torch.nn.functional.pad(values, (0, -len(values) % (8 * 127))).view(-1, 127)
    led = torch.cat([torch.full((len(values), 1), encoding.maximum), values], 1).view(-1, 1024)
    y = led.to("cuda")
    out = quantised.empty("fp8_group128", y, Options(encoding=encoding.name))
    triton_quant.quantise("fp8_group128", y, out)
    assert torch.equal(out.scale, torch.ones_like(out.scale))
    want = fp8.encode(led, encoding)
    assert torch.equal(out.values.cpu().view(torch.uint8), want.view(torch.uint8))
