"""Field cases (docs/field-cases.md) with no place in another test file, and the table itself."""

import ast
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mlakit import inputs, plots, shapes
from mlakit.context import Context
from mlakit.dispatch import call, probe
from mlakit.errors import MisuseError
from mlakit.formats import mxfp4
from mlakit.paths import checks, quantised, registry, triton_config
from mlakit.records import Cell
from mlakit.report import build, runbook
from mlakit.rounding import oracle, round_to
from mlakit.shapes import Widths
from mlakit.sweep import grid, store
from mlakit.timing import buffers, entry, guard, measure

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "field-cases.md").read_text(encoding="utf-8")
CPU = ("torch_native", "torch_rms_norm", "torch_rms_norm_copied", "cpu_fused")


def expected(made):
    return [
        round_to(oracle(x, w, e), x.dtype)
        for x, w, e in ((made.q, made.q_weight, made.q_eps), (made.k, made.k_weight, made.k_eps))
    ]


# ---- the table


def test_every_case_has_a_row_and_every_test_that_a_row_names_exists():
    rows = re.findall(r"^\| (F\d\d) \|(.*)$", TABLE, re.MULTILINE)
    assert [name for name, _ in rows] == sorted({name for name, _ in rows})
    assert len(rows) == 36
    for name, row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named or "cannot" in row, f"{name} has neither a test nor a reason"
        for file, test in named:
            tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
            there = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            assert test in there, f"{name}: no {test} in {file}"


# ---- F05, offsets past 2**31 elements


