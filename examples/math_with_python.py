"""School mathematics with a Python tool: the model may run code before it answers. For `recipes/gsm8k-python.toml`.

Code runs in a sandbox (`docs/security.md`). The last message is scored by
`stretto.environments.rewards.mathematics`.

Small models rarely call a tool that they are merely offered. So every conversation begins with a worked example, which
is a part of the context and is not trained on.
"""

from __future__ import annotations

from typing import Any

from examples.gsm8k import INSTRUCTION
from stretto.chat.policy import ChatPolicy
from stretto.environments.chat_environment import ChatEnvironment
from stretto.environments.rewards.mathematics import reward
from stretto.environments.tools.python import python_tool

CALLS = 3  # of the tool; `task.turns` is one more
ASKED = "\nUse the tool `python`, and put the final answer within \\boxed{}."
PROGRAM = "boxes = 14\npens = boxes * 12\nprint(pens - 25)"
EXAMPLE = (
    {"role": "user", "content": f"A shop has 14 boxes of 12 pens and sells 25 pens. How many are left?{ASKED}"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "example", "type": "function", "function": {"name": "python", "arguments": {"code": PROGRAM}}}
        ],
    },
    {"role": "tool", "tool_call_id": "example", "content": "143"},
    {"role": "assistant", "content": "The program printed 143, so \\boxed{143} pens are left."},
)


class MathWithPython(ChatEnvironment):
    """A problem is solved in up to four turns, each of which may run code."""

    tools = (python_tool(strict=False),)  # on a machine without namespaces, limits and a filter of system calls hold

    async def play(self, row: dict[str, Any], chat: ChatPolicy) -> float:
        *before, asked = row["messages"]
        problem = asked["content"].removesuffix(INSTRUCTION)
        messages = [*before, *EXAMPLE, {"role": "user", "content": problem + ASKED}]
        answer = await chat.run_tools(messages, self.tools, max_calls=CALLS)
        return reward("", answer.content, answer=row["answer"])
