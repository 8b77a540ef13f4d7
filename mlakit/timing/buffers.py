"""The ring of buffers a cell is timed on: every slot one call's inputs, weights and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mlakit import inputs
from mlakit.records import Cell

_ALIGN_BYTES = 256
"""what torch's own GPU allocator aligns to: no slot may run a slower, unaligned kernel"""
_ROWS_MADE = 8192
"""rows drawn anew; further ones repeat them, each by an exact sign and scale of its own (drawing
65,536 rows takes longer than timing them)"""


@dataclass(frozen=True)
class Slot:
    """One call: ``args`` in a path's order, and the outputs a graph writes (None: fresh ones)."""

    index: int
    args: tuple
    out: tuple[torch.Tensor, torch.Tensor] | None


def _weight_dtype(cell: Cell) -> torch.dtype:
    return inputs.TORCH_DTYPES[cell.norm_weight_dtype or cell.dtype]


def bytes_read(cell: Cell) -> int:
    """Bytes one call must read: both parts and both weights once."""
    size, hidden = inputs.TORCH_DTYPES[cell.dtype].itemsize, cell.widths.hidden
    return cell.m * hidden * size + hidden * _weight_dtype(cell).itemsize


def bytes_moved(cell: Cell, q_out_bytes: int | None = None) -> int:
    """Bytes one call must move: ``bytes_read`` and both outputs written once.

    ``q_out_bytes``: bytes of q's output where it is quantised (with its scales).
    """
    size = inputs.TORCH_DTYPES[cell.dtype].itemsize
    q_out = cell.m * cell.q_lora_rank * size if q_out_bytes is None else q_out_bytes
    return bytes_read(cell) + q_out + cell.m * cell.kv_lora_rank * size


def slot_bytes(cell: Cell) -> int:
    """Memory of one slot, the rope part and the outputs included."""
    size = inputs.TORCH_DTYPES[cell.dtype].itemsize
    w, m = cell.widths, cell.m
    row = w.row_stride if _is_split(cell) else w.hidden
    return m * (row + w.hidden) * size + w.hidden * _weight_dtype(cell).itemsize


def _is_split(cell: Cell) -> bool:
    """Whether q and k are views of one buffer."""
    return cell.layout in ("split", "split_out")


def _rotates_outputs(cell: Cell) -> bool:
    """Whether outputs are given, and rotate too; ``cpu`` and ``eager`` take fresh ones from the
    allocator unless the layout says that the caller gives them."""
    return cell.clock in ("graph", "kernel") or cell.layout == "split_out"


def slots_for(cell: Cell, cache_bytes: int) -> int:
    """Slots whose rotating bytes are twice the cache; one where the cell is timed hot."""
    turning = bytes_moved(cell) if _rotates_outputs(cell) else bytes_read(cell)
    return 1 if cell.cache == "hot" else -(-2 * cache_bytes // turning)


class _Slots:
    """Each is made when first asked for: of short rows there are a million, and a run uses few."""

    def __init__(self, count: int, make: Callable[[int], Slot]) -> None:
        self._made: list[Slot | None] = [None] * count
        self._make = make

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, i: int) -> Slot:
        found = self._made[i]
        if found is None:
            found = self._made[i] = self._make(i)
        return found


class Ring:
    """Slots taken in turn by every lane of a cell, so that none finds what another left cached.

    Raises:
        MisuseError: a layout that ``mlakit.inputs`` does not make.
    """

    def __init__(self, cell: Cell, device: str, count: int) -> None:
        self.cell, self.device = cell, device
        self._cursor = 0
        w, m, dtype = cell.widths, cell.m, inputs.TORCH_DTYPES[cell.dtype]
        split = _is_split(cell)
        sizes = [m * w.row_stride] if split else [m * w.q_lora_rank, m * w.kv_lora_rank]
        self._data = [_slab(count, n, dtype, device) for n in sizes]
        self._weights = [
            _slab(count, n, _weight_dtype(cell), device) for n in (w.q_lora_rank, w.kv_lora_rank)
        ]
        widths = (w.q_lora_rank, w.kv_lora_rank) if _rotates_outputs(cell) else ()
        self._out = [_slab(count, m * n, dtype, device) for n in widths]
        self.fill(cell.seed)
        self.slots = _Slots(count, self._slot)

    def fill(self, seed: int) -> None:
        """New inputs, in place; outputs become NaN. Slots differ by an exact sign and scale."""
        cell = self.cell
        made = inputs.make(
            min(cell.m, _ROWS_MADE),
            cell.widths,
            cell.dtype,
            weight_dtype=cell.norm_weight_dtype or None,
            layout="split" if _is_split(cell) else cell.layout,
            eps=cell.eps,
            seed=seed,
            device=self.device,
        )
        sources = [made.buffer] if len(self._data) == 1 else [made.q, made.k]
        generator = torch.Generator().manual_seed(seed)
        if cell.m > _ROWS_MADE:
            rows = torch.arange(cell.m, device=self.device) % _ROWS_MADE
            by_row = self._powers(cell.m, generator)[:, None]
            sources = [s[rows] * by_row for s in sources]
        self._sources = [s.reshape(-1) for s in sources]
        self._scales = self._powers(len(self._data[0]), generator)
        for slab, source in zip(self._data, self._sources, strict=True):
            part = slab[:, : source.numel()]
            part.copy_(source)
            part.mul_(self._scales[:, None])
        for slab, weight in zip(self._weights, (made.q_weight, made.k_weight), strict=True):
            slab[:, : weight.numel()] = weight
        for slab in self._out:
            slab.fill_(float("nan"))

    def _powers(self, count: int, generator: torch.Generator) -> torch.Tensor:
        powers = torch.tensor([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], dtype=torch.float32)
        picked = powers[torch.randint(6, (count,), generator=generator)]
        return picked.to(self._data[0].dtype).to(self.device)

    def intact(self, slot: Slot) -> bool:
        """Whether a slot's inputs, the rope part too, are still the bits that were filled in."""
        return all(
            torch.equal(slab[slot.index, : source.numel()], source * self._scales[slot.index])
            for slab, source in zip(self._data, self._sources, strict=True)
        )

    def take(self, count: int) -> list[Slot]:
        """The next ``count`` slots, going round."""
        n, start = len(self.slots), self._cursor
        self._cursor = (start + count) % n
        return [self.slots[(start + i) % n] for i in range(count)]

    def _slot(self, i: int) -> Slot:
        w, m = self.cell.widths, self.cell.m
        nq, nk = w.q_lora_rank, w.kv_lora_rank
        if len(self._data) == 1:
            rows = self._data[0][i, : m * w.row_stride].view(m, w.row_stride)
            q, k = rows[:, :nq], rows[:, nq : nq + nk]
        else:
            q, k = (s[i, : m * n].view(m, n) for s, n in zip(self._data, (nq, nk), strict=True))
        qw, kw = (s[i, :n] for s, n in zip(self._weights, (nq, nk), strict=True))
        out = None
        if self._out:
            q_out, k_out = self._out
            out = q_out[i, : m * nq].view(m, nq), k_out[i, : m * nk].view(m, nk)
        return Slot(i, (q, qw, self.cell.eps, k, kw, self.cell.eps), out)


def _slab(count: int, elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    step = _ALIGN_BYTES // dtype.itemsize
    return torch.empty(count, -(-max(elements, 1) // step) * step, dtype=dtype, device=device)
