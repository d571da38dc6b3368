"""Recipes of several tasks for small whole runs, on the files of `write_task` in the working directory."""

from __future__ import annotations

from pathlib import Path

from agent_cases import AGENT
from run_cases import small_recipe

from stretto.recipe.schema import Recipe

TASKS = """
[[task]]
label = "letters"
share = 0.6
type = "file"
path = "prompts.jsonl"
reward = "our_rewards:{reward}"
max_tokens = 8
[[task]]
label = "guess"
share = 0.3
type = "guess"
turns = 3
size = 40
[[task]]
label = "chain"
share = 0.1
type = "countdown-chain"
size = 12
"""
# One of each kind: a reward function, an environment in worker processes, an agent, and an environment in the driver.
KINDS = """
[[task]]
label = "scored"
share = 0.35
type = "file"
path = "prompts.jsonl"
reward = "our_rewards:letters"
max_tokens = 8
[[task]]
label = "played"
share = 0.3
type = "environment"
path = "prompts.jsonl"
environment = "our_environment:Twice"
turns = 2
workers = 1
[[task]]
label = "called"
share = 0.2
type = "agent"
path = "prompts.jsonl"
command = ["python", "-I", "-S", "agent.py"]
reward = "our_rewards:letters"
turns = 4
[[task]]
label = "guess"
share = 0.15
type = "guess"
turns = 3
"""

ENVIRONMENT = '''
class Twice:
    """Two turns; each earns its letters."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def episode(self, prompt, policy):
        context, said = list(prompt.tokens), ""
        for _ in range(2):
            if policy.left < 2:
                break
            turn = await policy.generate(context)
            said += self.tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            context += turn.tokens.tolist()
        return sum(character in "aeiou0123456789" for character in said) / 8
'''


def write_kinds(folder: Path) -> None:
    """The agent and the environment of `KINDS`."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "our_environment.py").write_text(ENVIRONMENT)


def mixture(model: Path, folder: Path, *overrides: str, reward: str = "letters", tasks: str = TASKS) -> Recipe:
    """Updates of 4 groups of 4 over three tasks: a reward function, an environment of several turns, a generator."""
    tables = f"""
        {tasks.format(reward=reward)}
        [rollout]
        prompts = 4
        max_tokens = {80 if tasks == KINDS else 12}
        stop = ["1", "2", "3"]
        [training]
        steps = 6
        [evaluation]
        prompts = 0
    """
    return small_recipe(model, folder, tables, *overrides)
