"""The inputs of a run, read before a model is built: data set, prompts and reward. `check` reads them too."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.chat.templates import Template, with_template
from stretto.environments.combined_rewards import CombinedRewards, combined_rewards
from stretto.environments.custom import (
    EnvironmentSpec,
    close_environment,
    load_environment,
    start_environment,
)
from stretto.environments.data import PromptStream, Row, TooLong
from stretto.environments.data_options import ChatTemplateOptions, RowsOptions
from stretto.environments.episode_pool import EpisodePool, EpisodePoolOptions, default_workers, pickled_tokenizer
from stretto.environments.given import NOTHING_GIVEN, Given, is_given, of_task
from stretto.environments.mixed_prompts import HeldOut, MixedHeldOut, MixedPrompts, Prompts
from stretto.environments.prompt_order import PassRates
from stretto.environments.protocol import Environment
from stretto.environments.reward_calls import ONE_AT_A_TIME, Columns, RewardSpec
from stretto.environments.reward_environment import named_variables
from stretto.environments.reward_pool import RewardPool
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.rows import count_shared
from stretto.environments.sandbox import PARTS, RESERVED_NUMBERS, missing
from stretto.environments.sandbox_processes import held_parts
from stretto.environments.task_options import (
    EnvironmentOptions,
    ProcessTaskOptions,
    ScoredTaskOptions,
    TaskOptions,
    option_of,
)
from stretto.environments.task_shares import TaskShares
from stretto.environments.tasks import Task, load_task
from stretto.environments.thread_episodes import ThreadEpisodes
from stretto.environments.thread_rewards import ThreadRewards
from stretto.environments.worker_process import WorkerOptions
from stretto.errors import RecipeError
from stretto.objectives.custom import CustomOptions
from stretto.recipe.schema import OneTaskRecipe, Recipe
from stretto.run.folder_checks import DrawnRows
from stretto.run.seeds import derived_seed
from stretto.setup.scorers import described_scorer, judge_variables, reward_specs, scorers_of

log = logging.getLogger(__name__)

LEAST_HANG_S = 5.0  # that a worker may be blocked for, however short its episodes are: machines are busy at times
MAX_TASK_SEED = 1 << 31  # of one of several tasks; some generators take no larger ones
SAMPLED_ROWS = 64  # of a generated task, to compare their columns with the parameters of the reward function


@dataclass(frozen=True, slots=True)
class TaskInputs:
    """One task and its prompts. Those that were checked are neither empty nor too long."""

    recipe: OneTaskRecipe  # as if it had this task alone
    task: Task
    prompts: PromptStream
    held_out: PromptStream | None
    tokenizer: Any  # with the chat template that the task asks for

    @property
    def label(self) -> str | None:
        """The label of the task, if it has one."""
        return self.recipe.task.label

    @property
    def prompt_limit(self) -> int:
        """Tokens, beyond which prompts of rollout are dropped or cut; 0: none is."""
        return self.prompts.too_long.limit if self.prompts.bends_long else 0

    @property
    def form(self) -> str:
        """A phrase on how the prompts are made from the rows."""
        templated, num_rows = self.prompts.num_templated, self.prompts.num_rows
        if 0 < templated < num_rows:
            return f"{templated:,} made by the chat template and {num_rows - templated:,} raw text"
        return "made by the chat template" if templated else "raw text"

    def notes(self, prompts_per_update: float) -> Iterator[str]:
        """Yields sentences that the user should read before the run, although nothing is wrong.

        `prompts_per_update`: of this task.
        """
        recipe = self.recipe
        yield from _sandbox_notes(recipe)
        yield from self._data_notes(recipe)
        yield from self._given_notes()
        yield from self._overlap_notes()
        wanted = recipe.evaluation.prompts
        if self.held_out is not None and self.held_out.num_rows < wanted:
            why = f"{self.task.name} has no more to spare"
            if isinstance(recipe.task, RowsOptions) and (source := recipe.task.evaluation_name) is not None:
                why = f"{source} has no more"
            yield (
                f"{self.held_out.num_rows} prompts are held out for evaluation, fewer than `evaluation.prompts = "
                f"{wanted}`: {why}"
            )
        checked, num_rows = self.prompts.num_checked, self.prompts.num_rows
        if prompts_per_update > num_rows:
            own = "" if prompts_per_update == recipe.rollout.prompts else f", of which it has {prompts_per_update:.3g},"
            yield (
                f"`rollout.prompts = {recipe.rollout.prompts}`{own} is more than the {num_rows:,} rows of "
                f"{self.task.name}: an update has the same prompt up to {math.ceil(prompts_per_update / num_rows)} "
                "times; raise `rollout.group` for more samples of a prompt"
            )
        if 0 < self.prompts.num_templated < num_rows:
            yield (
                f"some rows of {self.task.name} have `messages`, which the chat template renders, and others a "
                "`prompt`, which stays raw text: the model sees two forms; give all rows `messages`, or set "
                "`task.system`, which makes every `prompt` a message"
            )
        for stream in (self.prompts, self.held_out):
            if stream is not None and stream.num_unknown:
                yield (
                    f"{stream.num_unknown:,} prompts have text that the tokenizer of `model.path` does not know, such "
                    f"as {stream.first_unknown}: the model cannot see it"
                )
        if checked < num_rows:
            yield (
                f"{checked:,} of {num_rows:,} prompts of {self.task.name} were checked for their length; "
                "a later one that is too long fails, is counted, and the next takes its place"
            )

    def _data_notes(self, recipe: OneTaskRecipe) -> Iterator[str]:
        """Says which revision of a data set was read, and what was done with prompts that are too long."""
        for key, revision in self.task.data.revisions.items():
            if getattr(recipe.task, key.removeprefix("task.")).revision != revision:
                yield f'`{key}` is at revision {revision}; `{key}.revision = "{revision}"` keeps it there'
        done = {"drop": "are left out", "truncate": "are cut at their beginning"}.get(_too_long(recipe.task))
        for stream in (self.prompts, self.held_out):
            if stream is not None and stream.too_long.num and done is not None:
                held = "" if stream is self.prompts else "held-out "
                long = stream.too_long
                yield (
                    f"{long.num:,} {held}prompts of {self.task.name} have more than {long.limit:,} tokens and {done} "
                    f'(`task.too_long = "{_too_long(recipe.task)}"`): {long.places}'
                )

    def _overlap_notes(self) -> Iterator[str]:
        """Says how many held-out prompts are trained on too. Generated rows are not compared."""
        train, held_out = self.task.train, self.task.evaluation
        if self.held_out is None or not isinstance(train, list) or not isinstance(held_out, list):
            return
        shared = count_shared(train, held_out, by_columns=self.task.environment is not None)
        if shared:
            yield (
                f"{shared:,} of {len(held_out):,} held-out prompts of {self.task.name} are also among its training "
                "prompts: scores of evaluations do not tell what was learnt from what was memorized; remove the "
                "duplicates, or name other rows in `task.evaluation_path`"
            )

    def _given_notes(self) -> Iterator[str]:
        """Says where a reward or an environment runs that no worker process can import."""
        spec = self.task.environment
        name = spec.name if spec is not None and spec.given is not None else None
        if name is None and self.task.functions:
            name = next(each.target for each in self.task.rewards if each.name in self.task.functions)
            others = [f"`{each.name}`" for each in self.task.rewards if each.name not in self.task.functions]
            if others:
                yield f"{', '.join(others)} can be imported, and is run by the same threads as `{name}`"
        if name is not None:
            yield (
                f"`{name}` cannot be imported by a worker process, so threads of this process run it: while it "
                "computes, engine and trainer wait for the interpreter, and a call that hangs is abandoned at its "
                "deadline but not ended; put it into a module to give it processes of its own"
            )


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tasks of a run, and the prompts of all of them."""

    tasks: tuple[TaskInputs, ...]
    prompts: Prompts
    held_out: HeldOut | None
    chat_template: Template | None  # that all tasks ask for; None: the model's own, or not all ask for the same

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest checked prompt, which the engine must be able to hold."""
        return max(self.prompts.longest_checked, 0 if self.held_out is None else self.held_out.longest_checked)

    @property
    def templated(self) -> bool:
        """True if the tokenizer's chat template makes most of the prompts; otherwise they are raw text."""
        return 2 * self.prompts.num_templated > self.prompts.num_rows

    @property
    def rows(self) -> dict[str | None, DrawnRows]:
        """The rows of each task, by its label."""
        return {
            each.label: DrawnRows(each.prompts.num_rows, each.prompts.num_dropped, each.prompt_limit)
            for each in self.tasks
        }

    def notes(self, recipe: Recipe) -> Iterator[str]:
        """Yields sentences that the user should read before the run, although nothing is wrong."""
        several, weights = len(self.tasks) > 1, [task.share or 1.0 for task in recipe.tasks]
        for each, weight in zip(self.tasks, weights, strict=True):
            for note in each.notes(recipe.rollout.prompts * weight / sum(weights)):
                yield f"task `{each.label}`: {note}" if several else note


