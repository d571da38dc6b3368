"""The sections of a recipe: strict, typed, without torch. An unknown key is an error, and so is a key without effect.

`Recipe` is the whole. `reading.py` makes it from TOML. Tables that belong to a lower package are its options: `[task]`,
`[model.lora]`, `[algorithm]`, `[training]`, `[observe]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import tomli_w
from pydantic import Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from stretto.core.paradigms import PARADIGMS, Paradigm
from stretto.core.plan import Plan, resolve_plan
from stretto.core.spreading import Spread
from stretto.environments.task_options import EndpointOptions, TaskOptions
from stretto.environments.task_shares import Share
from stretto.errors import RecipeError
from stretto.models.adapter_config import lora_of_adapter
from stretto.models.lora_options import LoraOptions
from stretto.objectives import AlgorithmOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.observe.options import ObserveOptions
from stretto.options import Options
from stretto.recipe.checks import refusals, replays_nothing, without_effect
from stretto.recipe.task_tables import remove_key, without_none
from stretto.training.options import TrainingOptions

PARADIGM_NAMES = tuple(PARADIGMS)
UNREFUSED = "unrefused"  # a validation context: checks types only
MAX_SEED = 2**63 - 1  # the limit of torch generators and of TOML
MAX_THREADS = 4_096  # of one process; torch itself takes more only to fail
PREFILL_TOKENS = 2_048  # of `prefill_tokens = "auto"` on a CPU; the fewest on a GPU


class WarmStartSection(Options):
    """Supervised training before the run, on demonstrations, so that the policy knows the form of an answer.

    The result is version 0. It is kept in the user's cache and made once. Without `path`, it is that of the `tiny`
    model on the quickstart's task.
    """

    path: str | None = Field(
        None,
        min_length=1,
        description="JSONL or Parquet file of demonstrations: a column `prompt` or `messages`, and the answer in a "
        'column `completion` or as the last message, of the assistant; only "tiny" needs none',
    )
    steps: int | None = Field(
        None, ge=0, description="Supervised steps; default: those of `epochs`. Without `path` 0: random weights"
    )
    epochs: float | None = Field(
        None, gt=0, le=10_000, description="Passes over the demonstrations, instead of `steps`; default: 1"
    )
    batch: int | None = Field(None, ge=1, le=1_000_000, description="Demonstrations of a step; default: 16")
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate; default: 1e-5, with `model.lora` 2e-4"
    )
    seed: int = Field(
        0, ge=0, le=MAX_SEED, description="Seed of the order of the demonstrations; of `tiny` also of its weights"
    )

    @property
    def batch_size(self) -> int:
        """`batch`, or its default."""
        return 16 if self.batch is None else self.batch

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> WarmStartSection:
        if self.path is None:
            for name in ("epochs", "batch", "learning_rate"):
                if getattr(self, name) is not None:
                    raise ValueError(f"`{name}` has no effect without `path`; name a file of demonstrations")
        elif self.steps is not None and self.epochs is not None:
            raise ValueError("`steps` and `epochs` say the same in two ways; leave one of them out")
        elif self.steps == 0:
            raise ValueError("`path` has no effect with `steps = 0`; leave the table out")
        return self


class ModelSection(Options):
    """The model to train."""

    path: str = Field(
        min_length=1,
        description='A folder, a hub name, or "tiny" or "tiny-moe", a mixture of experts (both created on the spot)',
    )
    lora: LoraOptions | None = Field(None, description="Leave out for full-parameter training")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description='Type of the weights; "auto": bfloat16 on CUDA, float32 on the CPU; "float16" has the smallest '
        "difference between engine and trainer",
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description="Folder of a LoRA adapter of this model to start from, such as `RUN/policy`. It is trained "
        "further, with its own rank, alpha and targets, unless `merge_adapter`",
    )
    merge_adapter: bool = Field(
        False,
        description="Add `adapter` to the weights before the run starts; then train a new adapter (`model.lora`), or "
        "all weights",
    )
    warm_start: WarmStartSection | None = Field(None, description="Supervised training before the run")

    @property
    def is_tiny(self) -> bool:
        """True if the model is created on the spot."""
        return self.path in ("tiny", "tiny-moe")

    @property
    def continued_adapter(self) -> str | None:
        """The adapter that is trained further; None: there is none, or it is merged."""
        return None if self.merge_adapter else self.adapter

    @model_validator(mode="before")
    @classmethod
    def _take_lora_of_adapter(cls, values: Any) -> Any:
        """Fills in the options of the adapter that is trained further. Raises `ValueError` for others."""
        if not isinstance(values, Mapping) or not isinstance(values.get("adapter"), str) or values.get("merge_adapter"):
            return values
        lora = values.get("lora") or {}
        given = lora.model_dump(exclude_unset=True) if isinstance(lora, LoraOptions) else lora
        if not isinstance(given, Mapping):
            return values  # of another type, which is refused
        return {**values, "lora": lora_of_adapter(values["adapter"], given)}


class RedundancySection(Options):
    """Starts more groups and members than an update trains on; the first to finish win, the others are dropped.

    Dropped trajectories are longer than trained ones: watch `dropped_share` and `length_ratio`.
    """

    groups: int | None = Field(
        None, ge=1, le=1_000_000, description="Groups started for an update, at least `prompts`; default: `prompts`"
    )
    members: int | None = Field(
        None, ge=1, le=65_536, description="Trajectories started for a group, at least `group`; default: `group`"
    )


class RowLimit(NamedTuple):
    """The most rows that there is room for if `rollout.rows` is left out."""

    rows: int
    reason: str  # why there is no room for more


class RolloutSection(Options):
    """Generation of trajectories."""

    paradigm: Literal["synchronous", "one-step-off", "partial", "drop", "multi-version"] = Field(
        "multi-version", description="Decides what happens to running trajectories when a version is published"
    )
    staleness: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] | None = Field(
        None, description='K: the largest age of a trajectory in versions when it is trained, or "auto"; default: 2'
    )
    staleness_cap: int | None = Field(None, ge=1, le=64, description='Upper bound of "auto"; default: 4')
    prompts: int = Field(16, ge=1, le=1_000_000, description="Prompts per update, one group each (B)")
    group: int = Field(8, ge=1, le=65_536, description="Trajectories per prompt (G)")
    redundancy: RedundancySection | None = Field(
        None, description="Leave out to train on everything that is started (law 2)"
    )
    spread: Spread = Field(
        "auto",
        description="Instances that the members of a group start on; `auto`: as many as cost the least; `never`: one; "
        "`always`: one each",
    )
    rows: int | None = Field(
        None,
        ge=1,
        description="Target number of running trajectories; default: B * G, or what `redundancy` starts; with "
        "adapters in one process on a GPU with the native engine all trajectories in flight, fewer if memory is short "
        "(`stretto check` prints the number)",
    )
    in_flight: Annotated[int, Field(ge=1)] | Literal["full"] | None = Field(
        None,
        description='Most groups started and not yet in a batch; "full": as many as `staleness` allows, (K + 1) * B; '
        "default: 1.5 * B; with adapters in one process on a GPU with the native engine 3 * B, less if memory is "
        "short; never more than with `full`",
    )
    max_tokens: int = Field(
        256, ge=1, description="Most tokens of a completion; with several turns, of everything after the prompt"
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the likeliest tokens with this total probability; 1: from all"
    )
    top_k: int = Field(0, ge=0, le=4_096, description="Sample from this many of the likeliest tokens; 0: from all")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Sample from tokens at least this fraction as likely as the likeliest; 0: from all"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="Strings that end a completion")
    retries: int = Field(2, ge=0, description="Retries of a failed request, and again of a failed reward")
    filter: Literal["none", "no-signal"] = Field(
        "none", description="`no-signal`: replace groups whose rewards are all equal by new prompts (dynamic sampling)"
    )
    filter_limit: int | None = Field(
        None, ge=1, description="Most groups filtered for one update; further ones are trained; default: 10 * B"
    )
    kv_tokens: int | None = Field(
        None, ge=16, description="KV cache of all instances together, in tokens; default: enough for `rows`"
    )
    prefill_tokens: Annotated[int, Field(ge=16)] | Literal["auto"] = Field(
        "auto",
        description="Most prompt tokens prefilled in one engine step. `auto`: 8,192 on a GPU, less if memory is short "
        "(`stretto check` prints the number); 2,048 on a CPU and with `runtime.deterministic`",
    )

    _row_limit: RowLimit | None = PrivateAttr(None)  # found at every start

    @property
    def prefill_chunk_tokens(self) -> int:
        """The most tokens of a prefill. `auto` is replaced by a number before an engine is made."""
        return PREFILL_TOKENS if self.prefill_tokens == "auto" else self.prefill_tokens


class ReplaySection(Options):
    """Reuses trained groups in later updates, as long as they are not older than `staleness`."""

    ratio: float = Field(gt=0, description="Reused groups in an update, as a fraction of `prompts`")
    uses: int = Field(1, ge=1, description="Most later uses of a group")


class TrainingSection(TrainingOptions):
    """Updates of the policy."""

    replay: ReplaySection | None = Field(None, description="Leave out to train on every group once")


class EvaluationSection(Options):
    """Evaluation on held-out prompts, before and after training and optionally in between."""

    every: int = Field(0, ge=0, description="Updates between evaluations; 0: only before and after")
    prompts: int = Field(64, ge=0, le=1_000_000, description="Held-out prompts of each task; 0: never evaluate")
    temperature: float | None = Field(None, ge=0, description="Sampling temperature; 0: greedy; default: as in rollout")
    greedy: bool = Field(False, description="Also answer every prompt once at temperature 0, for a second score")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of a completion; default: as in rollout")

    @property
    def num_answers(self) -> int:
        """Most completions of one evaluation."""
        return self.prompts * (2 if self.greedy else 1)


class EngineSection(Options):
    """The rollout engine: the program that generates trajectories on every instance."""

    type: Literal["native", "vllm"] = Field(
        "native",
        description="`native`: in the process of the instance; `vllm`: vLLM in a child process of each instance "
        "(`docs/engines.md`)",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="`vllm`: devices that one instance cuts the model over; more than 1 on a cluster"
    )
    gpu_memory: float | None = Field(
        None,
        gt=0,
        le=1,
        description="`vllm`: share of a GPU's memory, or of `runtime.device_gib`, that an instance may take; default: "
        "by the memory plan of the run",
    )


class RuntimeSection(Options):
    """Execution of a run. May change at `--resume`.

    `local` is one process: the trainer and every instance have a thread, and share the base weights on one device.
    `ray` places instances, rewards and trainer as actors on a Ray cluster (`docs/cluster.md`).
    """

    type: Literal["local", "ray"] = Field("local", description="`local`: threads of one process; `ray`: a Ray cluster")
    instances: int = Field(
        1, ge=1, description="Rollout instances; `stretto pool` adds and removes some during the run"
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="Versions that an instance holds at once; default: all that the run needs, K + 1 or K + 2",
    )
    instance_seconds: float = Field(
        120.0, gt=0, description="An instance that makes no progress on its work for this long is replaced"
    )
    replacements: int = Field(16, ge=0, description="Most lost instances that are replaced")
    rebalance_seconds: float = Field(
        5.0, gt=0, description="Time between two checks of how versions and trajectories are spread over the instances"
    )
    address: str | None = Field(
        None,
        min_length=1,
        description='Address of a Ray cluster; "local": start one; default: one that runs here, else start one',
    )
    instance_cpus: float = Field(1.0, ge=0, description="CPUs of an instance; may be a fraction")
    instance_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs of an instance; may be a fraction; default: 1 on CUDA, or `engine.tensor_parallel`, else 0",
    )
    trainers: int = Field(1, ge=1, description="Ranks of the trainer, which share every update")
    trainer_cpus: float = Field(1.0, ge=0, description="CPUs of a rank; may be a fraction")
    trainer_gpus: float | None = Field(
        None, ge=0, description="GPUs of a rank; may be a fraction; default: 1 on CUDA, else 0"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description='"auto": cuda if torch finds one')
    device_gib: float | None = Field(
        None,
        gt=1,
        description="GPU memory that the run plans with and may take, in GiB, to try a smaller card on a large one; "
        "default: all that is free",
    )
    deterministic: bool = Field(
        False,
        description="On CUDA: a trajectory never depends on its neighbours, bit for bit; slower. Always so on the CPU",
    )
    engine_threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="Torch threads of an instance; default: 1 on CUDA; on the CPU its share of all cores if rollout "
        "and training take turns, else of half of them",
    )
    trainer_threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="Torch threads of the trainer; default: 1 on CUDA; on the CPU all cores if rollout and training "
        "take turns, else half of them",
    )
    checkpoint_seconds: float = Field(
        600.0, gt=0, description="Time between checkpoints, taken after an update; a stopped run always leaves one"
    )
    final_checkpoint: bool = Field(
        True,
        description="Leave a checkpoint of a finished run, so that more updates can follow at once: 12 bytes for each "
        "trained parameter. If false, a run that is extended trains again from its journal first",
    )
    durable_versions: bool = Field(
        True,
        description="Write full weights to disk before a group starts on them. If false, a killed run trains the "
        "versions it needs again from its journal. Adapters are always written",
    )
    stall_seconds: float = Field(
        900.0, gt=0, description="A run in which nothing happens for this long ends with an error"
    )
    update_seconds: float = Field(
        3_600.0, gt=0, description="An update or a checkpoint that takes longer ends the run with an error"
    )


OneTask = Annotated[TaskOptions, Tag("[task]")]
SeveralTasks = Annotated[tuple[TaskOptions, ...], Field(min_length=1), Tag("[[task]]")]


def _form_of_task(value: object) -> str:
    return "[[task]]" if isinstance(value, list | tuple) else "[task]"


class Recipe(Options):
    """A run."""

    seed: int = Field(
        0, ge=0, le=MAX_SEED, description="Seeds the order of the data, the trajectories and the initial adapters"
    )
    model: ModelSection
    task: Annotated[OneTask | SeveralTasks, Discriminator(_form_of_task)]
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmOptions = GrpoOptions()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    runtime: RuntimeSection = RuntimeSection()
    serve: EndpointOptions = EndpointOptions()
    observe: ObserveOptions = ObserveOptions()

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self, info: ValidationInfo) -> Recipe:
        if info.context != UNREFUSED and (problems := refusals(self)):
            raise RecipeError("\n".join(problems))
        return self

    @property
    def tasks(self) -> tuple[TaskOptions, ...]:
        """The tasks: one, or those of a mixture."""
        return self.task if isinstance(self.task, tuple) else (self.task,)

    @property
    def parts(self) -> tuple[OneTaskRecipe, ...]:
        """A recipe for each task, as if it had that task alone, with the task's own limits."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        parts = []
        for task in self.tasks:
            own = {name: value for name in ("max_tokens", "stop") if (value := getattr(task, name)) is not None}
            table = f"task.{task.label}" if isinstance(self.task, tuple) else "task"
            changed = {"task": task, "rollout": self.rollout.model_copy(update=own), "task_table": table}
            parts.append(OneTaskRecipe.model_construct(self.model_fields_set, **values | changed))
        return tuple(parts)

    @property
    def shares(self) -> dict[str, Share]:
        """The share of each task in the trained groups, by label; empty if there is one task without a label."""
        return {task.label: Share(task.share or 1.0, task.oversample) for task in self.tasks if task.label is not None}

    @property
    def max_lineages(self) -> int:
        """The most lineages of one episode, of any task."""
        return max(task.max_lineages for task in self.tasks)

    @property
    def num_answers(self) -> int:
        """Most completions of one evaluation, of all tasks."""
        return self.evaluation.num_answers * len(self.tasks)

    @property
    def paradigm(self) -> Paradigm:
        return PARADIGMS[self.rollout.paradigm]

    @property
    def starts_ahead(self) -> bool:
        """True if more groups are in flight by default, and all of them run: many rows of a GPU cost little more.

        Measured for adapters with the native engine in one process (`docs/performance.md`). On a CPU, rows cost what
        they compute. Versions of full weights are a batch each. A deterministic engine pads every step to all rows.
        """
        return self.runtime.device == "cuda" and self.may_start_ahead

    @property
    def may_start_ahead(self) -> bool:
        """True if it starts ahead on a GPU."""
        runtime, adapts = self.runtime, self.model.lora is not None and self.engine.type == "native"
        return adapts and runtime.type == "local" and runtime.device != "cpu" and not runtime.deterministic

    @property
    def plan(self) -> Plan:
        """The parameters of the core."""
        return self.plan_with(ahead=self.starts_ahead)

    def plan_with(self, *, ahead: bool) -> Plan:
        """Returns the parameters of the core of a run that starts ahead, or does not."""
        rollout = self.rollout
        staleness = rollout.staleness
        auto = staleness == "auto"
        replay = None if replays_nothing(self) else self.training.replay
        reused = 0 if replay is None else math.floor(replay.ratio * rollout.prompts + 0.5)
        bound: int | None = (rollout.staleness_cap or 4) if auto else (2 if staleness is None else int(staleness))
        reserve = rollout.redundancy if self.paradigm.allows_redundancy else None
        groups, members = (None, None) if reserve is None else (reserve.groups, reserve.members)
        in_flight = rollout.in_flight
        if in_flight == "full":
            in_flight = None if self.paradigm.one_batch else ((bound or 0) + 1) * rollout.prompts
        return resolve_plan(
            rollout.paradigm,
            batch=rollout.prompts,
            group_size=rollout.group,
            updates=self.training.steps,
            staleness=None if self.paradigm.staleness is not None else bound,
            auto=auto,
            rows=rollout.rows,
            in_flight=in_flight,
            retries=rollout.retries,
            evaluate_every=self.evaluation.every if self.evaluation.prompts else 0,
            filter_limit=0 if rollout.filter == "none" else rollout.filter_limit or 10 * rollout.prompts,
            replay_groups=reused,
            replay_uses=replay.uses if replay is not None and reused else 0,
            reserve_groups=0 if groups is None else groups - rollout.prompts,
            reserve_members=0 if members is None else members - rollout.group,
            spread=rollout.spread,
            ahead=ahead,
            rows_at_most=None if rollout._row_limit is None else rollout._row_limit.rows,
        )

    @property
    def sampled_ages(self) -> int:
        """An update gets the weights of the versions that sampled its batch, up to so much older; 0: of none."""
        return self.plan.staleness if self.algorithm.needs_sampled or self.training.mismatch_samples else 0

    @property
    def retrained_ages(self) -> int:
        """The same for an update that is trained again, which measures nothing."""
        return self.plan.staleness if self.algorithm.needs_sampled else 0

    @property
    def num_slots(self) -> int:
        """Version slots of an instance; by default all that the run needs, and one of full weights with vLLM."""
        if self.engine.type == "vllm" and self.model.lora is None:
            return 1
        return self.runtime.slots or self.plan.slots

    def dumps(self) -> str:
        """The recipe as TOML with every default that has an effect. Parses to the same run."""
        values = without_none(self.model_dump(mode="json"))
        for path in without_effect(self):
            remove_key(values, path)
        return tomli_w.dumps({name: value for name, value in values.items() if value != {}})

    def source_toml(self) -> str:
        """The recipe as TOML with only the keys that were set. Parses to the same recipe."""
        return tomli_w.dumps(without_none(self.model_dump(mode="json", exclude_unset=True)))


class OneTaskRecipe(Recipe):
    """The recipe of one task. `Recipe.parts` makes it, of parts that were checked together."""

    task: TaskOptions
    task_table: str = Field("task", exclude=True)  # the dotted name of the task's table, for messages
