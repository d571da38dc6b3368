"""What a run reads before it builds a model: data set, prompts and reward. `check` does the same, and stops there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.config import (
    CountdownChainSection,
    EnvironmentSection,
    GuessSection,
    ReasoningGymSection,
    Recipe,
    ScoredSection,
)
from stretto.environments.custom import EnvironmentSpec, load_environment
from stretto.environments.data import PromptStream
from stretto.environments.order import PassRates
from stretto.environments.reward_worker import Columns
from stretto.environments.rewards import RewardPool
from stretto.environments.tasks import (
    CountdownChainOptions,
    FileOptions,
    GuessOptions,
    ReasoningGymOptions,
    Task,
    TaskOptions,
    load_task,
)
from stretto.errors import RecipeError

LOOKED_AT = 64  # generated rows whose columns are held against the parameters of the reward function


@dataclass(frozen=True, slots=True)
class Inputs:
    """The task and its prompts, checked: none is empty, none too long, as far as they were looked at."""

    task: Task
    prompts: PromptStream
    held_out: PromptStream | None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that was checked, which the engine must be able to hold."""
        return max(self.prompts.longest_checked, 0 if self.held_out is None else self.held_out.longest_checked)

    @property
    def templated(self) -> bool:
        """Whether the tokenizer's chat template makes the prompts; otherwise they are raw text."""
        return self.prompts.templated

    def notes(self, recipe: Recipe) -> Iterator[str]:
        """What is no error and yet worth knowing before the run."""
        wanted = recipe.evaluation.prompts
        if self.held_out is not None and self.held_out.num_rows < wanted:
            path = getattr(recipe.task, "evaluation_path", None)
            why = f"{self.task.name} has no more to spare" if path is None else f"`{path}` has no more"
            yield (
                f"{self.held_out.num_rows} prompts are held out for evaluation, fewer than `evaluation.prompts = "
                f"{wanted}`: {why}"
            )
        checked, num_rows = self.prompts.num_checked, self.prompts.num_rows
        if checked < num_rows:
            yield (
                f"{checked:,} of {num_rows:,} prompts of {self.task.name} were checked for their length; "
                "a later one that is too long fails, is counted, and the next takes its place"
            )


def load_inputs(recipe: Recipe, tokenizer: Any, *, context: int, model_path: str) -> Inputs:
    """Read the data set and check it against the tokenizer and the model's `context`. Raises `RecipeError`."""
    limits = _prompt_limits(recipe, model_path, context)
    task = load_task(task_options(recipe), num_evaluation=recipe.evaluation.prompts)
    rates = None
    if recipe.task.order == "pass-rate":
        rates = PassRates(len(task.train), seed=recipe.seed, pass_reward=recipe.task.pass_reward or 1.0)
    prompts = PromptStream(
        task.train, tokenizer, seed=recipe.seed, max_prompt_tokens=limits[0], pass_rates=rates, name=task.name
    )
    held_out = None
    if recipe.evaluation.prompts:
        if not task.evaluation:
            raise RecipeError(
                f"`evaluation.prompts = {recipe.evaluation.prompts}`, but {task.name} has too few rows to hold any "
                "out; name a file of them in `task.evaluation_path`, or set `evaluation.prompts = 0`"
            )
        name = f"the held-out rows of {task.name}"
        held_out = PromptStream(
            task.evaluation, tokenizer, seed=recipe.seed, max_prompt_tokens=limits[1], shuffle=False, name=name
        )
    return Inputs(task, prompts, held_out)


def reward_columns(task: Task) -> Columns:
    """The columns of the task's rows: of all that are in memory, of generated ones as far as they were looked at."""
    in_memory = isinstance(task.train, list)
    rows = [*task.train, *task.evaluation] if in_memory else list(islice(task.train, LOOKED_AT))
    names = {name for row in rows for name in row.columns}
    return {name: next((row.where for row in rows if name not in row.columns), None) for name in names}


def reward_pool(recipe: Recipe, task: Task, said: Callable[[str], None] | None = None) -> RewardPool:
    """The pool that scores `task`; `said` is told every line that the function prints."""
    assert task.reward is not None
    assert isinstance(recipe.task, ScoredSection)
    return RewardPool(
        task.reward,
        workers=recipe.task.reward_workers,
        deadline_s=recipe.task.reward_seconds,
        columns=reward_columns(task),
        said=said,
    )


def check_scoring(recipe: Recipe, task: Task, tokenizer: Any) -> str:
    """Import the reward function as a run does, in a process of its own, and let it go again; or make the environment.

    Returns who scores, in words.
    """
    if task.environment is not None:
        load_environment(task.environment, tokenizer)
        return f"episodes of up to {task.max_turns} turns played by `{task.environment.name}`"

    async def start_and_close() -> None:
        pool = reward_pool(recipe, task)
        try:
            await pool.start()
        finally:
            await pool.close()

    asyncio.run(start_and_close())
    return f"scored by `{task.reward}`"


def _prompt_limits(recipe: Recipe, model_path: str, context: int) -> tuple[int, int]:
    """The longest prompts, in rollout and in evaluation, that the context and the engine's memory leave room for."""
    evaluation = recipe.evaluation.max_tokens or recipe.rollout.max_tokens
    asked = {"rollout.max_tokens": recipe.rollout.max_tokens, "evaluation.max_tokens": evaluation}
    for name, tokens in asked.items():
        if tokens >= context:
            raise RecipeError(
                f"`{name} = {tokens}` leaves no room for a prompt: the context of `{model_path}` is {context} tokens"
            )
    kv_tokens = recipe.rollout.kv_tokens
    room = context if kv_tokens is None else min(context, kv_tokens // recipe.runtime.instances)
    return room - recipe.rollout.max_tokens, room - evaluation


def task_options(recipe: Recipe) -> TaskOptions:
    """The task's own options; generated tasks draw their rows by the run's seed."""
    task = recipe.task
    if isinstance(task, CountdownChainSection):
        return CountdownChainOptions(num_rows=task.size, seed=recipe.seed)
    if isinstance(task, ReasoningGymSection):
        options = ReasoningGymOptions(
            name=task.name,
            size=task.size,
            seed=recipe.seed,
            config=task.model_dump(mode="json")["config"],
            scoring=task.scoring,
        )
        return options if task.instruction is None else replace(options, instruction=task.instruction)
    if isinstance(task, GuessSection):
        return GuessOptions(num_rows=task.size, seed=recipe.seed, turns=task.turns)
    held_out = None if task.evaluation_path is None else Path(task.evaluation_path)
    if isinstance(task, EnvironmentSection):
        spec = EnvironmentSpec(task.environment, task.turns, task.model_dump(mode="json")["config"])
        return FileOptions(Path(task.path), spec, held_out, recipe.seed, task.system)
    return FileOptions(Path(task.path), task.reward, held_out, recipe.seed, task.system)
