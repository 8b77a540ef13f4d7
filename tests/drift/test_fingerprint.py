"""Every mutant and every real implementation at hand gets its own name."""

import pytest
import torch
import torch.nn.functional as F
from mutants import ROUNDING_MUTANTS

from mlakit.drift.arithmetic import squares_are_exact
from mlakit.drift.fingerprint import fingerprint, first_of_pair, second_of_pair
from mlakit.drift.implementations import IMPLEMENTATIONS
from mlakit.rounding import ROUNDINGS, Recipe, round_to


@pytest.mark.parametrize("name", ROUNDING_MUTANTS)
def test_mutants_are_named(name):
    norm, want = ROUNDING_MUTANTS[name]
    assert fingerprint(norm).names == {want}


def test_there_are_enough_mutants():
    assert len({want for _, want in ROUNDING_MUTANTS.values()}) >= 12


def test_torch_rms_norm():
    found = fingerprint(lambda x, w, eps: F.rms_norm(x, w.shape, w, eps))
    assert found.names == {"round_once"}
    assert "divided" in found.details["contraction"]
    assert "1 / sqrt" in found.details["root"]


@pytest.mark.parametrize(
    ("module", "name"),
    [("llama", "LlamaRMSNorm"), ("deepseek_v3", "DeepseekV3RMSNorm")],
)
def test_transformers_norms(module, name):
    path = f"transformers.models.{module}.modeling_{module}"
    kind = getattr(pytest.importorskip(path), name)

    def norm(x, weight, eps):
        layer = kind(x.shape[-1], eps=eps)
        layer.weight.data = weight
        return layer(x)

    found = fingerprint(norm)
    assert found.names == {"cast_then_weight"}
    assert "so is the output" in found.details["weight"]


def test_ligers_none_mode_sums_in_bf16_and_rounds_once():
    """By hand what Triton compiles it to for sm_90, one element a thread (mul.bf16, fma.rn.bf16,
    add.bf16 over lanes 16, 8, 4, 2, 1 and then four warps; the rest in float32)."""

    def none_mode(x, w, eps):
        exact, lane, warp = x.double().square(), torch.arange(128), torch.arange(4)
        squares = round_to(exact, x.dtype).double()
        total = round_to(exact + squares[:, lane ^ 16], x.dtype).double()
        for distance in (8, 4, 2, 1):
            total = round_to(total + total[:, lane ^ distance], x.dtype).double()
        total = total[:, ::32]
        for distance in (2, 1):
            total = round_to(total + total[:, warp ^ distance], x.dtype).double()
        variance = total[:, :1].float() / 128 + torch.tensor(eps).to(x.dtype).float()
        return (x.float() * variance.double().rsqrt().float() * w.float()).to(x.dtype)

    found = fingerprint(none_mode)
    liger = next(i for i in IMPLEMENTATIONS if i.name == "Liger none")
    assert found.names == {liger.reads_as} == {"running_sum"}
    # what an H200 gave (data/recorded/h200), word for word
    assert found.text.endswith("its order shows; s up to 2**-9.0 off")


def test_pairs_are_taken_apart():
    def pair(q, q_weight, q_eps, k, k_weight, k_eps):
        return (
            ROUNDINGS["truncate"](q, q_weight, q_eps),
            ROUNDINGS["cast_then_weight"](k, k_weight, k_eps),
        )

    assert fingerprint(first_of_pair(pair)).names == {"truncate"}
    assert fingerprint(second_of_pair(pair)).names == {"cast_then_weight"}
    assert fingerprint(pair).names == {"truncate"}


def test_refused_float32_weights_leave_two_names():
    def norm(x, weight, eps):
        if weight.dtype != x.dtype:
            raise TypeError("one dtype, please")
        return ROUNDINGS["cast_then_weight"](x, weight, eps)

    found = fingerprint(norm)
    assert found.names == {"cast_then_weight", "weight_dtype"}
    assert "refused" in found.text


def test_float32_names_the_whole_set():
    found = fingerprint(lambda x, w, eps: F.rms_norm(x, w.shape, w, eps), dtype="fp32")
    assert {"round_once", "cast_then_weight", "truncate"} <= found.names
    assert "rounding to float32 changes nothing" in found.text


def test_contraction_is_seen_where_it_can_be():
    def fused(x, weight, eps):
        """mean + eps as one fma; both squares of a float32 pair rounded but one."""
        x32 = x.float()
        n = x.shape[-1]
        if x.dtype == torch.float32 and n == 2:
            wide = x.double()
            total = (wide[:, :1].float().square().double() + wide[:, 1:].square()).float()
        else:
            total = x32.square().sum(-1, keepdim=True)
        third = torch.tensor(1.0) / n
        variance = (total.double() * third.double() + eps).float()
        return (x32 * (1 / variance.sqrt()) * weight.float()).to(x.dtype)

    found = fingerprint(fused).details["contraction"]
    assert "mean + eps: contracted" in found
    assert "sum in float32: contracted" in found


