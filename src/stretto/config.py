"""A recipe: strict, typed, and free of torch. What is not known is an error; what has no effect is an error too.

`load_recipe` reads TOML, applies `--set key=value` (`overrides.py`), validates, and raises `RecipeError` with a line
per problem; which problems there are is in `refusals.py`. A default lives here and nowhere else. `paradigm_overrides`
is for `compare`, which runs one recipe under every paradigm and therefore drops the keys that a paradigm does not have
instead of refusing them.
"""

from __future__ import annotations

import copy
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from stretto.core.paradigms import PARADIGMS, Paradigm
from stretto.core.plan import Plan, resolve_plan
from stretto.errors import RecipeError
from stretto.explanations import explain
from stretto.objectives import AlgorithmSection
from stretto.objectives.grpo import GrpoOptions
from stretto.overrides import apply_override
from stretto.refusals import idle_keys, refusals, replays_nothing, without_effect

PARADIGM_NAMES = tuple(PARADIGMS)
UNREFUSED = "unrefused"  # as the context of a validation: types alone are checked
MAX_SEED = 2**63 - 1  # what a generator of torch takes, and TOML has


class Section(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LoraSection(Section):
    """Train low-rank adapters over a frozen base instead of every parameter."""

    rank: int = Field(16, ge=1, description="Rank of the adapters")
    alpha: float | None = Field(None, gt=0, description="Scale of the adapters is alpha / rank; default: 2 * rank")
    targets: tuple[str, ...] = Field(
        (), description="Ends of the names of the linear modules to adapt; empty: all but the output layer"
    )


class WarmStartSection(Section):
    """How the `tiny` model is taught the form of an answer before it is improved. Cached between runs."""

    steps: int | None = Field(None, ge=0, description="Supervised steps; 0 leaves it random; default: enough")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="Seed of its initial weights and demonstrations")


class ModelSection(Section):
    """Which model is trained."""

    path: str = Field(min_length=1, description='A folder, a hub name, or "tiny" (made on the spot)')
    lora: LoraSection | None = Field(None, description="Leave out for full-parameter training")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description='Type of the weights; "auto": bfloat16 on CUDA, float32 on the CPU; "float16" brings engine and '
        "trainer closest together",
    )
    warm_start: WarmStartSection | None = Field(None, description='Only for `path = "tiny"`')


class TaskSection(Section):
    """What every task has."""

    order: Literal["shuffled", "pass-rate"] = Field(
        "shuffled", description="Every row once an epoch, or the more often the less it was solved of late"
    )
    pass_reward: float | None = Field(
        None, gt=0, description='The reward that counts as solved, for `order = "pass-rate"`; default: 1'
    )

    @property
    def max_turns(self) -> int:
        """Of one episode."""
        return 1


class ScoredSection(TaskSection):
    """A task of one turn, which a reward function scores."""

    reward_seconds: float = Field(10.0, gt=0, description="Deadline of one call of the reward function")
    reward_workers: int = Field(1, ge=1, description="Processes that run the reward function")


class PlayedSection(TaskSection):
    """A task whose episodes an environment plays, of several turns perhaps, and says what they earn."""

    turns: int = Field(ge=1, description="Most turns of an episode")

    @property
    def max_turns(self) -> int:
        return self.turns


class CountdownChainSection(ScoredSection):
    """The quickstart's task: `4+3*17?` asks for (4 + 3*17) mod 10, by a chain of steps."""

    type: Literal["countdown-chain"]
    size: int = Field(4_096, ge=1, description="Rows to draw")


class ReasoningGymSection(ScoredSection):
    """Any task of the package reasoning-gym."""

    type: Literal["reasoning-gym"]
    name: str = Field(description="Name of the data set, such as `chain_sum`")
    size: int = Field(10_000, ge=1, description="Rows to draw")
    config: dict[str, Any] = Field(default_factory=dict, description="The data set's own options")
    scoring: Literal["exact", "scorer"] = Field("exact", description="Exact match, or the data set's own scorer")
    instruction: str | None = Field(None, description="Said before the problem; default: answer after `Answer:`")


class FileSection(ScoredSection):
    """A JSONL or Parquet file of prompts with a reward function."""

    type: Literal["file"]
    path: str = Field(description="File with a column `prompt` or `messages`")
    reward: str = Field(description="`package.module:function`")
    evaluation_path: str | None = Field(None, description="Held-out prompts; default: split off from `path`")
    system: str | None = Field(None, description="A system message; every `prompt` becomes a user's message after it")


