"""Arch names, and devices as torch's own build tells them."""

from types import SimpleNamespace

import pytest

from mlakit import archs
from mlakit.errors import MisuseError


@pytest.fixture(autouse=True)
def _fresh_devices():
    archs.devices.cache_clear()
    yield
    archs.devices.cache_clear()


@pytest.mark.parametrize(
    ("raw", "base"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx950:sramecc+:xnack+", "gfx950"),
        ("gfx9-4-generic", "gfx9-4-generic"),
        ("gfx1151", "gfx1151"),
        ("gfx1201", "gfx1201"),
        (" GFX942 ", "gfx942"),
        ("sm90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("cpu", "cpu"),
    ],
)
def test_base_name(raw, base):
    assert archs.base_name(raw) == base


def test_a_generic_target_is_no_device():
    assert not archs.is_device_arch("gfx9-4-generic")
    with pytest.raises(MisuseError, match="generic compile target"):
        archs.check("gfx9-4-generic")
    assert all(archs.is_device_arch(a) for a in archs.known())


@pytest.mark.parametrize("part", ["gfx9", "gfx94", "gfx110", "sm_9", "gfx", ""])
def test_names_are_compared_whole(part):
    with pytest.raises(MisuseError):
        archs.check(part)


def test_a_near_miss_is_named():
    with pytest.raises(MisuseError, match="did you mean 'gfx942'"):
        archs.check("gfx943")


@pytest.mark.parametrize(
    ("arch", "vendor", "fp8"),
    [
        ("gfx942", "amd", "fp8_fnuz"),
        ("gfx950", "amd", "fp8_ocp"),
        ("gfx1201", "amd", "fp8_ocp"),
        ("gfx90a", "amd", None),
        ("sm_90", "nvidia", "fp8_ocp"),
        ("sm_80", "nvidia", None),
        ("cpu", "cpu", "fp8_ocp"),
    ],
)
def test_vendor_and_fp8(arch, vendor, fp8):
    assert (archs.vendor_of(arch), archs.fp8_format(arch)) == (vendor, fp8)


def fake_torch(monkeypatch, *, available, hip, properties):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])
    monkeypatch.setattr(torch.version, "hip", hip)


MI300X = SimpleNamespace(
    name="AMD Instinct MI300X",
    gcnArchName="gfx942:sramecc+:xnack-",
    multi_processor_count=304,
    total_memory=192 << 30,
    major=9,
    minor=4,
)
H200 = SimpleNamespace(
    name="NVIDIA H200",
    gcnArchName="gfx942",
    multi_processor_count=132,
    total_memory=141 << 30,
    major=9,
    minor=0,
)


def test_rocm_is_amd_though_it_looks_like_cuda(monkeypatch):
    fake_torch(monkeypatch, available=True, hip="7.2.0", properties=[MI300X])
    (device,) = archs.devices()
    assert (device.vendor, device.arch) == ("amd", "gfx942")
    assert device.arch_raw == "gfx942:sramecc+:xnack-"
    assert archs.here() == ("gfx942", "cpu")


def test_a_cuda_build_is_nvidia_whatever_lies_on_disk(monkeypatch):
    # The properties even carry an AMD name here, as a leftover would: the build decides.
    fake_torch(monkeypatch, available=True, hip=None, properties=[H200])
    (device,) = archs.devices()
    assert (device.vendor, device.arch, device.arch_raw) == ("nvidia", "sm_90", "sm_90")


@pytest.mark.parametrize("hip", [None, "7.2.0"])
def test_no_device_whatever_the_build(monkeypatch, hip):
    fake_torch(monkeypatch, available=False, hip=hip, properties=[])
    assert archs.devices() == ()
    assert archs.here() == ("cpu",)


def test_a_driver_that_fails_is_no_device(monkeypatch):
    import torch

    def fail():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert archs.devices() == ()
