"""Files of versions: whole, synced and checked, or not there."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from stretto.errors import LostObjectError, RunError
from stretto.models.checksums import checksum
from stretto.store import version_files as module
from stretto.store.version_files import VersionFiles
from stretto.types import Probe, Weights


def weights(version: int, kind: Any = "lora") -> Weights:
    tensors = {
        "layer.lora_A": torch.randn(2, 3, generator=torch.Generator().manual_seed(version)),
        "layer.lora_B": torch.arange(6, dtype=torch.bfloat16).view(3, 2).t() + version,  # not contiguous
    }
    return Weights(version, kind, tensors, checksum(tensors, 0.1), 0.1)


def write(files: VersionFiles, *versions: int) -> None:
    async def all_of_them() -> None:
        for version in versions:
            files.write(weights(version))
        for version in versions:
            await files.durable(version)

    asyncio.run(all_of_them())


@pytest.fixture
def files(tmp_path: Path) -> Any:
    made = VersionFiles(tmp_path / "versions")
    yield made
    made.close()


def test_a_probe_comes_back_with_its_version(files: VersionFiles) -> None:
    probe = Probe((5, 3, 1), np.array([-0.1, -2.3], dtype=np.float32))
    files.write(replace(weights(1), probe=probe))
    asyncio.run(files.durable(1))
    found = files.read(1, weights(1).checksum)
    assert found is not None
    assert found.probe is not None
    assert found.probe.tokens == probe.tokens
    assert np.array_equal(found.probe.logprobs, probe.logprobs)


def test_a_version_comes_back_as_it_was(files: VersionFiles, tmp_path: Path) -> None:
    write(files, 3, 4)
    again = VersionFiles(tmp_path / "versions")
    assert again.versions() == [3, 4]
    for version in (3, 4):
        expected, found = weights(version), again.read(version, weights(version).checksum)
        assert found is not None
        assert (found.version, found.kind, found.checksum, found.scale) == (version, "lora", expected.checksum, 0.1)
        assert found.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    asyncio.run(again.durable(3))  # what was read is durable
    again.close()


def test_what_is_not_the_recorded_version_is_not_read(files: VersionFiles) -> None:
    write(files, 3)
    assert files.read(4, weights(4).checksum) is None
    assert files.read(3, weights(4).checksum) is None
    path = files.path(3)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[-1] ^= 1
    for damaged in (bytes(changed), whole[:-1], b"", whole[:5]):
        path.write_bytes(damaged)
        assert files.read(3, weights(3).checksum) is None
    path.write_bytes(whole)
    assert files.read(3, weights(3).checksum) is not None


def test_a_version_counts_only_when_it_is_synced_under_its_name(
    files: VersionFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, seen = threading.Event(), list[Any]()

    def slow(path: Path) -> None:
        seen.append((path.name, files.versions()))
        go_on.wait(10)
        os.sync()

    monkeypatch.setattr(module, "sync", slow)

    async def look() -> None:
        files.write(weights(3))
        waiting = asyncio.ensure_future(files.durable(3))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        other = asyncio.ensure_future(files.durable(3))
        await asyncio.sleep(0)
        other.cancel()  # somebody gives up: the write goes on
        go_on.set()
        await waiting

    asyncio.run(look())
    assert seen == [(".000003.partial", []), ("versions", [3])]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space left")])
def test_a_version_that_cannot_be_written_is_an_error_by_name(
    files: VersionFiles, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def full(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(RunError, match=r"version 3 could not be written to `.*000003.safetensors` .*`--resume`"):
        write(files, 3)
    assert list(files.folder.iterdir()) == []


def test_what_nothing_needs_is_removed(files: VersionFiles) -> None:
    write(files, 1, 2, 3, 4)
    (files.folder / ".000005.partial").write_text("half")
    files.remove(2)
    files.write(weights(6))
    files.prune({4, 6}.__contains__)
    files.write(weights(7))
    files.close()
    assert sorted(path.name for path in files.folder.iterdir()) == [
        f"00000{version}.safetensors" for version in (4, 6, 7)
    ]


def test_files_that_the_run_has_not_written_are_left_alone_and_stop_nothing(
    files: VersionFiles, caplog: pytest.LogCaptureFixture
) -> None:
    write(files, 3, 5)
    others = [
        "000003 copy.safetensors",
        "000003.safetensors.bak",
        "3.safetensors",
        "old.safetensors",
        "٠٠٠٠٠٣.safetensors",
    ]
    for name in others:
        (files.folder / name).write_bytes(b"not ours")
    (files.folder / "000001.safetensors").mkdir()  # it has our name, and cannot be removed like a file
    assert files.versions() == [1, 3, 5]
    files.prune({5}.__contains__)
    files.close()
    left = {path.name for path in files.folder.iterdir()}
    assert left == {*others, "000001.safetensors", "000005.safetensors"}
    assert "000001.safetensors` is not needed and cannot be removed" in caplog.text


def test_a_file_that_a_checkpoint_holds_goes_with_the_last_checkpoint_that_does(files: VersionFiles) -> None:
    write(files, 1, 2, 3, 4)
    files.hold(3, [1, 2])
    files.hold(4, [2, 3])
    for version in (1, 2):
        files.remove(version)
    assert all(files.keeps(version) for version in (1, 2))
    files.keep_holds({4})
    assert [files.keeps(version) for version in (1, 2, 3, 4)] == [False, True, True, True], "nothing has removed 3"
    files.keep_holds({5})
    files.close()
    assert files.versions() == [3, 4]


def test_a_reference_is_read_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = VersionFiles(Path("versions"))
    assert files.reference(weights(3)) is None, "it is not written yet"
    write(files, 3)
    found = files.reference(weights(3))
    assert found is not None
    assert found.store(Path("versions"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(pickle.dumps(found)).fetch().checksum == weights(3).checksum
    files.close()
    (tmp_path / "versions" / "000003.safetensors").unlink()
    with pytest.raises(LostObjectError, match="version 3 cannot be read from"):
        found.fetch()


def test_without_durability_only_what_is_kept_is_written(tmp_path: Path) -> None:
    files = VersionFiles(tmp_path / "versions", durable=False)

    async def two() -> None:
        files.write(weights(1))
        await files.durable(1)
        files.keep(weights(2))
        await files.durable(2)

    asyncio.run(two())
    assert files.versions() == [2]
    files.close()


class Elsewhere:
    """Weights that come `lost` times from whoever made them before they can be fetched."""

    version = 6
    checksum = weights(6).checksum

    def __init__(self, lost: int = 0, made_by: bool = False) -> None:
        self.lost, self.made_by = lost, made_by

    def store(self, folder: Path) -> bool:
        if self.made_by:
            module.write_file(folder, weights(6))
        return self.made_by

    def fetch(self) -> Weights:
        assert threading.current_thread() is not threading.main_thread()
        if self.made_by or self.lost:
            raise LostObjectError("it is gone")
        return weights(6)

    async def recreate(self) -> None:
        self.lost -= 1


@pytest.mark.parametrize("elsewhere", [Elsewhere(), Elsewhere(lost=2), Elsewhere(made_by=True)])
def test_weights_that_are_elsewhere_are_written_there_or_fetched_and_taken_again_where_they_are_lost(
    files: VersionFiles, elsewhere: Elsewhere
) -> None:
    files.write(elsewhere)
    asyncio.run(files.durable(6))
    assert files.read(6, weights(6).checksum) is not None


def test_weights_that_stay_lost_are_an_error_that_says_how_to_go_on(files: VersionFiles) -> None:
    files.write(Elsewhere(lost=9))
    with pytest.raises(RunError, match=r"version 6 was lost before it was written .* `--resume`"):
        asyncio.run(files.durable(6))
