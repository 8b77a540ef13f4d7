"""A contribution is whole, untouched, plausible and controlled, or refused with the reason."""

import json
import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from timing_rows import H200, row

from mlakit.datafiles import data_dir
from mlakit.errors import MisuseError
from mlakit.records import Cell
from mlakit.report import contribute
from mlakit.sweep import store


def cells() -> list[Cell]:
    return [c for c in contribute.cells("sm_90") if c.m in (64, 4096) and c.q_lora_rank == 1536]


@pytest.fixture
def make(tmp_path):
    """A finished run with rows of two paths, and a function that packs it."""

    def pack(change=lambda r: r, only=cells) -> "contribute.Path":
        run_dir = store.new_run_dir(tmp_path)
        asked = only()
        run = store.create_run(run_dir, asked, measure=["timing"])
        env = {"python": "3.12", "devices": {"cuda:0": H200}}
        run.save(status="ok", environment=env, other_environments=[])
        run.close()
        for cell in asked:
            us = 1.5 + cell.m * 8192 / 3.9e6
            more = H200 | cell.columns | {"started_at": "2026-11-30T08:00:00Z"}
            more |= {"bytes_moved": cell.m * 8192}
            rows = [row("triton_fused", us, **more), row("torch_rms_norm", 2 * us, **more)]
            store.write_part(run_dir, "timing", cell.id, [change(r) for r in rows])
        return contribute.pack(run_dir, tmp_path / contribute.file_name(run_dir))

    return pack


def test_a_good_file_is_filed_once(make, tmp_path):
    file = make()
    assert file.name == "h200-" + file.stem[-10:] + ".parquet"
    filed = contribute.ingest(file, tmp_path / "recorded")
    assert filed.parent.name == "h200"
    frame = store.read_rows(filed)
    assert set(frame["evidence"]) == {"recorded"}
    assert set(contribute.validate(filed)["path_ran"]) == {"triton_fused", "torch_rms_norm"}
    with pytest.raises(MisuseError, match="filed already"):
        contribute.ingest(file, tmp_path / "recorded")


def tampered(file, change) -> None:
    table = pq.read_table(file)
    frame = table.to_pandas()
    change(frame)
    changed = pa.Table.from_pandas(frame, schema=table.schema, preserve_index=False)
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), file)


def test_rows_recorded_on_an_h200_pass_and_a_tampered_file_of_them_does_not(tmp_path):
    """DeepSeek-V3's cells of the committed run as a contribution, skipped paths and all.

    Its A/A control is the same card's part of the run before it, over two cards.
    """
    kept = data_dir() / "recorded" / "h200"
    again = store.read_rows(kept / "two-cards" / "two-cards.parquet")
    again["cell_id"] = again.cell_id.str[::-1]
    rows = pd.concat([store.read_rows(sorted(kept.glob("*qk-norm.parquet"))[-1]), again])
    rows = rows[(rows.q_lora_rank == 1536) & (rows.dtype == "bf16")]
    rows = rows[rows.device_id == rows.device_id.iloc[0]]
    run_dir = store.new_run_dir(tmp_path)
    run = store.create_run(run_dir, cells(), measure=["timing"])
    run.save(status="ok", environment={"devices": {"cuda:0": H200}}, other_environments=[])
    run.close()
    for cell_id, part in rows.groupby("cell_id"):
        given = part.astype(object).where(part.notna(), None).to_dict("records")
        store.write_part(run_dir, "timing", cell_id, [r | {"evidence": "measured"} for r in given])
    file = contribute.pack(run_dir, tmp_path / contribute.file_name(run_dir))
    filed = contribute.ingest(file, tmp_path / "recorded")
    assert len(contribute.validate(filed)) == len(rows)
    tampered(file, lambda f: f.__setitem__("p50_us", f["p50_us"] * 0.9))
    with pytest.raises(MisuseError, match="hash differs"):
        contribute.ingest(file, tmp_path / "elsewhere")


