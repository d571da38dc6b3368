"""Prompts and scripted policies for environments of other packages."""

from __future__ import annotations

import asyncio
from typing import Any

from chat_cases import ScriptedPolicy, chat_tokenizer, spelled

from stretto.types import Prompt

TOKENIZER = chat_tokenizer("hermes")


def chat_prompt(text: str, **columns: Any) -> Prompt:
    """A row with messages."""
    return Prompt(0, text, tuple(TOKENIZER.encode(text)), {**columns, "messages": [{"role": "user", "content": text}]})


def plain_prompt(text: str, **columns: Any) -> Prompt:
    """A row with a prompt of plain text."""
    return Prompt(0, text, tuple(TOKENIZER.encode(text)), columns)


def play(environment: Any, prompt: Prompt, *script: Any) -> tuple[Any, list[tuple[bool, str]]]:
    """Plays an episode with what the policy says; returns its outcome, and its row of text, sampled or not."""
    policy = ScriptedPolicy(TOKENIZER, *script)
    outcome = asyncio.run(environment.episode(prompt, policy))
    assert set(policy.lineages) == {0}
    return outcome, spelled(TOKENIZER, policy.rows[0])
