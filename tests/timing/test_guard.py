"""The lock between processes, and what the machine says about itself."""

import json
import os
import subprocess
import sys
import time

import pytest

from mlakit.errors import MisuseError
from mlakit.timing import guard, sensors

HOLD = """
import sys, time
from mlakit.timing import guard
with guard.device_lock("cpu"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLAKIT_LOCK_DIR", str(tmp_path))


@pytest.fixture
def holder():
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "held"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_and_told_who_holds_it(holder):
    with pytest.raises(guard.LockedError, match=f'"pid": {holder.pid}'), guard.device_lock("cpu"):
        pass


def test_a_killed_holder_leaves_nothing_locked(holder):
    holder.kill()
    holder.wait()
    assert json.loads(guard.lock_path("cpu").read_text())["pid"] == holder.pid
    with guard.device_lock("cpu"):
        assert json.loads(guard.lock_path("cpu").read_text())["pid"] == os.getpid()


def test_waiting_gets_the_lock_once_it_is_free(holder):
    start = time.monotonic()
    holder.terminate()
    with guard.device_lock("cpu", wait_s=30):
        assert time.monotonic() - start < 30


def test_nested_use_is_free_and_released_once():
    with guard.device_lock("cpu"), guard.device_lock("cpu"):
        pass
    text = "from mlakit.timing import guard\nwith guard.device_lock('cpu'): pass"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
    assert guard.lock_path("cpu").read_text() == ""


def test_environment_of_the_cpu_names_no_host():
    found = guard.environment("cpu")
    assert (found["vendor"], found["arch"], found["driver"]) == ("cpu", "cpu", None)
    assert found["torch"]
    assert len(found["device_id"]) == 12
    assert os.uname().nodename not in str(found)


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(MisuseError, match="choose one of cpu"):
        guard.device_of("cuda:77")
    with pytest.raises(MisuseError, match="choose one of cpu"):
        guard.device_of("tpu")


def test_cache_size_is_read_from_this_machine():
    assert 2**18 <= guard.cache_bytes("cpu") <= 2**32


def test_unreadable_sensors_say_so():
    state = sensors.conditions(None)
    assert state["throttle"] == sensors.NOT_READABLE
    assert state["temp_c"] is None
    assert sensors.foreign_processes(None) is None


def test_throttle_bits_in_words():
    assert sensors.throttle_text(0x1) == "none"
    assert sensors.throttle_text(0x4 | 0x40) == "power cap, hardware thermal"


def test_foreign_load_sees_another_busy_process():
    load = guard.CpuLoad()
    busy = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.5: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert load.read() > 0


def test_the_lock_is_the_same_whatever_the_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("MLAKIT_LOCK_DIR", raising=False)
    before = guard.lock_path("cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert guard.lock_path("cpu") == before


def test_a_lock_folder_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setenv("MLAKIT_LOCK_DIR", "/nowhere/at/all")
    with pytest.raises(MisuseError, match="MLAKIT_LOCK_DIR"), guard.device_lock("cpu"):
        pass
