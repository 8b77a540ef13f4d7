"""The decode stack: a decoded token is the prefilled one, lanes run what they say, sums add up."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mlakit.errors import MisuseError
from mlakit.models import lanes, mla, stack
from mlakit.paths import registry

DIMS = mla.Dims(96, 3, 64, 32, nope=16, rope=8, v=16)


def test_a_decoded_token_is_what_a_longer_prefill_gives():
    made = stack.Stack(DIMS, 3, batch=2, context=0, dtype=torch.float32)
    step = registry.get("torch_native").call
    prompt = made.tokens(14)
    want = made._prefill(prompt)
    made.caches = [torch.zeros_like(c) for c in made.caches]
    made._prefill(prompt[:12])
    made.position.fill_(12)
    for i in (12, 13):
        got = made.decode(prompt[i].expand(2, -1), step)
        # Float32 sums in another order through 3 layers.
        assert torch.allclose(got, want[i].expand(2, -1), rtol=1e-4, atol=1e-5)
        assert int(made.position) == i + 1
    made.position.fill_(12)
    assert not torch.allclose(made.decode(prompt[13].expand(2, -1), step), got, rtol=1e-2)


def test_decoding_wraps_round_behind_the_context():
    made = stack.Stack(DIMS, 1, batch=1, context=5)
    before = made.caches[0][:, :5].clone()
    for _ in range(stack.ROOM):
        made.decode(made.tokens(1), registry.get("torch_rms_norm").call)
    assert int(made.position) == 5
    assert torch.equal(made.caches[0][:, :5], before)


def test_layers_have_weights_of_their_own():
    made = stack.Stack(DIMS, 3, batch=1, context=0)
    pointers = {t.data_ptr() for layer in made.layers for t in vars(layer).values()}
    assert len(pointers) == 3 * 8


def test_lanes_are_what_they_say(monkeypatch):
    made = stack.small()
    hidden = made.tokens(8)
    seen = []

    native = registry.get("torch_native").call

    def counting(*args):
        seen.append(args)
        return native(*args)

    path = registry.Path("torch_rms_norm", "", counting, lambda c: None, "round_once", 2)
    monkeypatch.setattr(lanes.registry, "get", lambda name: path)
    made.decode(hidden, stack.step_of("torch_rms_norm"))
    assert len(seen) == 4
    assert not seen[0][0].is_contiguous()
    q, k = torch.ones(2, 3), torch.ones(2, 4)
    assert stack.step_of("no_step")(q, None, 0.0, k, None, 0.0) == (q, k)


def test_a_lane_that_cannot_run_or_answers_wrong_is_refused(monkeypatch):
    made = stack.small()
    hidden = made.tokens(3)
    assert stack.refusal(made, hidden, "torch_native", "cpu") is None
    assert "second stream" in stack.refusal(made, hidden, "dual_stream", "cpu")
    assert stack.refusal(made, hidden, "torch_fp8_group128", "cpu") == (
        "delivers q as fp8_group128, q_b is float"
    )
    with pytest.raises(MisuseError, match="unknown path"):
        stack.refusal(made, hidden, "triton_fuse", "cpu")
    monkeypatch.setattr(lanes, "step_of", lambda name: lambda q, qw, qe, k, kw, ke: (q, k))
    assert "wrong" in stack.refusal(made, hidden, "torch_native", "cpu")


@pytest.mark.parametrize("weights", ["fp8_block128", "mxfp4"])
def test_quantised_weights_take_the_step_that_feeds_them(weights):
    """In the stack a q that came quantised gives what a q quantised by the product gives."""
    dims = mla.Dims(256, 2, 128, 64, nope=32, rope=16, v=64)
    made = stack.Stack(dims, 2, batch=3, context=6, weights=weights)
    hidden = made.tokens(3)
    quantising = f"torch_{mla.QUANTS[weights]}"
    assert stack.refusal(made, hidden, quantising, "cpu") is None
    other = ({"torch_fp8_group128", "torch_mxfp4"} - {quantising}).pop()
    assert f"q_b is {weights}" in stack.refusal(made, hidden, other, "cpu")
    plain = stack.Stack(dims, 2, batch=3, context=6)
    outs = []
    for s, lane in ((made, quantising), (made, "torch_rms_norm"), (plain, "torch_rms_norm")):
        s.position.fill_(6)
        outs.append(s.decode(hidden, stack.step_of(lane)).double())
    apart = [float((o - outs[2]).norm() / outs[2].norm()) for o in outs[:2]]
    assert 1e-3 < apart[0] < 0.3
    assert apart[0] < 1.2 * apart[1]
    result = stack.measure(made, [1], ["torch_rms_norm", quantising], rounds=3)
    assert (result["weights"], result["reference_products"]) == (weights, True)
    assert set(result["micro_us"]["1"]["between"]) == {"torch_rms_norm", quantising}
    assert set(result["micro_us"]["1"]["given"]) == {"torch_rms_norm"}


def test_measure_on_a_cpu_and_the_rows_it_makes(tmp_path):
    made = stack.small(layers=2, batch=4, context=8)
    lanes = ["torch_native", "torch_rms_norm", "dual_stream", "no_step"]
    saved = []
    result = stack.measure(
        made, [1, 4], lanes, rounds=5, micro=False, after=lambda r: saved.append(len(r["refused"]))
    )
    assert saved == [1, 2]
    again = json.loads(json.dumps(result))
    rows = stack.summarise(again)
    assert {(r["batch"], r["lane"]) for r in rows} == {
        (b, n) for b in (1, 4) for n in lanes if n != "dual_stream"
    }
    assert result["evidence"] == "measured"
    assert result["layers"] == 2
    assert set(result["refused"]["1"]) == {"dual_stream"}
    assert all(r["n"] == 5 and r["tokens_per_s"] > 0 for r in rows)


def test_summaries_find_what_was_put_in():
    """Samples with a known cost a layer and a drift that all lanes share."""
    drift = 1000 + np.arange(40.0)
    samples = {
        "torch_rms_norm": drift + 61 * 5, "triton_fused": drift + 61 * 3, "no_step": drift,
    }  # fmt: skip
    times = {"torch_rms_norm": 4.5, "triton_fused": 2.0}
    micro = {"cold": times, "between": {k: v + 7 for k, v in times.items()} | {"no_step": 7.5}}
    result = {
        "layers": 61, "samples_us": {"8": {k: list(v) for k, v in samples.items()}},
        "micro_us": {"8": micro},
    }  # fmt: skip
    row = next(r for r in stack.summarise(result) if r["lane"] == "triton_fused")
    assert row["cost_us"] == pytest.approx(3)
    assert row["saved_us"] == pytest.approx(2)
    assert row["saved_us_lo"] == pytest.approx(2)
    assert row["saved_cold_us"] == row["saved_between_us"] == pytest.approx(2.5)
    assert (row["cold_us"], row["between_us"]) == (pytest.approx(2), pytest.approx(1.5))
    base_us = np.median(samples["torch_rms_norm"])
    assert row["gain_predicted"] == pytest.approx(base_us / (base_us - 61 * 2.5))
    assert row["tokens_per_s"] == pytest.approx(8e6 / np.median(samples["triton_fused"]))
    assert row["tokens_lo"] <= row["tokens_per_s"] <= row["tokens_hi"]
    assert row["gain"] == pytest.approx(
        np.median(samples["torch_rms_norm"] / samples["triton_fused"])
    )


def test_intervals_are_those_of_the_captures():
    """Three graphs of a lane, each steady at a time of its own: rounds alone would see nothing."""
    middles = np.array([100.0, 90.0, 130.0])
    result = {
        "layers": 1, "copies": 3, "micro_us": {},
        "samples_us": {"1": {"torch_rms_norm": list(np.tile(middles, 5))}},
    }  # fmt: skip
    (row,) = stack.summarise(result)
    assert (row["step_us"], row["step_lo"], row["step_hi"]) == (100, 90, 130)


def test_what_does_not_fit_is_said_before_it_is_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (20 * 2**30, 24 * 2**30))
    with pytest.raises(MisuseError, match="61 layers and batch 256 need 39 GiB"):
        stack._check_memory(mla.Dims.of("DeepSeek-V3"), 61, 256, 1088, "cuda", torch.bfloat16)


def test_on_a_gpu_a_sample_is_one_timed_replay(monkeypatch):
    """A fake device: the step is captured once, and each sample replays twice and times one."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            self.n = None

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return 7.5

    def capture(call, slots):
        for slot in slots:
            call(*slot.args, out=slot.out)
        return SimpleNamespace(replay=lambda: log.append("replay")), []

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(lanes.clock, "capture", capture)
    fake = SimpleNamespace(decode=lambda hidden, step: log.append("decode"))
    lane = stack.StepLane(fake, SimpleNamespace(is_cuda=True), None)
    assert log == ["decode"] * (1 + lanes.COPIES)
    del log[:]
    assert lane.take() == 7500.0
    assert log == ["replay", "record", "replay", "record", "wait"]
    first = lane.graphs[0]
    for _ in range(lanes.COPIES):
        lane.take()
    assert lane.graphs[0] is first


def test_the_bare_entry_writes_what_it_measured(tmp_path, capsys):
    out = tmp_path / "stack.json"
    given = "--model A.X-K2 --layers 1 --batches 2 --context 4 --rounds 3 --device cpu"
    lanes = "torch_native,torch_rms_norm,triton_fused,no_step"
    assert stack.main([*given.split(), "--lanes", lanes, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["model"], result["layers"]) == ("A.X-K2", 1)
    assert set(result["samples_us"]) == {"2"}
    assert result["micro_us"]["2"]["hot"]["torch_native"] > 0
    said = capsys.readouterr().out
    assert "batch 2: triton_fused was not timed" in said
    assert len(said.splitlines()) == 1 + 3 + 1
