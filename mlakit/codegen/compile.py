"""Compile Triton kernels for cards that are not here, in a child process of its own.

Triton's interpreter and its compiler cannot share a process, so ``compile_many`` starts
``python -m mlakit.codegen.compile`` without ``TRITON_INTERPRET``, writes JSON to its input and
reads JSON back. Results are cached by Triton, keyed on source, Triton's version and options.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mlakit import archs
from mlakit.errors import MisuseError, unknown

ARCHS = (
    "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1250", "sm_80", "sm_90", "sm_100",
)  # fmt: skip
"""What every kernel is compiled for."""


@dataclass(frozen=True)
class Request:
    """One kernel for one arch. ``kernel``: ``module:function``.

    If that function is not a Triton kernel, it is called with ``arguments`` (plain JSON values) in
    the child and must return ``(fn, signature, constexprs, attrs, options)``; otherwise
    ``arguments`` holds those four under their names, ``divisible`` naming the arguments that are
    multiples of 16.
    """

    kernel: str
    arch: str
    arguments: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made. ``text``: AMD assembly or PTX; ``binary``: hsaco or cubin."""

    kernel: str
    arch: str
    text: str
    binary: bytes
    metadata: dict
    signature: tuple[tuple[str, str], ...]
    """(name, type) of each run-time argument, in order"""
    code_matches: bool
    """the text, assembled, gives the binary's code byte for byte (AMD only; False elsewhere)"""
    triton: str

    @property
    def amd(self) -> bool:
        """Whether this is code for an AMD card."""
        return self.arch.startswith("gfx")


def why_not() -> str | None:
    """One line that says why nothing can be compiled here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'mlakit[triton]' to compile kernels"
    return None


def compile_one(request: Request) -> Compiled:
    """Compile one kernel; see ``compile_many``."""
    return compile_many([request])[0]


def compile_many(requests: list[Request]) -> list[Compiled]:
    """Compile kernels in one child process (0.3 s to start, then about 0.1 s each).

    Raises:
        MisuseError: unknown arch, no Triton, or the compiler's own refusal, in one line; the
            first request that fails ends all.
    """
    if reason := why_not():
        raise MisuseError(reason)
    requests = [Request(r.kernel, archs.base_name(r.arch), r.arguments) for r in requests]
    for request in requests:
        if request.arch not in ARCHS:
            raise unknown("arch to compile for", request.arch, ARCHS)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = cache_dir()
    env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    child = subprocess.run(
        [sys.executable, "-m", "mlakit.codegen.compile"],
        input=json.dumps([asdict(r) for r in requests]),
        capture_output=True,
        text=True,
        env=env,
    )
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise MisuseError(f"the compiler's process ended with code {child.returncode}: {last}")
    answers = json.loads(child.stdout.splitlines()[-1])
    for answer in answers:
        if "error" in answer:
            raise MisuseError(answer["error"])
        answer["binary"] = base64.b64decode(answer["binary"])
        answer["signature"] = tuple(map(tuple, answer["signature"]))
    return [Compiled(**answer) for answer in answers]


def cache_dir() -> str:
    """Where compiled kernels are kept: TRITON_CACHE_DIR, the user's cache, or the temporary one."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return chosen
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlakit" / "triton"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return str(base)
    except OSError:
        base = Path("unwritable")
    return str(Path(tempfile.gettempdir()) / f"mlakit-triton-{os.getuid()}")


def section(binary: bytes, name: str) -> bytes:
    """One section of a 64-bit little-endian ELF file (hsaco, cubin, object); empty if absent."""
    at = int.from_bytes(binary[40:48], "little")
    size, count, names = (int.from_bytes(binary[k : k + 2], "little") for k in (58, 60, 62))
    headers = [binary[at + size * k : at + size * (k + 1)] for k in range(count)]

    def body(header: bytes) -> bytes:
        start, length = (int.from_bytes(header[k : k + 8], "little") for k in (24, 32))
        return binary[start : start + length]

    strings = body(headers[names])
    for header in headers:
        label = int.from_bytes(header[:4], "little")
        if strings[label : strings.index(b"\0", label)] == name.encode():
            return body(header)
    return b""


def _compile_here(request: dict) -> dict:
    """One request to one answer, inside the child."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arch, arguments = request["arch"], request["arguments"]
    module, name = request["kernel"].split(":")
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, triton.runtime.JITFunction):
        fn, signature = found, dict(arguments["signature"])
        constexprs, options = arguments.get("constexprs", {}), arguments.get("options", {})
        signature |= dict.fromkeys(constexprs, "constexpr")
        signature = {n: signature[n] for n in fn.arg_names}
        names = list(signature)
        divisible = arguments.get("divisible", ())
        attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    else:
        fn, signature, constexprs, attrs, options = found(**arguments)
    amd = arch.startswith("gfx")
    if amd:
        target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    else:
        target = GPUTarget("cuda", int(arch[3:]), 32)
    made = triton.compile(ASTSource(fn, signature, constexprs, attrs), target, options)
    text, binary = (made.asm[kind] for kind in (("amdgcn", "hsaco") if amd else ("ptx", "cubin")))
    plain = int | float | str | None
    metadata = {k: v for k, v in made.metadata._asdict().items() if isinstance(v, plain)}
    return dict(
        kernel=request["kernel"],
        arch=arch,
        text=text,
        binary=base64.b64encode(binary).decode(),
        metadata=metadata,
        signature=[[n, t] for n, t in signature.items() if t != "constexpr"],
        code_matches=amd and _assembles_to(text, arch, binary),
        triton=triton.__version__,
    )


def _assembles_to(text: str, arch: str, binary: bytes) -> bool:
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    features = ",-real-true16" if arch.startswith("gfx11") else ""
    again = section(amd.assemble_amdgcn(text, arch, features), ".text")
    return bool(again) and section(binary, ".text").startswith(again)


def _serve() -> None:
    answers = []
    for request in json.load(sys.stdin):
        try:
            answers.append(_compile_here(request))
        except Exception as error:
            line = re.sub(r"\s+", " ", str(error))[-300:]
            what = f"{request['kernel']} for {request['arch']}"
            answers.append({"error": f"{what} does not compile: {type(error).__name__}: {line}"})
    print(json.dumps(answers))


if __name__ == "__main__":
    _serve()
