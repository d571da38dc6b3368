"""Collects what is wrong with the rows of a data set, so that a user gets all of it at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.errors import RecipeError

SHOWN_REASONS = 8
SHOWN_PLACES = 3  # for each reason


@dataclass(slots=True)
class RowFaults:
    """The rows that cannot be used, by the reason. Keeps few of their places, and counts them all."""

    places: dict[str, list[str]] = field(default_factory=dict)  # the first ones of each reason
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def num(self) -> int:
        """The number of faults."""
        return sum(self.counts.values())

    def add(self, place: str, reason: str) -> None:
        """Notes a fault. `place` is the row's file and line; together they are a sentence: `PLACE: REASON`."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if len(self.places) < SHOWN_REASONS or reason in self.places:
            some = self.places.setdefault(reason, [])
            if len(some) < SHOWN_PLACES:
                some.append(place)

    def include(self, others: RowFaults) -> None:
        """Adds faults that were collected apart."""
        for reason, count in others.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            if reason in others.places and (len(self.places) < SHOWN_REASONS or reason in self.places):
                self.places[reason] = [*self.places.get(reason, []), *others.places[reason]][:SHOWN_PLACES]

    @property
    def text(self) -> str:
        """All faults: a sentence, or a line for each reason."""
        lines = [f"{named(some, self.counts[reason])}: {reason}" for reason, some in self.places.items()]
        if self.num == 1:
            return lines[0]
        if hidden := self.num - sum(self.counts[reason] for reason in self.places):
            lines.append(f"and {hidden:,} for other reasons")
        return "\n  ".join([f"{self.num:,} rows cannot be used:", *lines])

    def refuse(self) -> None:
        """Raises `RecipeError` if there is a fault."""
        if self.counts:
            raise RecipeError(self.text)


def named(places: list[str], count: int) -> str:
    """Returns the first of `count` places, and how many there are beside."""
    more = count - len(places)
    return ", ".join(places) + (f" and {more:,} more" if more else "")


def half_character(error: UnicodeEncodeError) -> str:
    """Returns what is wrong with a text that has half of a character, which no tokenizer takes."""
    half = f"`\\u{ord(error.object[error.start]):04x}`"
    return f"{half} is half of a character (a lone surrogate); write the other half after it, or remove it"
