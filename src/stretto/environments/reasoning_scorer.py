"""Scores answers with the scorers of the package reasoning-gym, in reward workers.

A separate module, because reasoning-gym takes seconds to import: a worker imports it at its start, before the deadline
of the first reward begins.
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
    """Returns the score that the data set's scorer gives to the extracted answer."""
    return float(_dataset(name, config).score_answer(extract_answer(completion, answer), entry))


@functools.lru_cache(maxsize=8)
def _dataset(name: str, config: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(config))
