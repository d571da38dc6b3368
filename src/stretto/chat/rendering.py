"""Messages to text and tokens, through the tokenizer's own chat template.

Text is what the template writes; a context is extended by text, so that no token in front of it is made again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.chat.messages import Message, for_template
from stretto.chat.templates import prefill_of
from stretto.errors import ChatError, RecipeError

log = logging.getLogger(__name__)


class Renderer:
    """Renders chats for one model. Holds no state of a chat: all episodes may share it.

    `prefill` is the text that a task lets every answer begin with, behind the template's own generation prompt.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Renders with the template of the tokenizer. Raises `RecipeError` if it has none."""
        self._tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        if template is None:
            raise RecipeError(
                "the tokenizer of `model.path` has no chat template, so it cannot chat; use a model that was tuned to "
                "chat, or give a template in `task.chat_template`"
            )
        self.prefill = prefill_of(template)
        self._shows_tools = "tools" in str(template)
        self._warned = False
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {int(number): str(token) for number, token in added.items() if token.special}
        self._special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=False))
        longest_first = sorted(filter(None, self._special.values()), key=len, reverse=True)
        self._forged = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the text of a chat, up to the place where the model answers.

        A special token that is written in the result of a tool is broken up: it would end the message there. Raises
        `ChatError` if the template refuses the messages.
        """
        if tools:
            self.warn_of_hidden_tools([str(tool.get("function", tool).get("name")) for tool in tools])
        given = [self._unforged(for_template(message)) for message in messages]
        options = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            return self._rendered(given, options)
        except Exception as error:  # a template may raise anything
            if any("tool_calls" in message for message in given):  # some join the arguments of a call to a text
                with contextlib.suppress(Exception):
                    return self._rendered([*map(_with_text_arguments, given)], options)
            raise ChatError(f"the chat template refused the messages: {error}") from error

    def warn_of_hidden_tools(self, names: Sequence[str]) -> None:
        """Warns once if the template does not show tools, so that the model does not know of these."""
        if names and not self._shows_tools and not self._warned:
            self._warned = True
            log.warning(
                "the chat template does not show tools, so the model is not told of %s: describe them in the messages, "
                "or use a model that was tuned to call tools",
                ", ".join(f"`{name}`" for name in names),
            )

    def _rendered(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return encodable(str(text))

    def encode(self, text: str, behind: int | None = None) -> tuple[int, ...]:
        """Returns the tokens of a text that the template wrote.

        `behind`: the special token in front of it, if there is one. It may change how the text is divided.
        """
        if behind is not None:
            tokens = self._tokenizer.encode(self._special[behind] + text, add_special_tokens=False)
            if tokens[:1] == [behind]:
                return tuple(tokens[1:])
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return encodable(str(text))

    def special(self, token: int) -> str | None:
        """Returns the text of a special token; None for any other."""
        return self._special.get(token)

    def begins_with_special(self, text: str) -> bool:
        """Tells if a text begins with a special token."""
        return self._forged.match(text) is not None

    def _unforged(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            message["content"] = self._forged.sub(lambda found: f"{found[0][0]} {found[0][1:]}", message["content"])
        return message


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


def encodable(text: str) -> str:
    """Returns a text that tokenizers take: half of a character (a lone surrogate) becomes `?`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
