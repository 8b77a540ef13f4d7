"""What is no width and no number of rows is said, before torch is asked."""

import pytest

import mlakit
from mlakit import inputs, shapes
from mlakit.errors import MisuseError

WIDTHS = shapes.Widths(96, 32)


@pytest.mark.parametrize("widths", ["DeepSeek-V3", (1536, 512), None])
def test_widths_that_are_none_are_refused(widths):
    with pytest.raises(MisuseError, match="give Widths"):
        inputs.make(4, widths)


@pytest.mark.parametrize("m", [-1, 1.5, "4", None])
def test_rows_that_are_no_number_are_refused(m):
    with pytest.raises(MisuseError, match="whole number of rows"):
        inputs.make(m, WIDTHS)


@pytest.mark.parametrize("text", [1536, None, b"1536+512"])
def test_hidden_that_is_no_text_is_refused(text):
    with pytest.raises(MisuseError, match=r"write q\+kv"):
        shapes.parse_hidden(text)


def test_an_eps_of_true_is_no_eps():
    q, w, _, *rest = inputs.make(2, WIDTHS).args
    with pytest.raises(MisuseError, match="eps is True"):
        mlakit.qk_rmsnorm(q, w, True, *rest)
