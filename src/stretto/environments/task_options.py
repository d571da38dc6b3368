"""The options of the tasks: the table `[task]` of a recipe, by its `type`. `tasks.py` loads the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from stretto.environments.data_options import ChatTemplateOptions, RowsOptions
from stretto.environments.reward_options import (
    JudgeRewardOptions,
    ModelRewardOptions,
    RewardTable,
    SharedRewardOptions,
)
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.environments.sandbox import Limits
from stretto.options import VARIABLE, Options, formed

_GIB, _MIB = 1 << 30, 1 << 20
MAX_ROWS = 100_000_000  # of a generated task: their order is drawn in memory


class SharedTaskOptions(Options):
    """The options that every task has."""

    type: str
    label: str | None = Field(
        None,
        pattern=formed(r"^[A-Za-z][A-Za-z0-9_-]*$", "letters, digits, `_` and `-`, and a letter first"),
        max_length=64,
        description="Name of the task in metrics, overrides and teachers; needed if there are several tasks",
    )
    share: float | None = Field(
        None,
        description="Of several tasks: its part of the trained groups, relative to the shares of the others; may "
        "change at `--resume`; default: all tasks have the same",
    )
    oversample: float | None = Field(
        None,
        ge=1,
        description="Of several tasks: most groups drawn for each that its share asks for, where groups are filtered "
        "or fail. 1: lost groups are not made up for; may change at `--resume`; default: no bound",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a completion of this task; default: `rollout.max_tokens`, the bound"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        None, description="Strings that end a completion, or a turn, of this task; default: `rollout.stop`"
    )
    order: Literal["shuffled", "pass-rate"] = Field(
        "shuffled",
        description="`shuffled`: every row once an epoch. `pass-rate`: the less a row is solved, the more often",
    )
    pass_reward: float | None = Field(
        None, gt=0, description='Lowest reward that counts as solved, for `order = "pass-rate"`; default: 1'
    )

    @property
    def max_turns(self) -> int:
        """The most turns of one episode."""
        return 1

    @property
    def max_lineages(self) -> int:
        """The most lineages of one episode, each of which has a turn."""
        return 1


class SandboxOptions(Options):
    """A sandbox for processes that run code written by the model: no network, no secrets, nothing to write to but a
    folder of its own. `stretto check` tells which parts hold on a machine."""

    memory_gib: float = Field(4.0, ge=0.125, le=4_096, description="Address space of each process, in GiB")
    disk_mib: int = Field(64, ge=1, le=1 << 20, description="Files in the sandbox's folder, in MiB")
    processes: int = Field(64, ge=4, le=32_768, description="Processes and threads at once; up to 300 more for root")
    strict: bool = Field(False, description="Refuse to run on a machine where a part of the sandbox does not hold")

    @property
    def limits(self) -> Limits:
        return Limits(int(self.memory_gib * _GIB), self.disk_mib * _MIB, self.processes)


class ProcessTaskOptions(SharedTaskOptions):
    """A task that runs code of the user's in processes of its own."""

    pass_env: tuple[Annotated[str, Field(pattern=VARIABLE)], ...] = Field(
        (), description="Environment variables that these processes see too; may change at `--resume`"
    )
    sandbox: SandboxOptions | None = Field(
        None, description="Runs these processes in a sandbox; leave out if they run no code of the model"
    )


class ScoredTaskOptions(ProcessTaskOptions):
    """A task of one turn that is scored by a reward function."""

    reward_seconds: float = Field(10.0, gt=0, description="Deadline of a call of the reward function")
    reward_workers: int = Field(1, ge=1, le=4_096, description="Processes that run the reward function")


class EpisodeTaskOptions(SharedTaskOptions):
    """A task whose episodes, of one turn or several, are played and rewarded by an environment."""

    turns: int = Field(ge=1, description="Most turns of an episode")

    @property
    def max_turns(self) -> int:
        return self.turns


