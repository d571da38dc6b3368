"""The conversations of sessions, by a model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stretto.chat.conversations import Conversations as ChatConversations
from stretto.chat.rendering import Renderer
from stretto.serve.sessions import Conversations

MakeConversations = Callable[[Sequence[int] | None], Conversations]
"""Makes the conversations of one session, from the tokens of its prompt if it has one."""


def chat_conversations(tokenizer: Any) -> MakeConversations:
    """Returns what makes the conversations of a session. Raises `RecipeError` if the model has no chat template."""
    renderer = Renderer(tokenizer)

    def make(prompt_tokens: Sequence[int] | None) -> Conversations:
        made: Conversations = ChatConversations(renderer, prompt_tokens=prompt_tokens)
        return made

    return make
