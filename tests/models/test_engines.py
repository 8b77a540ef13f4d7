"""The drop-ins: AITER's signatures, engines' own call sites, and the right bytes."""

import ast
import inspect
import os
import sys
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from package_index import download

from mlakit import inputs, rounding, shapes
from mlakit.dispatch import call
from mlakit.errors import MisuseError, RefusedError
from mlakit.formats import fp8
from mlakit.models import engines, mla
from mlakit.paths import aiter_api, quantised

GIVEN = inputs.make(5, shapes.Widths(256, 128))
WANT = tuple(
    rounding.round_to(rounding.oracle(x, w, e), x.dtype)
    for x, w, e in (GIVEN.args[:3], GIVEN.args[3:])
)


def buffers():
    return GIVEN.q.new_full((5, 256), torch.nan), GIVEN.k.new_full((5, 128), torch.nan)


def near(got, want):
    return torch.allclose(got.double(), want.double(), rtol=2**-7, atol=0)


def test_signatures_are_those_that_mlakit_recognises_as_aiters():
    pair = inspect.signature(engines.fused_qk_rmsnorm_pair).parameters
    unified = inspect.signature(engines.fused_qk_rmsnorm_unified).parameters
    assert aiter_api.generation_of(pair) == "pair"
    assert aiter_api.generation_of(unified) == "unified"
    # Read in ROCm/aiter at v0.1.14 and later, order and defaults included.
    assert (
        list(unified)
        == (
            "q_out_quantized q_out_scale q q_weight q_epsilon q_out_unquantized k_out q_res_out k "
            "k_weight k_epsilon q_residual gemma_norm quant_type group_size transpose_scale"
        ).split()
    )
    assert unified["q_epsilon"].default == 1e-6
    assert list(inspect.signature(engines.fused_qk_rmsnorm_private).parameters) == (
        "q_out q q_weight q_eps k_out k k_weight k_eps".split()
    )


def test_the_module_stands_in_for_aiters():
    assert aiter_api.generation_of(inspect.signature(engines.fused_qk_rmsnorm).parameters) == "pair"
    assert engines._fused_qk_rmsnorm is engines.fused_qk_rmsnorm_private


def test_the_pair_comes_back_new():
    q, k = engines.fused_qk_rmsnorm_pair(*GIVEN.args)
    assert near(q, WANT[0])
    assert near(k, WANT[1])
    assert q.is_contiguous()
    assert call.last_call().path


def test_unified_fills_the_buffers_and_returns_nothing():
    q_out, k_out = buffers()
    got = engines.fused_qk_rmsnorm_unified(
        q_out_quantized=q_out, k_out=k_out, q=GIVEN.q, q_weight=GIVEN.q_weight, q_epsilon=1e-6,
        k=GIVEN.k, k_weight=GIVEN.k_weight, k_epsilon=1e-6, quant_type=SimpleNamespace(name="No"),
    )  # fmt: skip
    assert got is None
    assert near(q_out, WANT[0])
    assert near(k_out, WANT[1])


def test_vllms_private_entry_both_ways():
    fresh = engines.fused_qk_rmsnorm_private(
        q_out=None, q=GIVEN.q, q_weight=GIVEN.q_weight, q_eps=1e-6,
        k_out=None, k=GIVEN.k, k_weight=GIVEN.k_weight, k_eps=1e-6,
    )  # fmt: skip
    assert near(fresh[0], WANT[0])
    outs = buffers()
    args = (outs[0], *GIVEN.args[:3], outs[1], *GIVEN.args[3:])
    assert engines.fused_qk_rmsnorm_private(*args)[1] is outs[1]
    assert near(outs[1], WANT[1])
    with pytest.raises(MisuseError, match="give both, or neither"):
        engines.fused_qk_rmsnorm_private(outs[0], *GIVEN.args[:3], None, *GIVEN.args[3:])


@pytest.mark.parametrize("name", ["per_1x128", "per_Token", "per_1x32"])
@pytest.mark.parametrize("also", [False, True])
def test_quantised_outputs_are_the_references(name, also):
    quant = engines.QUANTS[name]
    rule = {"rule": "round_up"} if quant == "mxfp4" else {}
    options = quantised.Options(unquantised=also, **rule)
    want = quantised.reference(quant, *GIVEN.args[:3], options)
    out, k_out = quantised.empty(quant, GIVEN.q, options), buffers()[1]
    engines.fused_qk_rmsnorm_unified(
        out.values, out.scale, *GIVEN.args[:3], out.unquantised, k_out, None, *GIVEN.args[3:],
        quant_type=SimpleNamespace(name=name),
    )  # fmt: skip
    got, ref = (quantised.dequantise(quant, x, options) for x in (out, want))
    # Float32 statistics may move a value that lies on a tie by one step.
    assert ((got - ref).abs() > 0.001 * ref.abs()).double().mean() < 0.002
    assert near(k_out, WANT[1])
    assert out.unquantised is None or near(out.unquantised, WANT[0])


def test_transposed_scales_are_column_major_bytes():
    plain, turned = (quantised.empty("fp8_group128", GIVEN.q) for _ in range(2))
    for out, transpose in ((plain, False), (turned, True)):
        engines.fused_qk_rmsnorm_unified(
            out.values, out.scale, *GIVEN.args[:3], None, buffers()[1], None, *GIVEN.args[3:],
            quant_type=SimpleNamespace(name="per_1x128"), transpose_scale=transpose,
        )  # fmt: skip
    assert torch.equal(fp8.by_row(turned.scale, "transposed"), plain.scale)
    assert not torch.equal(turned.scale, plain.scale)


