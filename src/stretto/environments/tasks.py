"""Tasks: the prompts, the reward function or environment that scores them, and the rows held out for evaluation.

`load_task` turns the options of a task (`task_options.py`) into rows and a reward, or into rows and an environment that
plays its episodes and rewards them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from stretto.environments import countdown, guess, reasoning_problems
from stretto.environments.custom import EnvironmentSpec
from stretto.environments.given import (
    ARGUMENTS,
    NOTHING_GIVEN,
    Given,
    refuse_missing,
    without_digest,
)
from stretto.environments.reward_calls import RewardSpec, as_specs
from stretto.environments.reward_options import SCORERS
from stretto.environments.rows import Row
from stretto.environments.task_options import (
    AgentOptions,
    CountdownChainOptions,
    EndpointOptions,
    EnvironmentOptions,
    FileOptions,
    GuessOptions,
    ReasoningGymOptions,
    TaskOptions,
)
from stretto.environments.task_rows import NOTHING_READ, DataRead, read_rows
from stretto.errors import RecipeError

NO_REWARD = "stretto.environments.rewards.none:reward"  # of a task that only a teacher trains
AGENTS = "stretto.serve.agents:AgentEnvironment"
AGENT_REWARDS = ("exit-status", "file", "posted")  # beside functions


@dataclass(frozen=True, slots=True)
class Task:
    """The rows of a task, and what scores them.

    Training and evaluation share no row. If all rows have the same prompt (`guess`), they are separate draws.
    """

    name: str  # for errors and reports
    train: Sequence[Row]
    evaluation: Sequence[Row]  # empty: no evaluation
    reward: str | None  # `package.module:function`, which scores the single completion of an episode
    environment: EnvironmentSpec | None = None  # plays the episodes; a task has either rewards or an environment
    several: tuple[RewardSpec, ...] = ()  # the rewards of a task that has several, instead of `reward`
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # given from Python, by reward
    data: DataRead = NOTHING_READ  # where its rows are from

    @property
    def rewards(self) -> tuple[RewardSpec, ...]:
        """The rewards that score the single completion of an episode; empty if an environment does."""
        return self.several or (() if self.reward is None else as_specs(self.reward))

    @property
    def max_turns(self) -> int:
        """The most turns that an episode can have."""
        return 1 if self.environment is None else self.environment.max_turns

    @property
    def max_lineages(self) -> int:
        """The most lineages that an episode can have."""
        return 1 if self.environment is None else self.environment.max_lineages


def load_task(
    options: TaskOptions,
    *,
    seed: int = 0,
    num_evaluation: int = 128,
    given: Given = NOTHING_GIVEN,
    endpoint: EndpointOptions | None = None,
) -> Task:
    """Makes the task that the options describe, with up to `num_evaluation` rows to evaluate on.

    `seed` draws the rows of a generated task, and those that are held out of a file. `given` has what the options name
    as given from Python; `RunError` is raised if it lacks something. `endpoint`: the one that agents call.
    """
    refuse_missing(options.model_dump(include=set(ARGUMENTS)), given.names)
    match options:
        case CountdownChainOptions():
            return _countdown_chain(options, seed, num_evaluation)
        case ReasoningGymOptions():
            return _reasoning_gym(options, seed, num_evaluation)
        case AgentOptions():
            return _agent(options, seed, num_evaluation, given, endpoint or EndpointOptions())
        case FileOptions() | EnvironmentOptions():
            return _file(options, seed, num_evaluation, given)
        case GuessOptions():
            return _guess(options, seed, num_evaluation)


class GeneratedRows(Sequence[Row]):
    """Rows that are generated when they are read; row `i` depends on nothing but `make` and `i`."""

    def __init__(self, num_rows: int, make: Callable[[int], Row]) -> None:
        self._num_rows = num_rows
        self._make = make

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._make(index % len(self))


# -- countdown-chain ---------------------------------------------------------------------------------------------------


def _countdown_row(index: int, seed: int, *, held_out: bool) -> Row:
    problem = countdown.problem_at(index, seed, held_out=held_out)
    return Row(text=problem.prompt, columns={"answer": problem.answer})


def _countdown_chain(options: CountdownChainOptions, seed: int, num_evaluation: int) -> Task:
    return Task(
        name="countdown-chain",
        train=GeneratedRows(options.size, partial(_countdown_row, seed=seed, held_out=False)),
        evaluation=GeneratedRows(num_evaluation, partial(_countdown_row, seed=seed, held_out=True)),
        reward=countdown.REWARD,
    )


# -- guess -------------------------------------------------------------------------------------------------------------


def _guess_row(index: int, seed: int, turns: int, *, held_out: bool) -> Row:
    numbers = guess.numbers_at(index, seed, turns, held_out=held_out)
    return Row(text=guess.PROMPT, columns={"numbers": numbers})


def _guess(options: GuessOptions, seed: int, num_evaluation: int) -> Task:
    make = partial(_guess_row, seed=seed, turns=options.turns)
    return Task(
        name="guess",
        train=GeneratedRows(options.size, partial(make, held_out=False)),
        evaluation=GeneratedRows(num_evaluation, partial(make, held_out=True)),
        reward=None,
        environment=EnvironmentSpec(guess.ENVIRONMENT, options.turns, {"wait_seconds": options.wait_seconds}),
    )


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def _reasoning_row(index: int, dataset: Any, instruction: str, scored_by: Mapping[str, Any] | None) -> Row:
    """Makes a row. `scored_by` holds what the scorer needs to load the data set; None: answers are compared."""
    entry = dataset[index]
    columns: dict[str, Any] = {"answer": str(entry["answer"])}
    if scored_by is not None:
        columns.update(scored_by, entry=entry)
    parts = [part for part in (instruction, str(entry["question"])) if part]
    roles = ["system", "user"][-len(parts) :]
    messages = tuple({"role": role, "content": part} for role, part in zip(roles, parts, strict=True))
    return Row(text="\n\n".join(parts) + "\n", messages=messages, columns=columns)


def _reasoning_gym(options: ReasoningGymOptions, seed: int, num_evaluation: int) -> Task:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from its imports, when they are first compiled
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise RecipeError(
            "`task.type = 'reasoning-gym'` needs the package reasoning-gym: `pip install 'stretto[reasoning-gym]'`"
        ) from error
    if options.name not in DATASETS:
        near = difflib.get_close_matches(options.name, DATASETS, n=1, cutoff=0.0)
        raise RecipeError(
            f"`task.name = {options.name!r}` is not a data set of reasoning-gym; did you mean `{near[0]}`?"
        )
    config, scored_by = _config(options), None
    if options.scoring == "scorer":
        scored_by = {"name": options.name, "config": json.dumps(config)}
    # Item `i` of a data set is drawn from `seed + i`, so evaluation begins where the training seeds end.
    train = _reasoning_dataset(options.name, config, DATASETS, seed, options.size)
    evaluation = _reasoning_dataset(options.name, config, DATASETS, seed + options.size, max(1, num_evaluation))
    instruction = reasoning_problems.INSTRUCTION if options.instruction is None else options.instruction

    def rows(dataset: Any) -> GeneratedRows:
        make = partial(_reasoning_row, dataset=dataset, instruction=instruction, scored_by=scored_by)
        return GeneratedRows(len(dataset), make)

    return Task(
        name=options.name,
        train=rows(train),
        evaluation=rows(evaluation) if num_evaluation > 0 else (),
        reward=reasoning_problems.EXACT_REWARD if scored_by is None else reasoning_problems.SCORER_REWARD,
    )


def _reasoning_dataset(name: str, config: Mapping[str, Any], datasets: Mapping[str, Any], seed: int, size: int) -> Any:
    dataset_class, config_class = datasets[name]
    allowed = sorted({entry.name for entry in dataclasses.fields(config_class)} - {"seed", "size"})
    unknown = sorted(set(config) - set(allowed))
    if unknown:
        raise RecipeError(
            f"`task.config` has {unknown}, which `{name}` does not know; it knows {allowed} "
            "(`seed` and `size` are options of the task itself)"
        )
    try:
        return dataset_class(config=config_class(seed=seed, size=size, **config))
    except (AssertionError, TypeError, ValueError) as error:
        raise RecipeError(f"`task.config = {dict(config)}` is refused by `{name}`: {error}") from error


# -- file --------------------------------------------------------------------------------------------------------------


def _file(options: FileOptions | EnvironmentOptions, seed: int, num_evaluation: int, given: Given) -> Task:
    name, rows, held_out, data = read_rows(options, seed, num_evaluation, given)
    if isinstance(options, FileOptions):
        several = tuple(table.spec() for table in options.rewards)
        alone = None if options.reward is None else without_digest(options.reward)
        if options.scorer is not None:
            alone = SCORERS[options.scorer]
        reward = None if several else alone or NO_REWARD
        chats = [*map(_with_column, rows)], [*map(_with_column, held_out)]
        return Task(name, *chats, reward, several=several, functions=given.rewards, data=data)
    environment = EnvironmentSpec(
        without_digest(options.environment), options.turns, _config(options), options.max_lineages, given.environment
    )
    return Task(name, [*map(_with_column, rows)], [*map(_with_column, held_out)], None, environment, data=data)


def _with_column(row: Row) -> Row:
    """Returns a row whose messages are also a column, for environments and for rewards that ask for them."""
    if row.messages is None:
        return row
    return dataclasses.replace(row, columns={**row.columns, "messages": [dict(message) for message in row.messages]})


def _config(options: ReasoningGymOptions | EnvironmentOptions) -> dict[str, Any]:
    """The table `config` with arrays as lists: a recipe holds them as tuples."""
    config: dict[str, Any] = options.model_dump(mode="json")["config"]
    return config


# -- agent -------------------------------------------------------------------------------------------------------------


def _agent(options: AgentOptions, seed: int, num_evaluation: int, given: Given, endpoint: EndpointOptions) -> Task:
    if (options.command is None) == (options.function is None):
        raise RecipeError(
            "an agent is a program or a function: set `task.command` or `task.function`, and not both"
            if options.command is not None
            else "an agent is a program or a function: set `task.command = ['python', 'agent.py']` or `task.function`"
        )
    if options.reward is not None and options.reward not in AGENT_REWARDS and ":" not in options.reward:
        names = ", ".join(f"`{name}`" for name in AGENT_REWARDS)
        raise RecipeError(f"`task.reward = {options.reward!r}` is none of {names} and no `package.module:function`")
    if options.function is not None and options.reward in ("exit-status", "file"):
        raise RecipeError(f"`task.reward = {options.reward!r}` is that of a program, and `task.function` is none")
    if options.sandbox is not None and options.function is not None:
        raise RecipeError("`task.sandbox` is for a program, and `task.function` runs in this process: leave one out")
    if options.sandbox is not None and options.reward == "file":
        raise RecipeError(
            "`task.reward = 'file'` cannot be used with `task.sandbox`, whose files are gone with it: let the agent "
            "post its reward, `task.reward = 'posted'`"
        )
    name, rows, held_out, data = read_rows(options, seed, num_evaluation, given)
    config = {"options": options, "endpoint": endpoint}
    spec = EnvironmentSpec(AGENTS, options.turns, config, options.max_lineages)
    return Task(name, [*map(_as_task, rows)], [*map(_as_task, held_out)], None, spec, data=data)


def _as_task(row: Row) -> Row:
    """Returns a row whose prompt is a chat, as an agent's calls are, and a column too: an agent gets the columns."""
    if row.messages is not None:
        return dataclasses.replace(row, columns={"messages": [dict(each) for each in row.messages], **row.columns})
    messages = ({"role": "user", "content": row.text or ""},)
    return dataclasses.replace(row, messages=messages, columns={"prompt": row.text, **row.columns})