def prompt_tokenizer(recipe: Recipe, tokenizer: Any) -> Any:
    """Returns the tokenizer with the chat template that the task asks for, or all tasks alike; else as it is."""
    chats = [part for part in recipe.parts if isinstance(part.task, ChatTemplateOptions)]  # others never chat
    made = []
    for part in chats:
        with of_task(part.task.label if isinstance(recipe.task, tuple) else None):
            made.append(_task_tokenizer(part, tokenizer))
    alike = bool(made) and all(each.chat_template == made[0].chat_template for each in made)
    return made[0] if alike else tokenizer


def _task_tokenizer(recipe: OneTaskRecipe, tokenizer: Any) -> Any:
    """Returns the tokenizer with the chat template that one task asks for, which all that chats in it is given."""
    task = recipe.task
    if not isinstance(task, ChatTemplateOptions):
        return tokenizer
    variables = task.model_dump(mode="json", include={"template"})["template"]
    return with_template(tokenizer, chat_template=task.chat_template, variables=variables, prefill=task.prefill)


def asked_template(recipe: Recipe, tokenizer: Any) -> Template | None:
    """Returns the template that all tasks ask for; None if it is the model's own, or not all ask for the same.

    The `tokenizer` is that of the model.
    """
    found = prompt_tokenizer(recipe, tokenizer)
    template: Template | None = None if found is tokenizer else found.chat_template
    return template


