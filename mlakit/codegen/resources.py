"""What a compiled kernel uses, read off the compiler's output; evidence is ``compiled``.

Occupancy is waves (warps) that one SIMD (an SM's quarter) can hold, and what limits it. Sources:
LLVM "User Guide for AMDGPU Backend" and its AMDGPU subtarget (register files, granules, 16
workgroups a compute unit); NVIDIA "CUDA C++ Programming Guide", table of compute capabilities.
No speed is claimed by anything here.
"""

from __future__ import annotations

import difflib
import re
import struct
from collections import Counter
from dataclasses import asdict, dataclass

import pandas as pd

from mlakit import archs
from mlakit.codegen.compile import ARCHS, Compiled, compile_many, section
from mlakit.codegen.isa.memory import SIZES
from mlakit.codegen.shipped import request
from mlakit.errors import MisuseError
from mlakit.paths import triton_config
from mlakit.paths.triton_config import Config
from mlakit.shapes import Widths

_VGPRS = {
    "gfx90a": (512, 8, 8), "gfx942": (512, 8, 8), "gfx950": (512, 8, 8),
    "gfx1100": (1536, 24, 16), "gfx1201": (1536, 24, 16), "gfx1250": (1024, 16, 16),
}  # fmt: skip
"""Vector registers a lane of a SIMD has, allocation granule, most waves a SIMD holds."""
_SIMDS = 4
"""SIMDs that share one LDS: a CDNA compute unit, an RDNA workgroup processor, an NVIDIA SM."""
_GROUPS = {"gfx1100": 32, "gfx1201": 32}
"""Workgroups of several waves that share an LDS at most, where it is not 16."""
_NVIDIA_WARPS, _NVIDIA_REGISTERS, _NVIDIA_BLOCKS, _NVIDIA_RESERVED_LDS = 64, 65536, 32, 1024


@dataclass(frozen=True)
class Resources:
    """One kernel on one arch. Counts are static instructions; memory in bytes."""

    arch: str
    vgprs: int
    """AMD: vector registers with AGPRs; NVIDIA: registers a thread"""
    vgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    warps: int
    waves_per_simd: int
    limited_by: str
    loads: dict[int, int]
    """global loads: bytes a lane and instruction -> count"""
    stores: dict[int, int]
    mix: dict[str, int]
    reductions: dict[str, int]
    """instructions that move data between lanes, by mechanism"""
    bf16_convert: str
    instructions: int
    code_bytes: int
    agprs: int = 0
    sgprs: int | None = None
    sgpr_spills: int = 0
    evidence: str = "compiled"

    @property
    def spills(self) -> bool:
        """Whether any register went to memory."""
        return bool(self.vgpr_spills or self.sgpr_spills or self.scratch_bytes)

    @property
    def wide_share(self) -> float:
        """Share of global bytes that move 16 bytes a lane at a time."""
        total = Counter(self.loads) + Counter(self.stores)
        moved = sum(size * n for size, n in total.items())
        return sum(size * n for size, n in total.items() if size >= 16) / moved if moved else 0.0


def isa(compiled: Compiled) -> list[str]:
    """The kernel's instructions and labels, one a line, without directives and comments."""
    lines = []
    comment = ";" if compiled.amd else "//"
    for raw in compiled.text.splitlines():
        line = raw.split(comment)[0].strip()
        if line.startswith((".Lfunc_end", ".section")):
            break
        label = re.fullmatch(r"[.$]?\w[\w$]*:", line) and not re.match(r"\.?\$?L?(tmp|func)", line)
        if label or (line and line[0] not in ".({})$" and not line.endswith((":", ","))):
            lines.append(line.rstrip(";") if not compiled.amd else line)
    return lines


def diff(a: Compiled, b: Compiled) -> list[str]:
    """Unified diff of two kernels' instructions; register numbers are masked."""
    mask = re.compile(r"(?<=\b[vs])\[?\d+(?::\d+\])?|(?<=%)(\w+?)\d+\b|\.LBB\d+_\d+")
    old, new = ([mask.sub("_", line) for line in isa(c)] for c in (a, b))
    return list(difflib.unified_diff(old, new, a.arch, b.arch, lineterm="", n=1))


def resources(compiled: Compiled) -> Resources:
    """Read everything off one compiled kernel."""
    lines = [line for line in isa(compiled) if not line.endswith(":")]
    warps = compiled.metadata["num_warps"]
    own = _amd(compiled, lines) if compiled.amd else _nvidia(compiled, lines)
    limits = own["vgprs"], own["lds_bytes"], warps, own.get("sgprs", 0)
    waves, limit = occupancy(compiled.arch, *limits)
    return Resources(
        compiled.arch, warps=warps, waves_per_simd=waves, limited_by=limit,
        instructions=len(lines), **own,
    )  # fmt: skip


def _note(text: str, name: str) -> int:
    found = re.search(rf"^\s*(?:;\s*|\.){name}\s*:\s*(\d+)", text, re.M)
    return int(found.group(1)) if found else 0


