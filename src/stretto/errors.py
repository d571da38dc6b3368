"""One flat vocabulary of errors, by boundary.

An error of the user's names the option in backticks, what it got, and what to do instead. A failure of a request, a
reward or an environment is data: it is recorded with its trajectory and counted, and the run goes on. A failure of the
trainer, the journal or the loop ends the run, by name.

Every class takes one message, so that it survives pickling between processes.
"""

import re

_LONG_NUMBER = re.compile(r"[0-9]{40,}")


class StrettoError(Exception):
    """Whatever Stretto raises on purpose. The command line prints it without a traceback."""

    def __str__(self) -> str:
        """Returns the message. A number of hundreds of digits, which any option may get, is shortened."""
        return shortened(super().__str__())


class RecipeError(StrettoError, ValueError):
    """A recipe, an option or a data set that cannot be run as it is."""


class ModelError(StrettoError, ValueError):
    """A folder that is no model, or an architecture that the engine cannot serve exactly."""


class RunError(StrettoError):
    """A run folder that cannot be used: it exists already, or there is nothing in it to resume."""


# -- failures that are data: they belong to one trajectory ------------------------------------------------------------


class RequestError(StrettoError):
    """One request cannot be served: its prompt is too long for the engine, or the engine could not finish it."""


class VersionNotResidentError(RequestError):
    """A request named a version that the engine does not hold. Never answered with another one."""


class SuspendedError(StrettoError):
    """The trajectory was suspended; whoever asked for that holds it now. Ends the pending `generate` call."""


class AbortedError(StrettoError):
    """The trajectory was aborted on purpose (the `drop` paradigm). Ends the pending `generate` call."""


class RewardError(StrettoError):
    """A reward function raised, returned something that is no finite number, or did not return in time."""


class LateRewardError(RewardError):
    """A reward function or an environment did not return in time."""


class ChatError(RewardError):
    """Messages or tools of a chat that cannot be rendered, or an answer to a request that is out of date."""


class RoomError(RewardError):
    """An episode asks for another turn, and what it has so far leaves no token for one. It may catch this and end."""


class BudgetError(RewardError):
    """An episode would spend more than its budget, `task.budget`. It may catch this and end."""


# -- failures that end the run -----------------------------------------------------------------------------------------


class ChecksumError(StrettoError):
    """The weights that arrived are not the weights that were sent."""


class LostObjectError(StrettoError):
    """An object of the cluster is lost: the machine that held it is gone, or its owner is."""


class EngineError(StrettoError):
    """The engine itself failed: every request on it is lost, and it takes no more."""


class TrainerError(StrettoError):
    """An update failed."""


class TrainerLostError(TrainerError):
    """A rank of the trainer is gone, and what it held with it. The policy is made again from the last checkpoint."""


class JournalError(StrettoError):
    """The journal could not be written or read. Nothing is trained on that is not recorded."""


class SchemaError(JournalError):
    """The journal is of another version of stretto: nothing is wrong with it, and this version cannot read it."""


class StalledError(StrettoError):
    """Nothing happened for longer than the run allows; the message says who waited for what."""


class ScoringHaltedError(StrettoError):
    """Scoring cannot go on: a judge is away for too long, its budget is used up, or it refuses the key.

    The run stops at the next update boundary. When it is resumed, what has no reward is scored.
    """


class TaskCancelledError(StrettoError):
    """A task of the run was cancelled by somebody else. What it was to do is not done."""


class TransitionError(StrettoError):
    """Something was reported about a trajectory that cannot happen in the state it is in: a fault of the caller's."""


# -- errors as text ----------------------------------------------------------------------------------------------------


def shortened(text: str) -> str:
    """Returns a text in which numbers of very many digits are cut in the middle."""
    return _LONG_NUMBER.sub(lambda found: f"{found[0][:6]}...{found[0][-6:]} ({len(found[0])} digits)", text)


def printable(text: str, *, lines: bool = False) -> str:
    """Returns a text with its control characters escaped: they could move the cursor or change what a terminal shows.

    Tabs stay, and with `lines` the ends of lines.
    """
    kept = "\t\n" if lines else "\t"
    return "".join(char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text)


def describe(error: BaseException) -> str:
    """Returns the message of one of these errors, and type and message of any other."""
    return str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message: those of torch and Ray are pages long."""
    return str(error).strip().partition("\n")[0]
