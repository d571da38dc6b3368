"""The data sets' own scorers of the package reasoning-gym, for reward workers.

A module apart, because reasoning-gym takes seconds to import: here that is part of the worker's start, where it is
waited for, and not of the first reward's time limit.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import reasoning_gym

from stretto.environments.reasoning_problems import extract_answer


def reward(
    prompt: str, completion: str, *, answer: str, entry: dict[str, Any], name: str, config: str, **row: Any
) -> float:
    """What the data set's own scorer gives the extracted answer."""
    return float(_dataset(name, config).score_answer(extract_answer(completion, answer), entry))


@functools.lru_cache(maxsize=8)
def _dataset(name: str, config: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(config))
