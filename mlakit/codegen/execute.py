"""Run a compiled AMD kernel on numpy arrays, with no AMD card.

The machine code that Triton made is stepped instruction by instruction; all waves at one program
counter step together. Evidence of what comes out is ``emulated``: instruction semantics are
reproduced, with idealised reciprocals and roots (hardware may differ by one ulp); there is no
timing, and missing waits or races are not seen. An unknown instruction, an address outside the
given arrays, or a read of a register that was never written stops the run.

Layout of the launch: LLVM, "User Guide for AMDGPU Backend", sections "Kernel Descriptor", "Initial
Kernel Execution State" and "Preloaded Kernel Arguments".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from mlakit.codegen.compile import Compiled, section
from mlakit.codegen.isa import lanes, memory, packed, scalar, vector
from mlakit.codegen.isa.parse import (
    M0,
    TTMP,
    EmulationError,
    Instruction,
    parse_program,
)
from mlakit.codegen.isa.state import VCC_MASK, Family, Waves
from mlakit.errors import MisuseError

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1250")
_MAX_STEPS = 300_000
_ITEM = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8, "u32": 4, "u64": 8}


@dataclass(frozen=True)
class _Descriptor:
    """What the kernel descriptor (64 bytes in ``.rodata``) says about the launch."""

    lds_bytes: int
    kernarg_bytes: int
    user_sgprs: int
    workgroup_ids: tuple[bool, bool, bool]
    private_segment_buffer: bool
    kernarg_pointer: bool
    other_user_sgprs: bool
    wave32: bool
    scratch_bytes: int
    preload_dwords: int
    preload_offset: int
    float_mode: int


def _read_descriptor(binary: bytes) -> _Descriptor:
    """The kernel descriptor of a code object that holds one kernel."""
    raw = section(binary, ".rodata")[:64]
    if len(raw) < 64:
        raise EmulationError("no kernel descriptor in the code object")
    field = lambda at, n: int.from_bytes(raw[at : at + n], "little")  # noqa: E731
    rsrc1, rsrc2, properties, preload = field(48, 4), field(52, 4), field(56, 2), field(58, 2)
    return _Descriptor(
        lds_bytes=field(0, 4),
        kernarg_bytes=field(8, 4),
        user_sgprs=rsrc2 >> 1 & 31,
        workgroup_ids=tuple(bool(rsrc2 >> b & 1) for b in (7, 8, 9)),
        private_segment_buffer=bool(properties & 1),
        kernarg_pointer=bool(properties >> 3 & 1),
        other_user_sgprs=bool(properties & 0b1110110),
        wave32=bool(properties >> 10 & 1),
        scratch_bytes=field(4, 4),
        preload_dwords=preload & 127,
        preload_offset=preload >> 7,
        float_mode=rsrc1 >> 12 & 255,
    )


@dataclass(frozen=True)
class Step:
    """One instruction of one wave, for teaching."""

    index: int
    text: str
    source: tuple[str, int] | None
    """(file, line) of the kernel's source"""
    vgprs: np.ndarray
    """(registers, lanes) uint32 after the instruction"""
    sgprs: np.ndarray
    """(128,) uint32 after the instruction"""
    exec: np.ndarray
    """(lanes,) bool"""
    lds: np.ndarray
    """the workgroup's LDS bytes"""
    bytes_moved: dict[str, int]
    """bytes this step moved, by kind, over all waves that stepped with it"""


@dataclass(frozen=True)
class Run:
    """What a run executed. Outputs are in the arrays that were given."""

    executed: Counter
    """wave-instructions by name"""
    traffic: Counter
    """bytes by kind: load, store, lds_load, lds_store, scalar_load"""
    waves: int
    evidence: str = "emulated"


def run(
    compiled: Compiled,
    grid: tuple[int, ...],
    args: dict | list | tuple,
    *,
    trace=None,
    trace_wave: tuple[int, int] = (0, 0),
) -> Run:
    """Execute ``compiled`` over ``grid`` (up to three numbers of workgroups).

    Args:
        args: run-time arguments, by name or in the signature's order: numpy arrays (pointers: any
            dtype of the right item size, written in place) and numbers.
        trace: called with a ``Step`` after each instruction of ``trace_wave``.
        trace_wave: (workgroup, wave) to trace.

    Raises:
        MisuseError: not AMD code, an arch this emulator does not know, wrong arguments.
        EmulationError: the run stopped, and why.
    """
    machine = _Machine(compiled, grid, args)
    with np.errstate(all="ignore"):
        machine.go(trace, trace_wave)
    return Run(machine.executed, machine.memory.traffic, len(machine.rank))


def _arguments(compiled: Compiled, args) -> list:
    names = [n for n, _ in compiled.signature]
    if isinstance(args, dict):
        missing, extra = [n for n in names if n not in args], [n for n in args if n not in names]
        if missing or extra:
            wrong = f"missing {', '.join(missing)}" if missing else f"unknown {', '.join(extra)}"
            raise MisuseError(f"arguments of {compiled.kernel}: {wrong}; give {', '.join(names)}")
        args = [args[n] for n in names]
    if len(args) != len(names):
        raise MisuseError(
            f"{compiled.kernel} takes {len(names)} arguments, not {len(args)}: {names}"
        )
    return list(args)


