"""Quantised paths against float64, their record and options, and the Triton kernel interpreted."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from quant_oracle import assert_faithful, share_of_codes_changed

from mlakit import inputs, shapes
from mlakit.codegen import resources
from mlakit.context import Context
from mlakit.errors import MisuseError
from mlakit.formats import fp8, mxfp4
from mlakit.paths import quantised, registry, triton_quant, triton_quant_config
from mlakit.paths.quantised import Options
from mlakit.paths.triton_config import Config
from mlakit.rounding import oracle
from mlakit.shapes import Widths

QUANTS = ("fp8_group128", "fp8_token", "mxfp4")
DEEPSEEK = Widths(1536, 512)


def options_of(quant):
    """Every option that changes a byte of ``quant``."""
    if quant == "mxfp4":
        for rule, layout in itertools.product(mxfp4.RULES, mxfp4.SCALE_LAYOUTS):
            yield Options(rule=rule, scale_layout=layout)
        return
    layouts = fp8.SCALE_LAYOUTS if quant == "fp8_group128" else ("row_major",)
    for encoding, layout in itertools.product(fp8.ENCODINGS, layouts):
        yield Options(encoding=encoding, scale_layout=layout)


CASES = [pytest.param(q, o, id=f"{q}-{o}") for q in QUANTS for o in options_of(q)]


def eager(quant, x, options):
    return registry.get(f"torch_{quant}").call(*x.args, options=options)


@pytest.mark.parametrize(("quant", "options"), CASES)
@pytest.mark.parametrize("family", inputs.FAMILIES)
def test_eager_is_faithful_to_float64(quant, options, family):
    x = inputs.make(19, Widths(768, 128), family=family, seed=11)
    before = x.buffer.clone()
    got, k_out = eager(quant, x, options)
    assert_faithful(quant, got, x.q, x.q_weight, x.q_eps, options)
    exact = oracle(x.k, x.k_weight, x.k_eps)
    assert torch.allclose(k_out.double(), exact, rtol=2**-8, atol=0, equal_nan=True)
    assert torch.equal(x.buffer.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_eager_takes_every_dtype_rank_and_layout(quant, dtype):
    x = inputs.make(6, Widths(256, 64), dtype, layout="contiguous", seed=12)
    got, _ = eager(quant, x, Options())
    q, k = x.q.view(2, 3, 256), x.k.view(2, 3, 64)
    again, k_out = registry.get(f"torch_{quant}").call(
        q, x.q_weight, x.q_eps, k, x.k_weight, x.k_eps
    )
    assert again.values.shape[:2] == (2, 3)
    assert k_out.shape == (2, 3, 64)
    assert torch.equal(
        again.values.view(torch.uint8).flatten(), got.values.view(torch.uint8).flatten()
    )
    assert torch.equal(again.scale, got.scale)


@pytest.mark.parametrize("quant", QUANTS)
def test_quantises_from_the_unrounded_norm(quant):
    """A bf16 norm between would change many more bytes than float32 rounding does."""
    x = inputs.make(64, DEEPSEEK, seed=13)
    want = quantised.reference(quant, x.q, x.q_weight, x.q_eps)
    got, _ = eager(quant, x, Options())
    assert share_of_codes_changed(got, want) < 1e-3
    rounded = oracle(x.q, x.q_weight, x.q_eps).to(torch.bfloat16).float()
    twice = quantised.fill(quant, rounded, quantised.empty(quant, x.q))
    assert share_of_codes_changed(twice, want) > 1e-2


@pytest.mark.parametrize("quant", QUANTS)
def test_unquantised_is_delivered_on_request_and_rounded_once(quant):
    x = inputs.make(9, Widths(256, 64), seed=14)
    assert eager(quant, x, Options())[0].unquantised is None
    got = eager(quant, x, Options(unquantised=True))[0].unquantised
    want = quantised.reference(quant, x.q, x.q_weight, x.q_eps, Options(unquantised=True))
    assert got.dtype == torch.bfloat16
    assert (got != want.unquantised).double().mean() < 1e-3


@pytest.mark.parametrize("quant", QUANTS)
def test_out_is_written_whole_and_no_rows_are_no_error(quant):
    x = inputs.make(5, Widths(256, 64), seed=15)
    options = Options(unquantised=True)
    want, k_want = eager(quant, x, options)
    for poison in (0x7F, 0x00):
        out = quantised.empty(quant, x.q, options), torch.empty_like(k_want)
        for tensor in (*out[0], out[1]):
            tensor.view(torch.uint8).fill_(poison)
        got, k_got = registry.get(f"torch_{quant}").call(*x.args, out=out, options=options)
        assert got is out[0]
        assert k_got is out[1]
        for a, b in zip((*got, k_got), (*want, k_want), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    none = inputs.make(0, Widths(256, 64))
    got, k_out = eager(quant, none, options)
    assert got.values.shape[0] == k_out.shape[0] == 0


def test_out_that_does_not_fit_is_refused():
    x = inputs.make(4, DEEPSEEK)
    k_out = torch.empty(4, 512, dtype=torch.bfloat16)
    options = Options(unquantised=True)
    good = quantised.empty("fp8_group128", x.q, options)
    for what, bad in (
        ("values", good._replace(values=good.values[:3])),
        ("scale", good._replace(scale=torch.empty(4, 1))),
        ("scale", good._replace(scale=fp8.empty_scale(4, 12, "strided"))),
        ("unquantised", good._replace(unquantised=None)),
    ):
        for kind in ("torch", "triton", "unfused"):
            path = registry.get(f"{kind}_fp8_group128")
            with pytest.raises(MisuseError, match=f"out's {what} must be"):
                path.call(*x.args, out=(bad, k_out), options=options)
    with pytest.raises(MisuseError, match="out's k must be"):
        registry.get("torch_fp8_group128").call(*x.args, out=(good, x.k), options=options)


@pytest.mark.parametrize("kind", ["torch", "triton", "unfused"])
def test_a_wanted_gradient_is_refused(kind):
    x = inputs.make(2, DEEPSEEK)
    x.q_weight.requires_grad_()
    with pytest.raises(MisuseError, match="a gradient is wanted"):
        registry.get(f"{kind}_mxfp4").call(*x.args)


def test_encoding_is_the_devices_own_unless_named():
    assert quantised.native_encoding(torch.device("cpu")).name == "fp8_ocp"
    x = inputs.make(2, Widths(128, 64))
    assert eager("fp8_token", x, Options())[0].values.dtype == torch.float8_e4m3fn
    fnuz = eager("fp8_token", x, Options(encoding="fp8_fnuz"))[0]
    assert fnuz.values.dtype == torch.float8_e4m3fnuz


def test_refusals():
    x = inputs.make(2, Widths(200, 64))
    for quant in ("fp8_group128", "mxfp4"):
        with pytest.raises(MisuseError, match="q is 200 wide"):
            eager(quant, x, Options())
    for bad in ({"encoding": "e5m2"}, {"rule": "even"}):
        with pytest.raises(MisuseError, match="unknown"):
            Options(**bad)
    with pytest.raises(MisuseError, match="unknown scale layout"):
        eager("mxfp4", inputs.make(2, DEEPSEEK), Options(scale_layout="transposed"))


@pytest.mark.parametrize("kind", ["torch", "unfused", "triton"])
def test_supports_explains(kind):
    def why(name, arch="sm_90", **context):
        return registry.get(f"{kind}_{name}").supports(Context(arch=arch, **context))

    for quant in QUANTS:
        assert why(quant, quant=quant) is None
        assert "none was asked for" in why(quant)
        assert "no q latent" in why(quant, quant=quant, q_lora_rank=0)
        assert "no backward" in why(quant, quant=quant, requires_grad=True)
    assert "sm_80 has no FP8" in why("fp8_token", quant="fp8_token", arch="sm_80")
    assert "200 wide" in why("fp8_group128", quant="fp8_group128", q_lora_rank=200)
    assert why("fp8_group128", quant="fp8_group128", arch="gfx942") is None
    assert why("mxfp4", quant="mxfp4", arch="gfx950") is None
    if kind != "torch":
        lacking = frozenset({"numba"})
        assert "triton is not installed" in why("mxfp4", quant="mxfp4", packages=lacking)
        assert "inner stride" in why("mxfp4", quant="mxfp4", layout="inner_strided")


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
@pytest.mark.parametrize("quant", QUANTS)
def test_heuristic_and_search_space_are_valid_for_every_model(quant, arch):
    for model in shapes.models():
        w = model.widths
        if quantised.refusal(quant, w.q_lora_rank):
            continue
        for dtype, m in itertools.product(("bf16", "fp32"), (1, 4096, 65536)):
            config = triton_quant.heuristic(quant, arch, m, w.q_lora_rank, w.kv_lora_rank, dtype)
            args = config, arch, w.q_lora_rank, w.kv_lora_rank, dtype
            assert triton_quant.check(quant, *args) is None
    assert len(triton_quant_config.search_space(quant, "sm_90", 4096, 1536, 512)) > 10


def test_check_says_what_is_wrong():
    config = triton_quant.heuristic("fp8_token", "sm_90", 1024, 1536, 512)
    for change, words in (
        ({"q_warps": 4}, "4 of 2 warps a row; the width's tree has 2"),
        ({"num_warps": 8}, "do not fill 8 warps"),
        ({"num_warps": 3}, "power of two"),
        ({"q_rows": 8}, "192 elements a thread"),
        ({"separate": False, "q_rows": 2, "k_rows": 4}, "equal rows"),
        ({"persistent": True}, "not persistent"),
        ({"k_rows": 1}, "k: 1 rows of 1 warps do not fill 2"),
    ):
        problem = triton_quant.check("fp8_token", replace(config, **change), "sm_90", 1536, 512)
        assert words in problem
    early = replace(config, pdl=True)
    assert "dependent launch" in triton_quant.check("fp8_token", early, "gfx950", 1536, 512)


def test_split_views_count_as_aligned_and_odd_starts_do_not():
    """Unaligned code is twice as long: it must not be what ordinary calls get."""
    x = inputs.make(4, DEEPSEEK)
    k_out = torch.empty(4, 512, dtype=torch.bfloat16)
    for quant in QUANTS:
        out = quantised.empty(quant, x.q)
        assert triton_quant.aligned(
            (x.q, x.q_weight, out.values, out.scale, x.q, x.k, x.k_weight, k_out)
        )
        for q in (x.buffer[:, 1:1537], torch.empty(4, 1537, dtype=x.q.dtype)[:, :1536]):
            assert not triton_quant.aligned(
                (q, x.q_weight, out.values, out.scale, q, x.k, x.k_weight, k_out)
            )


@pytest.mark.parametrize("name", ["triton_fused", "cpu_fused", "triton_mxfp4", "unfused_mxfp4"])
def test_a_meta_tensor_is_no_input_of_a_kernel(name):
    pytest.importorskip("triton")
    x = inputs.make(3, DEEPSEEK, seed=2)
    given = [a.to("meta") if torch.is_tensor(a) else a for a in x.args]
    with pytest.raises(MisuseError, match="a meta tensor has no memory"):
        registry.get(name).call(*given)


INTERPRETED = [
    ("fp8_group128", Options(encoding="fp8_ocp"), "bf16", "outlier"),
    ("fp8_group128", Options(encoding="fp8_fnuz", scale_layout="transposed"), "fp32", "heavy"),
    ("fp8_group128", Options(encoding="fp8_ocp", scale_layout="strided"), "fp16", "nonfinite"),
    ("fp8_token", Options(encoding="fp8_ocp"), "bf16", "nonfinite"),
    ("fp8_token", Options(encoding="fp8_fnuz"), "fp32", "zero_rows"),
    ("mxfp4", Options(rule="ocp_floor"), "fp32", "nonfinite"),
    ("mxfp4", Options(rule="round_up"), "fp16", "tiny"),
    ("mxfp4", Options(rule="quark_even"), "bf16", "zero_rows"),
    ("mxfp4", Options(scale_layout="shuffled"), "bf16", "outlier"),
    ("mxfp4", Options(scale_layout="shuffled"), "fp16", "nonfinite"),
]
"""The interpreter takes a second a case, so each value of each option comes once."""


@pytest.mark.parametrize(("quant", "options", "dtype", "family"), INTERPRETED)
def test_triton_kernel_interpreted_is_faithful_to_float64(quant, options, dtype, family):
    pytest.importorskip("triton")
    q_width = 96 if options.scale_layout == "shuffled" else 384
    x = inputs.make(3, Widths(q_width, 96), dtype, family=family, seed=16)
    before = x.buffer.clone()
    options = replace(options, unquantised=True)
    k_out = torch.full((3, 96), torch.nan, dtype=x.k.dtype)
    out = quantised.empty(quant, x.q, options)
    out.values.view(torch.uint8).fill_(0x7F)
    out.scale.fill_(0x7F)
    out.unquantised.fill_(torch.nan)
    got, k_got = registry.get(f"triton_{quant}").call(*x.args, out=(out, k_out), options=options)
    assert got is out
    assert_faithful(quant, got, x.q, x.q_weight, x.q_eps, options)
    for y, exact in (
        (k_got, oracle(x.k, x.k_weight, x.k_eps)),
        (got.unquantised, oracle(x.q, x.q_weight, x.q_eps)),
    ):
        # The interpreter cuts float32 to bf16 instead of rounding it.
        step = {"bf16": 2**-7, "fp16": 2**-10, "fp32": 2**-20}[dtype]
        assert torch.allclose(y.double(), exact, rtol=step, atol=1e-7, equal_nan=True)
    if options.scale_layout == "shuffled":
        groups = x.q.shape[1] // mxfp4.GROUP
        plain = quantised.plain_scale(quant, got, options)
        assert torch.equal(got.scale, mxfp4.shuffle_scale(plain))
        assert got.scale.shape == mxfp4.shuffled_shape(3, groups)
    assert torch.equal(x.buffer.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("quant", ["fp8_group128", "mxfp4"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_knob_changes_a_byte_and_kv_is_triton_fused_s(quant, dtype):
    pytest.importorskip("triton")
    x = inputs.make(2, DEEPSEEK, dtype, seed=18)
    want, k_want = triton_quant.fused(quant, *x.args)
    assert torch.equal(k_want, registry.get("triton_fused").call(*x.args)[1])
    q_tree, k_tree = triton_quant_config.trees_of("cpu", 1536, 512, dtype)
    for q_rows, k_rows, q_warps, k_warps, num_warps, separate in (
        (2, 2, 1, 1, 1, False),  # two turns of one row in one warp
        (1, 4, q_tree, k_tree, max(q_tree, k_tree), True),
    ):
        config = Config(q_rows, k_rows, q_warps, k_warps, num_warps, separate)
        got, k_got = triton_quant.fused(quant, *x.args, config=config)
        assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
        assert torch.equal(got.scale, want.scale)
        assert torch.equal(k_got, k_want)


def test_mxfp4_values_may_start_anywhere():
    """Words of 8 codes are stored where they start on 4 bytes, bytes elsewhere."""
    pytest.importorskip("triton")
    x = inputs.make(3, Widths(384, 96), seed=19)
    want, k_out = triton_quant.fused("mxfp4", *x.args)
    odd = torch.empty(3 * 192 + 4, dtype=torch.uint8)
    start = (1 - odd.data_ptr()) % 4
    odd = odd[start : start + 3 * 192].view(3, 192)
    triton_quant.fused("mxfp4", *x.args, out=(want._replace(values=odd), k_out))
    assert torch.equal(odd, want.values)


def every_bf16_up_to(limit, group):
    """(rows, 8 groups) of every bf16 value of magnitude up to ``limit``, which leads each group."""
    values = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    values = values[values.abs() <= limit]
    values = torch.nn.functional.pad(values, (0, -len(values) % (8 * (group - 1))))
    groups = values.view(-1, group - 1)
    led = torch.cat([torch.full((len(groups), 1), limit), groups], 1)
    return led.view(-1, 8 * group)


@pytest.mark.parametrize("encoding", fp8.ENCODINGS)
def test_kernel_encodes_every_bf16_value_in_fp8(encoding):
    """A group led by the maximum has scale 1, so its codes are its values' own."""
    pytest.importorskip("triton")
    y = every_bf16_up_to(fp8.encoding(encoding).maximum, fp8.GROUP)
    out = quantised.empty("fp8_group128", y, Options(encoding=encoding))
    triton_quant.quantise("fp8_group128", y, out)
    assert torch.equal(out.scale, torch.ones_like(out.scale))
    want = fp8.encode(y, fp8.encoding(encoding))
    assert torch.equal(out.values.view(torch.uint8), want.view(torch.uint8))