def test_what_is_not_served_is_refused():
    q_out, k_out = buffers()
    good = {
        "q_out_quantized": q_out, "k_out": k_out, "q": GIVEN.q, "q_weight": GIVEN.q_weight,
        "k": GIVEN.k, "k_weight": GIVEN.k_weight, "k_epsilon": 1e-6,
    }  # fmt: skip
    for change, error, text in (
        ({"q_residual": GIVEN.q}, RefusedError, "residual or gemma_norm"),
        ({"gemma_norm": True}, RefusedError, "residual or gemma_norm"),
        ({"quant_type": SimpleNamespace(name="per_Tensor")}, MisuseError, "unknown quant type"),
        ({"k_epsilon": None}, MisuseError, "k_epsilon is None"),
        ({"k": None}, MisuseError, "all needed"),
        ({"quant_type": SimpleNamespace(name="per_1x128")}, MisuseError, "q_out_scale is None"),
    ):
        with pytest.raises(error, match=text):
            engines.fused_qk_rmsnorm_unified(**good | change)
    assert q_out.isnan().all()


@pytest.mark.parametrize("folder", ["aiter.ops.triton.gemm.batched", "aiter.ops.triton"])
def test_aiters_batched_product_is_found_at_both_addresses(folder, monkeypatch):
    """A fake AITER; the arguments are those of its own test and of vLLM's call."""

    def kernel(X, WQ, w_scale, group_size=128, bias=None, dtype=torch.bfloat16):
        return mla.batched_a8w8(X, WQ, w_scale, group_size).to(dtype)

    name = f"{folder}.{engines.BATCHED}"
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:n]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(sys.modules[name], engines.BATCHED, kernel)
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1))
    coded, scale = weight.to(torch.float8_e4m3fn), torch.tensor(0.5)
    got = engines.aiter_batched_a8w8(x, coded, scale)
    assert torch.equal(got, mla.batched_a8w8(x, coded, scale))


def test_without_aiter_the_batched_product_is_refused():
    if aiter_api.find().version is not None:
        pytest.skip("AITER is installed here")
    with pytest.raises(RefusedError, match="batched"):
        engines.aiter_batched_a8w8(*(torch.zeros(1),) * 3)


def bind_calls(source, drop_ins):
    """Bind every call of a named function in ``source`` to its drop-in; which were called."""
    seen = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in drop_ins:
            keywords = {k.arg: None for k in node.keywords}
            drop_in = drop_ins[ast.unparse(node.func)]
            inspect.signature(drop_in).bind(*(None for _ in node.args), **keywords)
            seen.add(ast.unparse(node.func))
    return seen


def lines_to_change(heading):
    """The lines that docs/engines.md tells to replace, under one of its headings."""
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    part = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [x[1:].strip() for x in part.splitlines() if x.startswith("-")]


@pytest.mark.upstream
def test_sglangs_own_call_sites_fit(tmp_path):
    """Every call of the dual norm in SGLang's released module binds to a drop-in's signature."""
    folder = "sglang/srt/models/deepseek_common/attention_forward_methods/"
    wheel = zipfile.ZipFile(download("sglang==0.5.15", tmp_path))
    names = [n for n in wheel.namelist() if n.startswith(folder) and n.endswith(".py")]
    source = [wheel.read(n).decode() for n in names]
    drop_ins = {
        "fused_qk_rmsnorm_bf16": engines.fused_qk_rmsnorm_pair,
        "_aiter_fused_qk_rmsnorm_unified": engines.fused_qk_rmsnorm_unified,
    }
    assert set().union(*(bind_calls(s, drop_ins) for s in source)) == set(drop_ins)
    lines = lines_to_change("SGLang")
    assert len(lines) == 3
    assert all(any(line in s for s in source) for line in lines)


@pytest.mark.upstream
def test_vllms_own_call_site_fits():
    wheel = os.environ.get("MLAKIT_VLLM_WHEEL")
    if wheel is None:
        pytest.skip("vLLM's wheel is 336 MB: name one of 0.33.0 in MLAKIT_VLLM_WHEEL")
    source = zipfile.ZipFile(wheel).read("vllm/_aiter_ops.py").decode()
    drop_ins = {"_fused_qk_rmsnorm": engines.fused_qk_rmsnorm_private}
    assert bind_calls(source, drop_ins) == set(drop_ins)
    (line,) = lines_to_change("vLLM")
    assert source.count(line) == 1


@pytest.mark.upstream
def test_aiters_own_batched_product_takes_the_adapters_arguments(tmp_path):
    """The index's AITER is older than the dual norm, but has this kernel."""
    wheel = zipfile.ZipFile(download("amd-aiter==0.1.7.post2.dev18", tmp_path))
    source = wheel.read(f"aiter/ops/triton/{engines.BATCHED}.py")
    made = next(
        n for n in ast.parse(source).body
        if isinstance(n, ast.FunctionDef) and n.name == engines.BATCHED
    )  # fmt: skip
    names = [a.arg for a in made.args.args]
    assert names[:3] == ["X", "WQ", "w_scale"]
    assert {"group_size", "dtype"} <= set(names)
    assert len(made.args.defaults) == len(names) - 3
