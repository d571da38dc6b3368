"""Devices that are not here, as a user types them."""

from __future__ import annotations

import pytest

from stretto.errors import RecipeError
from stretto.recipe.planned_devices import PlannedDevices


@pytest.mark.parametrize(
    ("text", "count", "gib"),
    [("8x141GiB", 8, 141.0), ("1x23.5GiB", 1, 23.5), (" 16x80GiB ", 16, 80.0), ("8 x 141 gib", 8, 141.0)],
)
def test_a_count_and_a_size_are_read(text: str, count: int, gib: float) -> None:
    assert PlannedDevices.parse(text) == PlannedDevices(count, gib)


@pytest.mark.parametrize("text", ["", "8", "141GiB", "8*141GiB", "8x141", "8x141MiB", "-1x80GiB", "8xGiB"])
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RecipeError, match=r"`devices` is '.*', which is not COUNTxSIZE.*such as `8x141GiB`"):
        PlannedDevices.parse(text)


def test_a_size_in_gb_is_refused_with_the_gib_that_such_a_card_has() -> None:
    """Makers call 80 GiB "80 GB": the size of an H200, which is sold with 141 GB, is 140 GiB."""
    with pytest.raises(RecipeError, match=r"sold with 80 GB has about 80 GiB, .*: write `2x80GiB`, or `2x74GiB`"):
        PlannedDevices.parse("2x80GB")


@pytest.mark.parametrize("text", ["0x80GiB", "8x0.5GiB", "8x0GiB"])
def test_no_device_and_one_without_memory_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="at least one GPU"):
        PlannedDevices.parse(text)
