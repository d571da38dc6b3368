"""Tasks: where prompts come from, what scores them, and what is held out to evaluate on.

A task is one row of a table: its options are a dataclass, and `load_task` turns them into rows and a reward, or into
rows and an environment that plays its episodes and says what they earn.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from stretto.environments import countdown, guess, reasoning_problems
from stretto.environments.custom import EnvironmentSpec
from stretto.environments.data import Row, load_rows, split_held_out
from stretto.errors import RecipeError

HELD_OUT_SHARE = 5  # at most one row in so many is held out of a file


@dataclass(frozen=True, slots=True)
class Task:
    """What a run needs of its task. Training and evaluation rows have no row in common; where a prompt says nothing of
    the answer, they are other draws."""

    name: str  # what errors and reports call it
    train: Sequence[Row]
    evaluation: Sequence[Row]  # empty: there is nothing to evaluate on
    reward: str | None  # `package.module:function`, which scores the one completion of an episode
    environment: EnvironmentSpec | None = None  # plays episodes of its own; one of the two is given

    @property
    def max_turns(self) -> int:
        """Of one episode."""
        return 1 if self.environment is None else self.environment.max_turns


@dataclass(frozen=True, slots=True)
class CountdownChainOptions:
    """The quickstart's task."""

    num_rows: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningGymOptions:
    """Any data set of reasoning-gym, by its name."""

    name: str
    size: int = 10_000
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)  # the data set's own options
    scoring: Literal["exact", "scorer"] = "exact"  # compare the answer, or ask the data set's own scorer
    instruction: str = reasoning_problems.INSTRUCTION  # said before the problem; empty: nothing is


@dataclass(frozen=True, slots=True)
class FileOptions:
    """A file of your own, with a reward function or an environment of your own."""

    path: Path
    scored_by: str | EnvironmentSpec  # `package.module:function`, or what plays episodes
    evaluation_path: Path | None = None  # without it, rows of `path` are held out
    seed: int = 0  # decides which
    system: str | None = None  # a system message; with it, every `prompt` becomes a user's message after it


@dataclass(frozen=True, slots=True)
class GuessOptions:
    """The small task of several turns."""

    num_rows: int = 4096
    seed: int = 0
    turns: int = 6


TaskOptions = CountdownChainOptions | ReasoningGymOptions | FileOptions | GuessOptions


def load_task(options: TaskOptions, *, num_evaluation: int = 128) -> Task:
    """The task that the options describe, with up to `num_evaluation` rows to evaluate on."""
    match options:
        case CountdownChainOptions():
            return _countdown_chain(options, num_evaluation)
        case ReasoningGymOptions():
            return _reasoning_gym(options, num_evaluation)
        case FileOptions():
            return _file(options, num_evaluation)
        case GuessOptions():
            return _guess(options, num_evaluation)


class GeneratedRows(Sequence[Row]):
    """Rows made when they are asked for; row `i` depends on what makes it and on `i` alone."""

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


def _countdown_chain(options: CountdownChainOptions, num_evaluation: int) -> Task:
    if options.num_rows < 1:
        raise RecipeError(f"`task.num_rows = {options.num_rows}` must be at least 1")
    return Task(
        name="countdown-chain",
        train=GeneratedRows(options.num_rows, partial(_countdown_row, seed=options.seed, held_out=False)),
        evaluation=GeneratedRows(num_evaluation, partial(_countdown_row, seed=options.seed, held_out=True)),
        reward=countdown.REWARD,
    )


# -- guess -------------------------------------------------------------------------------------------------------------


def _guess_row(index: int, options: GuessOptions, *, held_out: bool) -> Row:
    numbers = guess.numbers_at(index, options.seed, options.turns, held_out=held_out)
    return Row(text=guess.PROMPT, columns={"numbers": numbers})


