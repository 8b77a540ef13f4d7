"""What mlakit's own rule loses on cells that its table never saw; every engine's rule beside it."""

import pandas as pd
import pytest

from mlakit.datafiles import data_dir
from mlakit.dispatch import policies, table
from mlakit.errors import MisuseError
from mlakit.sweep import regret, tune
from mlakit.sweep.store import read_rows

HELD_OUT = regret.held_out()
DEVICES = sorted(set(HELD_OUT["device"]))


def test_no_held_out_cell_is_among_the_rows_that_tables_and_models_come_from():
    files = (data_dir() / "recorded").glob("*/*.parquet")
    frames = [read_rows(f) for f in files if not f.stem.endswith(("accuracy", "samples"))]
    source = pd.concat(frames, ignore_index=True)
    seen = set(source[regret.CELL].itertuples(index=False, name=None))
    held = set(HELD_OUT[regret.CELL].itertuples(index=False, name=None))
    assert len(held) >= 16
    assert not held & seen


@pytest.mark.parametrize("device", DEVICES)
def test_our_own_rule_loses_little(device):
    rows = HELD_OUT[HELD_OUT["device"] == device]
    found = regret.regret(rows, "mlakit")
    assert found.unjudged == 0
    assert found.mean <= 0.02
    assert found.worst <= 0.05, found.worst_cell


def test_every_rule_has_its_figure_with_evidence():
    table = regret.by_policy(HELD_OUT, policies.POLICIES)
    assert set(table["policy"]) == set(policies.POLICIES)
    assert set(table["evidence"]) == {"recorded"}
    assert (table["cells"] + table["unjudged"]).nunique() <= len(DEVICES)
    for device, rows in table.groupby("device"):
        by_name = rows.set_index("policy")
        assert by_name.loc["torch_only", "mean_pct"] > by_name.loc["mlakit", "mean_pct"], device
        # what no registry path does is stood in for, by name
        stood_in = by_name["stand_ins"].str.contains("stands in for")
        assert stood_in["sglang_0_5_23"]
        assert not stood_in["mlakit"]


def test_a_device_without_a_figure_is_left_out_and_the_others_are_judged():
    skipped = HELD_OUT.assign(device="another", status="skipped", p50_us=float("nan"))
    judged = regret.by_policy(pd.concat([HELD_OUT, skipped]), ["mlakit"])
    assert list(judged["device"]) == DEVICES
    with pytest.raises(MisuseError, match="no timing row to judge"):
        regret.by_policy(skipped, ["mlakit"])


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("folder", ["h200", "amd-epyc-x2"])
def test_a_table_tuned_on_half_of_the_cells_loses_little_on_the_other(
    folder, half, tmp_path, monkeypatch
):
    """Every clock, dtype, width pair and quantisation on record, each M in turn left out."""
    files = sorted((data_dir() / "recorded" / folder).glob("*.parquet"))
    skip = ("accuracy", "samples", "one-thread")
    rows = tune.candidates(
        pd.concat([read_rows(f) for f in files if not f.stem.endswith(skip)], ignore_index=True)
    )
    odd = rows.groupby(tune.GROUP)["m"].rank(method="dense") % 2 == half
    tune.write(rows["arch"].iloc[0], tune.build(rows[odd], "half"), tmp_path / "dispatch")
    monkeypatch.setattr(table, "data_dir", lambda: tmp_path)
    table.ladders.cache_clear()
    try:
        found = regret.regret(rows[~odd], "mlakit")
    finally:
        table.ladders.cache_clear()
    assert found.cells >= 3
    assert found.unjudged == 0
    assert found.mean <= 0.02
    assert found.worst <= 0.05, found.worst_cell
