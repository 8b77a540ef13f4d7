"""Whole AMD binaries on numpy against the float64 oracle; seeded faults; what stops a run."""

import dataclasses
import itertools
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from mlakit import archs, inputs
from mlakit.codegen import shipped
from mlakit.codegen.compile import Request, compile_many
from mlakit.codegen.execute import ARCHS, Step, run
from mlakit.codegen.isa.parse import EmulationError
from mlakit.errors import MisuseError
from mlakit.formats import fp8, mxfp4
from mlakit.paths import triton_config
from mlakit.paths.quantised import Options
from mlakit.paths.triton_config import Config
from mlakit.rounding import ROUNDINGS, oracle, round_to
from mlakit.shapes import Widths

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
V3 = Widths(1536, 512)
ROWS = (1, 3, 4, 64)


def share_equal(found: shipped.Emulated, given: inputs.Inputs, rounding: str | None = None):
    equal = total = 0
    sides = (found.q, given.q, given.q_weight, given.q_eps), (
        found.k, given.k, given.k_weight, given.k_eps,
    )  # fmt: skip
    for out, x, weight, eps in sides:
        if rounding:
            want = ROUNDINGS[rounding](x, weight, eps)
        else:
            want = round_to(oracle(x, weight, eps), x.dtype)
        equal += int((out == want).sum())
        total += out.numel()
    return equal / total


def warps(n: int) -> Config:
    return Config(q_warps=n, k_warps=n, num_warps=n, own_tree=True)


HELD = Config(q_warps=1, k_warps=1, num_warps=1)
WALK = Config(separate=False, persistent=True, own_tree=True)
ODD = Widths(100, 24, 8)
QUANTS = ("fp8_group128", "fp8_token", "mxfp4")
FAULTS = ("none", "truncate", "drop_row", "no_mask")
WIDTHS = (Widths(768, 512), Widths(0, 512))


@pytest.fixture(scope="module")
def made():
    """Every kernel of this file, compiled in one child process."""
    asked = {("faulty", "sm_90", "none"): faulty("sm_90", "none")}
    for arch in ARCHS:
        for n in (1, 4, 8):
            for dtype in ("bf16", "fp16", "fp32"):
                asked[dtype, arch, n] = shipped.request(arch, V3, dtype, config=warps(n))
        for widths in WIDTHS:
            asked["bf16", arch, widths] = shipped.request(arch, widths)
        asked["fp16", arch, "tree"] = shipped.request(arch, V3, "fp16")
        asked["fp16", arch, "held"] = shipped.request(arch, V3, "fp16", config=HELD)
        asked["odd", arch] = shipped.request(arch, ODD, config=warps(1), aligned=False)
        asked["walk", arch] = shipped.request(arch, V3, config=WALK)
        for fault in FAULTS:
            asked["faulty", arch, fault] = faulty(arch, fault)
    return dict(zip(asked, compile_many(list(asked.values())), strict=True))


@pytest.fixture(scope="module")
def made_quantised():
    asked = {}
    for arch, quant in itertools.product(ARCHS, QUANTS):
        native = None if quant == "mxfp4" else archs.fp8_format(arch) or "fp8_ocp"
        options = Options(encoding=native)
        asked[quant, arch] = shipped.request(arch, V3, quant=quant, options=options)
    return dict(zip(asked, compile_many(list(asked.values())), strict=True))


@pytest.mark.parametrize("arch", ARCHS)
def test_bf16_equals_the_oracle_bit_for_bit(arch, made):
    cases = [(V3, warps(n), n) for n in (1, 4, 8)]
    for widths in WIDTHS:
        q, k = widths.q_lora_rank, widths.kv_lora_rank
        cases.append((widths, triton_config.heuristic(arch, 64, q, k), widths))
    for (widths, config, key), m in itertools.product(cases, ROWS):
        given = inputs.make(m, widths, seed=m)
        found = shipped.emulate_qk_rmsnorm(arch, given, config, made["bf16", arch, key])
        assert found.run.evidence == "emulated"
        assert share_equal(found, given) >= 0.9999, (widths, config, m)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes_equal_the_kernel_s_rounding(arch, dtype, made):
    for n in (1, 4, 8):
        given = inputs.make(64, V3, dtype, seed=5)
        found = shipped.emulate_qk_rmsnorm(arch, given, warps(n), made[dtype, arch, n])
        assert share_equal(found, given, "round_once") >= 0.9999
        if dtype == "fp16":
            # Float32's last ulps show next to a tie: one in 10,000, give or take what chance does.
            n = found.q.numel() + found.k.numel()
            assert 1 - share_equal(found, given) <= 1e-4 + 3 * (1e-4 / n) ** 0.5


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
def test_fewer_warps_than_the_tree_give_its_bits(arch, made):
    given = inputs.make(64, V3, "fp16", family="heavy")
    tree, held = (
        shipped.emulate_qk_rmsnorm(arch, given, config, made["fp16", arch, key])
        for config, key in ((None, "tree"), (HELD, "held"))
    )
    assert tree.compiled.text != held.compiled.text
    assert torch.equal(tree.q, held.q)
    assert torch.equal(tree.k, held.k)


