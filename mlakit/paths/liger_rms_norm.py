"""liger_rms_norm: Liger-Kernel's RMSNorm twice, its kernel called on the views."""

from __future__ import annotations

from mlakit.context import Context
from mlakit.paths.checks import kernel_limits
from mlakit.paths.peers import pair_of
from mlakit.paths.registry import Path


def norm(x, weight, eps):
    """The forward kernel that LigerRMSNormFunction calls, without the copy it makes of views.

    Casting mode ``llama``, its default: rounded before the weight, and again after it.
    """
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]


def supports(context: Context) -> str | None:
    """None if it can run, else why not in a line; a hypothetical context has the package."""
    if "liger_kernel" not in context.packages:
        return "liger_kernel is not installed: pip install liger-kernel"
    if context.vendor == "cpu":
        return "Liger's kernel needs a GPU"
    return kernel_limits(context)


PATH = Path(
    name="liger_rms_norm",
    text="two Liger-Kernel RMSNorm launches on the split views",
    call=pair_of(norm, "liger_kernel", "liger-kernel"),
    supports=supports,
    rounding="cast_then_weight",
    launches=2,
    makes_outputs=True,
)
