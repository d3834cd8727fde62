"""What the tests of the engines share."""

import pytest


@pytest.fixture(scope="session")
def reference():
    """The responses of the dense model, which every schedule has to draw."""
    from rollout.small_rollouts import dense

    return dense().reference