def read_tasks(recipe: Recipe, given: Given = NOTHING_GIVEN) -> list[Task]:
    """Reads the rows of all tasks, in their order. Needs no model, so that missing data shows before one is made.

    Raises `RecipeError`, which names the task if there are several.
    """
    tasks = []
    for part in recipe.parts:
        label = part.task.label
        with of_task(label if isinstance(recipe.task, tuple) else None):
            tasks.append(
                load_task(
                    part.task,
                    seed=_task_seed(recipe, label),
                    num_evaluation=recipe.evaluation.prompts,
                    given=given.of_label(label),
                    endpoint=recipe.serve,
                )
            )
    return tasks


def _task_seed(recipe: Recipe, label: str | None) -> int:
    """Returns the seed of a task: that of the recipe, or of several tasks one for each."""
    several = isinstance(recipe.task, tuple)
    return derived_seed(recipe.seed, "task", str(label)) % MAX_TASK_SEED if several else recipe.seed


def load_inputs(
    recipe: Recipe,
    tokenizer: Any,
    *,
    context: int,
    model_path: str,
    given: Given = NOTHING_GIVEN,
    prompt_limits: Mapping[str | None, int] | None = None,
    read: Sequence[Task] | None = None,
) -> Inputs:
    """Reads the data sets and checks them against the tokenizer and the model's `context`. Raises `RecipeError`.

    The `tokenizer` is that of the model. `prompt_limits`: tokens by the label of a task, beyond which a run that is
    resumed began to drop or cut prompts; it goes on so. `read` are the tasks, if `read_tasks` has read them already.
    """
    several, template = isinstance(recipe.task, tuple), asked_template(recipe, tokenizer)
    tasks = []
    for part, task in zip(recipe.parts, read_tasks(recipe, given) if read is None else read, strict=True):
        label, seed = part.task.label, _task_seed(recipe, part.task.label)
        with of_task(label if several else None):
            limits = _prompt_limits(part, model_path, context)
            if limit := (prompt_limits or {}).get(label):
                limits = _limit_as_begun(limit, limits[0]), limits[1]
            tasks.append(_load_task_inputs(part, task, tokenizer, seed, limits))
    if not several:
        return Inputs(tuple(tasks), tasks[0].prompts, tasks[0].held_out, template)
    prompts = MixedPrompts({str(each.label): each.prompts for each in tasks}, TaskShares(recipe.shares))
    held_out = {str(each.label): each.held_out for each in tasks if each.held_out is not None}
    return Inputs(tuple(tasks), prompts, MixedHeldOut(held_out) if held_out else None, template)


