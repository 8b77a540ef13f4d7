"""What is here and why not; switches; conflicts; and that looking never imports or raises."""

import importlib.machinery
import importlib.util
import subprocess
import sys
import textwrap

import pytest

from mlakit import archs
from mlakit.context import PACKAGES
from mlakit.dispatch import probe, switches
from mlakit.errors import MisuseError
from mlakit.records import Cell


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in switches.KNOWN:
        monkeypatch.delenv(name, raising=False)
    probe.refresh()
    archs.devices.cache_clear()
    yield
    probe.refresh()
    archs.devices.cache_clear()


@pytest.fixture
def cards(monkeypatch):
    """``cards("gfx942", "gfx950")``: a machine with those cards."""

    def put(*names):
        devices = tuple(
            archs.Device(i, n, archs.vendor_of(n), n, n, 256, 1 << 37, None, str(i))
            for i, n in enumerate(names)
        )
        monkeypatch.setattr(archs, "devices", lambda: devices)

    original = archs.devices
    yield put
    monkeypatch.setattr(archs, "devices", original)


# ---- switches


@pytest.mark.parametrize(
    ("value", "on", "origin", "odd"),
    [
        (None, False, "default", False),
        ("0", False, "env", False),
        ("1", True, "env", False),
        ("true", True, "env", False),
        ("True", True, "env", False),
        ("false", False, "env", False),
        ("", False, "env", True),
        ("2", False, "env", True),
        ("yes", False, "env", True),
    ],
)
def test_a_switch_has_value_and_origin_and_odd_values_are_errors(value, on, origin, odd):
    environ = {} if value is None else {"SGLANG_USE_AITER": value}
    s = switches.read("SGLANG_USE_AITER", environ)
    assert (s.on, s.origin, s.error is not None) == (on, origin, odd)
    if odd:
        with pytest.raises(MisuseError, match="set it to 1 or 0"):
            switches.check(environ)
    else:
        switches.check(environ)


def test_an_unknown_switch_gets_its_near_match():
    with pytest.raises(MisuseError, match="did you mean 'SGLANG_USE_AITER'"):
        switches.read("SGLANG_USE_AITR")


@pytest.mark.parametrize(
    ("name", "value", "odd"),
    [
        ("GPU_ARCHS", "gfx942;gfx950", False),
        ("GPU_ARCHS", "native", False),
        ("GPU_ARCHS", "mi300", True),
        ("HSA_OVERRIDE_GFX_VERSION", "9.4.2", False),
        ("HSA_OVERRIDE_GFX_VERSION", "gfx942", True),
    ],
)
def test_overrides_are_checked(name, value, odd):
    assert (switches.read(name, {name: value}).error is not None) == odd


@pytest.mark.parametrize(
    ("value", "arch"),
    [("9.4.2", "gfx942"), ("10.3.0", "gfx1030"), ("9.0.10", "gfx90a"), ("x", None)],
)
def test_the_arch_an_override_names(value, arch):
    assert switches.overridden_arch({"HSA_OVERRIDE_GFX_VERSION": value}) == arch


# ---- packages


def test_every_package_has_a_reason_or_none():
    reasons = probe.package_reasons()
    assert tuple(reasons) == PACKAGES
    for name, why in reasons.items():
        assert why is None or (why and "\n" not in why), name
    assert probe.packages() == {n for n, why in reasons.items() if why is None}


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert probe.package_reason("triton") == "triton is blocked in this process"
    probe.refresh()
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed; pip install 'mlakit[triton]'" in probe.package_reason("triton")


def test_a_bare_folder_is_not_the_package(monkeypatch):
    spec = importlib.machinery.ModuleSpec("quack", None, is_package=True)
    spec.submodule_search_locations.append("/somewhere/quack")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert "bare folder" in probe.package_reason("quack")


