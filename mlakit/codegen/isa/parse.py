"""Assembly text of one kernel to instructions (LLVM, "AMDGPU Instruction Syntax")."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

VCC, M0, TTMP = 106, 124, 108
_ENCODING = re.compile(r"(_e32|_e64_dpp|_e64|_dpp8|_dpp|_sdwa)$")


_NAMED: dict[str, tuple] = {
    "vcc": ("s", VCC, 2), "vcc_lo": ("s", VCC), "vcc_hi": ("s", VCC + 1), "m0": ("s", M0),
    "exec": ("exec", 0, 2), "exec_lo": ("exec", 0), "exec_hi": ("exec", 1),
    "null": ("null",), "off": ("off",), "scc": ("scc",),
}  # fmt: skip
"""kind, first register and how many of an operand that has a name"""


class EmulationError(RuntimeError):
    """The emulator cannot go on; one line that names the instruction, address or register."""


class Operand(NamedTuple):
    """One operand; ``kind`` is v, s, exec, scc, null, off, const or text."""

    kind: str
    index: int = 0
    count: int = 1
    neg: bool = False
    absolute: bool = False
    sext: bool = False
    half: int = 0
    """1 where the operand names the high 16 bits (``v3.h``)"""
    text: str = ""

    @property
    def plain(self) -> Operand:
        """The same without a sign: its bits as they are."""
        return self._replace(neg=False, absolute=False)


@dataclass(eq=False)
class Instruction:
    """One instruction: ``name`` without its encoding suffix, operands, modifiers, source line."""

    name: str
    plain: str
    """``name`` as the oldest generation that has it writes it"""
    operands: list[Operand]
    mods: dict[str, str]
    text: str
    source: tuple[str, int] | None = None
    dual: Instruction | None = None
    sdwa: bool = False
    handler: object = field(default=None, repr=False)

    def bits(self, key: str, default: int, n: int) -> list[int]:
        """A list modifier such as ``op_sel:[0,1]``, padded with ``default`` to ``n``."""
        found = [int(x, 0) for x in re.findall(r"\w+", self.mods.get(key, ""))]
        return found + [default] * (n - len(found))


@dataclass(frozen=True)
class Program:
    """A kernel's instructions and its labels (indices into them)."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    return [p.strip() for p in re.split(r",(?![^\[(]*[\])])", text)] if text else []


def _parse_operand(text: str) -> Operand:
    """One operand's text; an unknown word becomes kind ``text``."""
    neg = absolute = sext = False
    inner = text
    if inner.startswith("sext("):
        inner, sext = inner[5:-1], True
    if re.match(r"-[|vst]", inner) or inner.startswith("neg("):
        inner, neg = inner.removeprefix("neg(").removeprefix("-").rstrip(")"), True
    if inner.startswith("lit64("):
        inner = text = inner[6:-1]
    if inner.startswith("|"):
        inner, absolute = inner.strip("|"), True
    mods = dict(neg=neg, absolute=absolute, sext=sext, text=text)
    if m := re.fullmatch(r"(v|s|ttmp)(?:(\d+)(?:\.([lh]))?|\[(\d+):(\d+)\])", inner):
        kind, one, half, first, last = m.groups()
        index = int(one or first)
        count = int(last) - index + 1 if last else 1
        if kind == "ttmp":
            kind, index = "s", index + TTMP
        return Operand(kind, index, count, half=int(half == "h"), **mods)
    if inner in _NAMED:
        return Operand(*_NAMED[inner], **mods)
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?)", inner):
        return Operand("const", **mods)
    return Operand("text", **mods)


def const_bits(text: str, kind: str) -> int:
    """Bits of an inline constant or literal as an operand of ``kind`` (f16 f32 f64, else int).

    A 32-bit literal is the high half of a float64 (CDNA3 ISA, "Literal Constants").
    """
    text = text.strip("|")
    if kind == "f64" and re.fullmatch(r"0x[0-9a-f]{1,8}", text):
        return int(text, 0) << 32
    if "." in text and "x" not in text:
        code = {"f16": "<e", "f64": "<d"}.get(kind, "<f")
        return int.from_bytes(struct.pack(code, float(text)), "little")
    width = 64 if kind[1:] == "64" else 32
    return int(text, 0) & ((1 << width) - 1)


def parse_instruction(text: str, source: tuple[str, int] | None = None) -> Instruction:
    """One instruction from its text, dual issue (``::``) included."""
    first, _, second = text.partition("::")
    name, _, rest = first.strip().partition(" ")
    parts = _split(rest.strip())
    mods: dict[str, str] = {}
    if parts:
        last, *words = re.split(r"\s+(?![^\[(]*[\])])", parts[-1])
        parts[-1] = last
        if re.match(r"[a-z_0-9]+:", last):
            words, parts = [last, *words], parts[:-1]
        for word in words:
            key, _, value = word.partition(":")
            mods[key] = value or "1"
    sdwa = name.endswith("_sdwa")
    if name.startswith("v_"):
        name = _ENCODING.sub("", name).replace("v_dual_", "v_")
    dual = parse_instruction(second.strip(), source) if second else None
    operands = [_parse_operand(p) for p in parts]
    return Instruction(name, _plain_name(name), operands, mods, text, source, dual, sdwa)


def _plain_name(name: str) -> str:
    """A name without the parts that only newer generations write; AGPR moves are moves."""
    if name.startswith("v_accvgpr_"):
        return "v_mov_b32"
    name = name.replace("_nc_", "_").replace("_num_", "_")
    if name.startswith("s_"):
        name = name.replace("s_add_co_ci_", "s_addc_").replace("s_sub_co_ci_", "s_subb_")
        name = name.replace("_co_", "_")
    return name


def parse_program(asm: str) -> Program:
    """The kernel in ``asm`` (Triton's ``amdgcn`` text): the code between its label and its end.

    Raises:
        EmulationError: the text holds no AMD kernel.
    """
    kernel = re.search(r"^\s*\.amdhsa_kernel\s+(\S+)", asm, re.M)
    if not kernel:
        raise EmulationError("no .amdhsa_kernel in the assembly: this is not an AMD kernel")
    name = kernel.group(1)
    body = asm[re.search(rf"^{re.escape(name)}:", asm, re.M).start() :]
    # AGPRs are the upper part of one register file (LLVM, ".amdhsa_accum_offset").
    accum = int(found.group(1)) if (found := re.search(r"accum_offset\s+(\d+)", asm)) else 0
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    files: dict[str, str] = {}
    source = None
    for raw in body.splitlines():
        line = raw.split(";")[0].strip()
        if m := re.fullmatch(r"([.\w$]+):", line):
            if m.group(1).startswith(".Lfunc_end"):
                break
            labels[m.group(1)] = len(instructions)
        elif line.startswith(".file"):
            number, *path = re.findall(r'\d+|"[^"]*"', line)
            files[number] = path[-1].strip('"') if path[-1][0] == '"' else path[-2].strip('"')
        elif line.startswith(".loc"):
            _, number, at, *_ = line.split()
            source = (files.get(number, "?"), int(at))
        elif line.startswith(".section"):
            break
        elif line and not line.startswith("."):
            if accum:
                line = re.sub(r"\ba(\d+)\b", lambda m: f"v{int(m.group(1)) + accum}", line)
            instructions.append(parse_instruction(line, source))
    return Program(name, instructions, labels)
