"""An agent written with the package `openai`: it has a model solve a problem, and lets it try once more if it is wrong.

    pip install 'stretto[serve]' openai
    stretto train recipes/agent.toml --out runs/agent

The agent knows the address and the key of its model, and nothing else of the training. `recipes/agent.toml` calls it as
a function. An agent that is a program takes both from its environment (`docs/agents.md`).
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="each problem has its own")  # its connections are shared


async def solve(task: dict[str, Any], access: Any) -> float:
    """Returns 1 for a problem that is solved at once, 0.5 for one that is solved at the second try, else 0."""
    client = CLIENT.with_options(base_url=access.base_url, api_key=access.api_key)
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(
            model="any name", messages=[{"role": "user", "content": task["prompt"]}]
        )
        if (answer.choices[0].message.content or "").endswith(f"={task['answer']}"):
            return reward
    return 0.0
