"""Rendering of chats: tools that a template does not show."""

from __future__ import annotations

from typing import Any

import pytest
from chat_cases import chat_tokenizer

from stretto.chat.rendering import Renderer

MESSAGES: Any = [{"role": "user", "content": "hello"}]


def test_tools_that_the_template_does_not_show_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    shows = Renderer(chat_tokenizer("hermes"))
    shows.text(MESSAGES, [tool])
    assert not caplog.records
    hides = Renderer(chat_tokenizer("hermes", "{{ messages[0]['content'] }}"))
    hides.text(MESSAGES)
    assert not caplog.records
    for _ in range(2):
        assert hides.text(MESSAGES, [tool]) == "hello"
    (record,) = caplog.records
    assert "does not show tools, so the model is not told of `add`" in record.message
