"""Errors that scorers of this package raise in a worker. Imports nothing: reward workers load this module."""


class ScoringError(Exception):
    """One completion has no reward. The message is shown as it is."""


class HaltError(Exception):
    """Scoring cannot go on: the run ends at the next update boundary, and no completion fails because of it.

    The message is shown as it is. It says what to do before the run is resumed.
    """
