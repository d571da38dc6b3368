"""A version that arrives damaged or not at all is sent again, so often and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from stretto.errors import ChecksumError, EngineError, LostObjectError
from stretto.run.version_loader import TRANSFERS, send
from stretto.training.fake import FakeTrainer
from stretto.types import Weights, WeightsRef


class Elsewhere:
    """Weights that can be recreated, or not."""

    version, checksum = 4, "bits"

    def __init__(self, *, recreatable: bool = True) -> None:
        self.recreatable = recreatable
        self.recreated = 0

    def fetch(self) -> Weights:
        raise AssertionError("the run loop passes them on")

    def store(self, folder: Path) -> bool:
        return False

    async def recreate(self) -> None:
        if not self.recreatable:
            raise LostObjectError("no copy is left")
        self.recreated += 1


def sent(weights: Weights | WeightsRef, failures: Sequence[Exception]) -> tuple[int, list[str]]:
    """Sends a version that fails to arrive in these ways. Returns the number of transfers and the notes."""
    left, notes, transfers = list(failures), list[str](), 0

    async def transfer() -> None:
        nonlocal transfers
        transfers += 1
        if left:
            raise left.pop(0)

    asyncio.run(send(weights, transfer, lambda kind, text: notes.append(f"{kind}: {text}")))
    return transfers, notes


def test_what_arrives_damaged_or_not_at_all_is_recreated_and_sent_again() -> None:
    weights = Elsewhere()
    transfers, notes = sent(weights, [ChecksumError("other bits"), LostObjectError("its machine is gone")])
    assert (transfers, weights.recreated) == (3, 2)
    assert notes == [
        "damaged transfer: version 4 arrived damaged: other bits",
        "lost transfer: version 4 did not arrive: its machine is gone",
    ]


@pytest.mark.parametrize("failure", [ChecksumError("other bits"), LostObjectError("late")])
def test_after_so_many_transfers_the_instance_is_at_fault(failure: Exception) -> None:
    weights = Elsewhere()
    failures = [failure] * (TRANSFERS + 1)
    with pytest.raises(EngineError, match=f"version 4 .*: {failure}, {TRANSFERS} times"):
        sent(weights, failures)
    assert weights.recreated == TRANSFERS - 1


def test_weights_in_this_process_are_sent_again_as_they_are() -> None:
    assert sent(FakeTrainer().weights(0), [ChecksumError("other bits")])[0] == 2


def test_a_damaged_copy_that_is_the_only_one_is_sent_again() -> None:
    assert sent(Elsewhere(recreatable=False), [ChecksumError("other bits")])[0] == 2


def test_weights_that_nothing_can_recreate_are_not_the_fault_of_the_instance() -> None:
    with pytest.raises(LostObjectError, match=r"version 4 is lost .*no copy is left.*`--resume`"):
        sent(Elsewhere(recreatable=False), [LostObjectError("its machine is gone")])
