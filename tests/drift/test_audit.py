"""The audit catches every known-bad kernel and passes the good ones."""

import sys
import types

import pytest
import torch
from mutants import KNOWN_BAD

from mlakit.drift.audit import adapt, audit, load_target
from mlakit.errors import MisuseError
from mlakit.rounding import ROUNDINGS

NEEDED_LINE = {
    "zeros": "known answer",
    "copies": "known answer",
    "inputs returned": "new outputs",
    "row 0 repeated": "known answer",
    "last row missing": "batches",
    "q's statistics used for k": "q, k, rows apart",
    "stride ignored": "split views",
    "rope included in k": "split views",
    "truncation": "signed bias",
    "one eps for both": "two eps",
    "eps outside the root": "small rows",
    "written over its input": "inputs left alone",
    "NaN hidden": "NaN rows",
    "odd width spills into the next row": "odd widths",
    "one output buffer for all calls": "new outputs",
}


def by_name(card):
    return {line.name: line for line in card.lines}


def round_once(q, q_weight, q_eps, k, k_weight, k_eps):
    formula = ROUNDINGS["round_once"]
    return formula(q, q_weight, q_eps), formula(k, k_weight, k_eps)


def hugging_face(q, q_weight, q_eps, k, k_weight, k_eps):
    formula = ROUNDINGS["cast_then_weight"]
    return formula(q, q_weight, q_eps), formula(k, k_weight, k_eps)


@pytest.mark.parametrize("name", NEEDED_LINE)
def test_known_bad_kernels_are_caught(name):
    card = audit(KNOWN_BAD[name], target=name, max_m=3)
    line = by_name(card)[NEEDED_LINE[name]]
    assert line.verdict == "fail"
    assert line.smallest
    assert line.smallest in card.text


