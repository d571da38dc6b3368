"""Checkpoints: complete or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stretto.checksums import checksum
from stretto.errors import RunError
from stretto.store import checkpoint as module
from stretto.store.checkpoint import load_checkpoint, save_checkpoint
from stretto.types import Request, Sampling, Supports, Suspended, Weights


def weights(version: int) -> Weights:
    tensors = {
        "layer.lora_A": torch.randn(2, 3, generator=torch.Generator().manual_seed(version)),
        "layer.lora_B": torch.arange(6, dtype=torch.bfloat16).view(3, 2) + version,
    }
    return Weights(version, "lora", tensors, checksum(tensors, 2.0), 2.0)


def suspended(id: int, num_tokens: int, versions: bool = False, supports: bool = False) -> Suspended:
    sampling = Sampling(max_tokens=9, temperature=0.7, stop_tokens=(1, 5), stop_strings=("\n", "]"))
    others = np.arange(2 * num_tokens, dtype=np.int32)
    return Suspended(
        request=Request(id, 3, (4, 5, 6), seed=2**62 + id, sampling=sampling, group=id // 2, priority=0),
        tokens=np.arange(num_tokens, dtype=np.int32),
        logprobs=-np.arange(num_tokens, dtype=np.float32) / 7,
        checksum="abc",
        token_versions=np.full(num_tokens, 2, dtype=np.int32) if versions else None,
        started_at=12.5,
        prefilled=3,
        supports=Supports(np.full(num_tokens, 2, dtype=np.int32), others) if supports else None,
    )


def save(root: Path, updates: int = 4, save_trainer: Callable[[Path], None] | None = None) -> Path:
    def trainer(folder: Path) -> None:
        folder.mkdir()
        (folder / "state").write_text(str(updates))

    return save_checkpoint(
        root,
        updates=updates,
        snapshot={"next_update": updates},
        totals={"steps": updates, "ages": {0: 3}},
        prompts={"rows": [2]},
        weights={version: weights(version) for version in (updates - 1, updates)},
        suspended=[suspended(10, 4), suspended(11, 0), suspended(12, 2, True, supports=True)],
        save_trainer=save_trainer or trainer,
    )


def same(a: Suspended, b: Suspended) -> bool:
    arrays = [(a.tokens, b.tokens), (a.logprobs, b.logprobs), (a.token_versions, b.token_versions)]
    if (a.supports is None) != (b.supports is None):
        return False
    if a.supports is not None and b.supports is not None:
        arrays += [(a.supports.counts, b.supports.counts), (a.supports.tokens, b.supports.tokens)]
    for ours, theirs in arrays:
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and (ours.dtype != theirs.dtype or not np.array_equal(ours, theirs)):
            return False
    return (a.request, a.checksum, a.started_at, a.prefilled) == (b.request, b.checksum, b.started_at, b.prefilled)


def test_everything_comes_back(tmp_path: Path) -> None:
    folder = save(tmp_path)
    found = load_checkpoint(tmp_path)
    assert found.folder == folder == tmp_path / "000004"
    assert found.snapshot == {"next_update": 4}
    assert found.totals == {"steps": 4, "ages": {"0": 3}}
    assert found.prompts == {"rows": [2]}
    assert (folder / "trainer" / "state").read_text() == "4"
    assert sorted(found.weights) == [3, 4]
    for version, item in found.weights.items():
        expected = weights(version)
        assert (item.version, item.kind, item.checksum, item.scale) == (version, "lora", expected.checksum, 2.0)
        assert all(torch.equal(item.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert same(found.suspended[10], suspended(10, 4))
    assert same(found.suspended[11], suspended(11, 0))
    assert same(found.suspended[12], suspended(12, 2, True, supports=True))


def test_a_run_with_nothing_under_way_comes_back_too(tmp_path: Path) -> None:
    save_checkpoint(
        tmp_path,
        updates=1,
        snapshot={},
        prompts={},
        totals={},
        weights={1: weights(1)},
        suspended=[],
        save_trainer=Path.mkdir,
    )
    assert load_checkpoint(tmp_path).suspended == {}


def test_a_new_checkpoint_replaces_the_old_one_and_one_of_the_same_update(tmp_path: Path) -> None:
    save(tmp_path, 4)
    save(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["000007"]
    save(tmp_path, 7)
    assert load_checkpoint(tmp_path).snapshot == {"next_update": 7}


def test_a_folder_that_is_not_complete_is_ignored(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no complete checkpoint"):
        load_checkpoint(tmp_path / "none")
    (tmp_path / ".000009.partial" / "versions").mkdir(parents=True)
    (tmp_path / "000008").mkdir()
    with pytest.raises(RunError, match="no complete checkpoint"):
        load_checkpoint(tmp_path)
    save(tmp_path, 4)
    assert load_checkpoint(tmp_path).snapshot == {"next_update": 4}


def test_damaged_weights_are_found(tmp_path: Path) -> None:
    path = save(tmp_path) / "versions" / "000003.safetensors"
    tensors = load_file(path)
    tensors["layer.lora_A"][0, 0] += 1e-6
    save_file(tensors, path)
    with pytest.raises(RunError, match=r"version 3 .* is damaged"):
        load_checkpoint(tmp_path)


def test_files_cut_short_are_an_error_by_name(tmp_path: Path) -> None:
    path = save(tmp_path) / "versions" / "000003.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunError, match="is damaged"):
        load_checkpoint(tmp_path)
    state = save(tmp_path) / "state.json"
    state.write_text(state.read_text()[:-10])
    with pytest.raises(RunError, match="is damaged"):
        load_checkpoint(tmp_path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    state = save(tmp_path) / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    with pytest.raises(RunError, match="has format 99"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space left")])
def test_a_checkpoint_that_cannot_be_written_leaves_the_previous_one(tmp_path: Path, fault: Exception) -> None:
    save(tmp_path, 4)

    def full(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("...")
        raise fault

    with pytest.raises(RunError, match=r"000007` could not be written \(.*previous one is untouched"):
        save(tmp_path, 7, full)
    assert [path.name for path in tmp_path.iterdir()] == ["000004"]
    assert load_checkpoint(tmp_path).snapshot == {"next_update": 4}


def test_a_crash_between_the_old_and_the_new_of_the_same_update_leaves_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4)

    def killed(self: Path, target: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4)
    monkeypatch.undo()
    assert load_checkpoint(tmp_path).snapshot == {"next_update": 4}


def test_of_two_checkpoints_of_one_update_the_later_counts(tmp_path: Path) -> None:
    save(tmp_path, 4).rename(tmp_path / "000004.previous")
    folder = save(tmp_path, 4)
    folder.rename(tmp_path / "kept")
    save(tmp_path, 4).rename(tmp_path / "000004.previous")
    (tmp_path / "kept").rename(folder)
    assert load_checkpoint(tmp_path).folder == folder


def test_a_previous_one_that_a_crash_left_behind_does_not_stand_in_the_way(tmp_path: Path) -> None:
    save(tmp_path, 4).rename(tmp_path / "kept")
    save(tmp_path, 4)
    (tmp_path / "kept").rename(tmp_path / "000004.previous")
    save(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["000004"]
