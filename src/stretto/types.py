"""The nouns. Torch is imported for type checking only, so that the command line starts fast.

Identifiers are plain integers. A group's id is its position in the stream of prompts: the group that replaces another
takes the next prompt, so nothing is ever drawn twice by accident. A trajectory's id is `group * G + member`.
Versions are numbered from 0; update `n` trains version `n` and publishes version `n + 1`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

MAX_SUPPORT = 4_096
"""The most tokens that a draw of top-p, top-k or min-p may be left with where its support is recorded."""

FinishReason = Literal["stop", "length"]
"""`stop`: a stop token or stop string. `length`: cut at `max_tokens`, recorded as truncated and trained as it is."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task, tokenized once."""

    index: int  # position in the run's stream of prompts
    text: str  # after the chat template, where there is one
    tokens: tuple[int, ...]
    row: Mapping[str, Any]  # the task's own columns, handed to the reward function
    task: str | None = None  # its label, if it has one


@dataclass(frozen=True, slots=True)
class Sampling:
    """The way tokens are drawn. `temperature` 0 is greedy: a point mass, so every log-probability is 0."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()  # a stop token is part of the completion
    stop_strings: tuple[str, ...] = ()  # the completion ends with the token that completes one
    supports: bool = True  # record what `top_p`, `top_k` and `min_p` leave of each distribution, which training needs
    routing: bool = True  # record the experts of each token, if the engine's model is a mixture of experts

    @property
    def truncates(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary. Greedy draws are not: they are certain anyway."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to generate. Its tokens depend on `prompt`, `version`, `seed` and `sampling` alone."""

    id: int
    version: int
    prompt: tuple[int, ...]
    seed: int  # 63 bits
    sampling: Sampling
    group: int = -1  # requests of one group and version share the pages of their prompt; -1: shares with nobody
    priority: int = 0  # smaller first; evaluation runs at 1
    keep: bool = False  # another may follow under its id that begins with all of it: its KV is worth keeping


@dataclass(frozen=True, slots=True)
class Supports:
    """The tokens that each of `n` tokens was drawn from, where sampling cut the vocabulary down. Never changed."""

    counts: NDArray[np.int32]  # [n], each at least 1
    tokens: NDArray[np.int32]  # [sum(counts)], those of one draw after those of another; each once, the drawn one too

    def __len__(self) -> int:
        return len(self.counts)

    def at(self, places: NDArray[np.int64]) -> Supports:
        """Those of the tokens at these places, in their order."""
        counts = self.counts[places]
        starts = (np.cumsum(self.counts) - self.counts)[places]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return Supports(counts, self.tokens[np.repeat(starts, counts) + within])


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens of a finished request, or of an episode of several: then `turns` says which were sampled.

    A token that the environment put between two turns was observed: its log-probability is 0, its support is itself,
    and it is never trained on.
    """

    id: int
    version: int
    tokens: NDArray[np.int32]  # [n], the stop token included
    logprobs: NDArray[np.float32]  # [n], under the distribution that each token was really drawn from
    finish: FinishReason
    checksum: str  # of the weights that were resident while it was generated
    token_versions: NDArray[np.int32] | None = None  # [n]; only where it was continued under other weights
    started_at: float = 0.0  # at the first prefill, by `stretto.clock`
    finished_at: float = 0.0
    prefilled: int = 0  # tokens prefilled for it alone, prompt shared with its group not counted twice
    supports: Supports | None = None  # what each token was drawn from; None: the whole vocabulary, or not recorded
    turns: NDArray[np.int32] | None = None  # [turns, 2], where each begins and ends in `tokens`; None: one, all of it
    receipts: tuple[str, ...] = ()  # of the loads that it was sampled under, by engines that give receipts
    # [prompt + n - 1, layers, k] uint8 or int16: the experts that each token of prompt and completion but the last was
    # routed to as it was first computed (`models/routing.py`); None: no mixture of experts, or not recorded
    routing: NDArray[np.uint8] | NDArray[np.int16] | None = None

    @property
    def sampled(self) -> NDArray[np.int64]:
        """The positions in `tokens` of those that were sampled."""
        if self.turns is None:
            return np.arange(len(self.tokens))
        return np.concatenate([np.arange(start, end) for start, end in self.turns.tolist()])

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """Sampled tokens of each turn."""
        if self.turns is None:
            return (len(self.tokens),)
        return tuple((self.turns[:, 1] - self.turns[:, 0]).tolist())

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled."""
        return len(self.tokens) if self.turns is None else sum(self.turn_lengths)


