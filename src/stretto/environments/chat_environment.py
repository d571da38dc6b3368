"""The base class of environments that chat.

    class Sums(ChatEnvironment):
        tools = (calculator,)

        async def play(self, row, chat):
            answer = await chat.run_tools(row["messages"], self.tools, max_calls=4)
            return float(row["answer"] in answer.content)

`docs/chat.md` explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.chat.policy import ChatPolicy, TokenPolicy
from stretto.chat.rendering import Renderer
from stretto.chat.tools import AnyTool, as_tools
from stretto.environments.protocol import Outcome
from stretto.types import Prompt


class ChatEnvironment:
    """Plays episodes in messages. A subclass defines `play`, and may define `tools`."""

    tools: Sequence[AnyTool] = ()

    def __init__(self, tokenizer: Any) -> None:
        """The `tokenizer` has the chat template of the task (`chat/templates.py`)."""
        self.renderer = Renderer(tokenizer)
        offered = as_tools(self.tools)  # a tool that cannot be offered is an error before the run
        self.renderer.warn_of_hidden_tools([tool.name for tool in offered])

    async def play(self, row: dict[str, Any], chat: ChatPolicy) -> float | Outcome:
        """Plays one episode and returns its reward.

        `row` has the columns of the data set; `row["messages"]` are those of the prompt, a list that is yours to
        extend. A column `prompt` is one user message.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `async def play(self, row, chat)`")

    async def episode(self, prompt: Prompt, policy: TokenPolicy) -> float | Outcome:
        messages = prompt.row.get("messages") or [{"role": "user", "content": prompt.text}]
        row = {**prompt.row, "messages": [dict(message) for message in messages]}
        return await self.play(row, ChatPolicy(policy, self.renderer, prompt_tokens=prompt.tokens))
