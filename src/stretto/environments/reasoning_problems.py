"""Extracts and scores the answers to problems of the package reasoning-gym.

The answer is the text after the last `Answer:` (in any case, on the same line) or inside the last
`<answer>...</answer>`, whichever comes later. Without a marker, it is the last number of the text if a number is
expected, else the last non-empty line. If the expected answer has several lines, all text after the marker counts.
Surrounding space, `*`, `$` and backticks and a final full stop are removed.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

import re
from typing import Any

EXACT_REWARD = "stretto.environments.reasoning_problems:exact"
SCORER_REWARD = "stretto.environments.reasoning_scorer:reward"

INSTRUCTION = "Solve the problem. End with a line that says `Answer: ` followed by the answer and nothing else."

_MARKER = re.compile(r"answer\s*:|<answer>", re.IGNORECASE)
_CLOSED = re.compile(r"</answer>", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_AROUND = " \t\r\n*$`"


def extract_answer(text: str, expected: str) -> str:
    """Returns the answer in a completion, by the rule above."""
    markers = list(_MARKER.finditer(text))
    if markers:
        answer = _CLOSED.split(text[markers[-1].end() :])[0].strip(_AROUND)
        if "\n" not in expected.strip():
            answer = answer.split("\n")[0]
    elif _NUMBER.fullmatch(expected.strip()):
        numbers = _NUMBER.findall(text)
        answer = numbers[-1] if numbers else ""
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        answer = lines[-1] if lines else ""
    answer = answer.strip(_AROUND)
    return answer.removesuffix(".").strip(_AROUND) if not expected.strip().endswith(".") else answer


def exact(prompt: str, completion: str, *, answer: str, **row: Any) -> float:
    """Returns 1 if the extracted answer equals the expected one, else 0."""
    return float(extract_answer(completion, answer) == answer.strip())