class GuessSection(PlayedSection):
    """A small task of several turns: find numbers from 1 to 7, by guesses that are answered with `>`, `<` or `!`."""

    type: Literal["guess"]
    size: int = Field(4_096, ge=1, description="Rows to draw")
    turns: int = Field(6, ge=1, description="Guesses")


class EnvironmentSection(PlayedSection):
    """A JSONL or Parquet file of prompts with an environment of your own."""

    type: Literal["environment"]
    path: str = Field(description="File with a column `prompt` or `messages`")
    environment: str = Field(description="`package.module:Class`")
    config: dict[str, Any] = Field(default_factory=dict, description="The class's own options")
    evaluation_path: str | None = Field(None, description="Held-out prompts; default: split off from `path`")
    system: str | None = Field(None, description="A system message; every `prompt` becomes a user's message after it")


AnyTask = Annotated[
    CountdownChainSection | ReasoningGymSection | FileSection | GuessSection | EnvironmentSection,
    Field(discriminator="type"),
]


class RolloutSection(Section):
    """How trajectories are generated."""

    paradigm: Literal["synchronous", "one-step-off", "partial", "drop", "multi-version"] = Field(
        "multi-version", description="What happens to running work when a version is published"
    )
    staleness: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] | None = Field(
        None, description='K: the most versions a trajectory may be late, or "auto"; default: 2'
    )
    staleness_cap: int | None = Field(None, ge=1, le=64, description='Most that "auto" may choose; default: 4')
    prompts: int = Field(16, ge=1, description="Groups per update (B)")
    group: int = Field(8, ge=1, description="Trajectories per group (G)")
    rows: int | None = Field(None, ge=1, description="Target of running trajectories; default: B * G")
    in_flight: int | None = Field(None, ge=1, description="Most groups outstanding; default: 1.5 * B")
    max_tokens: int = Field(
        256, ge=1, description="Longest completion; of an episode with turns, all that follows its prompt"
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draw from the likeliest tokens with this share of the probability; 1: from all"
    )
    top_k: int = Field(0, ge=0, le=4_096, description="Draw from so many of the likeliest tokens; 0: from all")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Draw from tokens at least this fraction as likely as the likeliest; 0: from all"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="Strings that end a completion")
    retries: int = Field(2, ge=0, description="Tries after the first, for a request and again for its reward")
    filter: Literal["none", "no-signal"] = Field(
        "none", description="Replace groups whose rewards are all equal by the next prompts (dynamic sampling)"
    )
    filter_limit: int | None = Field(
        None, ge=1, description="Most groups filtered for one update; what comes then is trained; default: 10 * B"
    )
    kv_tokens: int | None = Field(
        None, ge=16, description="Tokens of context over all rows of all instances; default: what rows need"
    )
    prefill_tokens: int = Field(2_048, ge=16, description="Most prompt tokens prefilled in one step")


class ReplaySection(Section):
    """Use trained groups again in later updates, while they are not older than `staleness`."""

    ratio: float = Field(gt=0, description="Groups used again in an update, as a share of `prompts`")
    uses: int = Field(1, ge=1, description="Later uses of one group at most")


class TrainingSection(Section):
    """How the policy is updated."""

    steps: int = Field(100, ge=1, description="Updates")
    optimizer_steps: int = Field(
        1, ge=1, description="Optimizer steps an update: its batch is cut into so many parts of whole groups"
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="After the warm-up")
    final_fraction: float | None = Field(None, ge=0, le=1, description="Where the schedule ends; default: 0")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled decay")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW's averages"
    )
    epsilon: float = Field(1e-8, gt=0, description="AdamW's denominator")
    max_grad_norm: float = Field(
        1.0, gt=0, description="Gradients are clipped to this norm, a critic's apart from the policy's"
    )
    micro_tokens: int = Field(8_192, ge=1, description="Tokens of one packed micro-batch")
    checkpointing: bool = Field(
        False, description="Make activations again in the backward pass: much less memory, about a third more time"
    )
    compile: bool | None = Field(
        None, description="Compile the decoder layer; default: on CUDA in half precision, for plain decoders"
    )
    replay: ReplaySection | None = Field(None, description="Leave out to use every group once")


