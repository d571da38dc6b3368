"""Whole runs from Python: a model that costs nothing, and a working directory with a task in it."""

from run_fixtures import model, task

__all__ = ["model", "task"]
