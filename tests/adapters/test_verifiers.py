"""Tasks of verifiers 0.4 through the endpoint: its own agent, client and scoring, unchanged."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_cases import ScriptedPolicy, spelled
from world_cases import TOKENIZER, chat_prompt

pytest.importorskip("verifiers")
agents = pytest.importorskip("stretto.serve.agents")

# A taskset and a harness as a user of verifiers writes them. The harnesses of the package install programs first.
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def is_right(self, task, trace) -> float:
        return float(trace.branches[-1].messages[-1].content.strip() == task.answer)

    @vf.reward(weight=0.5)
    async def is_short(self, task, trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content) < 40)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield Sum(SumData(prompt=f"{number} + 40?", answer=str(number + 40)), self.config.task)
"""

HARNESS = '''
import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["TwoTurns"]


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks again for the answer alone."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for more in ("And the number alone?", None):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            if more is not None:
                messages.append({"role": "user", "content": more})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
'''

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"```python\n(# play.py.*?)```", PAGE, flags=re.DOTALL)
CLIENTS = {
    "chat completions": "vf.EvalClientConfig(**endpoint)",  # as on the page
    "tokens": "vf.TrainClientConfig(**endpoint, renderer_model_name='MODEL')",
}


def written(folder: Path, client: str, model: Path) -> list[str]:
    """Writes the program; returns the command that runs it."""
    used = CLIENTS["chat completions"]
    assert PROGRAM.count(used) == 1
    (folder / "my_taskset.py").write_text(TASKSET)
    (folder / "my_harness.py").write_text(HARNESS)
    (folder / "play.py").write_text(PROGRAM.replace(used, CLIENTS[client].replace("MODEL", str(model))))
    return [sys.executable, str(folder / "play.py")]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_task_is_played_by_the_policy_and_scored_by_its_own_rewards(client: str, tmp_path: Path) -> None:
    from stretto.environments.task_options import AgentOptions

    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    command = written(tmp_path, client, tmp_path / "tokenizer")
    options = AgentOptions(path="unused.jsonl", command=tuple(command), reward="file", turns=4, seconds=300)
    policy = ScriptedPolicy(TOKENIZER, "I think it is 42.", "42")

    async def episode() -> Any:
        made = agents.AgentEnvironment(TOKENIZER, options)
        try:
            return await made.episode(chat_prompt("2 + 40?", index=2), policy)
        finally:
            await made.close()

    assert asyncio.run(episode()) == 1.5
    assert (policy.lineages, policy.trained) == ([0, 0], [True])
    assert spelled(TOKENIZER, policy.rows[0]) == [
        (False, "<|im_start|>user\n2 + 40?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "I think it is 42.<|im_end|>"),
        (False, "\n<|im_start|>user\nAnd the number alone?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "42<|im_end|>"),
    ]
