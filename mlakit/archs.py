"""Architectures: parse their names, find the devices here, know their limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from mlakit.datafiles import data_dir, maybe, read_table
from mlakit.errors import MisuseError, unknown

_TRIPLE = "amdgcn-amd-amdhsa--"


@dataclass(frozen=True)
class Arch:
    """What mlakit uses of a line of ``data/archs.csv``; None where no source gave the figure."""

    name: str
    product: str
    vendor: str
    compute_units: int | None
    lds_kib: int | None
    l2_mib: float | None
    llc_mib: float | None
    hbm_gbps: float | None
    fp8_format: str | None
    mxfp4_native: bool
    bf16_convert: str


_FIGURES = {
    "compute_units": int, "lds_kib": int, "l2_mib": float, "llc_mib": float, "hbm_gbps": float,
}  # fmt: skip


def _arch(r: dict) -> Arch:
    return Arch(
        name=r["arch"], product=r["product"], vendor=r["vendor"],
        **{name: maybe(kind, r[name]) for name, kind in _FIGURES.items()},
        fp8_format=r["fp8_format"] or None, mxfp4_native=r["mxfp4_native"] == "yes",
        bf16_convert=r["bf16_convert"],
    )  # fmt: skip


@cache
def products() -> tuple[Arch, ...]:
    """Every product of ``data/archs.csv``; several products may share one arch."""
    return read_table(data_dir() / "archs.csv", _arch)


@cache
def known() -> tuple[str, ...]:
    """The arch names a person may ask for: ``cpu`` and each arch of the table, once."""
    return ("cpu", *dict.fromkeys(p.name for p in products()))


@cache
def arch(name: str) -> Arch:
    """The first product listed for ``name``'s base arch.

    Raises:
        MisuseError: the arch is not in the table (``cpu`` has no row either).
    """
    base = base_name(name)
    for p in products():
        if p.name == base:
            return p
    raise unknown("arch", name, known())


def base_name(raw: str) -> str:
    """The device arch in a raw name: ``gfx942:sramecc+:xnack-`` is ``gfx942``.

    Accepts a full target triple, ``sm90``/``sm_90a`` spellings and ``cpu``. A generic target such
    as ``gfx9-4-generic`` is kept whole: it is a compile target, never a device. Base names are
    compared whole, never by substring (``gfx9`` is inside both ``gfx90a`` and ``gfx942``).
    """
    name = raw.strip().lower().removeprefix(_TRIPLE).split(":")[0]
    sm = re.fullmatch(r"sm_?(\d+)[a-z]?", name)
    return f"sm_{sm.group(1)}" if sm else name


def is_device_arch(name: str) -> bool:
    """Whether ``name`` (a base name) names real hardware rather than a generic target."""
    return name == "cpu" or bool(re.fullmatch(r"gfx[0-9a-f]{3,5}|sm_\d+", name))


def check(raw: str) -> str:
    """The base name of ``raw`` if mlakit knows that arch.

    Raises:
        MisuseError: unknown arch, with the arch of the product so called or the nearest match.
    """
    base = base_name(raw)
    if base not in known():
        if not is_device_arch(base) and base.startswith("gfx"):
            raise MisuseError(
                f"arch {raw!r} is a generic compile target, not a device; "
                f"name a device arch: {', '.join(known())}"
            )
        called = [p for p in products() if len(base) > 3 and p.product.lower().startswith(base)]
        if called:
            name, product = called[0].name, called[0].product
            raise MisuseError(f"unknown arch {raw!r}: did you mean {name!r}, that of {product}?")
        raise unknown("arch", raw, known())
    return base


def vendor_of(name: str) -> str:
    """``amd``, ``nvidia`` or ``cpu`` for a base arch name."""
    return "amd" if name.startswith("gfx") else "nvidia" if name.startswith("sm_") else "cpu"


def from_sm_90(name: str) -> bool:
    """Whether a card is NVIDIA's of sm_90 or later: it can launch early, and QuACK runs on it."""
    return name.startswith("sm_") and int(name[3:]) >= 90


def fp8_format(name: str) -> str | None:
    """The FP8 encoding of an arch: ``fp8_fnuz`` (gfx942), ``fp8_ocp``, or None where it has none.

    The CPU computes in OCP, the encoding that torch's float8_e4m3fn holds.
    """
    return "fp8_ocp" if name == "cpu" else arch(name).fp8_format


@dataclass(frozen=True)
class Device:
    """One device that torch sees now; every figure is read from the device, none from a table."""

    index: int
    name: str
    vendor: str
    arch: str
    arch_raw: str
    compute_units: int
    memory_bytes: int
    l2_bytes: int | None
    uuid: str


@cache
def devices() -> tuple[Device, ...]:
    """The GPUs torch can use; empty on a machine without one. Never raises.

    The vendor comes from torch's build (``torch.version.hip``) and the device's own properties,
    never from ``cuda.is_available()`` alone, nor from folders or tools on disk.
    """
    import torch

    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(_device(torch, i) for i in range(count))
    except (RuntimeError, AssertionError):
        return ()


def _device(torch, index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    raw = p.gcnArchName if amd else f"sm_{p.major}{p.minor}"
    return Device(
        index=index,
        name=p.name,
        vendor="amd" if amd else "nvidia",
        arch=base_name(raw),
        arch_raw=raw,
        compute_units=p.multi_processor_count,
        memory_bytes=p.total_memory,
        l2_bytes=getattr(p, "L2_cache_size", None),
        uuid=str(getattr(p, "uuid", f"index-{index}")),
    )


def here() -> tuple[str, ...]:
    """The base arch names present on this machine; ``cpu`` is always the last."""
    return (*dict.fromkeys(d.arch for d in devices()), "cpu")


def of(device) -> str:
    """The arch of a ``torch.device``; ``cpu`` for all that is no GPU."""
    return devices()[device.index or 0].arch if device.type == "cuda" else "cpu"


def default_device() -> str:
    """``cuda`` (torch's name for AMD and NVIDIA GPUs alike) where there is one, else ``cpu``."""
    return "cuda" if devices() else "cpu"
