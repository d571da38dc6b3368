"""Rows of a data set, and the endless stream of prompts that a run draws from them.

Position `index` of the stream is row `permutation(seed, epoch)[index % rows]` with `epoch = index // rows`. It depends
on nothing else, so a resumed run continues with the same prompts. With `PassRates` (`prompt_order.py`) it also depends
on earlier rewards, and each position is drawn once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stretto.environments.prompt_order import Draw, PassRates
from stretto.environments.prompt_rendering import LongPrompts, PromptRenderer, UnrenderableRowError
from stretto.environments.row_faults import RowFaults
from stretto.environments.row_sources import load_rows as load_rows
from stretto.environments.rows import Row as Row
from stretto.environments.rows import split_held_out as split_held_out
from stretto.errors import RecipeError
from stretto.types import Prompt

CHECKED_ROWS = 20_000  # a data set in memory with at most this many rows is tokenized completely at the start
CHECK_S = 3.0  # larger and generated data sets are tokenized for this long: a row may take milliseconds to generate
CHECKED_AT_ONCE = 16
CHECKED_IN_MEMORY = 256  # at once: to tokenize many together is faster
CACHED_PROMPTS = 1024

TooLong = Literal["refuse", "drop", "truncate"]


class PromptStream:
    """An endless, shuffled stream of prompts with random access.

    A row that cannot become a prompt is an error at the start, and so is a prompt that is too long, unless `too_long`
    says to drop it or to cut it. One that was not checked at the start is returned as it is: the engine refuses it, and
    its trajectories fail and are counted. Row numbers are those of `rows`, whatever is dropped.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        *,
        seed: int,
        max_prompt_tokens: int,
        shuffle: bool = True,
        pass_rates: PassRates | None = None,
        name: str = "the data set",
        too_long: TooLong = "refuse",
        choices: Sequence[str] = (),
        task: str | None = None,
    ) -> None:
        """Checks the prompts; see `CHECKED_ROWS`. Raises `RecipeError` with all that is wrong.

        `name` is the data set's name in error messages. `shuffle = False` keeps the order of the rows, for evaluation.
        If `pass_rates` is given, it draws the rows; `shuffle` then only sets the order in which lengths are checked.
        `too_long`: "drop" checks every row and leaves those out that have more tokens, "truncate" keeps the last ones
        of a prompt. `choices` are values of `task.too_long` that a refusal suggests.
        `task` is the label of the task, which its prompts have too.
        """
        if len(rows) == 0:
            raise RecipeError(f"{name} has no rows; there is nothing to ask the model")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._pass_rates = pass_rates
        self._name = name
        self._if_long, self._choices = too_long, choices
        self._renderer = PromptRenderer(tokenizer, keep_last=max_prompt_tokens if too_long == "truncate" else None)
        self._kept: NDArray[np.int64] | None = None  # the rows that are drawn; None: all
        self._task = task
        self._permutation = lru_cache(maxsize=2)(self._permute)
        self._tokenized = lru_cache(maxsize=CACHED_PROMPTS)(self._tokenize)
        self.too_long = LongPrompts(max_prompt_tokens)  # those that are dropped or cut
        self.longest_checked = 0  # tokens
        self.num_unknown = 0  # checked rows with text that the tokenizer does not know
        self.first_unknown = ""  # such text, and its place
        in_memory = isinstance(rows, list | tuple) and len(rows) <= CHECKED_ROWS
        self.num_checked = self._check_all(math.inf if in_memory or too_long == "drop" else CHECK_S)

    @property
    def num_rows(self) -> int:
        """Prompts in one epoch."""
        return len(self._rows) if self._kept is None else len(self._kept)

    @property
    def num_dropped(self) -> int:
        """Rows that are never drawn, because their prompts are too long."""
        return len(self._rows) - self.num_rows

    @property
    def bends_long(self) -> bool:
        """True if prompts that are too long are dropped or cut."""
        return self._if_long != "refuse"

    @property
    def num_templated(self) -> int:
        """Rows whose prompts the chat template renders; the others are raw text. Generated rows are all alike."""
        if not self._renderer.has_template:
            return 0
        if isinstance(self._rows, list | tuple):
            drawn = self._rows if self._kept is None else [self._rows[number] for number in self._kept]
            return sum(row.messages is not None for row in drawn)
        return self.num_rows if self._rows[0].messages is not None else 0

    def epoch(self, index: int) -> int:
        """Returns the number of epochs completed before position `index`, if rows come in epochs."""
        return index // self.num_rows

    @property
    def follows_rewards(self) -> bool:
        """True if later draws depend on rewards."""
        return self._pass_rates is not None

    def draw(self, index: int) -> Draw:
        """Draws the row at position `index`, with a reason. With pass rates, each position is drawn once, in order."""
        if self._pass_rates is not None:
            return replace(self._pass_rates.draw(index), task=self._task)
        return Draw(self.row_number(index), self.epoch(index), "shuffled" if self._shuffle else "in order", self._task)

    def drawn(self, row_number: int, task: str | None = None) -> None:
        """Notes that a row was drawn before the run was resumed."""
        if self._pass_rates is not None:
            self._pass_rates.drawn(row_number)

    def scored(self, row_number: int, reward: float, task: str | None = None) -> None:
        """Notes the reward of a trajectory of a row, for later draws."""
        if self._pass_rates is not None:
            self._pass_rates.scored(row_number, reward)

    def settle(self, update: int) -> None:
        """Notes that the batch of an update was taken: the rewards noted before count for later draws."""
        if self._pass_rates is not None:
            self._pass_rates.settle(update)

    def prompt(self, index: int, row_number: int | None = None, task: str | None = None) -> Prompt:
        """Returns the prompt at position `index`, made from row `row_number` if that is given."""
        number = self.row_number(index) if row_number is None else row_number
        text, tokens, columns = self._tokenized(number)
        return Prompt(index=index, text=text, tokens=tokens, row=columns, task=self._task)

    def row_number(self, index: int) -> int:
        """Returns the row at position `index`, if rows come in epochs."""
        epoch, place = divmod(index, self.num_rows)
        place = int(self._permutation(epoch)[place]) if self._shuffle else place
        return place if self._kept is None else int(self._kept[place])

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)

    def _tokenize(self, number: int) -> tuple[str, tuple[int, ...], Mapping[str, Any]]:
        row = self._rows[number]
        try:
            made = self._renderer.render(row)
        except UnrenderableRowError as error:
            raise RecipeError(f"{self._called(number)}: {error}") from error
        return made.text, made.tokens, row.columns

    def _called(self, number: int) -> str:
        """Returns a row's name for errors: its line in its file (held-out rows shift the numbers), or its number."""
        return self._rows[number].where or f"row {number + 1} of {self._name}"

    def _check_all(self, most_s: float) -> int:
        """Checks rows for about `most_s` seconds, in the order of the draw; returns how many were checked.

        If rows are dropped, their own order is that of the check: the draw follows from it.
        """
        ends, num = time.monotonic() + most_s, len(self._rows)
        at_once = CHECKED_IN_MEMORY if isinstance(self._rows, list | tuple) else CHECKED_AT_ONCE
        faults, dropped = RowFaults(), list[int]()
        done = 0
        while done < num and (done == 0 or time.monotonic() < ends):
            some = range(done, min(done + at_once, num))
            numbers = list(some) if self._if_long == "drop" else [self.row_number(index) for index in some]
            self._check(numbers, faults, dropped)
            done = some.stop
        texts = [faults.text] if faults.num else []
        if self.too_long.num and self._if_long == "refuse":
            texts.append(self.too_long.refusal(self._choices))
        if len(dropped) == num:
            texts.append(f"all {num:,} prompts of {self._name} are too long: {self.too_long.places}")
        if texts:
            raise RecipeError("\n".join(texts))
        if dropped:
            self._drop(dropped)
        return done

    def _check(self, numbers: Sequence[int], faults: RowFaults, dropped: list[int]) -> None:
        limit = self.too_long.limit
        for number, found in zip(numbers, self._renderer.checked([self._rows[n] for n in numbers]), strict=True):
            if found.fault is not None:
                faults.add(self._called(number), found.fault)
                continue
            if found.length > limit:
                self.too_long.add(self._called(number), found.length)
                if self._if_long == "drop":
                    dropped.append(number)
                    continue
            self.longest_checked = max(self.longest_checked, min(found.length, limit))
            if found.unknown is not None:
                self.num_unknown += 1
                if not self.first_unknown:
                    part = self._renderer.unknown_part(found.unknown)
                    self.first_unknown = f"`{part}` in {self._called(number)}"

    def _drop(self, dropped: Sequence[int]) -> None:
        drawn = np.ones(len(self._rows), dtype=bool)
        drawn[list(dropped)] = False
        self._kept = np.flatnonzero(drawn)
        self._permutation.cache_clear()
        if self._pass_rates is not None:
            self._pass_rates.leave_out(dropped)
