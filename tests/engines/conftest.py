"""One torch thread, which is what the exactness claims are made for, and the model that most tests share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import build


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> Any:
    return build("qwen3")