_AMD_KINDS = (
    ("load", r"(global|buffer|flat)_load"),
    ("store", r"(global|buffer|flat)_store"),
    ("scratch", r"scratch_"),
    ("lds", r"ds_"),
    ("scalar_load", r"s_(buffer_)?load"),
    ("wait", r"s_(wait|nop|delay|clause|sendmsg)|v_nop|\w+_inv"),
    ("barrier", r"s_barrier"),
    ("branch", r"s_(c?branch|endpgm)"),
    ("scalar", r"s_|v_s_"),
    ("convert", r"v_cvt"),
    ("transcendental", r"v_(rsq|rcp|sqrt|exp|log)"),
    ("move", r"v_(mov|perm_|read|write|permlane|swap|accvgpr|cndmask)"),
    ("vector", r"v_"),
)
_PTX_KINDS = (
    ("load", r"ld\.global"),
    ("store", r"st\.global"),
    ("lds", r"(ld|st)\.shared"),
    ("scratch", r"(ld|st)\.local"),
    ("scalar_load", r"ld\.param"),
    ("shuffle", r"shfl"),
    ("barrier", r"bar"),
    ("branch", r"bra|ret"),
    ("convert", r"cvt"),
    ("transcendental", r"(rsqrt|rcp|sqrt|ex2|lg2|div)"),
    ("move", r"(mov|selp|prmt)"),
    ("vector", r""),
)


def _moved(lines: list[str], pattern: str, bytes_of) -> tuple[dict[int, int], dict[int, int]]:
    """(loads, stores): how many move how many bytes a lane; ``pattern`` finds verb and size."""
    found = [m.groups() for line in lines if (m := re.match(pattern, line))]
    moved = Counter((verb[0], bytes_of(*rest)) for verb, *rest in found)
    loads, stores = ({n: k for (v, n), k in moved.items() if v == verb} for verb in "ls")
    return loads, stores