@pytest.mark.parametrize("arch", ARCHS)
def test_odd_layouts_walks_and_families(arch, made):
    given = inputs.make(5, ODD, seed=1)
    found = shipped.emulate_qk_rmsnorm(arch, given, warps(1), made["odd", arch])
    assert share_equal(found, given) == 1
    for family in inputs.FAMILIES:
        given = inputs.make(7, V3, family=family, seed=2)
        found = shipped.emulate_qk_rmsnorm(arch, given, WALK, made["walk", arch])
        for out, x, weight in (
            (found.q, given.q, given.q_weight),
            (found.k, given.k, given.k_weight),
        ):
            want = ROUNDINGS["round_once"](x, weight, 1e-6)
            assert torch.equal(out.isnan(), want.isnan())
            same = (out == want) | want.isnan()
            assert same.double().mean() >= 0.9999, family


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("quant", QUANTS)
def test_quantised_kernels(arch, quant, made_quantised):
    given = inputs.make(64, V3, seed=3)
    found = shipped.emulate_quantised(quant, arch, given, compiled=made_quantised[quant, arch])
    want_k = round_to(oracle(given.k, given.k_weight, 1e-6), torch.bfloat16)
    assert (found.k == want_k).double().mean() >= 0.9999
    y = oracle(given.q, given.q_weight, given.q_eps)
    if quant == "mxfp4":
        values, scale = mxfp4.quantise(y.float())
        assert (found.q.scale == scale).double().mean() >= 0.9999
        assert (found.q.values == values).double().mean() >= 0.9999
        return
    encoding = fp8.encoding(archs.fp8_format(arch) or "fp8_ocp")
    groups = y.unflatten(-1, (-1, 128)) if quant == "fp8_group128" else y.unsqueeze(1)
    scale = groups.abs().amax(-1) / encoding.maximum
    got_scale = found.q.scale.double().reshape(scale.shape)
    assert torch.allclose(got_scale, scale, rtol=3e-7, atol=0)
    exact = (groups / got_scale.unsqueeze(-1)).clamp(-encoding.maximum, encoding.maximum)
    exact = exact.reshape(y.shape)
    got = found.q.values.double()
    # FP8 has so few bits that float32's last ulps show wherever a value lies between two codes:
    # what differs from the exact rounding must be such a tie, and rare.
    want = fp8.encode(exact.float(), encoding).double()
    differs = got != want
    assert differs.double().mean() < 5e-4
    tie = (got + want)[differs] / 2
    assert torch.allclose(exact[differs], tie, rtol=1e-6, atol=0)


def faulty(arch: str, fault: str, n_warps: int = 4):
    pointers = "q q_weight q_out k k_weight k_out".split()
    signature = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("q_stride", "k_stride"), "i32")
    signature |= {"m": "i32", "q_eps": "fp32", "k_eps": "fp32"}
    constants = {"Q_N": 1536, "K_N": 512, "Q_B": 2048, "K_B": 512, "FAULT": fault}
    arguments = {
        "signature": signature, "constexprs": constants, "options": {"num_warps": n_warps},
        "divisible": [*pointers, "q_stride", "k_stride"],
    }  # fmt: skip
    return Request("faulty_kernels:two_norms", arch, arguments)


def run_faulty(compiled, m=4):
    given = inputs.make(m, V3, seed=m)
    bits = lambda t: t.view(torch.int16).numpy()  # noqa: E731
    q_out, k_out = (
        torch.full_like(given.q.contiguous(), 7),
        torch.full_like(given.k.contiguous(), 7),
    )
    done = run(
        compiled,
        (m, 2),
        [bits(given.q), bits(given.q_weight), bits(q_out), bits(given.k), bits(given.k_weight),
         bits(k_out), given.q.stride(0), given.k.stride(0), m, 1e-6, 1e-6],
    )  # fmt: skip
    return share_equal(shipped.Emulated(q_out, k_out, done, compiled), given)


WRONG_LANE = {
    "gfx90a": ("row_shr:8", "row_shr:7"), "gfx942": ("row_shr:8", "row_shr:7"),
    "gfx950": ("row_shr:8", "row_shr:7"), "gfx1100": ("row_shr:4", "row_shr:3"),
    "gfx1201": ("row_shr:4", "row_shr:3"), "gfx1250": ("row_shr:4", "row_shr:3"),
}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_seeded_faults_are_caught(arch, made):
    made = {fault: made["faulty", arch, fault] for fault in FAULTS}
    assert run_faulty(made["none"]) == 1
    assert run_faulty(made["truncate"]) < 0.75
    assert run_faulty(made["drop_row"]) <= 0.75
    # The last row's unmasked read leaves the given bytes: that alone stops the run.
    with pytest.raises(EmulationError, match="was not given"):
        run_faulty(made["no_mask"])
    right, wrong = WRONG_LANE[arch]
    assert right in made["none"].text
    lane = dataclasses.replace(made["none"], text=made["none"].text.replace(right, wrong))
    assert run_faulty(lane) < 0.9


