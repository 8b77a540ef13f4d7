"""cpu_fused beyond its answers: conversions, vector code, threads, invariance, its disk cache."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mlakit import inputs
from mlakit.errors import MisuseError
from mlakit.paths import cpu_fused
from mlakit.rounding import oracle, round_to
from mlakit.shapes import Widths

numba = pytest.importorskip("numba")

WIDTHS = Widths(1536, 512)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == FP32 else torch.int16)


def each(function, values, dtype):
    """``function`` compiled over a numpy array, element by element."""
    cpu_fused._teach_numba()

    @numba.njit
    def run(values, result):
        for i in range(values.size):
            result[i] = function(values[i])

    result = np.empty(values.size, dtype)
    run(values, result)
    return result


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_16_bit_pattern_loads_as_torch_reads_it(dtype):
    patterns = np.arange(1 << 16).astype(np.uint16)
    _, load, _ = cpu_fused._BITS[dtype]
    got = torch.from_numpy(each(load, patterns, np.float32))
    want = torch.from_numpy(patterns.view(np.int16)).view(dtype).float()
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(bits(got)[number], bits(want)[number])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_stores_round_to_nearest_even_as_torch_casts(dtype):
    """Every top half of a float32 with low halves at, beside and between the ties."""
    low = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    patterns = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | low).ravel()
    values = patterns.view(np.float32)
    _, _, store = cpu_fused._BITS[dtype]
    got = torch.from_numpy(each(store, values, np.uint16).view(np.int16)).view(dtype)
    want = torch.from_numpy(values).to(dtype)
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(bits(got)[number], bits(want)[number])


def test_nan_and_inf_are_kept():
    made = inputs.make(3, WIDTHS)
    made.q[0, 7] = float("nan")
    made.q_weight[5] = float("inf")
    made.k_weight[3] = float("nan")
    made.k[2, 9] = float("-inf")
    q_out, k_out = cpu_fused.call(*made.args)
    for y, x, weight in ((q_out, made.q, made.q_weight), (k_out, made.k, made.k_weight)):
        want = round_to(oracle(x, weight, 1e-6), BF16)
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(y.isinf(), want.isinf())
    assert q_out[0].isnan().all()
    assert q_out[1:, 5].isinf().all()


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)]
)
def test_inner_loops_are_vector_code(dtype, weight_dtype):
    """Both loops of a row: the sum (reordered adds) and the product that is stored."""
    llvm = cpu_fused.build(dtype, weight_dtype, disk_cache=False).inspect_llvm()
    sums = re.findall(r"fadd reassoc contract <(\d+) x float>", llvm)
    products = re.findall(r"fmul <(\d+) x float>", llvm)
    stored = re.findall(r"store <(\d+) x (?:i16|i32|float)>", llvm)
    assert sums, "the sum of squares is scalar"
    assert products, "the product is scalar"
    assert stored, "the stores are scalar"
    assert max(map(int, sums)) >= 4
    # Only the sum may be reordered: the rounding of the product is the path's promise.
    assert not re.search(r"fmul (reassoc|fast|contract)[^\n]*\n[^\n]*store", llvm)
    assert " fast " not in llvm
    assert "nnan" not in llvm


@pytest.mark.parametrize("width", [1, 2, 511, 513, 769, 1535, 8193])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_odd_widths_stay_in_their_rows(width, dtype):
    made = inputs.make(7, Widths(width, 5, 3), dtype, seed=width)
    big = torch.full((9, width + 8), 777.0, dtype=made.q.dtype)
    out = big[1:8, 1 : 1 + width], torch.empty(7, 5, dtype=made.q.dtype)
    first = None
    for _ in range(5):
        cpu_fused.call(*made.args, out=out)
        first = out[0].clone() if first is None else first
        assert torch.equal(first, out[0])
    want = round_to(oracle(made.q, made.q_weight, 1e-6), made.q.dtype)
    assert (bits(first).int() - bits(want).int()).abs().max() <= 1
    big[1:8, 1 : 1 + width] = 777.0
    assert (big == 777.0).all()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_row_does_not_depend_on_its_company(dtype):
    made = inputs.make(16384, WIDTHS, dtype, seed=9)
    full = cpu_fused.call(*made.args)
    q, q_weight, q_eps, k, k_weight, k_eps = made.args
    for m in (1, 2, 255, 256, 257, 4095, 4096, 16383):
        part = cpu_fused.call(q[:m], q_weight, q_eps, k[:m], k_weight, k_eps)
        assert torch.equal(part[0], full[0][:m])
        assert torch.equal(part[1], full[1][:m])
    for row in (0, 255, 256, 8191, 8192, 16383):
        at = slice(row, row + 1)
        alone = cpu_fused.call(q[at], q_weight, q_eps, k[at], k_weight, k_eps)
        assert torch.equal(alone[0], full[0][at])
        assert torch.equal(alone[1], full[1][at])


def test_alignment_and_stride_do_not_change_the_bits():
    """Word by word where rows are 4-byte aligned, element by element elsewhere: one sum order."""
    made = inputs.make(16, WIDTHS, seed=10)
    want = cpu_fused.call(*made.args)
    for offset, stride in ((1, 2113), (0, 2049), (3, 2112)):
        buffer = torch.empty(16 * stride + 8, dtype=BF16)
        q = buffer.as_strided((16, 1536), (stride, 1), offset)
        k = buffer.as_strided((16, 512), (stride, 1), offset + 1536)
        q.copy_(made.q)
        k.copy_(made.k)
        got = cpu_fused.call(q, made.q_weight, 1e-6, k, made.k_weight, 1e-6)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_threads_are_used_only_where_they_pay_and_change_nothing(two_threads, monkeypatch):
    teams = []
    parallel, *queries = cpu_fused._openmp()
    if parallel is None:
        pytest.skip("this torch brings no GNU OpenMP: the kernel is serial")

    def counting(address, block, threads, flags):
        teams.append(threads)
        parallel(address, block, threads, flags)

    monkeypatch.setattr(cpu_fused, "_openmp", lambda: (counting, *queries))
    for m, expected in ((1, []), (64, []), (4096, [2])):
        teams.clear()
        made = inputs.make(m, WIDTHS, seed=m)
        many = cpu_fused.call(*made.args)
        assert teams == expected
        torch.set_num_threads(1)
        one = cpu_fused.call(*made.args)
        torch.set_num_threads(2)
        assert teams == expected, "one thread asked for, a team started"
        assert torch.equal(one[0], many[0])
        assert torch.equal(one[1], many[1])


@pytest.mark.usefixtures("two_threads")
def test_concurrent_calls():
    made = [inputs.make(1024, WIDTHS, seed=s) for s in range(4)]
    want = [cpu_fused.call(*m.args) for m in made]

    def repeat(i):
        with torch.no_grad():
            return [cpu_fused.call(*made[i].args) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for i, results in enumerate(pool.map(repeat, range(4))):
            for q_out, k_out in results:
                assert torch.equal(q_out, want[i][0])
                assert torch.equal(k_out, want[i][1])


def test_no_openmp_still_runs(monkeypatch):
    made = inputs.make(1024, WIDTHS, seed=11)
    want = cpu_fused.call(*made.args)
    queries = cpu_fused._openmp()[1:]
    monkeypatch.setattr(cpu_fused, "_openmp", lambda: (None, *queries))
    assert torch.equal(cpu_fused.call(*made.args)[0], want[0])


def child(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


SETUP = """
import torch
from mlakit import inputs
from mlakit.errors import MisuseError
from mlakit.paths import cpu_fused
from mlakit.shapes import Widths
"""


def test_no_folder_to_cache_in_is_no_failure():
    code = SETUP + (
        "from numba.core import caching\n"
        "caching.CompileResultCacheImpl._locator_classes = []\n"
        "made = inputs.make(2, Widths(64, 32))\n"
        "print(cpu_fused.build(torch.bfloat16, torch.bfloat16).cache_hits)\n"
        "print(cpu_fused.call(*made.args)[0].isfinite().all().item())\n"
    )
    assert child(code) == ["0", "True"]


def test_a_second_process_loads_the_kernel_from_disk(tmp_path):
    code = SETUP + "print(cpu_fused.build(torch.bfloat16, torch.bfloat16).cache_hits)\n"
    assert child(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["0"]
    assert child(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["1"]


def test_a_forked_child_does_not_wait_for_its_parents_threads():
    code = SETUP + (
        "import os, signal\n"
        "torch.set_num_threads(2)\n"
        "made = inputs.make(4096, Widths(1536, 512))\n"
        "want = bytes(cpu_fused.call(*made.args)[1].view(torch.uint8).numpy())\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.alarm(30)\n"
        "    got = bytes(cpu_fused.call(*made.args)[1].view(torch.uint8).numpy())\n"
        "    os._exit(0 if got == want else 3)\n"
        "print(os.waitpid(pid, 0)[1])\n"
    )
    assert child(code) == ["0"]


def test_fake_tensors_are_refused_before_any_address_is_taken():
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = inputs.make(3, Widths(64, 32))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with pytest.raises(MisuseError, match="no memory"):
            cpu_fused.call(*given.args)
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given.args]
    with pytest.raises(MisuseError, match="no memory"):
        cpu_fused.call(*fakes)


def test_a_trace_that_would_hold_empty_outputs_is_refused():
    from torch.fx.experimental.proxy_tensor import make_fx

    given = inputs.make(3, Widths(64, 32))
    with pytest.raises(MisuseError, match="traced"):
        make_fx(lambda q: cpu_fused.call(q, *given.args[1:]))(given.args[0])


def test_a_tangent_or_a_transform_is_refused_rather_than_lost():
    from torch.autograd import forward_ad

    q, *rest = inputs.make(3, Widths(64, 32)).args
    with forward_ad.dual_level(), pytest.raises(MisuseError, match="gradient"):
        cpu_fused.call(forward_ad.make_dual(q, q), *rest)
    with pytest.raises(MisuseError, match="gradient"):
        torch.vmap(lambda x: cpu_fused.call(x, *rest)[0])(q[None])
