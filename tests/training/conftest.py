"""Properties are checked without a clock: how long an example takes says how busy the machine is."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def one_thread():
    """Models of these tests are too small for several threads, which would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
