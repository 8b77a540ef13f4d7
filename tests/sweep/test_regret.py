"""What mlakit's own rule loses on cells that its table never saw; every engine's rule beside it."""

import pandas as pd
import pytest

from mlakit.datafiles import data_dir
from mlakit.dispatch import policies
from mlakit.sweep import regret
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
