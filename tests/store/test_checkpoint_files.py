"""Checkpoints: complete or not there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from stretto.errors import RunError
from stretto.store import checkpoint_files as module
from stretto.store.checkpoint_files import (
    abandon_checkpoints,
    begin_checkpoint,
    complete_checkpoint,
    find_checkpoint,
    load_checkpoint,
)
from stretto.types import Completion, Lineage, Request, Sampling, Supports, Suspended


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


def save(root: Path, updates: int = 4) -> Path:
    scratch = begin_checkpoint(root, updates)
    (scratch / "trainer").mkdir()
    (scratch / "trainer" / "state").write_text(f"the trainer after {updates} updates")
    return complete_checkpoint(scratch, [suspended(10, 4), suspended(11, 0), suspended(12, 2, True, supports=True)])


def found(root: Path, most: int = 99) -> int | None:
    """The updates of the checkpoint that a run would go on from."""
    checkpoint, _ = find_checkpoint(root, most)
    return None if checkpoint is None else checkpoint.updates


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
    checkpoint = load_checkpoint(folder)
    assert checkpoint.folder == folder == tmp_path / "000004"
    assert checkpoint.updates == 4
    assert (folder / "trainer" / "state").read_text() == "the trainer after 4 updates"
    assert same(checkpoint.suspended[10], suspended(10, 4))
    assert same(checkpoint.suspended[11], suspended(11, 0))
    assert same(checkpoint.suspended[12], suspended(12, 2, True, supports=True))


def test_the_turns_that_were_done_come_back(tmp_path: Path) -> None:
    counts = np.array([2, 1, 1], dtype=np.int32)
    made = Completion(
        id=12,
        version=3,
        tokens=np.array([7, 90, 8], dtype=np.int32),
        logprobs=np.array([-0.5, 0.0, -0.25], dtype=np.float32),
        finish="stop",
        checksum="abc",
        token_versions=np.array([3, 4, 4], dtype=np.int32),
        started_at=1.5,
        finished_at=2.5,
        prefilled=9,
        supports=Supports(counts, np.array([7, 1, 90, 8], dtype=np.int32)),
        turns=np.array([[0, 1], [2, 3]], dtype=np.int32),
    )
    one = Completion(13, 3, made.tokens.copy(), made.logprobs.copy(), "stop", "abc")
    other = replace(one, id=12, tokens=np.array([1, 2, 3], dtype=np.int32), logprobs=one.logprobs.copy())
    turns = {
        12: (Lineage((4, 5), made, turn_numbers=(0, 2)), Lineage((6,), other, train=False, turn_numbers=(1,))),
        13: (Lineage((4, 5), one),),
    }
    folder = complete_checkpoint(begin_checkpoint(tmp_path, 4), [suspended(12, 2)], turns)
    read = load_checkpoint(folder)
    assert same(read.suspended[12], suspended(12, 2))
    for name in Completion.__dataclass_fields__:
        for before, after in zip((*turns[12], *turns[13]), (*read.turns[12], *read.turns[13]), strict=True):
            assert replace(after, completion=before.completion) == before
            old, new = getattr(before.completion, name), getattr(after.completion, name)
            if isinstance(old, Supports):
                assert np.array_equal(old.counts, new.counts)
                assert np.array_equal(old.tokens, new.tokens)
            else:
                assert np.array_equal(old, new), name
                assert getattr(old, "dtype", None) == getattr(new, "dtype", None)


def test_a_run_with_nothing_under_way_comes_back_too(tmp_path: Path) -> None:
    assert load_checkpoint(complete_checkpoint(begin_checkpoint(tmp_path, 1), [])).suspended == {}


def test_what_a_killed_process_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (begin_checkpoint(tmp_path, 7) / "trainer").mkdir()
    abandon_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["000004"]
    abandon_checkpoints(tmp_path / "never made")


def test_the_last_two_are_kept_and_one_of_the_same_update_takes_its_place(tmp_path: Path) -> None:
    for updates in (4, 7, 9, 9):
        save(tmp_path, updates)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000007", "000009"]
    assert found(tmp_path) == 9
    assert found(tmp_path, most=8) == 7, "the journal may know less than a checkpoint that another machine wrote"


def test_a_folder_that_is_not_complete_is_ignored(tmp_path: Path) -> None:
    assert found(tmp_path / "none") is None
    begin_checkpoint(tmp_path, 9)
    (tmp_path / "000008").mkdir()
    assert found(tmp_path) is None
    save(tmp_path, 4)
    assert found(tmp_path) == 4


@pytest.mark.parametrize("name", ["000009 copy", "000009.bak", "000009-old", "9", "000000009", "٠٠٠٠٠٩", "9" * 200])
def test_a_copy_that_somebody_made_is_ignored_and_kept(tmp_path: Path, name: str) -> None:
    shutil.copytree(save(tmp_path, 9), tmp_path / name)
    assert found(tmp_path) == 9
    for updates in (10, 11):
        save(tmp_path, updates)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "000010", "000011"])


def test_a_checkpoint_under_the_number_of_another_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, 4).rename(tmp_path / "000007")
    checkpoint, (problem,) = find_checkpoint(tmp_path, 99)
    assert checkpoint is None
    assert "000007` is damaged: it was written after 4 updates" in problem


@pytest.mark.parametrize("name", ["trainer/state", "suspended.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_with_a_damaged_one_the_one_before_it_counts_and_the_damage_is_named(
    tmp_path: Path, name: str, damage: str
) -> None:
    save(tmp_path, 4)
    path = save(tmp_path, 7) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-3])
        case "changed":
            path.write_bytes(content)
        case "gone":
            path.unlink()
    checkpoint, problems = find_checkpoint(tmp_path, 99)
    assert checkpoint is not None
    if (name, damage) == ("state.json", "changed"):
        return  # one letter may be one of a name that nobody reads
    assert checkpoint.updates == 4
    assert len(problems) == (0 if (name, damage) == ("state.json", "gone") else 1), "without a state it is not complete"
    assert all("000007` is damaged" in problem for problem in problems)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    state = folder / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    with pytest.raises(RunError, match="has format 99"):
        load_checkpoint(folder)


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space left")])
def test_a_checkpoint_that_cannot_be_written_leaves_the_previous_one(
    tmp_path: Path, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4)

    def full(*_: Any) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full)
        with pytest.raises(RunError, match=r"000007` could not be written \(.*previous one is untouched"):
            save(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["000004"]
    assert found(tmp_path) == 4


def test_a_crash_as_a_checkpoint_gets_its_name_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4)

    def killed(self: Path, target: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 7)
    assert found(tmp_path) == 4
    save(tmp_path, 7)
    assert found(tmp_path) == 7
    shutil.rmtree(tmp_path / "000007")
    assert found(tmp_path) == 4