def test_kernel_encodes_every_bf16_value_in_mxfp4():
    pytest.importorskip("triton")
    y = every_bf16_up_to(6.0, mxfp4.GROUP)
    options = Options(rule="round_up")
    out = triton_quant.quantise("mxfp4", y, quantised.empty("mxfp4", y, options), options)
    assert (out.scale == 127).all()
    assert torch.equal(mxfp4.unpack(out.values), mxfp4.encode(y))


@pytest.mark.parametrize("quant", QUANTS)
def test_unfused_pair_interpreted_quantises_the_rounded_norm(quant):
    pytest.importorskip("triton")
    x = inputs.make(3, Widths(256, 64), "fp16", seed=17)
    got, k_out = registry.get(f"unfused_{quant}").call(*x.args)
    rounded = oracle(x.q, x.q_weight, x.q_eps).half().float()
    want = quantised.fill(quant, rounded, quantised.empty(quant, x.q))
    assert share_of_codes_changed(got, want) < 0.01
    assert torch.allclose(k_out.double(), oracle(x.k, x.k_weight, x.k_eps), rtol=2**-10, atol=0)


def stack_of(cubin: bytes) -> int:
    """Bytes of stack a thread: what ptxas spills."""
    return resources._cubin(cubin)[1]


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
@pytest.mark.parametrize("quant", QUANTS)
def test_kernel_compiles_for_every_target_without_spills(quant, arch):
    pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for m, normalise in ((1, True), (1024, True), (4096, True), (65536, True), (65536, False)):
        config = triton_quant.heuristic(quant, arch, m, 1536, 512)
        function, signature, constexprs, attrs, knobs = triton_quant.kernel_signature(
            quant, config, arch, 1536, 512, normalise=normalise
        )
        nvidia = arch.startswith("sm_")
        target = GPUTarget("cuda", 90, 32) if nvidia else GPUTarget("hip", arch, 64)
        source = ASTSource(function, signature, constexprs, attrs)
        asm = triton.compile(source, target=target, options=knobs).asm
        if nvidia:
            assert stack_of(asm["cubin"]) == 0
            assert "ld.global.v4" in asm["ptx"]
            assert ("cvt.rn.satfinite.e4m3x2" in asm["ptx"]) == (quant != "mxfp4")
        else:
            assert re.search(r"(global|buffer)_load_dwordx4", asm["amdgcn"])
            assert ".vgpr_spill_count: 0" in asm["amdgcn"]
            assert bool(re.search(r"v_cvt_\S*fp8", asm["amdgcn"])) == (quant != "mxfp4")


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("kind", ["triton", "unfused"])
def test_a_row_can_say_whether_launches_overlap(quant, kind):
    """Else a figure of overlapping launches is held against a copy of launches that do not."""
    path = registry.get(f"{kind}_{quant}")
    for arch, m, early in (("sm_90", 64, True), ("sm_90", 1024, True), ("sm_80", 64, False)):
        context = Context(
            arch=arch, m=m, q_lora_rank=1536, kv_lora_rank=512, dtype="bf16", quant=quant
        )
        assert path.knobs(context)["pdl"] is early
