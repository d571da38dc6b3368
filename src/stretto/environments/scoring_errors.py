"""Errors that scorers of this package raise in a worker. Imports nothing: reward workers load this module."""


class ScoringError(Exception):
    """One completion has no reward. The message is shown as it is."""


class HaltError(Exception):
    """Scoring cannot go on: the run ends at the next update boundary, and no completion fails because of it.

    The message is shown as it is. It says what to do before the run is resumed.
    """


HALT = "\0halt\0"  # begins the text of a `HaltError` on its way to the pool


def error_text(error: ScoringError | HaltError) -> str:
    """Returns an error as it goes to the pool, which `halt_reason` reads."""
    return f"{HALT}{error}" if isinstance(error, HaltError) else str(error)


def halt_reason(text: str | None) -> str | None:
    """Returns the message of a `HaltError`; None if the text is that of another error."""
    return text.removeprefix(HALT) if text is not None and text.startswith(HALT) else None