def _count(lines: list[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for line in lines)


def _amd(compiled: Compiled, lines: list[str]) -> dict:
    text = compiled.text
    # A dual-issue pair is one instruction with two halves, each of which counts in the mix.
    halves = [half.strip() for line in lines for half in line.split("::")]
    loads, stores = _moved(
        lines,
        r"(?:global|buffer|flat)_(load|store)_(\w+)",
        lambda what: SIZES.get(what, (0, ""))[0],
    )
    reductions = {
        "dpp": r"_dpp|row_|quad_perm",
        "permute": r"^ds_(b?permute|swizzle)",
        "permlane": r"^v_permlane",
        "readlane": r"^v_readlane",
        "lds": r"^ds_(read|write|load|store)",
    }
    hardware, software = _count(halves, r"^v_cvt_pk_bf16_f32"), _count(halves, "v_add3_u32")
    return dict(
        vgprs=_note(text, "TotalNumVgprs") or _note(text, "NumVgprs"),
        agprs=_note(text, "NumAgprs"),
        sgprs=_note(text, "TotalNumSgprs"),
        vgpr_spills=_note(text, "vgpr_spill_count"),
        sgpr_spills=_note(text, "sgpr_spill_count"),
        scratch_bytes=_note(text, "ScratchSize"),
        lds_bytes=max(compiled.metadata.get("shared", 0), _note(text, "LDSByteSize")),
        loads=loads,
        stores=stores,
        mix=_mix(halves, _AMD_KINDS),
        reductions={name: _count(halves, pattern) for name, pattern in reductions.items()},
        bf16_convert=_convert(hardware, "v_cvt_pk_bf16_f32", software),
        code_bytes=len(section(compiled.binary, ".text")),
    )


def _mix(lines: list[str], kinds) -> dict[str, int]:
    return dict(Counter(next(k for k, p in kinds if re.match(p, line)) for line in lines))


def _convert(hardware: int, name: str, software: int) -> str:
    if hardware:
        return f"hardware: {hardware} x {name}"
    return f"software: {software} x round by add" if software else "none"


def occupancy(arch: str, vgprs: int, lds_bytes: int, warps: int, sgprs: int = 0) -> tuple[int, str]:
    """(waves a SIMD holds, what limits them) for one kernel.

    Registers are given out in granules; a workgroup's waves, their registers and its LDS must be
    there at once, so whole workgroups are counted, and the waves are those of the SIMD that holds
    most of them. An arch whose LDS size no source gave is not limited by LDS.
    """
    lds_total = (archs.arch(arch).lds_kib or 0) * 1024
    if arch.startswith("gfx"):
        total, granule, most = _VGPRS[arch]
        by_registers = total // (max(1, -(-vgprs // granule)) * granule)
        if arch.startswith("gfx9") and sgprs > 100:
            by_registers = min(by_registers, 7)
        groups = _GROUPS.get(arch, 16) if warps > 1 else _SIMDS * most
    else:
        most = _NVIDIA_WARPS // _SIMDS
        per_warp = -(-vgprs * 32 // 256) * 256
        by_registers = _NVIDIA_REGISTERS // _SIMDS // per_warp
        lds_bytes += _NVIDIA_RESERVED_LDS
        groups = _NVIDIA_BLOCKS
    slots = {"most a SIMD holds": most, "registers": by_registers}
    limits = {name: waves * _SIMDS // warps for name, waves in slots.items()}
    limits["workgroups"] = groups
    if lds_bytes and lds_total:
        limits["LDS"] = lds_total // lds_bytes
    limit = min(limits, key=lambda name: limits[name])
    return -(-limits[limit] * warps // _SIMDS), limit


def _nvidia(compiled: Compiled, lines: list[str]) -> dict:
    lines = [re.sub(r"^@!?%p\d+\s+", "", line) for line in lines]
    registers, frame = _cubin(compiled.binary)
    loads, stores = _moved(
        lines,
        r"(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b",
        lambda many, bits: int(many or 1) * int(bits) // 8,
    )
    return dict(
        vgprs=registers,
        vgpr_spills=frame // 4,
        scratch_bytes=frame,
        lds_bytes=compiled.metadata.get("shared", 0),
        loads=loads,
        stores=stores,
        mix=_mix(lines, _PTX_KINDS),
        reductions={
            "shuffle": _count(lines, "^shfl"),
            "lds": _count(lines, r"^(ld|st)\.shared"),
        },
        bf16_convert=_convert(_count(lines, r"^cvt\.rn\.bf16"), "cvt.rn.bf16", 0),
        code_bytes=len(section(compiled.binary, ".text." + compiled.metadata["name"])),
    )


def _cubin(binary: bytes) -> tuple[int, int]:
    """(registers, stack bytes) a thread, from the ``.nv.info`` section's attributes 2f and 11."""
    info, at, found = section(binary, ".nv.info"), 0, {}
    while at + 4 <= len(info):
        form, attribute, size = info[at], info[at + 1], struct.unpack_from("<H", info, at + 2)[0]
        if form == 4 and size >= 8:
            found[attribute] = struct.unpack_from("<I", info, at + 8)[0]
        at += 4 + (size if form == 4 else 0)
    return found.get(0x2F, 0), found.get(0x11, 0)


def table(
    hidden: list[Widths], dtype: str = "bf16", arch_names: tuple[str, ...] = ARCHS, **more
) -> pd.DataFrame:
    """Resources of the fused kernel, one row an arch and width; ``more`` goes to ``request``."""
    wanted = [(w, request(a, w, dtype, **more)) for w in hidden for a in arch_names]
    made = compile_many([ask for _, ask in wanted])
    rows = []
    for (widths, ask), compiled in zip(wanted, made, strict=True):
        found = resources(compiled)
        row = asdict(found) | dict(hidden=str(widths), dtype=dtype, wide_share=found.wide_share)
        rows.append(row | dict(config=str(ask.arguments["config"]), triton=compiled.triton))
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class ConfigChoice:
    """A config and why: the rule's figures for it. No speed is claimed."""

    config: Config
    found: Resources
    idle_share: float
    """share of lane slots that hold no element of a row"""
    considered: int
    rule: str = (
        "valid, no spills, most bytes moved 16 at a time, fewest idle lane slots, most waves a "
        "SIMD, fewest instructions"
    )

    @property
    def text(self) -> str:
        """One line for a person."""
        return f"Of {self.considered} configs the rule ({self.rule}) takes {self.config}."


def idle_share(config: Config, arch: str, widths: Widths, dtype: str = "bf16") -> float:
    """Share of the lane slots of a row pair that hold no element."""
    chunk = triton_config.lanes_of(arch) * triton_config.vector_width(dtype)
    slots = 0
    sides = (widths.q_lora_rank, config.q_warps), (widths.kv_lora_rank, config.k_warps)
    for width, warps in sides:
        slots += -(-width // (chunk * warps)) * chunk * warps
    return 1 - widths.hidden / slots


def choose_config(arch: str, widths: Widths, m: int = 64, dtype: str = "bf16") -> ConfigChoice:
    """The AMD config that the rule of ``ConfigChoice`` takes for an arch and a width pair.

    Raises:
        MisuseError: not an AMD arch, or no valid config without spills.
    """
    arch = archs.base_name(arch)
    if archs.vendor_of(arch) != "amd":
        raise MisuseError(f"{arch}: configs are chosen from compiled code for AMD archs only")
    q, k = widths.q_lora_rank, widths.kv_lora_rank
    space = triton_config.search_space(arch, m, q, k, dtype, batch_invariant=False)
    plain = {
        (c.q_warps, c.k_warps): c
        for c in reversed(space)
        if c.num_warps == max(c.q_warps if q else 1, c.k_warps)
        and (c.separate or not q)
        and not (c.persistent or c.evict_first)
        and c.k_rows * c.k_warps == c.num_warps
    }
    configs = list(plain.values())
    made = compile_many([request(arch, widths, dtype, config=c) for c in configs])
    ranked: list[tuple] = []
    for config, compiled in zip(configs, made, strict=True):
        found, idle = resources(compiled), idle_share(config, arch, widths, dtype)
        order = (-found.wide_share, idle, -found.waves_per_simd, found.instructions)
        if not found.spills:
            ranked.append((order, len(ranked), ConfigChoice(config, found, idle, len(configs))))
    if not ranked:
        raise MisuseError(f"{arch} {widths}: every valid config spills registers")
    return min(ranked)[2]