@dataclass(frozen=True, slots=True)
class Lineage:
    """One row of tokens of a trajectory: a context, and the turns that were sampled behind it.

    Most trajectories have one lineage, whose context is the prompt of their group. A sub-agent, a context that was
    compacted or a history that was rewritten has one of its own. Lineages are numbered from 0 in the order of their
    first turns. All lineages of a trajectory have its version and its reward.
    """

    context: tuple[int, ...]
    completion: Completion
    train: bool = True  # False: recorded, so that its episode can be run again, and never trained on
    # The numbers of its turns among those of the episode; None: they are all of them, as if it is the only lineage.
    turn_numbers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class KVRef:
    """The KV of a suspended trajectory that lies on another machine. A backend adds where it is."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Suspended:
    """A trajectory between two engines. Portable: pickles, and needs nothing of the engine that made it.

    With `kv` it resumes token for token as if nothing had happened; without, its context is prefilled again, which is
    the same to rounding. The sampler has no state of its own: draws are keyed by (seed, position).
    """

    request: Request
    tokens: NDArray[np.int32]  # [n] so far
    logprobs: NDArray[np.float32]  # [n]
    checksum: str
    token_versions: NDArray[np.int32] | None = None
    # [layers, 2, tokens, kv heads, head size], of every token but the last; an engine is given the tensor itself
    kv: torch.Tensor | KVRef | None = None
    started_at: float = 0.0
    prefilled: int = 0
    supports: Supports | None = None  # [n], where its sampling records them
    receipts: tuple[str, ...] = ()  # as in `Completion`
    # [at most prompt + n - 1, layers, k]: as in `Completion`, of the tokens that were computed so far
    routing: NDArray[np.uint8] | NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed sequence with its log-probabilities under some weights, by the trainer that made them.

    An engine that cannot read back the weights that it holds scores the sequence, and compares.
    """

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]  # [tokens - 1], of each token after the first, at temperature 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """The evidence that an engine serves a version, where the engine cannot read back the weights that it holds."""

    id: str  # unique in all runs
    version: int
    checksum: str  # of the file that the engine loaded, read before it did
    num_tokens: int  # of the probe that were compared
    mean_difference: float  # between engine and trainer, of the log-probabilities of the probe, absolute
    largest_difference: float
    tolerance: float  # the largest mean difference that counts as rounding
    served_by: str  # the program and its release, such as `vllm 0.32.0`
    layout: str = ""  # devices and type of the weights: engines with the same one hold a version in the same form
    held: str | None = None  # digest of the weights in the engine, by its own checksums; None: the release has none


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one version, on their way from the trainer to an engine. Never changed after they are made."""

    version: int
    kind: Literal["lora", "full"]
    # full: by parameter name; lora: `<module>.lora_A` [r, in], `.lora_B` [out, r], of experts with their axis before
    tensors: Mapping[str, torch.Tensor]
    checksum: str
    scale: float = 1.0  # lora: alpha / rank
    probe: Probe | None = None  # for engines that give receipts; None: the trainer was not asked for one

    def on_host(self) -> Weights:
        """Returns the same weights in host memory. Blocks."""
        return replace(self, tensors={name: tensor.cpu() for name, tensor in self.tensors.items()})


class WeightsRef(Protocol):
    """Weights of one version that lie elsewhere and are fetched on demand. The run loop passes it on like `Weights`."""

    @property
    def version(self) -> int: ...
    @property
    def kind(self) -> Literal["lora", "full"]: ...
    @property
    def checksum(self) -> str: ...
    def fetch(self) -> Weights:
        """Returns the weights themselves. Raises `LostObjectError` if they are lost. Blocks."""
        ...

    def store(self, folder: Path) -> bool:
        """Has the process that holds them write the version file into `folder`. Returns False if it cannot. Blocks.

        Raises `OSError` or `SafetensorError` if the file cannot be written.
        """
        ...

    async def recreate(self) -> None:
        """Makes `fetch` work again after the weights were lost. Raises `LostObjectError` if nothing has them."""
        ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of an engine."""

    slots: int  # versions at once
    rows: int  # trajectories decoding at once
    kv_tokens: int  # tokens of context over all rows
    max_context: int  # prompt plus completion of one trajectory
    kv_bytes_per_token: int = 0  # of what a suspended trajectory takes along; 0: it takes none


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of an engine, and its counts since it started."""

    running: int
    queued: int
    kv_tokens: int  # in use
    versions: Mapping[int, int]  # resident version -> trajectories running or queued under it
    longest: Mapping[int, int] = field(default_factory=dict)  # version -> tokens so far of its longest trajectory
    steps: int = 0
    tokens: int = 0  # sampled since the start
    prefilled: int = 0  # tokens prefilled since the start
    preemptions: int = 0
    busy_s: float = 0.0  # time with at least one running row of rollout (priority 0)
    row_s: float = 0.0  # integral of the running rows of rollout over time
    since: float = 0.0  # when it joined the run; filled by whoever holds all instances
    until: float = math.inf  # and when it left
    kv_between_turns: int = 0  # tokens that wait on the device for their next turn; not in `kv_tokens`
    kv_on_host: int = 0  # tokens that wait in host memory for their next turn


class RewardPart(NamedTuple):
    """One of several rewards of a trajectory, which is their weighted sum."""

    name: str
    weight: float
    value: float | None  # None: it does not apply to this trajectory, and is left out of the sum


@dataclass(frozen=True, slots=True)
class Sample:
    """One lineage of a finished trajectory as the trainer sees it. Most trajectories have one."""

    trajectory: int
    group: int
    version: int
    prompt: Sequence[int]  # the context of the lineage
    completion: Completion
    reward: float  # of the trajectory
    use: int = 0  # 0: trained for the first time; later ones are those of a replay
    # Of each turn of the trajectory, adding up to `reward`; None: all at the last one.
    turn_rewards: tuple[float, ...] | None = None
    lineage: int = 0
    turn_numbers: tuple[int, ...] | None = None  # as in `Lineage`
    reward_parts: tuple[RewardPart, ...] | None = None  # if `reward` is the weighted sum of several
    task: str | None = None  # the label of its task, if that has one

    @property
    def oldest_version(self) -> int:
        """The version of its oldest token, which its age is counted from."""
        made = self.completion
        if made.token_versions is None or not len(made.token_versions):
            return self.version
        return int(made.token_versions[made.sampled].min())

    @property
    def rewards_by_turn(self) -> tuple[float, ...]:
        """The reward of each turn of its completion.

        What other lineages earned after a turn of this one, and before its next turn, counts as earned at that turn.
        """
        if self.turn_rewards is None:
            return (0.0,) * (len(self.completion.turn_lengths) - 1) + (self.reward,)
        if self.turn_numbers is None:
            return self.turn_rewards
        ends = (*self.turn_numbers[1:], len(self.turn_rewards))
        spans = zip(self.turn_numbers, ends, strict=True)
        return tuple(math.fsum(self.turn_rewards[start:end]) for start, end in spans)

    @property
    def token_versions(self) -> NDArray[np.int64]:
        """The version that each sampled token was drawn from."""
        if self.completion.token_versions is None:
            return np.full(self.completion.num_sampled, self.version, dtype=np.int64)
        return self.completion.token_versions[self.completion.sampled].astype(np.int64)


def part_means(parts: Iterable[Sequence[RewardPart] | None]) -> dict[str, float]:
    """Returns the mean value of each reward by its name, over those that it applies to; `parts` of one trajectory each.

    A reward that applies to none is left out.
    """
    values: dict[str, list[float]] = {}
    for own in parts:
        for name, _, value in own or ():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}


def older_versions(samples: Iterable[Sample], update: int) -> list[int]:
    """Returns the versions older than `update` that tokens of the samples were drawn from, in order."""
    found: set[int] = set()
    for sample in samples:
        mixed = sample.completion.token_versions is not None
        found.update(np.unique(sample.token_versions).tolist() if mixed else (sample.version,))
    return sorted(version for version in found if version < update)


def by_trajectory(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Returns the samples of each trajectory and use: one for each lineage that is trained."""
    found: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.trajectory, sample.use), []).append(sample)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one update, ordered by (version, group, member, lineage); those used again follow, likewise.

    `versions` has the weights of the older versions that sampled it, for a trainer that scores tokens under them. It
    may lack some, or all.
    """

    update: int
    samples: Sequence[Sample]
    versions: Mapping[int, Weights | WeightsRef] = field(default_factory=dict)
    micro_tokens: int | None = None  # most tokens of a micro-batch; None: those that the trainer was made with
    lowered: bool = False  # `micro_tokens` are fewer than asked for, because an update ran out of memory
    skips: bool = True  # sequences without a gradient are not computed; false for updates of runs from before that
    reports_tokens: bool = False  # the report has what was computed for each token


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The report of an update. `metrics` goes into `metrics.jsonl` as it is."""

    update: int
    metrics: Mapping[str, float]
    mismatch_kl_sum: float  # engine against trainer at the same version, summed over `mismatch_tokens`
    mismatch_tokens: int
    seconds: float
    advantages: str | None = None  # digest of the advantages; None: the trainer computes none
    tokens: Sequence[TokenReport] = ()  # of samples that were computed, if the batch asks for them


