"""AITER in all its generations: by signature, by keyword, proven first, and guarded."""

import subprocess
import sys
import textwrap
import types

import pytest
import torch
from package_index import install

from mlakit import inputs, rounding, shapes
from mlakit.context import Context
from mlakit.errors import MisuseError, RefusedError
from mlakit.paths import aiter_api, aiter_fused

DEEPSEEK = shapes.Widths(1536, 512)


def norm(x, w, eps):
    return rounding.round_to(rounding.oracle(x, w, eps), x.dtype)


class QuantType:
    No = object()


calls = []


def pair(q, q_weight, q_eps, k, k_weight, k_eps):
    calls.append("pair")
    return norm(q, q_weight, q_eps), norm(k, k_weight, k_eps)


def unified(
    q_out_quantized=None,
    q_out_scale=None,
    q=None,
    q_weight=None,
    q_epsilon=1e-6,
    q_out_unquantized=None,
    k_out=None,
    q_res_out=None,
    k=None,
    k_weight=None,
    k_epsilon=None,
    q_residual=None,
    gemma_norm=False,
    quant_type=QuantType.No,
    group_size=None,
    transpose_scale=False,
):
    calls.append("unified")
    assert quant_type is QuantType.No
    assert q_out_unquantized is None  # BF16 goes into q_out_quantized in this generation
    assert k_epsilon is not None
    q_out_quantized.copy_(norm(q, q_weight, q_epsilon))
    k_out.copy_(norm(k, k_weight, k_epsilon))


def unknown(q, k, q_weight, k_weight, eps):
    raise AssertionError("never called")


def forgetful(q, q_weight, q_eps, k, k_weight, k_eps):
    """The public name with one eps for both: right for equal eps, wrong by position."""
    return norm(q, q_weight, q_eps), norm(q[:, : k.shape[1]].contiguous(), k_weight, k_eps)


def refuses(q, q_weight, q_eps, k, k_weight, k_eps):
    raise RuntimeError("HIP error: invalid device function")


@pytest.fixture
def fake(monkeypatch):
    """Install a fake AITER: ``fake(pair=function)``, ``fake(unified=function)`` or ``fake()``."""

    def install(**functions):
        modules = {n: types.ModuleType(n) for n in ("aiter", "aiter.ops", "aiter.ops.enum")}
        modules["aiter"].__path__ = []
        modules["aiter.ops"].__path__ = []
        modules["aiter.ops.enum"].QuantType = QuantType
        places = {"pair": aiter_api.PAIR_MODULE, "unified": aiter_api.UNIFIED_MODULE}
        for kind, function in functions.items():
            module = modules[places[kind]] = types.ModuleType(places[kind])
            if function is not None:
                module.fused_qk_rmsnorm = function
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    calls.clear()
    aiter_fused._trusted.cache_clear()
    yield install
    aiter_fused._trusted.cache_clear()


GENERATIONS = [{"pair": pair}, {"unified": unified}, {"pair": None, "unified": unified}]


@pytest.mark.parametrize("functions", GENERATIONS)
@pytest.mark.parametrize("m", [1, 2, 3, 257])
def test_each_generation_gives_the_known_step(fake, functions, m):
    fake(**functions)
    i = inputs.make(m, DEEPSEEK, eps=(1e-6, 1e-5), family="tiny", seed=m)
    q, k = aiter_fused.call(*i.args)
    assert torch.equal(q, norm(i.q, i.q_weight, 1e-6))
    assert torch.equal(k, norm(i.k, i.k_weight, 1e-5))
    assert q.is_contiguous()
    assert k.is_contiguous()


