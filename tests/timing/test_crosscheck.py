"""The cross-check needs a GPU; without one it says so, with one the clocks must agree."""

import pytest

from mlakit.archs import devices
from mlakit.errors import MisuseError
from mlakit.timing.crosscheck import crosscheck


def test_a_cpu_is_refused():
    with pytest.raises(MisuseError, match="give device='cuda'"):
        crosscheck(["torch_rms_norm"], [64], device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU here")
def test_clocks_agree_with_independent_timers():
    rows = crosscheck(["torch_rms_norm"], [64, 4096])
    assert rows[0]["agrees"] is None
    assert rows[1]["agrees"], rows[1]
