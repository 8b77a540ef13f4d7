"""Timing rows made up for tests."""

from mlakit.records import SCHEMA_VERSION, TIMING_COLUMNS

ROW = dict.fromkeys(TIMING_COLUMNS) | {
    "schema_version": SCHEMA_VERSION, "evidence": "measured", "status": "ok", "device": "a CPU",
    "vendor": "cpu", "arch": "cpu", "q_lora_rank": 1536, "kv_lora_rank": 512, "m": 64,
    "dtype": "bf16", "quant": "none", "layout": "split", "clock": "cpu", "cache": "cold",
}  # fmt: skip
H200 = {"device": "NVIDIA H200", "vendor": "nvidia", "arch": "sm_90", "arch_raw": "sm_90"}
ON_H200 = H200 | {"clock": "graph", "evidence": "recorded"}


def row(path: str, us: float | None = None, ratio: float | None = None, **more) -> dict:
    """A whole row of one path, ``ok`` on a CPU unless ``more`` says otherwise.

    Around ``us`` lie quantiles 10 % either way, and so lies the interval of ``ratio``.
    """
    made = ROW | {"path_requested": path, "path_ran": path} | more
    if us is not None:
        made |= {"n": 100, "p05_us": 0.9 * us, "p20_us": 0.9 * us, "p50_us": us, "p80_us": 1.1 * us}
        made |= {"p95_us": 1.1 * us}
        if made["bytes_moved"]:
            made["gbps"] = made["bytes_moved"] / us / 1e3
    if ratio is not None:
        made |= {"ratio": ratio, "ratio_lo": 0.9 * ratio, "ratio_hi": 1.1 * ratio}
    return made | {k: v for k, v in more.items() if k in TIMING_COLUMNS}