def _load_task_inputs(
    recipe: OneTaskRecipe, task: Task, tokenizer: Any, seed: int, limits: tuple[int, int]
) -> TaskInputs:
    rates, label, own = None, recipe.task.label, _task_tokenizer(recipe, tokenizer)
    if recipe.task.order == "pass-rate":
        rates = PassRates(len(task.train), seed=seed, pass_reward=recipe.task.pass_reward or 1.0)
    choices = recipe.task.other_too_long if isinstance(recipe.task, RowsOptions) else ()

    def stream(rows: Sequence[Row], limit: int, name: str, **options: Any) -> PromptStream:
        return PromptStream(
            rows,
            own,
            seed=seed,
            max_prompt_tokens=limit,
            name=name,
            too_long=_too_long(recipe.task),
            choices=choices,
            task=label,
            **options,
        )

    prompts = stream(task.train, limits[0], task.name, pass_rates=rates)
    _refuse_raw_text(recipe, prompts, task.name)
    held_out = None
    if recipe.evaluation.prompts:
        if not task.evaluation:
            raise RecipeError(
                f"`evaluation.prompts = {recipe.evaluation.prompts}`, but {task.name} has too few rows to hold any "
                "out; name a file of them in `task.evaluation_path`, or set `evaluation.prompts = 0`"
            )
        held_out = stream(task.evaluation, limits[1], f"the held-out rows of {task.name}", shuffle=False)
    return TaskInputs(recipe, task, prompts, held_out, own)


def _too_long(task: TaskOptions) -> TooLong:
    choice: TooLong = getattr(task, "too_long", "refuse")
    return choice


def _limit_as_begun(begun: int, now: int) -> int:
    if begun > now:
        raise RecipeError(
            f"the run began with prompts of up to {begun:,} tokens, and context and `rollout.kv_tokens` leave room for "
            f"{now:,} now: give the engines as much KV as before, or start a new run"
        )
    return begun


def _refuse_raw_text(recipe: OneTaskRecipe, prompts: PromptStream, name: str) -> None:
    """Raises `RecipeError` if options of the chat template have no effect, because rows are raw text.

    An environment may chat whatever the rows are.
    """
    task = recipe.task
    if not isinstance(task, ChatTemplateOptions) or isinstance(task, EnvironmentOptions):
        return
    raw, set_keys = prompts.num_rows - prompts.num_templated, task.model_fields_set
    if task.prefill is not None and raw:
        raise RecipeError(
            f"`task.prefill = {task.prefill!r}` follows the chat template, and {raw:,} of {prompts.num_rows:,} rows of "
            f"{name} are raw text (`prompt`): give `messages` instead, set `task.system`, or write it at the end of "
            "each `prompt`"
        )
    for key in ("chat_template", "template"):
        if key in set_keys and getattr(task, key) and raw == prompts.num_rows:
            raise RecipeError(
                f"`task.{key}` has no effect: all rows of {name} are raw text (`prompt`); give `messages`, for example "
                'with `task.columns = { messages = "prompt" }`, set `task.system`, or leave it out'
            )


def reward_columns(task: Task) -> Columns:
    """Returns the columns of all rows that are in memory, or of the first `SAMPLED_ROWS` that are generated."""
    in_memory = isinstance(task.train, list)
    rows = [*task.train, *task.evaluation] if in_memory else list(islice(task.train, SAMPLED_ROWS))
    names = {name for row in rows for name in row.columns}
    return {name: next((row.where for row in rows if name not in row.columns), None) for name in names}


def passed_variables(recipe: OneTaskRecipe) -> dict[str, str]:
    """The variables of `task.pass_env`. Raises `RecipeError` for one, or for the key of a judge, that is not set."""
    for name, options in scorers_of(recipe.task).items():
        if isinstance(options, JudgeOptions):
            judge_variables(options, option_of(options, name, recipe.task_table))
    return named_variables(recipe.task.pass_env) if isinstance(recipe.task, ProcessTaskOptions) else {}