def test_the_text_that_runs_is_the_binary_that_was_compiled(made):
    for compiled in made.values():
        if not compiled.amd:
            continue
        assert compiled.code_matches
        other = dataclasses.replace(compiled, code_matches=False)
        with pytest.raises(MisuseError, match="does not assemble"):
            run(other, (1,), [])


def test_counts_and_bytes_are_what_the_step_moves(made):
    given = inputs.make(4, V3)
    found = shipped.emulate_qk_rmsnorm("gfx942", given, warps(4), made["bf16", "gfx942", 4])
    moved = found.run.traffic
    assert moved["store"] == 4 * 2048 * 2
    assert moved["load"] == 2 * 4 * 2048 * 2
    assert found.run.waves == 32
    assert found.run.executed["s_endpgm"] == 32
    assert 30 <= len(found.run.executed) <= 90


def test_trace_shows_one_wave_step_by_step(made):
    compiled = made["bf16", "gfx950", 4]
    given = inputs.make(2, V3)
    steps: list[Step] = []
    found = shipped.emulate_qk_rmsnorm(
        "gfx950", given, warps(4), compiled, trace=steps.append, trace_wave=(1, 2)
    )
    assert steps[-1].text.startswith("s_endpgm")
    assert len(steps) <= found.run.executed.total()
    assert {Path(s.source[0]).name for s in steps if s.source} >= {"triton_kernels.py"}
    first = steps[0]
    assert first.vgprs[0].tolist() == list(range(128, 192))
    assert any(s.bytes_moved.get("load") for s in steps)
    assert any((a.vgprs != b.vgprs).any() for a, b in itertools.pairwise(steps))


def test_missing_rows_and_short_buffers_stop(made):
    compiled = made["faulty", "gfx942", "none"]
    given = inputs.make(4, V3)
    bits = lambda t: t.view(torch.int16).numpy()  # noqa: E731
    args = {
        "q": bits(given.q), "q_weight": bits(given.q_weight),
        "q_out": np.zeros((3, 1536), np.int16),
        "k": bits(given.k), "k_weight": bits(given.k_weight),
        "k_out": np.zeros((4, 512), np.int16),
        "q_stride": 2112, "k_stride": 2112, "m": 4, "q_eps": 1e-6, "k_eps": 1e-6,
    }  # fmt: skip
    with pytest.raises(EmulationError, match="argument q_out was not given"):
        run(compiled, (4, 2), args)
    with pytest.raises(MisuseError, match="missing m"):
        run(compiled, (4, 2), {n: v for n, v in args.items() if n != "m"})
    with pytest.raises(MisuseError, match="takes 11 arguments, not 2"):
        run(compiled, (4, 2), [1, 2])
    with pytest.raises(MisuseError, match="numpy array"):
        run(compiled, (4, 2), args | {"q": 5})
    with pytest.raises(MisuseError, match="give a number"):
        run(compiled, (4, 2), args | {"m": np.zeros(2)})


def test_bad_input_is_one_line(made):
    nvidia = made["faulty", "sm_90", "none"]
    with pytest.raises(MisuseError, match="only AMD code"):
        run_faulty(nvidia)
    amd = made["faulty", "gfx942", "none"]
    with pytest.raises(MisuseError, match="no emulation of gfx906"):
        run_faulty(dataclasses.replace(amd, arch="gfx906"))
    text = re.sub(r"v_rsq_f32_e32", "v_rsq_f99_e32", amd.text)
    with pytest.raises(EmulationError, match="unknown instruction 'v_rsq_f99"):
        run_faulty(dataclasses.replace(amd, text=text))
    text = re.sub(r"(v_rsq_f32_e32 v\d+, v)\d+", r"\g<1>20", amd.text)
    with pytest.raises((EmulationError, AssertionError)):
        assert run_faulty(dataclasses.replace(amd, text=text)) == 1
    loop = re.sub(r"s_endpgm", ".Lagain:\\n\\ts_branch .Lagain", amd.text, count=1)
    with pytest.raises(EmulationError, match="endless loop"):
        run_faulty(dataclasses.replace(amd, text=loop), m=1)


def test_gfx942_and_gfx950_differ_in_conversion_only(made):
    given = inputs.make(16, V3, seed=9)
    found = {
        a: shipped.emulate_qk_rmsnorm(a, given, warps(4), made["bf16", a, 4])
        for a in ("gfx942", "gfx950")
    }
    assert torch.equal(found["gfx942"].q, found["gfx950"].q)
    used = {a: Counter(f.run.executed) for a, f in found.items()}
    assert used["gfx950"]["v_cvt_pk_bf16_f32"] > 0
    assert used["gfx942"]["v_cvt_pk_bf16_f32"] == 0
    assert used["gfx942"]["v_add3_u32"] > 0
