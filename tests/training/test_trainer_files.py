"""The file of a trainer's checkpoint."""

from pathlib import Path

import pytest
import torch

from stretto.errors import TrainerError
from stretto.training.trainer_files import STATE_FILE, base_entry, read_state, write_state

STATE = {"value/weight": torch.tensor([1.0, 2.0]), "step": torch.tensor(3)}


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_state(tmp_path / "new" / "folder", STATE)
    found = read_state(tmp_path / "new" / "folder", {})
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=f"is no checkpoint of a trainer: it has no `{STATE_FILE}`"):
        read_state(tmp_path, {})


def test_adapters_of_another_base_are_refused_unless_its_type_differs_too(tmp_path: Path) -> None:
    write_state(tmp_path, {**STATE, **base_entry("00ff", torch.float32)})
    assert "base/float32" in read_state(tmp_path, base_entry("00ff", torch.float32))
    with pytest.raises(TrainerError, match=r"adapters of another base: give the original `model\.path`"):
        read_state(tmp_path, base_entry("00fe", torch.float32))
    read_state(tmp_path, base_entry("00fe", torch.bfloat16))  # the checksums of two types cannot be compared
    assert base_entry(None, torch.float32) == {}