@pytest.mark.parametrize("error", [ImportError("a"), ValueError("quack.__spec__ is None")])
def test_a_broken_package_is_a_reason(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(importlib.util, "find_spec", fail)
    assert probe.package_reason("quack").startswith("quack is broken here: ")


def test_a_compiler_that_fails_is_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not on PATH" in probe.package_reason("cxx")
    # inductor takes the empty string, too, and does not fall back on g++
    monkeypatch.setenv("CXX", "")
    probe.refresh()
    assert "CXX is empty" in probe.package_reason("cxx")
    bad = tmp_path / "bad-cxx"
    bad.write_text("#!/bin/sh\necho 'fatal error: cmath: No such file' >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CXX", str(bad))
    probe.refresh()
    assert "fatal error: cmath" in probe.package_reason("cxx")


def test_aiter_switched_off_is_a_reason_and_is_not_imported(monkeypatch, cards):
    cards("gfx950")
    monkeypatch.setenv("SGLANG_USE_AITER", "0")
    assert "SGLANG_USE_AITER=0 turns AITER off" in probe.package_reason("aiter")
    probe.refresh()
    monkeypatch.setenv("SGLANG_USE_AITER", "on")
    assert "a yes-or-no switch" in probe.package_reason("aiter")
    assert "aiter" not in sys.modules


def test_looking_loads_nothing_optional():
    code = """
        import sys
        from mlakit.dispatch import probe
        from mlakit.records import Cell
        probe.package_reasons(); probe.here("cuda:3"); list(probe.conflicts())
        probe.context_for(Cell("cpu", 1, 1536, 512, ("torch_native",)))
        optional = {"triton", "numba", "aiter", "liger_kernel", "quack", "flashinfer"}
        loaded = optional & set(sys.modules)
        assert not loaded, loaded
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- contexts


def test_a_cell_of_this_machine_has_this_machines_packages():
    c = probe.context_for(Cell("cpu", 7, 96, 32, ("torch_native",), dtype="fp32", clock="graph"))
    found = c.arch, c.m, c.dtype, c.norm_weight_dtype, c.capture
    assert found == ("cpu", 7, "fp32", "fp32", True)
    assert c.packages == probe.packages()


def test_a_cell_of_another_arch_assumes_all_packages():
    c = probe.context_for(Cell("gfx950", 7, 1536, 512, ("torch_native",), quant="mxfp4"))
    assert c.packages == frozenset(PACKAGES)
    assert c.weight_dtype == "mxfp4"
    with pytest.raises(MisuseError, match="no MXFP4"):
        probe.context_for(Cell("gfx942", 7, 1536, 512, ("torch_native",), quant="mxfp4"))


def test_fp8_cells_carry_the_cards_own_encoding():
    kinds = {"gfx942": "fp8_fnuz", "gfx950": "fp8_ocp", "sm_90": "fp8_ocp", "cpu": "fp8_ocp"}
    for arch, kind in kinds.items():
        c = probe.context_for(Cell(arch, 7, 1536, 512, ("torch_native",), quant="fp8_token"))
        assert (c.weight_dtype, c.block_scale) == (kind, False)


def test_an_amd_machine(monkeypatch, cards):
    cards("gfx950")
    monkeypatch.setenv("SGLANG_USE_AITER", "1")
    monkeypatch.setenv("ATOM_ENABLE_DS_QKNORM_FUSION", "0")
    c = probe.here("cuda")
    assert (c.arch, c.use_aiter, c.aiter_api) == ("gfx950", True, "none")
    assert c.switches == {"SGLANG_USE_AITER", "ATOM_ENABLE_DS_QKNORM_FUSION=0"}


@pytest.mark.parametrize("device", ["cpu", "cuda:7", "cuda"])
def test_here_never_raises(device, cards):
    cards("sm_89")
    assert probe.here(device).arch == "cpu"


@pytest.mark.parametrize("device", ["cuda:-1", "cuda:x", "cuda:", "cuda:2", "cpu:0"])
def test_a_device_that_is_none_gives_the_cpus_context(device, cards):
    cards("gfx942", "gfx950")
    assert probe.here("cuda").arch == "gfx942"
    assert probe.here("cuda:1").arch == "gfx950"
    assert probe.here(device).arch == "cpu"


# ---- conflicts


def texts():
    return " | ".join(c.text for c in probe.conflicts())


def test_no_conflict_on_a_plain_machine(cards):
    cards("gfx942")
    assert not list(probe.conflicts())


def test_conflicts_are_named(monkeypatch, cards):
    cards("gfx942", "gfx950")
    assert "mixed cards: gfx942, gfx950" in texts()
    monkeypatch.setenv("GPU_ARCHS", "gfx942")
    assert "GPU_ARCHS=gfx942, but the card is gfx950" in texts()
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "9.4.2")
    assert "makes every card call itself gfx942" in texts()
    assert all(c.todo for c in probe.conflicts())


def test_gpu_archs_without_a_card(monkeypatch, cards):
    cards()
    monkeypatch.setenv("GPU_ARCHS", "gfx950")
    assert "no AMD card is here" in texts()
