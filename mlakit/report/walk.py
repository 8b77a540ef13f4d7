"""Step through an AMD kernel as one wave sees it: instruction, source line, lanes, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from mlakit import inputs
from mlakit.codegen import shipped
from mlakit.codegen.execute import Step
from mlakit.shapes import Widths

SMALL = Widths(256, 128, 64)
"""Widths of the walk: one wave, a few hundred instructions, every kind of them."""


@dataclass(frozen=True)
class Walk:
    """``steps``: a row an instruction. ``lanes``: (steps, lanes), what the vector register that an
    instruction wrote then held, as float32; NaN rows where it wrote none, NaN lanes where the
    execution mask is off."""

    steps: pd.DataFrame
    lanes: np.ndarray


def walk(arch: str, dtype: str = "bf16", seed: int = 0) -> Walk:
    """Run one row of the fused norm through ``arch``'s binary, and keep what each step did.

    Evidence is ``emulated``: instruction semantics, no timing.

    Raises:
        MisuseError: not an AMD arch, or no Triton here.
        EmulationError: the run stopped, and why.
    """
    rows: list[dict] = []
    held: list[np.ndarray] = []
    before: list[np.ndarray | None] = [None, None]

    def see(step: Step) -> None:
        vgprs, lds = before
        known = vgprs is not None and vgprs.shape == step.vgprs.shape
        wrote = np.flatnonzero((vgprs != step.vgprs).any(axis=1)) if known else np.array([], int)
        value = np.full(len(step.exec), np.nan, np.float32)
        if len(wrote):
            bits = np.ascontiguousarray(step.vgprs[wrote[0]])
            value = np.where(step.exec, bits.view(np.float32), np.nan)
        file, line = step.source or ("", 0)
        rows.append(
            {
                "step": step.index,
                "source": f"{Path(file).name}:{line}" if file else "",
                "instruction": step.text.strip(),
                "writes": ", ".join(f"v{r}" for r in wrote[:4]),
                "lanes": int(step.exec.sum()),
                "bytes": ", ".join(f"{n} {k}" for k, n in step.bytes_moved.items() if n),
                "lds": "written" if lds is not None and (lds != step.lds).any() else "",
            }
        )
        held.append(value)
        before[:] = [step.vgprs.copy(), step.lds.copy()]

    given = inputs.make(1, SMALL, dtype, seed=seed)
    shipped.emulate_qk_rmsnorm(arch, given, trace=see)
    return Walk(pd.DataFrame(rows), np.array(held))


def kinds(steps: pd.DataFrame) -> pd.DataFrame:
    """How many instructions of each kind the wave executed: vector, scalar, memory, LDS."""
    names = steps["instruction"].str.split().str[0]
    prefixes = dict.fromkeys(("global_", "buffer_", "flat_"), "global memory")
    prefixes |= {"ds_": "LDS", "s_": "scalar"}
    kind = names.map(lambda n: next((k for p, k in prefixes.items() if n.startswith(p)), "vector"))
    found = kind.value_counts().rename_axis("kind").reset_index(name="executed")
    return found.assign(distinct=[names[kind == k].nunique() for k in found["kind"]])