@pytest.mark.parametrize("functions", GENERATIONS)
def test_out_is_written_and_returned(fake, functions):
    fake(**functions)
    i = inputs.make(3, DEEPSEEK)
    out = tuple(torch.full_like(t, float("nan")).contiguous() for t in (i.q, i.k))
    got = aiter_fused.call(*i.args, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    assert torch.equal(out[0], norm(i.q, i.q_weight, 1e-6))
    assert torch.equal(out[1], norm(i.k, i.k_weight, 1e-6))


def test_both_generations_present_takes_the_unified_one(fake):
    fake(pair=pair, unified=unified)
    assert aiter_api.load().generation == "unified"


def test_the_group_quant_file_of_v0_1_12_lacks_the_name(fake):
    fake(unified=None, pair=pair)
    assert aiter_api.load().generation == "pair"


def test_no_rows_means_no_call(fake):
    fake(unified=unified)
    i = inputs.make(0, DEEPSEEK)
    q, k = aiter_fused.call(*i.args)
    assert (q.shape, k.shape, q.dtype) == ((0, 1536), (0, 512), torch.bfloat16)
    assert calls == []
    aiter_fused.call(*inputs.make(2, DEEPSEEK).args)
    assert calls == ["unified"] * 2  # its known answer, then the call


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({}, "this AITER has no fused_qk_rmsnorm"),
        ({"unified": unknown}, r"unknown signature: fused_qk_rmsnorm\(q, k, q_weight"),
        ({"pair": forgetful}, "wrong known answer for k; not trusted"),
        ({"pair": refuses}, "failed its test call: RuntimeError: HIP error"),
    ],
)
def test_what_is_not_trusted_is_refused_in_one_line(fake, functions, message):
    fake(**functions)
    with pytest.raises(RefusedError, match=message) as caught:
        aiter_fused.call(*inputs.make(2, DEEPSEEK).args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("no ROCm\nsecond line"), KeyError("HIP"), OSError("lib"), SystemError()]
)
def test_import_may_raise_anything(fake, monkeypatch, error):
    fake()

    def failing(name):
        raise error

    monkeypatch.setattr(aiter_api.importlib, "import_module", failing)
    with pytest.raises(RefusedError, match="aiter does not import: " + type(error).__name__) as e:
        aiter_fused.call(*inputs.make(2, DEEPSEEK).args)
    assert "\n" not in str(e.value)


def test_running_out_of_memory_is_not_a_reason(fake):
    def hungry(q, q_weight, q_eps, k, k_weight, k_eps):
        raise torch.OutOfMemoryError("HIP out of memory")

    fake(pair=hungry)
    with pytest.raises(torch.OutOfMemoryError):
        aiter_fused.call(*inputs.make(2, DEEPSEEK).args)


def test_a_refusal_is_not_remembered(fake):
    fake(pair=refuses)
    i = inputs.make(2, DEEPSEEK)
    with pytest.raises(RefusedError):
        aiter_fused.call(*i.args)
    fake(pair=pair)
    aiter_fused.call(*i.args)


def bad(**changes):
    i = inputs.make(4, DEEPSEEK)
    args = dict(zip(("q", "q_weight", "q_eps", "k", "k_weight", "k_eps"), i.args, strict=True))
    return {**args, **{name: change(args) for name, change in changes.items()}}


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (bad(q=lambda a: a["q"].t().contiguous().t()), MisuseError, "inner stride 4"),
        (bad(k=lambda a: a["k"][:3]), MisuseError, "rows"),
        (bad(q_weight=lambda a: a["q_weight"].float()), RefusedError, "must be equal"),
        (bad(k_weight=lambda a: a["k_weight"][:511]), MisuseError, "weight"),
        (bad(k_eps=lambda a: None), MisuseError, "eps"),
        (
            bad(q=lambda a: torch.ones(4, 8193).bfloat16(),
                q_weight=lambda a: torch.ones(8193).bfloat16()),
            RefusedError, "8192",
        ),
        (
            {n: v.float() if torch.is_tensor(v) else v for n, v in bad().items()},
            RefusedError, "bf16 and fp16",
        ),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_check_never_reaches_it(fake, args, error, message):
    fake(pair=pair)
    with pytest.raises(error, match=message):
        aiter_fused.call(*args.values())
    assert calls == []


AMD = {"arch": "gfx950", "use_aiter": True}


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (Context(**AMD), None),
        (Context(arch="gfx942", aiter_api="unified"), None),
        (Context(arch="sm_90"), "AMD cards only"),
        (Context(**AMD, aiter_api="none"), "no dual norm"),
        (Context(**AMD, packages=frozenset({"triton"})), "no usable AITER"),
        (Context(**AMD, dtype="fp32", norm_weight_dtype="fp32"), "bf16 and fp16"),
        (Context(**AMD, norm_weight_dtype="fp32"), "fp32 norm weights"),
        (Context(**AMD, q_lora_rank=8193), "width 8193 > 8192"),
        (Context(**AMD, q_lora_rank=8192), None),
        (Context(**AMD, q_lora_rank=0), "no pair to fuse"),
        (Context(**AMD, layout="inner_strided"), "inner stride"),
        (Context(**AMD, quant="fp8_token"), "unquantised"),
        (Context(**AMD, requires_grad=True), "backward"),
    ],
)
def test_supports(context, reason):
    got = aiter_fused.supports(context)
    assert got is None if reason is None else reason in got