_FAMILIES = [f for m in (scalar, memory, lanes, vector, packed) for f in m.FAMILIES]


@cache
def _family(plain: str) -> Family | None:
    return next((f for f in _FAMILIES if f.pattern.fullmatch(plain)), None)


def find_handler(i: Instruction) -> Callable[[Waves, Instruction], None] | None:
    """The function that runs an instruction; None for control flow and the unknown.

    A modifier that the function does not know makes the instruction unknown.
    """
    found = _family(i.plain)
    if found is None or not ("*" in found.mods or found.mods.issuperset(i.mods)):
        return None
    if i.dual is not None and not (found.run is find_handler(i.dual) is vector.arithmetic):
        return None
    return found.run


class _Machine:
    """One launch: memory, waves, and the loop that steps them."""

    def __init__(self, compiled: Compiled, grid: tuple[int, ...], args):
        if not compiled.amd:
            raise MisuseError(f"{compiled.arch} is not an AMD arch: only AMD code can be run here")
        if compiled.arch not in ARCHS:
            raise MisuseError(f"no emulation of {compiled.arch}; known: {', '.join(ARCHS)}")
        if not compiled.code_matches:
            raise MisuseError(f"{compiled.kernel}: the text does not assemble to the binary's code")
        self.grid = (*grid, 1, 1, 1)[:3]
        self.gfx = 910 if compiled.arch == "gfx90a" else int(compiled.arch[3:])
        self.program = parse_program(compiled.text)
        self.descriptor = d = _read_descriptor(compiled.binary)
        if d.float_mode != 0xF0:
            raise EmulationError(
                f"float mode {d.float_mode:#x}: only round-to-nearest, no flushing"
            )
        if d.scratch_bytes and compiled.arch == "gfx90a":
            raise EmulationError("the kernel spills, and gfx90a's swizzled scratch is not emulated")
        if d.other_user_sgprs:
            raise EmulationError("the kernel asks for dispatch or queue pointers")
        self.lanes = 32 if d.wave32 else 64
        self.per_group = compiled.metadata["num_warps"]
        self.memory = memory.Memory()
        lds = max(d.lds_bytes, compiled.metadata.get("shared", 0))
        self.lds = memory.Lds(int(np.prod(self.grid)), lds)
        self.executed: Counter = Counter()
        self.kernarg = self._kernarg(compiled, _arguments(compiled, args))
        next_free = re.search(r"\.amdhsa_next_free_vgpr\s+(\d+)", compiled.text)
        self.vgprs = int(next_free.group(1)) + 1
        groups = np.arange(int(np.prod(self.grid)))
        self.group = np.repeat(groups, self.per_group)
        self.rank = np.tile(np.arange(self.per_group), len(groups))
        # What is unknown stops the run only if it is reached.
        for i in self.program.instructions:
            i.handler = find_handler(i)

    def _kernarg(self, compiled: Compiled, args: list) -> np.ndarray:
        """The kernarg segment: arguments at their natural alignment, then Triton's scratch."""
        segment, at = bytearray(), 0
        for (name, kind), value in zip(compiled.signature, args, strict=True):
            if kind.startswith("*"):
                raw = self.memory.add(value, name).to_bytes(8, "little")
            elif isinstance(value, np.ndarray) or not np.isscalar(value):
                raise MisuseError(f"argument {name}: give a number for type {kind}")
            elif kind.startswith("fp"):
                raw = np.float32(value).tobytes() if kind == "fp32" else np.float64(value).tobytes()
            else:
                size = _ITEM[kind]
                raw = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            at += -at % len(raw)
            segment[at:at] = bytes(at - len(segment))
            segment += raw
            at += len(raw)
        segment += bytes(max(0, self.descriptor.kernarg_bytes - len(segment)))
        hidden = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", self.grid, strict=True)}
        hidden |= {"hidden_group_size_x": self.per_group * self.lanes, "hidden_grid_dims": 3}
        hidden |= {"hidden_group_size_y": 1, "hidden_group_size_z": 1}
        entry = r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(hidden_\w+)"
        for at, size, what in re.findall(entry, compiled.text):
            value = hidden.get(what, 0).to_bytes(int(size), "little")
            segment[int(at) : int(at) + int(size)] = value
        return np.frombuffer(bytes(segment), np.uint8).copy()

    def _initial(self) -> Waves:
        """All waves at the entry, registers as the ABI sets them."""
        d = self.descriptor
        shared = self.memory, self.lds
        waves = Waves(
            self.group, self.rank, self.lanes, self.vgprs, self.gfx, *shared, d.scratch_bytes
        )
        kernarg = self.memory.add(self.kernarg, "kernarg")

        def put(index: int, value) -> None:
            waves.s[index] = value
            waves.s_set[index] = True

        at = 4 * d.private_segment_buffer
        if d.private_segment_buffer:
            for k in range(4):
                put(k, 0)
        if d.kernarg_pointer:
            put(at, kernarg & 0xFFFFFFFF)
            put(at + 1, kernarg >> 32)
            at += 2
        words = self.kernarg[: len(self.kernarg) & ~3].view(np.uint32)
        for k in range(d.preload_dwords):
            put(at + k, words[d.preload_offset + k])
        ids = np.unravel_index(self.group, self.grid[::-1])[::-1]
        if self.gfx >= 1200:
            put(TTMP + 9, ids[0])
            put(TTMP + 7, ids[1] | (ids[2] << 16))
            put(TTMP + 8, self.rank << 25)
        else:
            at = d.user_sgprs
            for wanted, value in zip(d.workgroup_ids, ids, strict=True):
                if wanted:
                    put(at, value)
                    at += 1
        put(M0, 0)
        waves.v[0] = self.rank[:, None] * self.lanes + np.arange(self.lanes)
        waves.v_set[0] = True
        if d.preload_dwords:
            # Firmware that preloads enters 256 bytes in: past the loads that older firmware needs.
            first = next(i for i in self.program.instructions if i.name == "s_branch")
            waves.pc = self._target(first)
        return waves

    def _target(self, i: Instruction) -> int:
        return self.program.labels[i.operands[-1].text]

    def go(self, trace, trace_wave: tuple[int, int]) -> None:
        """Step the group at the lowest program counter until every wave has ended.

        A group is split where a branch parts its waves and joined where they meet again. Waves at a
        barrier wait until nothing else can run: then every wave that lives is at its barrier.
        """
        groups, steps = [self._initial()] if len(self.rank) else [], 0
        while groups:
            ready = [g for g in groups if not g.waiting]
            if not ready:
                for g in groups:
                    g.waiting = False
                continue
            now = min(ready, key=lambda g: g.pc)
            rest = [g for g in groups if g is not now]
            for g in [g for g in rest if not g.waiting and g.pc == now.pc]:
                now = now.join(g)
                rest.remove(g)
            stop = min(
                (g.pc for g in rest if not g.waiting), default=len(self.program.instructions)
            )
            while True:
                steps += 1
                if steps > _MAX_STEPS:
                    raise EmulationError(f"no end after {_MAX_STEPS} steps: an endless loop?")
                new = self._step(now, trace, trace_wave)
                if new is not None or now.pc >= stop:
                    break
            groups = rest + ([now] if new is None else new)

    def _step(self, waves: Waves, trace, trace_wave) -> list[Waves] | None:
        """One instruction; None to go on, or the groups that come of it."""
        i = self.program.instructions[waves.pc]
        self.executed[i.name] += len(waves.scc)
        before = Counter(self.memory.traffic) if trace else None
        waves.pc += 1
        outcome = None
        if i.handler is not None:
            try:
                i.handler(waves, i)
            except EmulationError as stop:
                where = "" if i.text in str(stop) else f" (in: {i.text})"
                raise EmulationError(f"{stop}{where}") from None
        else:
            outcome = self._control(waves, i)
        if trace:
            self._trace(waves, i, trace, trace_wave, before)
        return outcome

    def _control(self, waves: Waves, i: Instruction) -> list[Waves] | None:
        if i.name == "s_endpgm":
            return []
        if i.name in ("s_barrier", "s_barrier_wait"):
            waves.waiting = True
            return [waves]
        if i.name == "s_barrier_signal":
            return None
        taken = self._taken(waves, i)
        if taken.all():
            waves.pc = self._target(i)
        elif taken.any():
            jump, stay = waves.take(taken), waves.take(~taken)
            jump.pc = self._target(i)
            return [jump, stay]
        return None

    def _taken(self, waves: Waves, i: Instruction) -> np.ndarray:
        """(W,) bool: which waves branch."""
        if i.name == "s_branch":
            return np.ones(len(waves.scc), bool)
        known = re.fullmatch(r"s_cbranch_(scc|exec|vcc)(0|1|z|nz)", i.name)
        if not known:
            raise EmulationError(f"unknown instruction {i.name!r} in: {i.text}")
        what, when = known.groups()
        if what == "vcc":
            truth = waves.read_mask(VCC_MASK).any(1)
        else:
            truth = waves.scc if what == "scc" else waves.exec.any(1)
        return truth == (when in ("1", "nz"))

    def _trace(self, waves, i, trace, trace_wave, before) -> None:
        found = np.nonzero((waves.group == trace_wave[0]) & (waves.rank == trace_wave[1]))[0]
        if not len(found):
            return
        w = found[0]
        row = self.lds.data[trace_wave[0] * self.lds.pitch :][: self.lds.size]
        moved = {k: n - before[k] for k, n in self.memory.traffic.items() if n != before[k]}
        at = self.program.instructions.index(i)
        state = waves.v[:, w].copy(), waves.s[:, w].copy(), waves.exec[w].copy(), row.copy()
        trace(Step(at, i.text, i.source, *state, moved))
