"""One instruction at a time on registers that a test fills; edge values to fill them with."""

import itertools

import numpy as np

from mlakit.codegen.execute import find_handler
from mlakit.codegen.isa.memory import Lds, Memory
from mlakit.codegen.isa.parse import parse_instruction
from mlakit.codegen.isa.state import Waves

F32_EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, 3.4028235e38, -3.4028235e38, 1.1754944e-38, 1e-45, -1e-40,
     np.inf, -np.inf, np.nan, 65504.0, 65520.0, 5.96e-8, 2.98e-8, 1.00390625, 1.01171875, 448.0,
     464.0, 465.0, 240.0, 248.0, 249.0, 0.0009765625, 0.25, 0.75, 5.0, 7.0, 1e30, 3.0],
    np.float32,
)  # fmt: skip
PAIRS = np.array(list(itertools.product(F32_EDGES, F32_EDGES)), np.float32)


def waves(gfx=942, **registers):
    """One wave, its registers written: ``v1=array`` for lanes (repeated), ``s2=number``."""
    lanes = 64 if gfx < 1100 else 32
    w = Waves(np.zeros(1, int), np.zeros(1, int), lanes, 64, gfx, Memory(), Lds(1, 64))
    w.s_set[:] = w.v_set[:] = True
    put(w, **registers)
    return w


def put(w, **registers):
    for name, value in registers.items():
        kind, index = name[0], int(name[1:])
        if kind == "s":
            w.s[index] = value
        else:
            value = np.atleast_1d(value)
            bits = np.resize(value, w.lanes).view(f"u{value.dtype.itemsize}")
            w.v[index] = bits.astype(np.uint32)


def execute(w, *texts):
    """Run the instructions on the wave, which is returned."""
    for text in texts:
        i = parse_instruction(text)
        handler = find_handler(i)
        assert handler is not None, f"unknown: {text}"
        with np.errstate(all="ignore"):
            handler(w, i)
    return w


def v(w, register, n=None):
    """The first n lanes of a vector register."""
    return w.v[register, 0, :n]


def f32(w, register, n=None):
    return v(w, register, n).view(np.float32)


def same(a, b):
    """Equal values, NaN and the signs of zeros included."""
    a, b = np.asarray(a), np.asarray(b)
    signs = np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)])
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(*signs)
