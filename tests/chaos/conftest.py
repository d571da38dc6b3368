from __future__ import annotations

from pathlib import Path

import pytest

from stretto.models.tiny import WarmStart, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that costs nothing."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", warm_start=WarmStart(steps=2))
