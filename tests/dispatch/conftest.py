import pytest

from mlakit.dispatch import call


@pytest.fixture
def fresh():
    """No choice of an earlier call is remembered, nor of this test's by the next."""
    call.reset()
    yield
    call.reset()