def test_no_install_text_names_the_wrong_package():
    assert "pip install aiter" not in aiter_api.WANTED
    assert aiter_api.WANTED.startswith("amd-aiter")


PROBE = """
    import sys
    from mlakit.paths import aiter_api, aiter_fused
    from mlakit.errors import RefusedError
    from mlakit import inputs, shapes
    found = aiter_api.find()
    assert "aiter" not in sys.modules
    print(found.generation, found.version, found.error, sep="|")
    try:
        aiter_fused.call(*inputs.make(2, shapes.Widths(1536, 512)).args)
    except RefusedError as error:
        print(error)
"""


def ask(*folders) -> list[str]:
    """What the adapter says in a fresh interpreter with ``folders`` first on its path."""
    code = f"import sys; sys.path[:0] = {[str(f) for f in folders]!r}\n" + textwrap.dedent(PROBE)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.splitlines()


def write_amd(folder, module, signature):
    (folder / "amd_aiter-0.1.15.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.15\n"
    (folder / "amd_aiter-0.1.15.dist-info" / "METADATA").write_text(metadata)
    ops = folder / "aiter" / "ops"
    ops.mkdir(parents=True)
    (folder / "aiter" / "__init__.py").write_text("raise RuntimeError('no ROCm here')\n")
    (ops / f"{module}.py").write_text(f"def fused_qk_rmsnorm({signature}): ...\n")


@pytest.mark.parametrize(
    ("module", "signature", "generation"),
    [
        ("fused_qk_norm_rope_cache_quant", "q, q_weight, q_eps, k, k_weight, k_eps", "pair"),
        (
            "fused_qk_rmsnorm_group_quant",
            "q_out_quantized=None, q_out_scale=None, q=None, q_weight=None, q_epsilon=1e-6, "
            "q_out_unquantized=None, k_out=None, q_res_out=None, k=None, k_weight=None, "
            "k_epsilon=None, q_residual=None, gemma_norm=False, quant_type=None, group_size=None, "
            "transpose_scale=False",
            "unified",
        ),
        ("fused_qk_rmsnorm_group_quant", "q, k, eps", "none"),
        ("other", "q", "none"),
    ],
)
def test_find_reads_the_generation_without_importing(tmp_path, module, signature, generation):
    write_amd(tmp_path, module, signature)
    found, refusal = ask(tmp_path)
    assert found.startswith(f"{generation}|0.1.15|")
    assert (found.endswith("|None")) == (generation != "none")
    assert refusal == "aiter_fused: aiter does not import: RuntimeError: no ROCm here"


def test_a_bare_folder_called_aiter_is_not_amds(tmp_path):
    (tmp_path / "aiter").mkdir()
    found, refusal = ask(tmp_path)
    assert f"a folder called aiter at {tmp_path / 'aiter'} is not AMD's AITER" in found
    assert "aiter does not import" in refusal or "no fused_qk_rmsnorm" in refusal


@pytest.mark.upstream
def test_the_real_wheel_without_rocm(tmp_path):
    """PyPI's amd-aiter is 0.1.7: no dual norm, and importing it without ROCm raises."""
    install("amd-aiter", tmp_path)
    found, refusal = ask(tmp_path)
    assert found.startswith("none|0.1.7")
    assert "has no fused_qk_rmsnorm" in found
    assert refusal.startswith("aiter_fused: aiter does not import: ")


@pytest.mark.upstream
def test_the_unrelated_package(tmp_path):
    install("aiter", tmp_path)
    found, refusal = ask(tmp_path)
    assert "aiter 0.13.20191203, an unrelated iterator helper" in found
    assert "this AITER has no fused_qk_rmsnorm" in refusal
    assert "pip install aiter" not in found + refusal


@pytest.mark.upstream
def test_both_installed(tmp_path):
    """Both distributions claim one folder; AMD's metadata decides, the symbols are then missing."""
    install("aiter", tmp_path / "helper")
    write_amd(tmp_path / "amd", "other", "q")
    found, _ = ask(tmp_path / "helper", tmp_path / "amd")
    assert found.startswith("none|0.1.15|amd-aiter 0.1.15 has no fused_qk_rmsnorm")


@pytest.mark.parametrize(
    ("arch", "dtype", "rounding"),
    [
        ("gfx942", "bf16", "truncate"),
        ("gfx90a", "bf16", "truncate"),
        ("gfx950", "bf16", "round_once"),
        ("gfx942", "fp16", "round_once"),
    ],
)
def test_the_declared_rounding_follows_the_card(arch, dtype, rounding):
    assert aiter_fused.PATH.rounding_on(arch, dtype) == rounding
