"""liger_rms_norm: Liger-Kernel's RMSNorm twice, its kernel called on the views."""

from __future__ import annotations

from mlakit.paths.peers import peer


def norm(x, weight, eps):
    """The forward kernel that LigerRMSNormFunction calls, without the copy it makes of views.

    Casting mode ``llama``, its default: rounded before the weight, and again after it.
    """
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]


PATH = peer(
    "liger_rms_norm",
    "two Liger-Kernel RMSNorm launches on the split views",
    norm, "liger_kernel", "liger-kernel",
    lambda context: "Liger's kernel needs a GPU" if context.vendor == "cpu" else None,
    "cast_then_weight",
)  # fmt: skip