def make_rewards(
    recipe: OneTaskRecipe,
    task: Task,
    said: Callable[[str], None] | None = None,
    folder: Path | None = None,
    *,
    note: Callable[[str], None] | None = None,
) -> RewardPool | ThreadRewards | CombinedRewards:
    """Makes what scores `task`: processes, or threads for a function that was given from Python.

    `said` gets every line that the processes print. `folder` is the run folder; None: nothing is kept there. `note`, if
    the recipe is only checked, gets what judges say, also that one could not be reached, which is an error otherwise.
    """
    assert isinstance(recipe.task, ScoredTaskOptions)
    if task.functions:
        return ThreadRewards(
            task.rewards,
            task.functions,
            threads=recipe.task.reward_workers,
            deadline_s=recipe.task.reward_seconds,
            columns=reward_columns(task),
        )
    options, columns, passed = recipe.task, reward_columns(task), passed_variables(recipe)
    scorers = scorers_of(options)

    def pool(specs: Sequence[RewardSpec]) -> RewardPool:
        is_judge = isinstance(scorers.get(specs[0].name), JudgeOptions)
        return RewardPool(
            specs,
            workers=options.reward_workers if specs[0].built is None else 1,
            deadline_s=options.reward_seconds,
            columns=columns,
            on_output=note if is_judge and note is not None else said,
            extra_environment=passed,
            sandbox=None if options.sandbox is None else options.sandbox.limits,
            strict_sandbox=options.sandbox is not None and options.sandbox.strict,
        )

    return combined_rewards(reward_specs(recipe, task, folder, checks=note is not None), pool)


def plays_in_workers(recipe: OneTaskRecipe) -> bool:
    """True if worker processes play the episodes of the task."""
    task = recipe.task
    return isinstance(task, EnvironmentOptions) and task.workers != 0 and not is_given(task.environment)


def played_in_thread(recipe: OneTaskRecipe, spec: EnvironmentSpec, tokenizer: Any) -> ThreadEpisodes:
    """Makes the environment that was given from Python. Raises `RecipeError` if that fails."""
    return ThreadEpisodes(lambda: load_environment(spec, tokenizer), hang_s=recipe.runtime.stall_seconds / 2)


def episode_pool_options(recipe: OneTaskRecipe, task: Task, tokenizer: Any) -> EpisodePoolOptions:
    """The options of the pool that plays the episodes of `task`."""
    assert task.environment is not None
    assert isinstance(recipe.task, EnvironmentOptions)
    hang_s, hang_reason = recipe.runtime.stall_seconds / 2, "half of `runtime.stall_seconds`"
    if recipe.task.episode_seconds is not None and (own_s := max(LEAST_HANG_S, recipe.task.episode_seconds)) < hang_s:
        # An episode that blocks its worker for longer is past its own limit, and those beside it run into theirs.
        hang_s, hang_reason = own_s, "as long as an episode may take, `task.episode_seconds`"
    return EpisodePoolOptions(
        task.environment,
        pickled_tokenizer(tokenizer),
        workers=recipe.task.workers,
        hang_s=hang_s,
        hang_reason=hang_reason,
        max_bytes=None if recipe.task.worker_gib is None else int(recipe.task.worker_gib * (1 << 30)),
        max_episodes=recipe.task.worker_episodes,
    )


def worker_options(recipe: OneTaskRecipe, said: Callable[[str], None]) -> WorkerOptions:
    """The options of the processes of a task. `said` gets every line that they print."""
    assert isinstance(recipe.task, ProcessTaskOptions)
    sandbox = recipe.task.sandbox
    return WorkerOptions(
        said,
        passed_variables(recipe),
        None if sandbox is None else sandbox.limits,
        sandbox is not None and sandbox.strict,
    )


def _sandbox_notes(recipe: OneTaskRecipe) -> Iterator[str]:
    """Says which parts of the sandbox hold on this machine, and what code in it can do because others do not."""
    if not isinstance(recipe.task, ProcessTaskOptions) or recipe.task.sandbox is None:
        return
    where = "on this machine (others of the cluster may differ)" if recipe.runtime.type == "ray" else "on this machine"
    held = held_parts(recipe.task.sandbox.limits)
    yield f"`task.sandbox` {where}: these parts hold: {', '.join(part for part in PARTS if part in held) or 'none'}"
    for gap in missing(held):
        yield f"`task.sandbox` {where} has a gap: {gap}"
    processes = recipe.task.sandbox.processes
    if os.getuid() == 0 and "process count" in held:
        yield (
            f"`task.sandbox.processes = {processes}` is not exact {where}: code in the sandbox may have up to "
            f"{RESERVED_NUMBERS + processes} processes at once, because this process runs as root; run it as another "
            f"user for a limit of {processes}"
        )
    readable = "every file" if os.getuid() == 0 else "the files that your user can read"
    readable += " outside of the home folder" if "home" in held else ""
    because = ", because this process is root's" if os.getuid() == 0 else ""
    yield f"`task.sandbox` does not keep code from reading {readable}{because}, nor from using a bug of the kernel"


