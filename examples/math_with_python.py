"""School mathematics with a Python tool: the model may run code before it answers. For `recipes/gsm8k-python.toml`.

Code runs in a sandbox (`docs/security.md`). The last message is scored by
`stretto.environments.rewards.mathematics`.
"""

from __future__ import annotations

from typing import Any

from stretto.chat.policy import ChatPolicy
from stretto.environments.chat_environment import ChatEnvironment
from stretto.environments.rewards.mathematics import reward
from stretto.environments.tools.python import python_tool

CALLS = 3  # of the tool; `task.turns` is one more


class MathWithPython(ChatEnvironment):
    """A problem is solved in up to four turns, each of which may run code."""

    tools = (python_tool(strict=False),)  # on a machine without namespaces, limits and a filter of system calls hold

    async def play(self, row: dict[str, Any], chat: ChatPolicy) -> float:
        answer = await chat.run_tools(row["messages"], self.tools, max_calls=CALLS)
        return reward("", answer.content, answer=row["answer"])
