"""triton_fused on a real card: the tree on 65,537 rows, big offsets, streams, graphs, host time."""

import dataclasses

import pytest
import torch

from mlakit import archs, inputs, rounding
from mlakit.paths import triton_fused
from mlakit.paths.triton_config import heuristic, search_space
from mlakit.shapes import Widths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
BOUNDARIES = (1, 2, 32, 33, 128, 129, 192, 193, 1024, 1025, 2048, 2049, 4095, 4096, 4097, 65535)


def rows(m, widths, dtype=torch.bfloat16, seed=0):
    """Arguments made on the card, as split views of one buffer."""
    generator = torch.Generator("cuda").manual_seed(seed)
    buffer = torch.randn(m, widths.row_stride, generator=generator, device="cuda").to(dtype)
    q, k, _ = buffer.split([widths.q_lora_rank, widths.kv_lora_rank, widths.qk_rope_head_dim], -1)
    weights = [
        (1 + 0.25 * torch.randn(n, generator=generator, device="cuda")).to(dtype)
        for n in (q.shape[1], k.shape[1])
    ]
    return q, weights[0], 1e-6, k, weights[1], 1e-6


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def part(args, start, m):
    return [a[start : start + m] if torch.is_tensor(a) and a.ndim == 2 else a for a in args]


@pytest.mark.parametrize(
    "widths", [(1536, 512, 64), (768, 256, 32), (2048, 512, 64), (0, 512, 64), (769, 33, 7)]
)
def test_a_row_has_the_same_bits_in_any_number_of_rows(widths):
    args = rows(65537, Widths(*widths))
    whole = triton_fused.call(*args)
    for m in BOUNDARIES:
        for start in (0, 65537 - m):
            got = triton_fused.call(*part(args, start, m))
            assert same(got, [y[start : start + m] for y in whole]), (m, start)


@pytest.mark.parametrize("widths", [(1536, 512, 64), (769, 257, 7)])
def test_no_config_changes_a_bit(widths):
    q, k, _ = widths
    args = rows(65537, Widths(*widths))
    whole = triton_fused.call(*args)
    space = {}
    for c in search_space(archs.devices()[0].arch, 65537, q, k):
        # Rows that start anywhere take seconds to compile: fewer of those.
        if q % 2 == 0 or (c.separate and c.num_warps in (1, 4)):
            key = c.q_warps, c.num_warps, c.separate and c.q_rows, c.separate, c.persistent
            space.setdefault(key, c)
    assert {c.q_warps for c in space.values()} >= {1, 2}
    differ = {}
    for config in space.values():
        got = triton_fused.call(*args, config=config)
        counts = [int((x != y).sum()) for x, y in zip(got, whole, strict=True)]
        if any(counts):
            differ[config] = counts
    assert not differ, f"of {len(space)} configs: {differ}"


@pytest.mark.parametrize("widths", [(1536, 512, 64), (768, 256, 8), (2048, 512, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_split_views_give_the_bits_of_their_copies(widths, dtype):
    args = rows(4096, Widths(*widths), dtype)
    copies = [a.contiguous() if torch.is_tensor(a) else a for a in args]
    assert same(triton_fused.call(*args), triton_fused.call(*copies))


@pytest.mark.parametrize("widths", [(769, 33, 7), (768, 256, 1), (1536, 512, 63)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_start_anywhere_give_the_bits_of_their_copies(widths, dtype):
    args = rows(65537, Widths(*widths), dtype)
    copies = [a.contiguous() if torch.is_tensor(a) else a for a in args]
    assert same(triton_fused.call(*args), triton_fused.call(*copies))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("family", ["normal", "outlier", "tiny", "heavy", "zero_rows"])
def test_bits_are_round_onces(dtype, family):
    x = inputs.make(2048, Widths(1536, 512), dtype, family=family, device="cuda")
    for y, args in zip(triton_fused.call(*x.args), (x.args[:3], x.args[3:]), strict=True):
        differing = (y != rounding.ROUNDINGS["round_once"](*args)).float().mean()
        assert differing <= 1e-4


def test_offsets_beyond_two_to_the_31():
    m, need = 1_016_900, 13 << 30
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need >> 30} GiB of device memory")
    args = rows(1, Widths(1536, 512))
    buffer = torch.empty(m, 2112, dtype=torch.bfloat16, device="cuda")
    buffer[-128:].normal_()
    q, k, _ = buffer.split([1536, 512, 64], -1)
    got = triton_fused.call(q, args[1], 1e-6, k, args[4], 1e-6)
    tail = triton_fused.call(q[-128:].clone(), args[1], 1e-6, k[-128:].clone(), args[4], 1e-6)
    assert same([y[-128:] for y in got], tail)


def test_a_graph_replays_on_new_data_and_a_stream_is_the_callers():
    args = rows(64, Widths(1536, 512))
    triton_fused.call(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = triton_fused.call(*args)
    args[0].normal_()
    graph.replay()
    assert same(held, triton_fused.call(*args))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        args[0].normal_()
        got = triton_fused.call(*args)
    side.synchronize()
    assert same(got, triton_fused.call(*args))


def test_an_early_launch_waits_for_what_it_reads():
    args = rows(512, Widths(1536, 512))
    plain = heuristic(archs.devices()[0].arch, 512, 1536, 512)
    early = dataclasses.replace(plain, pdl=True)
    first = dataclasses.replace(early, release_first=True)
    if early not in search_space(archs.devices()[0].arch, 512, 1536, 512):
        pytest.skip("this card has no programmatic dependent launch")
    news = torch.randn(100, 512, 1536, device="cuda").bfloat16()
    results = []
    for config in (plain, early, first):
        got = []
        for new in news:
            args[0].copy_(new)
            once = triton_fused.call(*args, config=config)
            twice = triton_fused.call(once[0], *args[1:3], once[1], *args[4:], config=config)
            got.append(twice[0] + 1)
        results.append(torch.stack(got))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_gradients_and_compile_on_the_card():
    args = [a.requires_grad_() if torch.is_tensor(a) else a for a in rows(257, Widths(1536, 512))]
    args = [a.detach().requires_grad_() if torch.is_tensor(a) else a for a in args]
    out = triton_fused.call(*args)
    grads = [torch.randn_like(y) for y in out]
    torch.autograd.backward(out, grads)
    wide = [a.detach().double().requires_grad_() if torch.is_tensor(a) else a for a in args]
    exact = rounding.oracle(*wide[:3]), rounding.oracle(*wide[3:])
    torch.autograd.backward(exact, [g.double() for g in grads])
    for got, want in zip(args, wide, strict=True):
        if torch.is_tensor(got):
            assert (got.grad.double() - want.grad).norm() / want.grad.norm() < 4e-3
    plain = rows(257, Widths(1536, 512))
    compiled = torch.compile(lambda *a: triton_fused.call(*a), fullgraph=True)
    assert same(compiled(*plain), triton_fused.call(*plain))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_second_device_is_served_while_the_first_is_current():
    args = rows(64, Widths(1536, 512))
    there = [a.to("cuda:1") if torch.is_tensor(a) else a for a in args]
    for _ in range(2):
        got = triton_fused.call(*there)
        assert got[0].device.index == 1
        assert same([y.cpu() for y in got], [y.cpu() for y in triton_fused.call(*args)])