class EvaluationSection(Section):
    """Held-out prompts, before and after training and every few updates in between."""

    every: int = Field(0, ge=0, description="Updates between evaluations; 0: only before and after")
    prompts: int = Field(64, ge=0, description="Held-out prompts; 0: never evaluate")
    temperature: float | None = Field(None, ge=0, description="Default: as in rollout; 0 is greedy")
    max_tokens: int | None = Field(None, ge=1, description="Default: as in rollout")


class RuntimeSection(Section):
    """How a run is carried out. May change at `--resume`.

    `local` is one process: a thread each for the trainer and for every instance, which share the base in the memory of
    one device. `ray` places instances, rewards and trainer as actors on a Ray cluster (`docs/cluster.md`).
    """

    type: Literal["local", "ray"] = Field("local", description="`local`: threads of one process; `ray`: a cluster")
    instances: int = Field(1, ge=1, description="Rollout instances; `stretto pool` adds and removes some while it runs")
    slots: int | None = Field(
        None,
        ge=1,
        description="Versions that one instance holds at once; default: all that a run needs, K + 1 or K + 2",
    )
    instance_seconds: float = Field(
        120.0, gt=0, description="An instance that has work and makes no progress for so long is lost and replaced"
    )
    replacements: int = Field(16, ge=0, description="Instances that are replaced at most when they are lost")
    rebalance_seconds: float = Field(
        5.0, gt=0, description="Between two looks at how versions and trajectories are spread over the instances"
    )
    address: str | None = Field(
        None,
        min_length=1,
        description='Of a Ray cluster; "local" starts one; default: one that runs here, else a new one',
    )
    instance_cpus: float = Field(1.0, ge=0, description="Of the cluster's CPUs, for one instance; may be a fraction")
    instance_gpus: float | None = Field(
        None, ge=0, description="Of the cluster's GPUs, for one instance; may be a fraction; default: 1 on CUDA, else 0"
    )
    trainers: int = Field(1, ge=1, description="Ranks that share an update")
    trainer_cpus: float = Field(1.0, ge=0, description="Of the cluster's CPUs, for one rank; may be a fraction")
    trainer_gpus: float | None = Field(
        None, ge=0, description="Of the cluster's GPUs, for one rank; may be a fraction; default: 1 on CUDA, else 0"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description='"auto": cuda where torch sees one')
    deterministic: bool = Field(
        False, description="On CUDA: no bit of a trajectory depends on its neighbours; slower. On the CPU always so"
    )
    engine_threads: int | None = Field(
        None,
        ge=1,
        description="Of one instance; default: 1 on CUDA; on the CPU its share of every core if it takes turns, else "
        "of half",
    )
    trainer_threads: int | None = Field(
        None, ge=1, description="Default: 1 on CUDA; on the CPU every core if it takes turns, else half"
    )
    checkpoint_seconds: float = Field(
        600.0, gt=0, description="Between checkpoints, at the next update; a run that is stopped always leaves one"
    )
    durable_versions: bool = Field(
        True,
        description="Full weights: a version is on the disk before a group starts on it. If not, those that a killed "
        "run needs are trained again from its journal; adapters are always on the disk",
    )
    stall_seconds: float = Field(900.0, gt=0, description="A run in which nothing happens for so long is an error")
    update_seconds: float = Field(3_600.0, gt=0, description="An update or a checkpoint that takes longer is an error")


