"""Devices that a run is planned for without being on them: `stretto check --devices 8x141GiB`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stretto.errors import RecipeError, shortened

SAFE_SHARE = 0.93  # of a card, that is left on a machine with a desktop
FORM = re.compile(r"(\d{1,6}) ?x ?(\d{1,6}(?:\.\d{1,6})?) ?(GiB|GB)", re.ASCII | re.IGNORECASE)
EXAMPLE = "such as `8x141GiB` for eight GPUs of 141 GiB"


@dataclass(frozen=True, slots=True)
class PlannedDevices:
    """GPUs of one size, all of them free and in one machine."""

    count: int
    gib: float  # of each

    @classmethod
    def parse(cls, text: str) -> PlannedDevices:
        """Reads COUNTxSIZE, such as `8x141GiB`. Raises `RecipeError` for anything else."""
        said = f"`devices` is {shortened(repr(text))}"
        found = FORM.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise RecipeError(
                f"{said}, which is not COUNTxSIZE: write the number of GPUs and the size of one, {EXAMPLE}"
            )
        count, size = int(found[1]), float(found[2])
        if count < 1 or size <= 1:
            raise RecipeError(f"{said}: there must be at least one GPU, of more than 1 GiB; write them {EXAMPLE}")
        if found[3].lower() == "gb":
            safe = f", or `{count}x{int(SAFE_SHARE * size)}GiB` to be safe" if SAFE_SHARE * size >= 2 else ""
            raise RecipeError(
                f"{said}: sizes are in GiB, as `stretto doctor` prints them. A card that is sold with {size:g} GB has "
                f"about {size:g} GiB, of which the driver and a desktop take some: write `{count}x{size:g}GiB`{safe}"
            )
        return cls(count, size)

    def __str__(self) -> str:
        return f"{self.count} x {self.gib:g} GiB"
