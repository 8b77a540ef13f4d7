"""The call on a card that is not the current one: every path, graphs, threads, remembered calls."""

from __future__ import annotations

import threading

import pytest
import torch

import mlakit
from mlakit.dispatch import probe
from mlakit.errors import MisuseError, RefusedError
from mlakit.paths import registry, triton_fused
from mlakit.shapes import Widths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices"),
]
BOTH = ("cuda:0", "cuda:1")


def arguments(m=64, widths=(1536, 512, 64), seed=0):
    """The same arguments on both cards."""
    given = mlakit.make_inputs(m, Widths(*widths), "bf16", seed=seed)
    return [[a.to(d) if torch.is_tensor(a) else a for a in given.args] for d in BOTH]


def tensors(result):
    """The bytes of all tensors of a result, quantised or not, on the CPU."""
    if torch.is_tensor(result):
        return [result.contiguous().view(torch.uint8).cpu()]
    return [t for part in result if part is not None for t in tensors(part)]


def test_the_choice_is_made_for_each_card_and_tensors_of_two_are_refused():
    here, there = arguments(m=65)
    for args, device in zip((here, there, here), (*BOTH, BOTH[0]), strict=True):
        out = mlakit.qk_rmsnorm(*args)
        assert {str(y.device) for y in out} == {device}
        assert mlakit.last_call().path == "triton_fused"
    with pytest.raises(MisuseError, match="cuda:1"):
        mlakit.qk_rmsnorm(*here[:3], *there[3:])
    assert probe.device_arch("cuda:1") == probe.device_arch("cuda:0")


def test_each_card_has_its_own_remembered_launch():
    triton_fused._READY.clear()
    here, there = arguments(m=66)
    for args in (here, there, here, there):
        triton_fused.call(*args)
    found = {r.launch.device: r.launch for r in triton_fused._READY.values()}
    assert set(found) == {0, 1}
    assert found[0].function != found[1].function, "a kernel is loaded into one context"


@pytest.mark.parametrize("path", ["torch_rms_norm", "dual_stream", "triton_fused", None])
def test_a_graph_captured_on_the_second_card_replays_while_the_first_is_current(path):
    here, there = arguments(m=67)
    mlakit.qk_rmsnorm(*there, path=path)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        mlakit.qk_rmsnorm(*there, path=path)
        torch.cuda.synchronize()
        # torch's own capture stream belongs to the card of the first graph ever captured.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
            held = mlakit.qk_rmsnorm(*there, path=path)
    new, fresh = arguments(m=67, seed=1)
    there[0].copy_(fresh[0]), there[3].copy_(fresh[3])
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    with torch.cuda.stream(torch.cuda.Stream(1)):
        graph.replay()
    torch.cuda.synchronize(1)
    want = mlakit.qk_rmsnorm(*new[:1], *here[1:3], *new[3:4], *here[4:], path=path)
    assert all(torch.equal(a, b) for a, b in zip(tensors(held), tensors(want), strict=True))


def test_two_threads_with_a_card_each_do_not_disturb_each_other():
    given, wrong = arguments(m=513), []
    want = tensors(mlakit.qk_rmsnorm(*given[0]))

    def work(args, current):
        torch.cuda.set_device(current)
        for _ in range(200):
            got = mlakit.qk_rmsnorm(*args)
            if not all(torch.equal(a, b) for a, b in zip(tensors(got), want, strict=True)):
                wrong.append(current)

    threads = [threading.Thread(target=work, args=(a, 1 - i)) for i, a in enumerate(given)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", registry.names())  # last: a kernel on the wrong card ends them all
def test_every_path_serves_the_card_that_its_tensors_are_on(name):
    here, there = arguments()
    torch.cuda.set_device(0)
    try:
        first = mlakit.qk_rmsnorm(*here, path=name)
    except RefusedError as refused:
        pytest.skip(str(refused))
    for _ in range(2):  # the second call is a remembered one
        second = mlakit.qk_rmsnorm(*there, path=name)
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        assert second[1].device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        pairs = zip(tensors(first), tensors(second), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert mlakit.last_call().path == name