def _guess(options: GuessOptions, num_evaluation: int) -> Task:
    return Task(
        name="guess",
        train=GeneratedRows(options.num_rows, partial(_guess_row, options=options, held_out=False)),
        evaluation=GeneratedRows(num_evaluation, partial(_guess_row, options=options, held_out=True)),
        reward=None,
        environment=EnvironmentSpec(guess.ENVIRONMENT, options.turns),
    )


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def _reasoning_row(index: int, dataset: Any, instruction: str, scored_by: Mapping[str, Any] | None) -> Row:
    """`scored_by`: what the scorer needs to make the data set again; None where answers are compared exactly."""
    entry = dataset[index]
    columns: dict[str, Any] = {"answer": str(entry["answer"])}
    if scored_by is not None:
        columns.update(scored_by, entry=entry)
    parts = [part for part in (instruction, str(entry["question"])) if part]
    roles = ["system", "user"][-len(parts) :]
    messages = tuple({"role": role, "content": part} for role, part in zip(roles, parts, strict=True))
    return Row(text="\n\n".join(parts) + "\n", messages=messages, columns=columns)


def _reasoning_gym(options: ReasoningGymOptions, num_evaluation: int) -> Task:
    if options.size < 1:
        raise RecipeError(f"`task.size = {options.size}` must be at least 1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of packages that it imports, when they are first compiled
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise RecipeError(
            "`task.type = 'reasoning-gym'` takes the package reasoning-gym: `pip install 'stretto[reasoning-gym]'`"
        ) from error
    if options.name not in DATASETS:
        near = difflib.get_close_matches(options.name, DATASETS, n=1, cutoff=0.0)
        raise RecipeError(f"`task.name = {options.name!r}` is no data set of reasoning-gym; nearest is `{near[0]}`")
    scored_by = None
    if options.scoring == "scorer":
        scored_by = {"name": options.name, "config": json.dumps(dict(options.config))}
    # Item `i` of a data set is drawn from `seed + i`, so evaluation begins where the training seeds end.
    train = _reasoning_dataset(options, DATASETS, options.seed, options.size)
    evaluation = _reasoning_dataset(options, DATASETS, options.seed + options.size, max(1, num_evaluation))

    def rows(dataset: Any) -> GeneratedRows:
        make = partial(_reasoning_row, dataset=dataset, instruction=options.instruction, scored_by=scored_by)
        return GeneratedRows(len(dataset), make)

    return Task(
        name=options.name,
        train=rows(train),
        evaluation=rows(evaluation) if num_evaluation > 0 else (),
        reward=reasoning_problems.EXACT_REWARD if scored_by is None else reasoning_problems.SCORER_REWARD,
    )


def _reasoning_dataset(options: ReasoningGymOptions, datasets: Mapping[str, Any], seed: int, size: int) -> Any:
    dataset_class, config_class = datasets[options.name]
    allowed = sorted({entry.name for entry in dataclasses.fields(config_class)} - {"seed", "size"})
    unknown = sorted(set(options.config) - set(allowed))
    if unknown:
        raise RecipeError(
            f"`task.config` has {unknown}, which `{options.name}` does not know; it knows {allowed} "
            "(`seed` and `size` are options of the task itself)"
        )
    try:
        return dataset_class(config=config_class(seed=seed, size=size, **options.config))
    except (AssertionError, TypeError, ValueError) as error:
        raise RecipeError(f"`task.config = {dict(options.config)}` is refused by `{options.name}`: {error}") from error


# -- file --------------------------------------------------------------------------------------------------------------


def _file(options: FileOptions, num_evaluation: int) -> Task:
    rows = [_with_system(row, options.system) for row in load_rows(options.path)]
    if options.evaluation_path is not None:
        rows_there = load_rows(options.evaluation_path, "task.evaluation_path")
        held_out = [_with_system(row, options.system) for row in rows_there][:num_evaluation]
    else:
        rows, held_out = split_held_out(rows, min(num_evaluation, len(rows) // HELD_OUT_SHARE), options.seed)
    name, scored_by = f"`{options.path}`", options.scored_by
    if isinstance(scored_by, EnvironmentSpec):
        return Task(name, rows, held_out, None, scored_by)
    return Task(name, rows, held_out, scored_by)


def _with_system(row: Row, system: str | None) -> Row:
    if system is None:
        return row
    messages = row.messages if row.messages is not None else ({"role": "user", "content": row.text or ""},)
    if messages[0]["role"] == "system":
        raise RecipeError(
            f"`task.system` is given, but {row.where or 'a row'} begins with a system message of its own; leave one out"
        )
    return dataclasses.replace(row, text=None, messages=({"role": "system", "content": system}, *messages))
