"""What every Triton path needs to launch: a kernel compiled once for a device, and its C launcher.

Triton's own ``kernel[grid](...)`` looks every argument over on each call, 25 to 41 us of host time;
a kernel compiled from its signature is launched in 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch


def _plain_empty(shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# torch.compile's own allocation for its generated code, on the current device: 2.3 us for the two
# outputs, where torch.empty takes 10.0 of the 22 that a call took with it (H200's host).
empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _plain_empty)


@dataclass(frozen=True, slots=True)
class Launch:
    """A compiled kernel on one device with its grid."""

    device: int
    grid: int
    run: Callable
    """the compiled kernel's C launcher"""
    kernel: object
    function: int
    packed: object
    hooks: object
    """triton's launch hooks live on it: profilers set them"""
    constants: tuple


def prepare(device: int, grid: int, signature: Callable, *facts, **named_facts) -> Launch:
    """Lay out a launch of ``grid`` programs of the kernel that ``signature(*facts)`` describes.

    ``signature`` returns a kernel, its signature, constants, attributes and compiler options, as
    ``triton_kernels.kernel_signature`` does; facts are hashable, and each set is compiled once.
    """
    from triton import knobs

    with torch.cuda.device(device):
        kernel = _compiled(device, signature, *facts, **named_facts)
        return Launch(
            device=device,
            grid=grid,
            run=kernel.run,
            kernel=kernel,
            function=kernel.function,
            packed=kernel.packed_metadata,
            hooks=knobs.runtime,
            constants=tuple(kernel.src.constants.values()),
        )


@cache
def _compiled(device: int, signature: Callable, *facts, **named_facts):
    """The kernel compiled for, and loaded on, the current device."""
    import triton
    from triton.compiler import ASTSource

    function, types, constants, attrs, options = signature(*facts, **named_facts)
    return triton.compile(
        ASTSource(function, types, constants, attrs),
        target=triton.runtime.driver.active.get_current_target(),
        options=options,
    )


def start(launch: Launch, *arguments) -> None:
    """Launch on the current device, which must be the tensors', and its current stream."""
    stream = torch._C._cuda_getCurrentRawStream(launch.device)
    enter, leave, metadata = None, None, None
    hooks = launch.hooks
    if hooks.launch_enter_hook is not None and hooks.launch_enter_hook.calls:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        metadata = launch.kernel.launch_metadata((launch.grid, 1, 1), stream, *arguments)
    launch.run(
        launch.grid, 1, 1, stream, launch.function, launch.packed, metadata, enter, leave,
        *arguments, *launch.constants,
    )  # fmt: skip