def check_objective(recipe: Recipe) -> None:
    """Tries a custom objective on a made-up batch. Raises `RecipeError`, which names its function, file and line."""
    if isinstance(recipe.algorithm, CustomOptions):
        recipe.algorithm.try_out()


def check_scoring(recipe: OneTaskRecipe, task: Task, tokenizer: Any, note: Callable[[str], None]) -> str:
    """Imports the reward function or the environment in a process, as a run does, and ends that process.

    Returns a phrase on how the task is scored. `note` gets sentences on judges: one whose model is not listed by its
    server, or that could not be asked.
    """
    if task.environment is not None:
        played = f"episodes of up to {task.max_turns} turns played by `{task.environment.name}`"
        if plays_in_workers(recipe):
            return f"{played} {asyncio.run(_try_worker(recipe, task, tokenizer))}"
        environment: Environment
        if task.environment.given is not None:
            environment = played_in_thread(recipe, task.environment, tokenizer)
        else:
            environment = load_environment(task.environment, tokenizer)

        async def try_environment() -> None:
            try:
                await start_environment(environment)
            finally:
                await close_environment(environment)

        asyncio.run(try_environment())
        return f"{played} in the driver's process"

    async def start_and_close() -> tuple[str, ...]:
        pool = make_rewards(recipe, task, note=note)
        try:
            await pool.start()
            return pool.forms
        finally:
            await pool.close()

    forms = asyncio.run(start_and_close())
    return f"scored by {_described(recipe, task, forms)}" + (" in the driver's process" if task.functions else "")


def _described(recipe: OneTaskRecipe, task: Task, forms: Sequence[str]) -> str:
    """Returns the rewards of a task in words, and how each is called if that is not the plain way."""
    scorers = scorers_of(recipe.task)
    if "" in scorers:
        return described_scorer(scorers[""])
    if task.reward is not None:
        return f"`{task.reward}`" + ("" if forms == (ONE_AT_A_TIME,) else f" ({forms[0]})")
    parts = []
    for spec, form in zip(task.rewards, forms, strict=True):
        own = scorers.get(spec.name)
        words = f"`{spec.target}`, {form}" if own is None else described_scorer(own)
        parts.append(f"{spec.weight:g} x `{spec.name}` ({words})")
    return "the sum of " + ", ".join(parts)


async def _try_worker(recipe: OneTaskRecipe, task: Task, tokenizer: Any) -> str:
    """Starts one worker that plays episodes, and ends it. Returns a phrase on what it found."""
    asked = episode_pool_options(recipe, task, tokenizer)
    count = default_workers() if asked.workers is None else asked.workers
    pool = EpisodePool(replace(asked, workers=1), worker_options(recipe, log.warning))
    began = time.monotonic()
    try:
        await pool.start()
        took_s = time.monotonic() - began
        (memory,) = pool.memory.values()
    finally:
        await pool.close()
    return f"in {count} worker process{'es' * (count > 1)} (one starts in {took_s:.1f} s and takes {memory >> 20} MiB)"


def refuse_long_completions(recipe: Recipe, model_path: str, context: int) -> None:
    """Raises `RecipeError` if a completion of some task alone would fill the `context` of the model."""
    for part in recipe.parts:
        with of_task(part.task.label if isinstance(recipe.task, tuple) else None):
            _prompt_limits(part, model_path, context)


def _prompt_limits(recipe: OneTaskRecipe, model_path: str, context: int) -> tuple[int, int]:
    """Returns the longest prompts of rollout and of evaluation that context and KV cache leave room for."""
    evaluation = recipe.evaluation.max_tokens or recipe.rollout.max_tokens
    own = "rollout" if recipe.task.max_tokens is None else recipe.task_table
    asked = {f"{own}.max_tokens": recipe.rollout.max_tokens, "evaluation.max_tokens": evaluation}
    for name, tokens in asked.items():
        if tokens >= context:
            raise RecipeError(
                f"`{name} = {tokens}` leaves no room for a prompt: the context of `{model_path}` is {context} tokens"
            )
    kv_tokens = recipe.rollout.kv_tokens
    room = context if kv_tokens is None else min(context, kv_tokens // recipe.runtime.instances)
    return room - recipe.rollout.max_tokens, room - evaluation