class Recipe(Section):
    """A whole run."""

    seed: int = Field(
        0, ge=0, le=MAX_SEED, description="Order of the data, seeds of the trajectories, initial adapters"
    )
    model: ModelSection
    task: AnyTask
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = GrpoOptions()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    runtime: RuntimeSection = RuntimeSection()

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self, info: ValidationInfo) -> Recipe:
        if info.context != UNREFUSED and (problems := refusals(self)):
            raise RecipeError("\n".join(problems))
        return self

    @property
    def paradigm(self) -> Paradigm:
        return PARADIGMS[self.rollout.paradigm]

    @property
    def plan(self) -> Plan:
        """What the core needs to know."""
        rollout = self.rollout
        staleness = rollout.staleness
        auto = staleness == "auto"
        replay = None if replays_nothing(self) else self.training.replay
        again = 0 if replay is None else math.floor(replay.ratio * rollout.prompts + 0.5)
        bound: int | None = (rollout.staleness_cap or 4) if auto else (2 if staleness is None else int(staleness))
        return resolve_plan(
            rollout.paradigm,
            batch=rollout.prompts,
            group_size=rollout.group,
            updates=self.training.steps,
            staleness=None if self.paradigm.staleness is not None else bound,
            auto=auto,
            rows=rollout.rows,
            in_flight=rollout.in_flight,
            retries=rollout.retries,
            evaluate_every=self.evaluation.every if self.evaluation.prompts else 0,
            filter_limit=0 if rollout.filter == "none" else rollout.filter_limit or 10 * rollout.prompts,
            replay_groups=again,
            replay_uses=replay.uses if replay is not None and again else 0,
        )

    @property
    def num_slots(self) -> int:
        """Version slots of one instance: by default all that the run needs, so that its K always fits."""
        return self.runtime.slots or self.plan.slots

    def dumps(self) -> str:
        """The recipe as TOML, every default spelled out but those that cannot act; parses again to the same run."""
        values = _without_none(self.model_dump(mode="json"))
        for section, name in without_effect(self):
            values[section].pop(name, None)
        return tomli_w.dumps(values)

    def source_toml(self) -> str:
        """The recipe as TOML with only what was set by hand, which parses again to the same recipe."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json", exclude_unset=True)))


# -- reading -----------------------------------------------------------------------------------------------------------


def load_recipe(path: Path, overrides: Sequence[str] = (), *, compare_as: str | None = None) -> Recipe:
    """Read and validate a recipe; `overrides` are `key=value` with dotted keys, `key=` takes one out.

    Raises `RecipeError`, which blames the overrides where the file alone is a recipe.
    """
    try:
        raw = tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # some editors mark the beginning
    except FileNotFoundError:
        raise RecipeError(f"recipe `{path}` does not exist") from None
    except IsADirectoryError:
        raise RecipeError(f"recipe `{path}` is a folder; name a TOML file") from None
    except OSError as error:
        raise RecipeError(
            f"recipe `{path}` cannot be read: {error.strerror}; name a TOML file that you may read"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe `{path}` is not valid TOML: {error}") from error
    source = str(path)
    if overrides:
        written, raw = raw, _overridden(raw, overrides)
        said = " ".join(f"--set {override}" for override in overrides)
        source = f"`{said}` on `{path}`" if _is_recipe(written) else f"`{path}` with `{said}`"
    if compare_as is not None:
        raw = paradigm_overrides(raw, compare_as)
    return parse_recipe(raw, source=source)


def _is_recipe(raw: Mapping[str, Any]) -> bool:
    try:
        parse_recipe(raw)
    except RecipeError:
        return False
    return True


def parse_recipe(raw: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Validate a recipe given as nested tables."""
    try:
        return Recipe.model_validate(_tuples(raw))
    except ValidationError as error:
        lines = explain(error.errors(include_url=False), Recipe, raw)
        if any("has no effect" in line for line in lines):
            lines.append("(`--set KEY=`, with nothing after it, takes a key out for one run)")
        raise RecipeError(f"{source}:\n{_indented(chr(10).join(lines))}") from None


def paradigm_overrides(raw: Mapping[str, Any], paradigm: str) -> dict[str, Any]:
    """The same recipe under another paradigm: keys that it fixes itself are left out."""
    row = PARADIGMS[paradigm]
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    rollout = result.setdefault("rollout", {})
    rollout["paradigm"] = paradigm
    if row.staleness is not None:
        for key in ("staleness", "staleness_cap"):
            rollout.pop(key, None)
    if row.one_batch:
        rollout.pop("in_flight", None)
        if isinstance(result.get("training"), dict):
            result["training"].pop("replay", None)
        defaults = RolloutSection()
        most = rollout.get("prompts", defaults.prompts) * rollout.get("group", defaults.group)
        if rollout.get("rows", 0) > most:  # more than one batch has
            rollout.pop("rows")
    for section, key in idle(result) - idle(raw):
        if section in ("algorithm", "runtime"):  # such as clips that cannot act without staleness
            del result[section][key]
    return result


def _overridden(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The recipe with `key=value` applied. What only they have made idle gives way, unless they ask for it too."""
    result = copy.deepcopy(dict(raw))
    asked = {tuple(apply_override(result, override)) for override in overrides}
    for section, key in idle(result) - idle(raw) - asked:
        del result[section][key]
    return result


def idle(raw: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """The keys that are set and cannot act; none where the recipe is no recipe, which `parse_recipe` says better."""
    try:
        return set(idle_keys(Recipe.model_validate(_tuples(raw), context=UNREFUSED)))
    except ValidationError:
        return set()


def _tuples(value: Any) -> Any:
    """TOML has arrays; strict models have tuples. Integers may stand for floats, as TOML users write them."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