class CountdownChainOptions(ScoredTaskOptions):
    """The task of the quickstart: `4+3*17?` asks for (4 + 3*17) mod 10, solved by a chain of steps."""

    type: Literal["countdown-chain"] = "countdown-chain"
    size: int = Field(4_096, ge=1, le=MAX_ROWS, description="Number of rows")


class ReasoningGymOptions(ScoredTaskOptions, ChatTemplateOptions):
    """Any task of the package reasoning-gym."""

    type: Literal["reasoning-gym"] = "reasoning-gym"
    name: str = Field(description="Name of the data set, such as `chain_sum`")
    size: int = Field(10_000, ge=1, le=MAX_ROWS, description="Number of rows")
    config: dict[str, Any] = Field(default_factory=dict, description="Options of the data set")
    scoring: Literal["exact", "scorer"] = Field(
        "exact", description="`exact`: exact match. `scorer`: the data set's scorer"
    )
    instruction: str | None = Field(
        None, description="Text before the problem; default: asks for a last line `Answer: ...`"
    )


class FileOptions(ScoredTaskOptions, RowsOptions):
    """Rows of files, or of a data set of the hub, with a reward function."""

    type: Literal["file"] = "file"
    reward: str | None = Field(
        None,
        description="`package.module:function`; may be left out with `rewards`, `judge`, `reward_model`, or with "
        '`algorithm.type = "distill"`',
    )
    rewards: tuple[RewardTable, ...] = Field(
        (),
        description="Several rewards instead of `reward`, each a table `[[task.rewards]]`; their weighted sum counts",
    )
    judge: JudgeOptions | None = Field(None, description="Scores completions by a model behind an address instead")
    reward_model: RewardModelOptions | None = Field(None, description="Scores completions by a model of yours instead")
    too_long: Literal["refuse", "drop", "truncate"] = Field(
        "refuse",
        description="Prompts that the context has no room for: refuse the run, leave them out, or keep their last "
        "tokens",
    )

    @property
    def scorers(self) -> Mapping[str, JudgeOptions | RewardModelOptions]:
        """The judges and the reward models, by the name of the reward; that of the only reward is empty."""
        found: dict[str, JudgeOptions | RewardModelOptions] = {}
        for table in self.rewards:
            if isinstance(table, JudgeRewardOptions):
                found[table.spec().name] = table.judge
            elif isinstance(table, ModelRewardOptions):
                found[table.spec().name] = table.model
        alone = self.judge or self.reward_model
        return found if alone is None else {**found, "": alone}

    @property
    def scorer(self) -> str | None:
        """The table that has a scorer of this package, `judge` or `reward_model`; None: there is none."""
        return "judge" if self.judge is not None else "reward_model" if self.reward_model is not None else None


class GuessOptions(EpisodeTaskOptions):
    """A small task of several turns: find numbers from 1 to 7 by guesses, which are answered with `>`, `<` or `!`."""

    type: Literal["guess"] = "guess"
    size: int = Field(4_096, ge=1, le=MAX_ROWS, description="Number of rows")
    turns: int = Field(6, ge=1, description="Most guesses of an episode")
    wait_seconds: float = Field(
        0.0, ge=0, le=3_600, description="Mean time that the world takes to answer a guess; few answers take very long"
    )


class EnvironmentOptions(EpisodeTaskOptions, ProcessTaskOptions, RowsOptions):
    """Rows of files, or of a data set of the hub, with your own environment."""

    type: Literal["environment"] = "environment"
    environment: str = Field(description="`package.module:Class`")
    lineages: int = Field(
        16, ge=1, le=4_096, description="Most lineages of an episode: contexts of its own, such as that of a sub-agent"
    )
    config: dict[str, Any] = Field(default_factory=dict, description="Options of the class")
    workers: int | None = Field(
        None,
        ge=0,
        le=4_096,
        description="Processes that play episodes, many each; 0: the driver plays them; may change at `--resume`; "
        "default: one for four cores",
    )
    worker_gib: float | None = Field(
        None, gt=0, description="Memory in GiB, beyond which a process is replaced when its episodes have ended"
    )
    worker_episodes: int | None = Field(None, ge=1, description="Episodes, after which a process is replaced")
    episode_seconds: float | None = Field(
        None, gt=0, description="Seconds of an episode outside of generation, after which it is cut"
    )
    budget: float | None = Field(None, ge=0, description="Most that an episode may spend with `policy.spend`")
    too_long: Literal["refuse", "drop"] = Field(
        "refuse", description="Prompts that the context has no room for: refuse the run, or leave them out"
    )

    @property
    def max_lineages(self) -> int:
        return min(self.lineages, self.turns)


