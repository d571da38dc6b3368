"""Templates: options of a recipe that become part of a policy's own template."""

from __future__ import annotations

from typing import Any

import pytest
from chat_cases import chat_tokenizer

from stretto.chat.rendering import Renderer, template_with

MESSAGES: Any = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{{ name }}|{{ 'short' if brief is defined and brief else 'long' }}|{{ rules.most }}|"
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)


@pytest.mark.parametrize(
    "options",
    [
        {"name": 'a "quoted" name\nof two lines, é 🙂', "brief": True, "rules": {"most": 3}},
        {"name": "x", "brief": False, "rules": {"most": [1.5, "two"]}},
        {"name": "x", "rules": {}, "chat_template": "{{ name }}: {{ messages[0]['content'] }}"},
    ],
)
def test_a_template_with_options_renders_as_it_did_with_them_apart(options: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer("hermes", TEMPLATE)
    apart = Renderer(tokenizer, options).text(MESSAGES)
    assert apart.endswith("hello")
    tokenizer.chat_template = template_with(TEMPLATE, options)
    assert Renderer(tokenizer).text(MESSAGES) == apart


def test_a_template_without_options_stays_as_it_is() -> None:
    assert template_with(TEMPLATE, {}) == TEMPLATE


def test_tools_that_the_template_does_not_show_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    shows = Renderer(chat_tokenizer("hermes"))
    shows.text(MESSAGES, [tool])
    assert not caplog.records
    hides = Renderer(chat_tokenizer("hermes"), {"chat_template": "{{ messages[0]['content'] }}"})
    hides.text(MESSAGES)
    assert not caplog.records
    for _ in range(2):
        assert hides.text(MESSAGES, [tool]) == "hello"
    (record,) = caplog.records
    assert "does not show tools, so the model is not told of `add`" in record.message
