"""A walk shows every instruction of one wave, and its last values are the kernel's outputs."""

import numpy as np
import pytest

from mlakit import plots
from mlakit.codegen import compile as compiler
from mlakit.errors import MisuseError
from mlakit.report import walk

pytestmark = pytest.mark.skipif(bool(compiler.why_not()), reason="needs triton to compile")


@pytest.fixture(scope="module")
def one():
    return walk.walk("gfx942")


def test_steps_are_the_programs_own(one):
    steps = one.steps
    assert steps["instruction"].iloc[-1].startswith("s_endpgm")
    assert len(one.lanes) == len(steps)
    assert steps["source"].str.contains("triton_kernels.py:").any()
    assert walk.kinds(steps)["executed"].sum() == len(steps)
    # one wave does q's or k's row: it loads x and the weight, and stores the result
    assert steps["bytes"].str.contains("load").sum() >= 2
    assert steps["bytes"].str.contains("store").sum() >= 1


def test_the_reciprocal_root_is_the_same_in_every_lane(one):
    roots = np.flatnonzero(one.steps["instruction"].str.contains("v_rsq_f32"))
    assert len(roots)
    values = one.lanes[roots[-1]]
    assert np.unique(values[~np.isnan(values)]).size == 1


def test_the_strip_has_a_row_for_each_step_that_wrote(one):
    figure = plots.lane_strip(one.lanes)
    image = figure.axes[0].images[0].get_array()
    assert image.shape[0] == (~np.isnan(one.lanes).all(axis=1)).sum()
    assert np.nanmax(image) <= 1


def test_other_cards_are_refused():
    with pytest.raises(MisuseError):
        walk.walk("sm_90")