class AgentOptions(EpisodeTaskOptions, ProcessTaskOptions, RowsOptions):
    """Rows of files, or of a data set of the hub, with an agent: a program, or a function, that calls the policy over
    HTTP. A program gets its row as its task."""

    type: Literal["agent"] = "agent"
    command: tuple[str, ...] | None = Field(
        None, min_length=1, description="The program and its arguments, such as `['python', 'agent.py']`"
    )
    function: str | None = Field(
        None, description="`package.module:function` instead of a program, called as `function(task, access)`"
    )
    turns: int = Field(32, ge=1, description="Most calls of an episode")
    seconds: float = Field(600.0, gt=0, description="Deadline of the agent, after which it is killed")
    timeout_reward: float | None = Field(
        None, description="Reward of an agent that is killed at its deadline; default: the episode fails"
    )
    reward: str | None = Field(
        None,
        description="`exit-status`, `file`, `posted`, or `package.module:function`, which gets what the agent prints; "
        "default: `exit-status`, and of a function what it returns",
    )
    reward_seconds: float = Field(10.0, gt=0, description="Deadline of a call of the reward function")
    reward_workers: int = Field(1, ge=1, le=4_096, description="Processes that run the reward function")
    lineages: int = Field(
        16, ge=1, le=4_096, description="Most lineages of an episode: contexts of its own, such as that of a sub-agent"
    )
    sandbox: SandboxOptions | None = Field(
        None, description="Runs the program in a sandbox, from which it reaches the endpoint and nothing else"
    )
    too_long: Literal["refuse", "drop"] = Field(
        "refuse", description="Prompts that the context has no room for: refuse the run, or leave them out"
    )

    @property
    def max_lineages(self) -> int:
        return min(self.lineages, self.turns)


class EndpointOptions(Options):
    """The endpoint that the agents of `task.type = "agent"` call while the run lasts. May change at `--resume`."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description='Address that it listens on; "0.0.0.0": all of this machine, for agents on others. It does not '
        "encrypt",
    )
    port: int = Field(0, ge=0, le=65_535, description="Port that it listens on; 0: any that is free")
    url: str | None = Field(
        None,
        description="URL that agents get, if they reach the endpoint by another than `http://HOST:PORT`, such as that "
        "of a proxy or of this machine as others see it",
    )

    @field_validator("url")
    @classmethod
    def _refuse_other_urls(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f'`serve.url = "{url}"` must begin with `http://` or `https://`')
        return url


TaskOptions = Annotated[
    CountdownChainOptions | ReasoningGymOptions | FileOptions | GuessOptions | EnvironmentOptions | AgentOptions,
    Field(discriminator="type"),
]


def option_of(options: JudgeOptions | RewardModelOptions, name: str, table: str = "task") -> str:
    """Returns the table of a judge or a reward model in messages.

    `name` is that of its reward; empty: it is alone. `table` is the dotted name of its task's table.
    """
    alone, several = ("judge", "judge") if isinstance(options, JudgeOptions) else ("reward_model", "model")
    return f"{table}.rewards.{name}.{several}" if name else f"{table}.{alone}"


def rewards_of(task: TaskOptions) -> tuple[SharedRewardOptions, ...]:
    """Returns the tables `[[task.rewards]]` of a task; empty if it has none."""
    return task.rewards if isinstance(task, FileOptions) else ()