@dataclass(frozen=True, slots=True)
class TokenReport:
    """The numbers of an update for the sampled tokens of one sample, in order; for people who look at a run."""

    position: int  # of the sample in the batch
    logprobs: NDArray[np.float32]  # [n], of the policy as the update began
    ratios: NDArray[np.float32]  # [n], of the objective: the policy in training over its anchor
    advantages: NDArray[np.float32]  # [n]
    gradients: NDArray[np.float32]  # [n], of the loss by the log-probability; 0: clipped or masked


Moment = Literal["before", "during", "after"]

EpisodeLimit = Literal["turns", "tokens", "seconds", "budget"]
"""The limit that an episode has reached: `task.turns`, `rollout.max_tokens`, `task.episode_seconds`, `task.budget`."""


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """The score of the held-out prompts, each answered once in the same way."""

    score: float | None  # mean reward, accuracy where rewards are 0 or 1; None where nothing could be scored
    num_scored: int
    num_failed: int
    mean_tokens: float  # of the completions that there are, scored or not


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """One answer of an evaluation: what was generated for a held-out prompt, and its reward or why it has none."""

    index: int  # of the prompt among those held out
    prompt: Prompt
    greedy: bool  # at temperature 0, beside an answer at the evaluation's temperature
    lineages: tuple[Lineage, ...]  # none if it failed before its first token
    texts: tuple[str, ...]  # one a lineage
    contexts: tuple[str | None, ...]  # one a lineage; None: it begins with the prompt
    reward: float | None
    error: str | None
    reward_parts: tuple[RewardPart, ...] | None = None  # if `reward` is the weighted sum of several


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The score of the held-out prompts of one task, as in an `EvaluationResult`."""

    sampled: HeldOutScore
    greedy: HeldOutScore | None = None  # None: not asked for


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of one evaluation, with the version that was evaluated.

    `score`, `num_scored`, `num_failed` and `mean_tokens` are those of the answers at the evaluation's temperature, as
    in a `HeldOutScore`.
    """

    version: int
    moment: Moment
    score: float | None
    num_scored: int
    num_failed: int
    mean_tokens: float
    at: float  # when it ended
    seconds: float
    greedy: HeldOutScore | None = None  # of the answers at temperature 0; None: not asked for
    rewards: Mapping[str, float] | None = None  # mean of each part of `score`; None: the task has one reward
    tasks: Mapping[str, TaskScore] = field(default_factory=dict)  # of each task that has a label
