"""triton_fused as compiled for a card that is not here: what its speed depends on."""

import os
import re
import subprocess

import pytest

from mlakit.paths.triton_config import heuristic

triton = pytest.importorskip("triton")
TOOL = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "nvdisasm")


LETTERS = {"LDG": "L", "STG": "S", "ACQBULK": "W", "PREEXIT": "R", "SHFL": "s"}
"""loads, stores, the wait for the kernel before, the release of the next one, shuffles"""


@pytest.mark.skipif(not os.path.exists(TOOL), reason="this triton brings no nvdisasm")
@pytest.mark.parametrize(
    ("m", "q_width", "k_width", "weights"),
    [
        (4096, 0, 512, None),
        (4096, 1024, 512, None),
        (512, 768, 256, "fp32"),
        (8, 1536, 512, None),
        (16384, 768, 256, None),
    ],
)
def test_weights_are_asked_for_before_the_reduction(tmp_path, m, q_width, k_width, weights):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mlakit.paths.triton_kernels import kernel_signature

    config = heuristic("sm_90", m, q_width, k_width)
    *source, options = kernel_signature(config, "sm_90", q_width, k_width, "bf16", weights)
    target = GPUTarget("cuda", 90, 32)
    built = triton.compile(ASTSource(*source), target=target, options=options)
    (tmp_path / "kernel.cubin").write_bytes(built.asm["cubin"])
    command = [TOOL, "-c", tmp_path / "kernel.cubin"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    order = "".join(LETTERS[f] for f in re.findall(rf"\b({'|'.join(LETTERS)})\b", listing))
    parts = 2 if q_width else 1
    assert re.fullmatch(rf"R?((WR?)?L+s+S+){{{parts}}}", order), order


def test_no_more_than_two_are_added_at_once():
    """The order of a longer sum is the layout's, which differs by rows a program and alignment."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mlakit.paths.triton_kernels import kernel_signature

    config = heuristic("sm_90", 4096, 769, 33)
    *source, options = kernel_signature(config, "sm_90", 769, 33, aligned=False)
    target = GPUTarget("cuda", 90, 32)
    text = triton.compile(ASTSource(*source), target=target, options=options).asm["ttir"]
    reduce = r'"tt.reduce"\(.*?axis = (\d).*?\) : \(tensor<([\dx]+)xf32>\)'
    sums = re.findall(reduce, text, re.DOTALL)
    assert len(sums) == 10
    assert {int(shape.split("x")[int(axis)]) for axis, shape in sums} == {2}
