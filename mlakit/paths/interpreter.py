"""Run a Triton kernel on CPU tensors: in a child process, since the interpreter needs one.

``TRITON_INTERPRET`` is read when triton is first imported and changes every kernel of a process,
so the child alone has it set. It is for correctness only: nothing that runs here may be timed.
One child serves a process until it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

_LOCK = threading.Lock()
_CHILDREN: dict[int, subprocess.Popen] = {}
"""by process id: a forked process must not share its parent's pipe"""


def launch(kernel: str, programs: int, arguments: dict[str, Any], written: set[str]) -> None:
    """Run ``module:function`` (a ``triton.jit`` kernel) over a grid of ``programs``.

    CPU tensors among ``arguments`` reach the kernel as pointers to a copy of the memory from their
    first to their last element, strides and gaps included; the ``written`` ones are copied back.

    Raises:
        RuntimeError: the kernel failed; the message is the interpreter's.
    """
    packed = {n: _pack(a) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    request = pickle.dumps((kernel, programs, packed, sorted(written)))
    with _LOCK:
        child = _child()
        try:
            _send(child.stdin, request)
            failure, memories = pickle.loads(_receive(child.stdout))
        except (OSError, EOFError, struct.error) as error:
            _CHILDREN.pop(os.getpid(), None)
            child.kill()
            raise RuntimeError(f"Triton's interpreter process ended: {error}") from error
    if failure:
        raise RuntimeError(f"Triton's interpreter: {failure}")
    for name, memory in memories.items():
        _write_back(arguments[name], packed[name][1], memory)


def _write_back(x: torch.Tensor, sent: bytes, got: bytes) -> None:
    """Change the bytes that the kernel changed, gaps between rows included, and no other.

    Two outputs may be columns of one buffer: the whole span of one holds the other's old bytes.
    """
    if not got:
        return
    new = np.frombuffer(got, np.uint8)
    held = np.ctypeslib.as_array((ctypes.c_uint8 * len(got)).from_address(x.data_ptr()))
    changed = new != np.frombuffer(sent, np.uint8)
    held[changed] = new[changed]


def _pack(x: torch.Tensor) -> tuple[torch.dtype, bytes]:
    if not x.numel():
        return x.dtype, b""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.dtype, ctypes.string_at(x.data_ptr(), (last + 1) * x.element_size())


def _child() -> subprocess.Popen:
    child = _CHILDREN.get(os.getpid())
    if child is None or child.poll() is not None:
        root = str(Path(__file__).resolve().parents[2])
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([root, inherited] if inherited else [root])
        child = subprocess.Popen(
            [sys.executable, "-m", "mlakit.paths.interpreter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        )
        _CHILDREN[os.getpid()] = child
        atexit.register(_close, child)
    return child


def _close(child: subprocess.Popen) -> None:
    if _CHILDREN.get(os.getpid()) is child and child.stdin:
        child.stdin.close()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()


def _send(pipe: Any, message: bytes) -> None:
    pipe.write(struct.pack("<Q", len(message)))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: Any) -> bytes:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError("its pipe closed")
    (size,) = struct.unpack("<Q", head)
    return pipe.read(size)


def _execute(request: bytes) -> dict[str, bytes]:
    """In the child: run one request and return the written arguments' memory."""
    kernel, programs, packed, written = pickle.loads(request)
    module, name = kernel.split(":")
    function = getattr(importlib.import_module(module), name)
    memory, arguments = {}, {}
    for key, value in packed.items():
        if isinstance(value, tuple):
            dtype, data = value
            # One spare element: torch makes no tensor of an empty buffer.
            memory[key] = bytearray(data) + bytes(8)
            arguments[key] = torch.frombuffer(memory[key], dtype=dtype)
        else:
            arguments[key] = value
    function[(programs,)](**arguments)
    return {n: bytes(memory[n][:-8]) for n in written}


def _as_compiled(convert: Callable) -> Callable:
    """The interpreter's float conversion, but bfloat16 to and from float32 as compiled kernels do.

    Triton 3.6's and 3.7's interpreter cuts float32 to bfloat16 instead of rounding to even, and
    reads subnormal bfloat16 as other numbers.
    """
    import triton.language as tl

    def converted(values, source, target, mode):
        if source == tl.bfloat16 and target == tl.float32:
            return np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16
        if source != tl.float32 or target != tl.bfloat16:
            return convert(values, source, target, mode)
        bits = np.ascontiguousarray(values).view(np.uint32)
        even = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(values), (bits >> 16) | 0x40, even).astype(np.uint16)

    return converted


def _serve() -> None:
    """The child's loop; it ends with its standard input."""
    from triton.runtime import interpreter

    interpreter._convert_float = _as_compiled(interpreter._convert_float)
    answers = os.fdopen(os.dup(1), "wb")
    # What a kernel prints must not mix with the answers.
    os.dup2(2, 1)
    while True:
        try:
            request = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: tuple = (None, _execute(request))
        except Exception as error:
            answer = (f"{type(error).__name__}: {error}", {})
        _send(answers, pickle.dumps(answer))


if __name__ == "__main__":
    _serve()
