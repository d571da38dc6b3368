"""The spending of an episode, within its budget (`task.budget`)."""

from __future__ import annotations

import math

from stretto.errors import BudgetError, RewardError


class Spending:
    """Adds up what one run of an episode spends: money, calls, or whatever its environment counts."""

    __slots__ = ("budget", "refused", "spent")

    def __init__(self, budget: float = math.inf) -> None:
        self.budget = budget
        self.spent = 0.0
        self.refused = False  # an amount was refused

    @property
    def left(self) -> float:
        return self.budget - self.spent

    @staticmethod
    def check(amount: float, what: str) -> float:
        """Returns an amount as a number. Raises `RewardError` if it is none that can be spent."""
        number = float(amount)
        if not 0 <= number < math.inf:
            raise RewardError(f"the environment spent {amount!r} ({what}): spend a finite number that is not negative")
        return number

    def spend(self, amount: float, what: str) -> None:
        """Counts an amount. Raises `BudgetError`, and does not count it, if it is more than what is left."""
        number = self.check(amount, what)
        if self.spent + number > self.budget:
            self.refused = True
            raise BudgetError(
                f"{number:g} for {what or 'something'} is more than the episode has left: it has spent {self.spent:g} "
                f"of {self.budget:g} (`task.budget`); catch this error and return what was earned"
            )
        self.spent += number
