"""Clocks, power, temperature, throttling and foreign processes, where the machine shows them.

Everything here only reads: clocks and power limits are never changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
from functools import cache
from pathlib import Path

from mlakit.archs import Device

NOT_READABLE = "not readable"
_CLOCKS, _TEMPERATURE_GPU = (1, 2), 0
"""``NVML_CLOCK_SM`` and ``_MEM``, ``NVML_TEMPERATURE_GPU`` (nvml.h)"""


def _cpuinfo() -> list[tuple[str, str]]:
    """``/proc/cpuinfo`` as (name, value) pairs; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [(k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in lines)]


def cpu_model() -> str:
    """The processor's name, or where it has none its architecture."""
    return next((v for k, v in _cpuinfo() if k == "model name"), platform.machine())


def free_host_bytes() -> int:
    """Memory that the kernel and this control group still give; endless where neither says."""
    limits = [1 << 62]
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        top, used = (
            int(Path(f"/sys/fs/cgroup/memory.{n}").read_text()) for n in ("max", "current")
        )
        limits.append(top - used)
    return min(limits)


@cache
def _nvml() -> ctypes.CDLL | None:
    """NVIDIA's management library, which comes with the driver; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def nvidia_driver() -> str | None:
    """The driver's version; None without NVIDIA's driver."""
    library, version = _nvml(), ctypes.create_string_buffer(80)
    if library is None or library.nvmlSystemGetDriverVersion(version, 80):
        return None
    return version.value.decode()


@cache
def _nvml_handle(uuid: str) -> ctypes.c_void_p | None:
    """By UUID: NVML's order of devices differs from torch's."""
    library, handle = _nvml(), ctypes.c_void_p()
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    if library is None or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None
    return handle


def _nvml_read(uuid: str, function: str, *args: int, kind: type = ctypes.c_uint) -> int | None:
    handle, value = _nvml_handle(uuid), kind()
    if handle is None or getattr(_nvml(), function)(handle, *args, ctypes.byref(value)):
        return None
    return value.value


class _Process(ctypes.Structure):
    """``nvmlProcessInfo_t``, version 2 and later."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def conditions(found: Device | None) -> dict[str, object]:
    """``clocks`` (text), ``temp_c``, ``power_w``, ``throttle`` now; what cannot be read says so."""
    state: dict[str, object] = {"clocks": NOT_READABLE, "throttle": NOT_READABLE}
    state |= {"temp_c": None, "power_w": None}
    if found is None:
        mhz = [float(v) for k, v in _cpuinfo() if k == "cpu MHz"]
        return state | ({"clocks": f"{sum(mhz) / len(mhz):.0f} MHz"} if mhz else {})
    if found.vendor == "amd":
        return state | _amd_conditions(found)
    return state | _nvidia_conditions(found.uuid)


def _nvidia_conditions(uuid: str) -> dict[str, object]:
    if _nvml_handle(uuid) is None:
        return {}
    core, memory = (_nvml_read(uuid, "nvmlDeviceGetClockInfo", k) for k in _CLOCKS)
    milliwatt = _nvml_read(uuid, "nvmlDeviceGetPowerUsage")
    cap = _nvml_read(uuid, "nvmlDeviceGetEnforcedPowerLimit")
    temp = _nvml_read(uuid, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
    reasons = _nvml_read(uuid, "nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    return {
        "clocks": f"sm {core} MHz, memory {memory} MHz, cap {cap and cap // 1000} W",
        "temp_c": None if temp is None else float(temp),
        "power_w": None if milliwatt is None else milliwatt / 1000,
        "throttle": NOT_READABLE if reasons is None else throttle_text(reasons),
    }


# Bits of NVML's nvmlClocksThrottleReasons (nvml.h); 1 is an idle GPU, which is no throttling.
_THROTTLE = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}


def throttle_text(reasons: int) -> str:
    """NVML's throttle bits in words; ``none`` without any."""
    return ", ".join(text for bit, text in _THROTTLE.items() if reasons & bit) or "none"


def _leading_number(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def _amd_conditions(device: Device) -> dict[str, object]:
    try:
        import amdsmi
    except (ImportError, KeyError, OSError):
        return {}
    try:
        amdsmi.amdsmi_init()
        handle = amdsmi.amdsmi_get_processor_handles()[device.index]
        core = amdsmi.amdsmi_get_clock_info(handle, amdsmi.AmdSmiClkType.GFX)
        memory = amdsmi.amdsmi_get_clock_info(handle, amdsmi.AmdSmiClkType.MEM)
        power = amdsmi.amdsmi_get_power_info(handle)
        temp = amdsmi.amdsmi_get_temp_metric(
            handle, amdsmi.AmdSmiTemperatureType.HOTSPOT, amdsmi.AmdSmiTemperatureMetric.CURRENT
        )
        return {
            "clocks": f"gfx {core.get('clk')} MHz, memory {memory.get('clk')} MHz",
            "temp_c": float(temp),
            "power_w": _leading_number(str(power.get("current_socket_power"))),
        }
    except (amdsmi.AmdSmiException, IndexError, TypeError, ValueError):
        return {}


def foreign_processes(found: Device | None) -> int | None:
    """Processes on the device besides this one; None where that cannot be read.

    Inside a container the driver may show process ids of the host: one entry is then taken to be
    this process.
    """
    handle = _nvml_handle(found.uuid) if found and found.vendor == "nvidia" else None
    if handle is None:
        return None
    count, table = ctypes.c_uint(64), (_Process * 64)()
    read = getattr(_nvml(), "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if read is None or read(handle, ctypes.byref(count), table):
        return None
    return max(0, count.value - 1)