def test_welfords_variance_is_told_from_a_sum_of_squares():
    def norm(x, weight, eps):
        """As torch's CUDA kernel where it does not vectorise: moments merged element by element."""
        x32 = x.float()
        mean, spread = x32[:, :1], torch.zeros_like(x32[:, :1])
        for seen, column in enumerate(x32[:, 1:].split(1, -1), 1):
            delta = column - mean
            mean = mean + delta / (seen + 1)
            spread = spread + delta * delta * (seen / (seen + 1))
        square = spread / x.shape[-1] + mean * mean
        return (x32 * torch.rsqrt(square + eps) * weight.float()).to(x.dtype)

    found = fingerprint(norm).details["contraction"]
    assert "sum in float32: Welford's variance + mean * mean" in found


def test_squares_of_16_bit_floats_are_exact_in_float32():
    assert squares_are_exact("bf16")
    assert squares_are_exact("fp16")
    # significands of bf16 have 8 bits, of fp16 11: their squares need at most float32's 24
    assert max(n * n for n in range(2**7, 2**8)) < 2**24
    assert max(n * n for n in range(2**10, 2**11)) < 2**24


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w, eps: torch.zeros_like(x),
        lambda x, w, eps: x.clone(),
        lambda x, w, eps: F.layer_norm(x.float(), w.shape, w.float(), None, eps).to(x.dtype),
        lambda x, w, eps: (ROUNDINGS["round_once"](x, w, eps).float() * 1.02).to(x.dtype),
    ],
)
def test_what_is_none_of_these_is_called_so(norm):
    found = fingerprint(norm)
    assert found.names == frozenset()
    assert found.text.startswith("none of these")


def test_what_raises_is_reported():
    def broken(x, w, eps):
        raise RuntimeError("no such kernel")

    assert "no such kernel" in fingerprint(broken).text
    assert "returned" in fingerprint(lambda x, w, eps: x[:1]).text


def test_fp16_too():
    for name in ("round_once", "cast_then_weight", "bf16_rstd", "eps_outside"):
        assert fingerprint(ROUNDINGS[name], dtype="fp16").names == {name}


def test_every_recipe_without_approximation_names_itself():
    for recipe in (
        Recipe(rstd="bf16_rstd", product="cast_then_weight"),
        Recipe(rstd="bf16_rstd", product="truncate", offset=1),
        Recipe("bf16_mean"),
        Recipe(eps="eps_clamped", product="cast_then_weight"),
    ):
        assert fingerprint(recipe).names == {recipe.name}


# ---- what refuses some experiments


def _plain(x, weight, eps):
    return ROUNDINGS["round_once"](x, weight, eps)


@pytest.mark.parametrize("most", [64, 2048])
def test_a_norm_that_takes_few_rows_is_still_named(most):
    def norm(x, weight, eps):
        if x.shape[0] > most:
            raise ValueError(f"at most {most} rows")
        return _plain(x, weight, eps)

    found = fingerprint(norm)
    assert "round_once" in found.names
    assert any(f"refused (ValueError: at most {most} rows)" in line for line in found.evidence)


def test_a_norm_of_one_width_is_still_named():
    def norm(x, weight, eps):
        if x.shape[-1] != 128:
            raise ValueError("width 128 only")
        return _plain(x, weight, eps)

    found = fingerprint(norm)
    assert found.names == {"round_once"}
    assert any("rows of 384 are refused (ValueError: width 128" in e for e in found.evidence)
    assert "mean + eps: not observable (ValueError: width 128 only)" in found.details["contraction"]


@pytest.mark.parametrize("odd", [lambda x: None, lambda x: x[:1]])
def test_an_odd_output_for_a_float32_weight_is_a_refusal(odd):
    def norm(x, weight, eps):
        return _plain(x, weight, eps) if weight.dtype == x.dtype else odd(x)

    found = fingerprint(norm)
    assert found.names == {"round_once"}
    assert "a float32 weight is refused (it returned" in found.details["weight"]


def test_an_inexact_norm_that_fails_on_its_second_call_is_none_of_these():
    calls = []

    def norm(x, weight, eps):
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("once only")
        return torch.zeros_like(x)

    found = fingerprint(norm)
    assert found.text.startswith("none of these: nearest is")
    assert "sorted rows are refused (RuntimeError: once only)" in found.evidence[-1]


def test_a_norm_with_options_is_no_pair():
    def norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        return _plain(x, weight, eps)

    assert fingerprint(norm).names == {"round_once"}