def k_7_above_1e4(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = round_once(q, q_weight, q_eps, k, k_weight, k_eps)
    large = k.float().abs().amax(-1, keepdim=True) > 1e4
    return q_out, torch.where(large, torch.full_like(k_out, 7), k_out)


def k_cut_in_large_batches(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = round_once(q, q_weight, q_eps, k, k_weight, k_eps)
    if len(k) < 200:
        return q_out, k_out
    # one bit pattern less is one step toward zero, of either sign
    bits = k_out.view(torch.int16)
    return q_out, torch.where(bits != 0, bits - 1, bits).view(k_out.dtype)


def nothing_for_no_rows(q, *rest):
    return round_once(q, *rest) if len(q) else ()


def nan_in_k_hidden(q, q_weight, q_eps, k, k_weight, k_eps):
    return round_once(q, q_weight, q_eps, k.nan_to_num(0.0), k_weight, k_eps)


def float32_q_alone(q, q_weight, q_eps, k, k_weight, k_eps):
    q_out, k_out = round_once(q, q_weight, q_eps, k, k_weight, k_eps)
    return q_out.to(torch.promote_types(q.dtype, q_weight.dtype)), k_out


@pytest.mark.parametrize(
    ("fn", "name", "words"),
    [
        (nan_in_k_hidden, "NaN rows", "k: a NaN in the row is hidden"),
        (k_7_above_1e4, "overflow of squares", "k: row 0 column 0 is 7"),
        (k_cut_in_large_batches, "signed bias", "one-sided: k"),
        (nothing_for_no_rows, "M = 0", "wanted a pair"),
        (float32_q_alone, "float32 weights", "q: returned torch.float32"),
    ],
)
def test_a_fault_of_one_output_fails_its_line(fn, name, words):
    line = by_name(audit(fn, max_m=1))[name]
    assert line.verdict == "fail"
    assert words in line.detail


@pytest.mark.parametrize("max_m", [0, -1])
def test_no_batch_to_try_is_refused(max_m):
    with pytest.raises(MisuseError, match=f"max_m is {max_m}: give 1 or more"):
        audit(round_once, max_m=max_m)


def test_every_known_bad_kernel_is_tried():
    assert set(NEEDED_LINE) | {"rows above 65535 lost"} == set(KNOWN_BAD)


def test_rows_beyond_the_grid_limit_are_caught_at_the_first_batch():
    line = by_name(audit(KNOWN_BAD["rows above 65535 lost"]))["batches"]
    assert line.verdict == "fail"
    assert line.smallest.startswith("M=65536,")


def test_a_good_norm_passes():
    card = audit(round_once, max_m=257)
    assert card.ok, card.text
    lines = by_name(card)
    assert lines["rounding of q"].detail == "round_once"
    assert lines["overflow of squares"].verdict == "pass"
    assert lines["graph capture"].verdict == "not applicable"
    assert lines["batch invariance"].verdict == "pass"
    assert len(card.to_json()["lines"]) == len(card.lines)


def test_float32_sums_overflow_and_that_is_a_convention():
    def plain(q, q_weight, q_eps, k, k_weight, k_eps):
        norm = torch.nn.functional.rms_norm
        return norm(q, q_weight.shape, q_weight, q_eps), norm(k, k_weight.shape, k_weight, k_eps)

    line = by_name(audit(plain, max_m=1))["overflow of squares"]
    assert line.verdict == "convention difference"
    assert "1e19" in line.detail


def test_another_convention_is_no_failure():
    card = audit(hugging_face, max_m=2)
    assert card.ok, card.text
    assert by_name(card)["rounding of k"].verdict == "convention difference"


def test_the_wrong_answers_of_the_field_are_recognised():
    for name, words in (("stride ignored", "stride"), ("rope included in k", "rope")):
        assert words in by_name(audit(KNOWN_BAD[name], max_m=1))["known answer"].detail


def test_batch_dependence_is_shown_with_its_batch():
    def blocked(q, q_weight, q_eps, k, k_weight, k_eps):
        if q.shape[0] < 256 or q.ndim != 2:
            return round_once(q, q_weight, q_eps, k, k_weight, k_eps)
        return hugging_face(q, q_weight, q_eps, k, k_weight, k_eps)

    line = by_name(audit(blocked, max_m=257))["batch invariance"]
    assert line.verdict == "convention difference"
    assert "M=255" in line.detail
    assert "M=256" not in line.detail


def test_unwritten_memory_shows():
    def sometimes(q, q_weight, q_eps, k, k_weight, k_eps):
        right = round_once(q, q_weight, q_eps, k, k_weight, k_eps)
        q_out = torch.empty(q.shape, dtype=q.dtype)
        q_out[..., :-1] = right[0][..., :-1]
        return q_out, right[1]

    assert by_name(audit(sometimes, max_m=2))["uninitialised memory"].verdict == "fail"


def test_refusals_are_refusals():
    def strict(q, q_weight, q_eps, k, k_weight, k_eps):
        if q.ndim != 2 or q.stride(-1) != 1 or len(q) != len(k):
            raise ValueError("two dimensions, neighbours in memory, equal rows")
        return round_once(q, q_weight, q_eps, k, k_weight, k_eps)

    lines = by_name(audit(strict, max_m=2))
    for name in ("inner stride", "unequal rows", "rank 3"):
        assert lines[name].verdict == "refused"
        assert "two dimensions" in lines[name].detail


def test_a_tensor_without_data_is_never_dereferenced():
    def raw(q, q_weight, q_eps, k, k_weight, k_eps):
        assert q.data_ptr(), "address 0"
        return round_once(q, q_weight, q_eps, k, k_weight, k_eps)

    line = by_name(audit(raw, max_m=1))["fake tensors"]
    assert line.verdict == "refused"
    assert "address 0" not in line.detail


def test_cpu_paths_have_no_failures():
    card = audit("cpu_fused", max_m=257)
    assert card.ok, card.text


def test_all_generations_of_aiter_are_taken():
    def later(
        q_out_quantized, q_out_scale, q, q_weight, q_epsilon, q_out_unquantized=None, k_out=None,
        k=None, k_weight=None, k_epsilon=None, *, quant_type,
    ):  # fmt: skip
        assert quant_type == "none at all"
        q_new, k_new = round_once(q, q_weight, q_epsilon, k, k_weight, k_epsilon)
        q_out_quantized.copy_(q_new)
        k_out.copy_(k_new)

    def private(q_out, q, q_weight, q_eps, k_out, k, k_weight, k_eps):
        later(q_out, None, q, q_weight, q_eps, None, k_out, k, k_weight, k_eps,
              quant_type="none at all")  # fmt: skip
        return q_out, k_out

    module = sys.modules[later.__module__]
    module.QuantType = types.SimpleNamespace(No="none at all")
    for fn in (later, private, round_once):
        assert audit(fn, max_m=2).ok


def test_targets_that_cannot_be_loaded():
    texts = "no_such_path mlakit.nothing:fn mlakit.errors:nothing math:pi .x:fn ../x:fn :fn"
    for text in texts.split():
        with pytest.raises(MisuseError) as error:
            load_target(text)
        assert "\n" not in str(error.value)
    with pytest.raises(MisuseError, match="takes 2 arguments"):
        adapt(lambda x, weight: x)


def test_a_path_that_cannot_run_here_is_refused_before_any_line():
    with pytest.raises(MisuseError, match="AMD"):
        audit("aiter_fused")
    with pytest.raises(MisuseError, match="mxfp4"):
        audit("torch_mxfp4")