def forged(file, change):
    """``file`` with other rows, and the hash that fits them: whoever sends one can write it."""
    table = pq.read_table(file)
    table = change(table).replace_schema_metadata(table.schema.metadata)
    frame = table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    told = json.loads(table.schema.metadata[contribute._KEY])
    told["rows_sha256"] = contribute._rows_hash(frame)
    metadata = table.schema.metadata | {contribute._KEY: json.dumps(told).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), file)
    return file


def with_values(column, value, kind=None):
    """A change of ``forged``: ``value`` in all rows of ``column``."""

    def change(table):
        at = table.column_names.index(column)
        values = pa.array([value] * len(table), kind or table.schema.field(column).type)
        return table.set_column(at, column, values)

    return change


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("started_at", "../../evil", "started_at is '../../evil'"),
        ("started_at", "2026-11-30", "a time such as"),
        ("started_at", "2026-11-30T08:00:00+00:00", "a time such as"),
        ("started_at", "2026-13-30T08:00:00Z", "a time such as"),
        ("started_at", None, "a time such as"),
        ("device", None, "has no device"),
        ("cell_id", None, "has no cell_id"),
        ("cache", None, "has no cache"),
        ("arch", "nonsense", "unknown arch 'nonsense'"),
        ("arch", None, "unknown arch"),
        ("p50_us", float("inf"), "p50_us holds what is no finite number"),
        ("p05_us", float("nan"), "p05_us holds what is no finite number"),
        ("gbps", float("-inf"), "gbps holds what is no finite number"),
        ("p05_us", None, "a time is absent"),
        ("p50_us", None, "a time is absent"),
        ("p50_us", 0.0, "not positive"),
        ("p95_us", 0.1, "out of order"),
    ],
)
def test_rows_with_a_fitting_hash_are_still_judged(make, tmp_path, column, value, says):
    file = forged(make(), with_values(column, value))
    before = sorted(tmp_path.parent.rglob("*"))
    with pytest.raises(MisuseError, match=re.escape(says)):
        contribute.ingest(file, tmp_path / "recorded")
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_a_file_with_other_columns_is_refused(make):
    file = make()
    whole = file.read_bytes()
    for column in ("p50_us", "path_ran", "cell_id", "cache", "note"):
        file.write_bytes(whole)
        with pytest.raises(MisuseError, match=rf"not those of timing rows \({column}\)"):
            contribute.validate(forged(file, lambda t, c=column: t.drop_columns([c])))
    for column, value, kind in (("p50_us", "5", pa.string()), ("m", 64.0, pa.float64())):
        file.write_bytes(whole)
        with pytest.raises(MisuseError, match=f"column {column} is {kind}, not"):
            contribute.validate(forged(file, with_values(column, value, kind)))
    file.write_bytes(whole)
    assert len(contribute.validate(forged(file, lambda t: t))) > 0


def test_a_damaged_file_is_refused(make):
    file = make()
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(MisuseError, match="does not read as Parquet"):
        contribute.validate(file)


def test_a_file_of_somebody_else_is_refused(tmp_path):
    file = tmp_path / "x.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(file)
    with pytest.raises(MisuseError, match="no provenance"):
        contribute.validate(file)


def test_too_much_bandwidth_is_refused(make):
    file = make(lambda r: r | {k: r[k] / 3 for k in ("p05_us", "p50_us", "p95_us")})
    with pytest.raises(MisuseError, match="implausible"):
        contribute.validate(file)


def test_no_control_is_refused(make):
    with pytest.raises(MisuseError, match="no A/A control"):
        make(only=lambda: [c for c in cells() if c.repeat == 0])


def test_a_failing_control_is_refused(make):
    twice = {c.id for c in cells() if c.repeat == 1}

    def slower(r: dict) -> dict:
        factor = 1.3 if r["cell_id"] in twice else 1.0
        return r | {k: r[k] * factor for k in ("p05_us", "p50_us", "p95_us")}

    with pytest.raises(MisuseError, match="A/A control fails"):
        make(slower)


def test_no_path_of_a_machine_is_kept(make):
    file = make(lambda r: r | {"note": "/home/somebody/x and hf_ABCDEFGHIJ"})
    notes = set(store.read_rows(file)["note"])
    assert notes == {"[home]/x and [removed]"}
