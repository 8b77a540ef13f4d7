"""The engines' policies: SGLang by release, vLLM, ATOM. Read in their released sources.

Each is a pure function of the context. SGLang's releases differ by five facts, so a release is a
record of those facts and one function reads them: a diff of two records is a diff of behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.context import Context
from mlakit.dispatch.choice import RAISES, Choice, made, switch_on
from mlakit.paths.aiter_api import SPLITS_FROM_M


@dataclass(frozen=True)
class Sglang:
    """What one SGLang release's absorbed-MLA branch does; the fields are its differences.

    bf16: archs whose fall-through goes to the fused BF16 kernel: ``never``, ``not_gfx95``, ``all``.
    apis: generations of AITER's dual norm that the module can import; empty: imports none.
    rocm_streams: SGLANG_ROCM_USE_MULTI_STREAM makes a second stream.
    block_gate: only block-scaled FP8 goes to the group-quantising kernel.
    split_copies: RMSNorm's AITER form copies a strided view first.
    a8w4: AITER_FORCE_A8W4 replaces the fused BF16 kernel.
    as_told: the split is named as a pull request's text has it, not as such a build runs it.
    """

    bf16: str
    apis: tuple[str, ...]
    rocm_streams: bool
    block_gate: bool
    split_copies: bool
    a8w4: bool
    as_told: bool = False


SGLANG_0_5_10_POST1 = Sglang("never", (), False, False, False, False)
SGLANG_PR23186_BEFORE = Sglang("not_gfx95", ("pair",), False, False, True, False, as_told=True)
SGLANG_0_5_11 = Sglang("all", ("pair",), False, False, True, False)
SGLANG_0_5_12 = Sglang("all", ("pair", "unified"), True, False, True, False)
SGLANG_0_5_23 = Sglang("all", ("pair", "unified"), True, True, True, True)


def sglang(release: Sglang, c: Context) -> Choice:
    """What a SGLang release runs in a context; the first row that matches wins."""
    gfx95 = c.use_aiter and c.arch.startswith("gfx95")
    a8w4 = release.a8w4 and c.use_aiter and switch_on(c, "AITER_FORCE_A8W4")
    imports = c.use_aiter and release.apis and not a8w4
    if imports and c.aiter_api not in ("", *release.apis):
        return made(
            RAISES,
            f"ImportError: this release imports AITER's dual norm ({' or '.join(release.apis)}) "
            f"and the AITER here has generation {c.aiter_api}; its model classes do not load",
        )
    if c.q_lora_rank == 0:
        return _split(release, c, "no q latent: kv alone is normalised")
    if c.prefill:
        return _prefill(release, c, gfx95)
    rocm_stream = release.rocm_streams and switch_on(c, "SGLANG_ROCM_USE_MULTI_STREAM")
    if c.capture and (c.vendor == "nvidia" or (c.vendor == "amd" and rocm_stream)):
        why = "graph capture with a second stream: q on one, kv on the other"
        if gfx95 or (c.use_aiter and release.bf16 != "never"):
            why += "; tested first, so every fused kernel is bypassed"
        return made("dual_stream", why, _split(release, c, "").launches)
    if gfx95 and c.weight_dtype == "mxfp4":
        return made("aiter_mxfp4", "gfx95, AITER, MXFP4 q_b_proj: both norms and q's quantisation")
    if gfx95 and c.weight_dtype == "fp8_ocp" and (c.block_scale or not release.block_gate):
        why = "gfx95, AITER, FP8 q_b_proj: both norms and q's quantisation by groups of 128"
        if not c.block_scale:
            why += "; but the weight has per-channel scales: the layouts do not match"
        return made("aiter_fp8_group128", why)
    fused_here = ("all",) if gfx95 else ("all", "not_gfx95")
    if c.use_aiter and release.bf16 in fused_here:
        return _fused_bf16(c, a8w4)
    split = _split(release, c, "no fused branch matches")
    if release.as_told and c.use_aiter:
        return made(
            "torch_native",
            "no fused branch matches: sequential PyTorch, as the pull request tells it (such a "
            f"build's RMSNorm is bound to AITER's kernel: {split.launches} launches would run)",
        )
    return split


def _fused_bf16(c: Context, a8w4: bool) -> Choice:
    if a8w4 and switch_on(c, "SGLANG_QK_RMSNORM_TORCH"):
        return made("torch_native", "AITER_FORCE_A8W4 with SGLANG_QK_RMSNORM_TORCH: torch")
    if a8w4:
        copies = 0 if c.layout == "contiguous" else 2
        also = ", copying strided inputs first" if copies else ""
        why = f"AITER_FORCE_A8W4: a Triton norm for each part in place of the kernel{also}"
        return made("triton_split", why, 2 + copies)
    if c.m >= SPLITS_FROM_M:
        why = f"AITER's dual norm, which launches two kernels from M = {SPLITS_FROM_M}"
        return made("aiter_fused", why, launches=2)
    return made("aiter_fused", "AITER in use: one kernel for both norms")


def _split(release: Sglang, c: Context, why: str) -> Choice:
    """q_a_layernorm, then kv_a_layernorm, as RMSNorm is bound on this card."""
    norms = 1 if c.q_lora_rank == 0 else 2
    if c.use_aiter:
        copies = norms if release.split_copies and c.layout != "contiguous" else 0
        also = f", copying {copies} strided inputs first" if copies else ""
        return made("aiter_split", f"{why}: AITER's RMSNorm for each part{also}", norms + copies)
    kernel = {"amd": "vLLM's operator if installed, else native", "nvidia": "sgl_kernel's"}
    return made("engine_split", f"{why}: {kernel.get(c.vendor, 'native')} RMSNorm each", norms)


def _prefill(release: Sglang, c: Context, gfx95: bool) -> Choice:
    fp8 = c.weight_dtype == "fp8_ocp" and (c.block_scale or not release.block_gate)
    if not gfx95 or not (fp8 or c.weight_dtype == "mxfp4"):
        return _split(release, c, "prefill never uses the dual kernel")
    kv = 1 if fp8 or not release.split_copies or c.layout == "contiguous" else 2
    why = "prefill never uses the dual kernel: q's norm with its quantising, and kv's norm"
    return made("aiter_split", why, launches=1 + kv)


_VLLM_EPS = (1e-5, 1e-6)
"""The only eps values for which vLLM registers its dual-norm patterns."""
_VLLM_ARCHS = ("gfx942", "gfx950", "gfx1250")
"""Where vLLM lets AITER in: CDNA 3 and later, by its ``get_cdna_version``."""


def _norms(c: Context, why: str) -> Choice:
    norms = 1 if c.q_lora_rank == 0 else 2
    return made("aiter_split" if c.use_aiter else "engine_split", why, norms)


def vllm_compile(c: Context) -> Choice:
    """vLLM 0.33.0 compiled at its default level: a pattern over the graph decides.

    Its pass does not look whether AITER has the kernel: the operation imports it when it runs.
    """
    if c.q_lora_rank == 0:
        return _norms(c, "no q latent: kv alone is normalised")
    if not c.use_aiter or c.arch not in _VLLM_ARCHS:
        return _norms(c, "the dual-norm pass wants ROCm on CDNA 3 or later with AITER in use")
    if c.q_eps != c.k_eps or c.q_eps not in _VLLM_EPS:
        return _norms(c, f"eps {c.q_eps:g}, {c.k_eps:g}: the pattern wants 1e-5 or 1e-6, equal")
    if c.dtype != "bf16":
        return _norms(c, f"the patterns are registered for bf16 only, not {c.dtype}")
    fp8 = c.weight_dtype in ("fp8_ocp", "fp8_fnuz")
    if c.aiter_api == "none" or (c.aiter_api == "pair" and not (fp8 and c.block_scale)):
        return made(
            RAISES,
            "ImportError when the fused operation first runs: it wants AITER's unified generation, "
            f"here is {c.aiter_api}",
        )
    if fp8 and c.block_scale:
        return made("aiter_fp8_group128", "pattern matched: q quantised by groups of 128, and kv")
    if fp8:
        return made("aiter_fp8_token", "pattern matched: q quantised per token, and kv")
    if c.m >= SPLITS_FROM_M:
        why = f"pattern matched; AITER launches two kernels from M = {SPLITS_FROM_M}"
        return made("aiter_fused", why, launches=2)
    return made("aiter_fused", "pattern matched: equal eps, bf16, AITER in use")


def vllm_eager(c: Context) -> Choice:
    """vLLM without compilation: no pattern runs (its Kimi-K3 model alone calls the kernel)."""
    return _norms(c, "not compiled: the pass does not run; only Kimi-K3's model calls the kernel")


def atom(c: Context) -> Choice:
    """ATOM: weight dtype and two switches decide, never the arch or the row count."""
    if c.vendor != "amd":
        return made(RAISES, "ATOM runs on AMD cards only")
    if c.aiter_api not in ("", "unified"):
        return made(RAISES, f"ImportError: ATOM wants AITER's unified dual norm, not {c.aiter_api}")
    if c.q_lora_rank == 0:
        return made("aiter_split", "no q latent: kv alone is normalised", launches=1)
    quant = switch_on(c, "ATOM_ENABLE_DS_QKNORM_QUANT_FUSION")
    if not quant and not switch_on(c, "ATOM_ENABLE_DS_QKNORM_FUSION"):
        return made("aiter_split", "both of ATOM's fusion switches are 0")
    fp8 = c.weight_dtype in ("fp8_ocp", "fp8_fnuz")
    if quant and (fp8 or c.weight_dtype == "mxfp4") and switch_on(c, "ATOM_USE_TRITON_GEMM"):
        return made("atom_reduce_norm_quant", "quant fusion with the Triton GEMM")
    if c.weight_dtype == "mxfp4":
        return made("aiter_mxfp4", "weight dtype is MXFP4")
    if fp8:
        path = "aiter_fp8_group128" if c.block_scale else "aiter_fp8_token"
        return made(path, "weight dtype is FP8: the unified kernel with the layer's quant type")
    if c.weight_dtype == "bf16":
        split = 2 if c.m >= SPLITS_FROM_M else None
        return made("aiter_fused", "weight dtype is BF16: the unified kernel, no quantising", split)
    return made(RAISES, f"ValueError: ATOM's fusion knows no {c.weight_dtype} weight")