@pytest.mark.parametrize("name", CPU)
def test_a_row_beyond_two_to_the_31_elements_is_read(name):
    """The memory between the rows is never touched, so none is taken."""
    path = registry.get(name)
    if path.supports(Context(packages=probe.packages())):
        pytest.skip(f"{name} does not run here")
    made = inputs.make(2, Widths(64, 32), seed=3)
    try:
        far = torch.empty(2**31 + 200, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("the system promises no 4 GiB")
    q, k = (far.as_strided((2, n), (2**31 + 8, 1), at) for n, at in ((64, 0), (32, 64)))
    q.copy_(made.q)
    k.copy_(made.k)
    with torch.no_grad():
        got = path.call(q, made.q_weight, 1e-6, k, made.k_weight, 1e-6)
    assert all(torch.equal(y, want) for y, want in zip(got, expected(made), strict=True))


@pytest.mark.parametrize("file", ["triton_kernels", "triton_quant_kernels", "triton_copy_kernels"])
def test_kernels_multiply_rows_by_strides_in_64_bits(file):
    """Every product with a ``*stride`` has a side that was made int64 before.

    But for groups (128 of them times as many rows as fill a card stay below 2**31) and for the
    few hundred rows of one program's turns (``t``), which a row of 8 MiB would take to overflow.
    """
    tree = ast.parse((ROOT / "mlakit" / "paths" / f"{file}.py").read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    wide = {f.name for f in functions if "tl.int64" in ast.unparse(f.body[-1])}
    makes_wide = re.compile("|".join([r"tl\.int64", *(rf"\b{name}\(" for name in wide)]))
    products = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and makes_wide.search(ast.unparse(node.value)):
            wide |= {ast.unparse(t) for t in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = ast.unparse(node.left), ast.unparse(node.right)
            small = "group" in sides or any(re.match(r"t \* [A-Z]|i \* GROUPS", s) for s in sides)
            if any(re.fullmatch(r"\w*stride", side) for side in sides) and not small:
                products.append(sides)
    assert products
    for sides in products:
        assert any("tl.int64" in s or re.split(r"\W", s)[0] in wide for s in sides), sides


def test_the_grid_is_one_number_and_so_lies_in_x():
    """y and z end at 65,535 blocks."""
    for m in (65_535, 65_536, 65_537, 1_016_801):
        config = triton_config.heuristic("sm_90", m, 1536, 512, "bf16")
        programs = triton_config.programs(config, m, 1536, 132 * 8)
        assert isinstance(programs, int)
        assert programs < 2**31


# ---- F06, F02, F07: widths and layouts through the public call


@pytest.mark.filterwarnings("ignore::mlakit.dispatch.call.FallbackWarning")
@pytest.mark.parametrize("width", [1, 2, 511, 513, 769, 1535, 8193, 16384])
def test_odd_widths_repeat_themselves_and_stay_inside(width):
    made = inputs.make(7, Widths(width, 3, 1), "fp16", seed=width)
    big = torch.full((7, width + 5), 7.0, dtype=torch.float16)
    out = big[:, :width], torch.empty(7, 3, dtype=torch.float16)
    with torch.no_grad():
        first = [y.clone() for y in call.qk_rmsnorm(*made.args, out=out)]
        for _ in range(19):
            again = call.qk_rmsnorm(*made.args, out=out)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert (big[:, width:] == 7).all()
    for y, want in zip(first, expected(made), strict=True):
        assert (y.view(torch.int16).int() - want.view(torch.int16).int()).abs().max() <= 1


@pytest.mark.filterwarnings("ignore::mlakit.dispatch.call.FallbackWarning")
def test_rows_of_no_single_stride_fall_back_with_that_reason():
    call.reset()
    made = inputs.make(6, Widths(96, 32), layout="contiguous", seed=2)
    q, k = (x.view(3, 2, -1).transpose(0, 1) for x in (made.q, made.k))
    with torch.no_grad():
        got = call.qk_rmsnorm(q, made.q_weight, 1e-6, k, made.k_weight, 1e-6)
    assert got[0].shape == (2, 3, 96)
    ran = call.last_call()
    assert ran.path.startswith("torch")
    assert "stride" in ran.reason or "rank" in ran.reason or "layout" in ran.reason, ran.reason
    want = round_to(oracle(q, made.q_weight, 1e-6), q.dtype)
    assert (got[0] != want).float().mean() < 1e-3
    call.reset()


# ---- F03: no rows, then some


@pytest.mark.filterwarnings("ignore::mlakit.dispatch.call.FallbackWarning")
@pytest.mark.parametrize("quant", ["none", "fp8_token", "fp8_group128", "mxfp4"])
def test_no_rows_leave_nothing_behind(quant):
    with torch.no_grad():
        for m in (0, 2, 0, 2):
            made = inputs.make(m, Widths(256, 64))
            q_out, k_out = call.qk_rmsnorm(
                *made.args, **({} if quant == "none" else {"quant": quant})
            )
            values = q_out if quant == "none" else q_out.values
            assert values.shape[0] == k_out.shape[0] == m
            assert torch.equal(k_out, expected(made)[1])


# ---- F15: the rule that is a mistake


def test_no_rule_of_ours_clips_everything():
    """floor(log2(amax / 6)) clips nearly every group: a fault, and none of the named rules."""
    amax = torch.tensor([2.7, 5.5, 6.5, 8.0, 12.0])
    wrong = torch.floor(torch.log2(amax / 6)).int() + 127
    assert wrong.tolist() == [125, 126, 127, 127, 128]
    for rule in mxfp4.RULES:
        assert mxfp4.scale_of(amax, rule).int().tolist() != wrong.tolist()


# ---- F17: aliasing and half-written outputs


@pytest.mark.parametrize("quant", ["fp8_token", "fp8_group128", "mxfp4"])
@pytest.mark.parametrize("which", ["k", "q's weight", "values in q"])
def test_quantised_outputs_may_not_lie_on_an_input(quant, which):
    made = inputs.make(4, Widths(256, 64), layout="contiguous")
    fresh = quantised.empty(quant, made.q)
    out = fresh, made.k
    if which == "values in q":
        memory = made.q.view(torch.uint8)[:, : fresh.values.shape[1]].reshape(-1)
        on_q = made.q.view(torch.uint8).view(-1)[: memory.numel()].view(fresh.values.shape)
        out = fresh._replace(values=on_q.view(fresh.values.dtype)), torch.empty_like(made.k)
    if which == "q's weight":
        held = torch.zeros(4 * 64 + 256, dtype=torch.bfloat16)
        made = replace(made, q_weight=held[:256])
        out = fresh, held[128:384].view(4, 64)
    before = [t.clone() for t in (made.q, made.k, made.q_weight)]
    for kind in ("torch", "unfused", "triton"):
        with pytest.raises(MisuseError, match="overlaps"):
            registry.get(f"{kind}_{quant}").call(*made.args, out=out)
    after = (made.q, made.k, made.q_weight)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_path_that_writes_half_and_fails_leaves_no_trace(monkeypatch):
    """The fallback starts from the inputs as they were and writes the whole output."""
    call.reset()
    made = inputs.make(5, Widths(96, 32), seed=4)
    before = made.buffer.clone()
    out = torch.empty_like(made.q).contiguous(), torch.empty_like(made.k).contiguous()

    def half(*arguments, out=None):
        out[0][:2] = float("nan")
        raise RuntimeError("k must be 2D")

    real = registry.get
    broken = replace(real("cpu_fused"), call=half)
    monkeypatch.setattr(registry, "get", lambda n: broken if n == "cpu_fused" else real(n))
    with torch.no_grad(), pytest.warns(call.FallbackWarning, match="k must be 2D"):
        got = call.qk_rmsnorm(*made.args, out=out)
    assert got[0] is out[0]
    assert call.last_call().path != "cpu_fused"
    assert torch.equal(made.buffer, before)
    for y, want in zip(out, expected(made), strict=True):
        assert (y != want).float().mean() < 1e-2
    call.reset()


# ---- F25: switches reach the kernel of a notebook, and the report


def test_a_notebook_s_kernel_sees_the_switches_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_AITER", "0")
    assert runbook._environment(tmp_path)["SGLANG_USE_AITER"] == "0"


def test_the_report_lists_switches_eps_and_devices_by_their_names(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_AITER", "1")
    folder = tmp_path / "r"
    run = store.create_run(store.report_run(folder), grid.expand(batches=[1]), measure=["timing"])
    card = {"device": "AMD Instinct MI300X", "arch_raw": "gfx942:sramecc+", "torch": "2.11+rocm7.2"}
    run.save(environment={"python": "3.12", "devices": {"cuda:0": card}})
    run.close()
    rows = build.environment_rows(folder)
    said = {r["what"]: r["version"] for r in rows}
    assert said["SGLANG_USE_AITER"] == "'1' (environment)"
    assert said["eps"] == "1e-06"
    assert said["GPU 0"] == "AMD Instinct MI300X (gfx942:sramecc+)"
    assert "cuda" not in str(rows).lower()


# ---- F32, F33: what is fed and what is timed


def test_timed_inputs_are_random_and_differ_between_slots():
    ring = buffers.Ring(Cell("cpu", 16, 96, 32, ("x",)), "cpu", 3)
    q = [slot.args[0].float() for slot in ring.slots]
    assert all(x.std() > 0.3 and x.unique().numel() > 100 for x in q)
    assert not torch.equal(q[0], q[1])


@pytest.mark.parametrize("layout", ["split", "split_out"])
def test_a_slow_first_call_has_a_column_of_its_own(monkeypatch, tmp_path, layout):
    seen = set()
    monkeypatch.setattr(guard, "_cpu_cache_bytes", lambda: 1 << 20)
    monkeypatch.setenv("MLAKIT_LOCK_DIR", str(tmp_path))

    def lazy(q, *rest, out=None):
        if (out is None) not in seen:
            seen.add(out is None)
            time.sleep(0.4)
        return registry.get("torch_rms_norm").call(q, *rest, out=out)

    made = replace(registry.get("torch_rms_norm"), name="lazy", call=lazy)
    real = registry.get
    monkeypatch.setattr(registry, "get", lambda name: made if name == "lazy" else real(name))
    cell = Cell("cpu", 4, 96, 32, ("lazy", "torch_native"), layout=layout, budget_s=0.2)
    rows = measure.measure_cell(cell, device="cpu", run={}).rows
    row = next(r for r in rows if r["path_requested"] == "lazy")
    assert seen == {layout == "split"}, "built as it is timed, and nothing else"
    assert row["status"] == "ok", row
    assert row["first_call_s"] >= 0.4
    assert row["p50_us"] < 100_000


# ---- F37: widths by name


def test_presets_have_widths_by_name_and_they_add_up_to_the_row():
    widths = shapes.model("DeepSeek-V3").widths
    assert (widths.q_lora_rank, widths.kv_lora_rank, widths.qk_rope_head_dim) == (1536, 512, 64)
    assert widths.row_stride == 2112
    for model in shapes.models():
        w = model.widths
        assert w.row_stride == w.q_lora_rank + w.kv_lora_rank + w.qk_rope_head_dim


# ---- F48: a report says which notebook it ran, a missed night is a gap


def test_the_footer_names_each_notebook_by_its_content_and_the_version():
    import mlakit

    footer = build._footer(build.Options(notebooks=("02_speed",)))
    assert re.search(r"02_speed [0-9a-f]{12}", footer)
    assert mlakit.__version__ in footer


def test_a_missed_night_breaks_the_line():
    pytest.importorskip("matplotlib")
    days = pd.to_datetime(["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-09", "2026-01-10"])
    frame = pd.DataFrame({"at": days, "ratio": 1.0, "lo": 0.99, "hi": 1.01, "status": "ok"})
    lines = [line for line in plots.trend(frame).axes[0].lines if len(line.get_xdata()) > 1]
    spans = [pd.to_datetime(line.get_xdata()) for line in lines if line.get_linewidth() == 1]
    assert spans
    assert all((s.max() - s.min()).days < 6 for s in spans if len(s) in (2, 3))


def test_an_overlap_is_told_from_neighbouring_columns():
    """Two outputs in one buffer are fine; one element shared is not."""
    big = torch.zeros(4, 20)
    made = inputs.make(4, Widths(8, 4), "fp32")
    checks.refuse_overlap({"a": big[:, :8], "b": big[:, 8:12]}, *made.args[:2], *made.args[3:5])
    with pytest.raises(MisuseError, match="b overlaps a"):
        checks.refuse_overlap({"a": big[:, :8], "b": big[:, 7:11]}, *made.args[:2], *made.args[3:5])
    # Ranks above 2 likewise; and one memory may be under storages that start apart.
    cube = torch.zeros(2, 2, 12)
    x = [torch.zeros(2, 2, 8), torch.ones(8), torch.zeros(2, 2, 4), torch.ones(4)]
    checks.refuse_overlap({"a": cube[..., :8], "b": cube[..., 8:]}, *x)
    memory = np.zeros(64, np.float32)
    x[0], y = (torch.from_numpy(memory[at : at + 32]).view(2, 2, 8) for at in (0, 16))
    with pytest.raises(MisuseError, match="a overlaps q"):
        checks.refuse_overlap({"a": y}, *x)


# ---- F30: two clocks, and figures that are mostly launch


def test_a_figure_that_its_launches_take_most_of_is_launch_bound():
    floor_us, samples = 2.0, torch.full((40,), 5.0).numpy()
    for launches, on_gpu, flagged in ((1, True, False), (2, True, True), (2, False, False)):
        path = replace(registry.get("torch_native"), launches=launches)
        found = entry.Entry("x", path)
        found.flag(samples, floor_us, on_gpu=on_gpu)
        assert ("launch-bound" in found.flags) == flagged


def test_runs_of_another_clock_are_never_compared(tmp_path):
    from mlakit.report.compare import compare

    for name, clock in (("a", "cpu"), ("b", "eager")):
        folder = tmp_path / name
        cell = grid.expand(batches=[64], paths=["torch_native"])[0]
        run = store.create_run(folder, [cell], measure=["timing"])
        row = {"evidence": "measured", "status": "ok", "arch": "cpu", "m": 64, "clock": clock}
        row |= {"cell_id": cell.id, "path_requested": "torch_native", "p50_us": 2.0}
        row |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "path_ran": "torch_native"}
        samples = {"torch_native": [2.0 + i / 100 for i in range(40)]}
        store.write_part(folder, "timing", cell.id, [row], samples)
        run.close()
    with pytest.raises(MisuseError, match="no cell in common"):
        compare(tmp_path / "a", tmp_path / "b")
