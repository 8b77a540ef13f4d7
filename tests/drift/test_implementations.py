"""What is installed is fingerprinted as its source reads; what isn't says why."""

import pytest

from mlakit.drift.implementations import IMPLEMENTATIONS, fingerprint_everything
from mlakit.paths import registry


@pytest.fixture(scope="module")
def everything():
    return fingerprint_everything(compiler=False)


def test_what_runs_here_reads_as_its_source(everything):
    ran = everything[(everything["status"] == "ok") & (everything["reads_as"] != "")]
    assert {"torch F.rms_norm", "torch_native q", "torch_rms_norm k"} <= set(ran["implementation"])
    assert ran["agrees"].all(), ran[~ran["agrees"].astype(bool)].to_string()


def test_what_does_not_run_says_why(everything):
    skipped = everything[everything["status"] == "skipped"]
    assert skipped["text"].str.len().min() > 5
    assert (skipped["names"] == "").all()


def test_nothing_is_left_out(everything):
    unquantised = [p for p in registry.all_paths() if p.output == "none"]
    assert len(everything) == len(IMPLEMENTATIONS) + 2 * len(unquantised)


@pytest.mark.slow
def test_inductor_rounds_once_unless_told_to_keep_the_casts():
    from mlakit.drift.fingerprint import fingerprint

    by_name = {i.name: i for i in IMPLEMENTATIONS}
    plain = by_name["inductor, Hugging Face order"].load()
    kept = by_name["inductor, casts emulated"].load()
    assert fingerprint(plain).names == {"round_once"}
    assert fingerprint(kept).names == {"cast_then_weight"}
