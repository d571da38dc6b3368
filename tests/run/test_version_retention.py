"""Weights are kept while an engine or an update may need them, off the device where only an update does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest
import torch

from stretto.errors import RunError, StalledError
from stretto.run.version_retention import VersionRetention
from stretto.store.journal import Journal
from stretto.types import Weights, WeightsRef


class Recorded:
    """A journal that is always on disk."""

    async def durable(self) -> None:
        pass


class Files:
    """A `VersionStore` that has files, or could not write them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.removed: list[int] = []
        self._error = error

    def write(self, weights: Weights | WeightsRef) -> None:
        raise AssertionError("only updates write versions")

    async def durable(self, version: int) -> None:
        if self._error is not None:
            raise self._error

    def reference(self, weights: Weights | WeightsRef) -> Any:
        return None if self._error is not None else f"file of version {weights.version}"

    def remove(self, version: int) -> None:
        self.removed.append(version)


def weights(version: int, kind: Any) -> Weights:
    return Weights(version, kind, {"weight": torch.full((2,), float(version))}, f"bits {version}")


class Case:
    def __init__(self, ages: int, *, kind: str = "full", retired: tuple[int, ...] = (), files: Files | None) -> None:
        self.held: dict[int, Any] = {version: weights(version, kind) for version in range(6)}
        self.work: list[Coroutine[Any, Any, None]] = []
        self.retention = VersionRetention(
            self.held, ages=ages, retired=retired, journal=cast(Journal, Recorded()), versions=files,
            spawn=lambda work, name: self.work.append(work),
        )  # fmt: skip

    def settle(self) -> None:
        async def all_of_it() -> None:
            for each in self.work:
                await each

        asyncio.run(all_of_it())
        self.work = []


@pytest.mark.parametrize("ages", [0, 2])
def test_a_retired_version_is_released_when_no_update_can_need_it(ages: int) -> None:
    files = Files()
    case = Case(ages, kind="lora", files=files)
    for version in (0, 1, 3):
        case.retention.retire(version, newest=4)
    case.settle()
    first = 4 - ages
    assert files.removed == [version for version in (0, 1, 3) if version < first]
    assert sorted(case.held) == sorted({0, 1, 2, 3, 4, 5} - set(files.removed))
    case.retention.release(5)
    case.settle()
    assert files.removed == [version for version in (0, 1, 3) if version < first + 1], "2 and 5 are not retired"
    case.retention.release(20)
    case.settle()
    assert sorted(case.held) == [2, 4, 5]


def test_what_only_an_update_needs_leaves_the_device_and_adapters_stay() -> None:
    case, adapters = Case(2, files=Files()), Case(2, kind="lora", files=Files())
    for each in (case, adapters):
        each.retention.retire(3, newest=4)
        each.settle()
    assert case.held[3] == "file of version 3"
    assert isinstance(case.held[2], Weights)
    assert isinstance(adapters.held[3], Weights)


def test_a_run_that_begins_with_versions_that_no_engine_needs_moves_them_too() -> None:
    case = Case(2, retired=(1, 2), files=Files())
    case.retention.begin()
    case.settle()
    assert [version for version, each in case.held.items() if isinstance(each, str)] == [1, 2]


@pytest.mark.parametrize("error", [RunError("the disk is full"), StalledError("the disk hangs")])
def test_without_a_file_full_weights_wait_in_host_memory_and_the_run_goes_on(error: Exception) -> None:
    for files in (Files(error), None):
        case = Case(2, files=files)
        before = case.held[3]
        case.retention.retire(3, newest=4)
        case.settle()
        assert isinstance(case.held[3], Weights)
        assert case.held[3] is not before
        assert torch.equal(case.held[3].tensors["weight"], before.tensors["weight"])


def test_a_version_that_is_released_meanwhile_does_not_come_back() -> None:
    case = Case(2, files=Files())
    case.retention.retire(3, newest=4)
    case.retention.release(9)
    case.settle()
    assert 3 not in case.held
