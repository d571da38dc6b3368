"""Several ranks give the gradient of one, and are told what one is told; on real processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_cases import Processes
from training_cases import random_batch, tiny
from transformers import AutoModelForCausalLM
from version_cases import aged, with_logprobs

from stretto.errors import LostObjectError, RecipeError, TrainerError
from stretto.models.checksums import checksum
from stretto.objectives.base import ObjectiveOptions
from stretto.objectives.dora import DoraOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.gspo import GspoOptions
from stretto.objectives.hispo import HispoOptions
from stretto.objectives.ppo import PpoOptions
from stretto.objectives.reinforce import ReinforceOptions
from stretto.objectives.reinforce_plus_plus import ReinforcePlusPlusOptions
from stretto.training.parallel import Ranks, shares
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch, Weights

TIMES = ("seconds", "flops")  # measured or counted, and nobody's gradient


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    torch.set_num_threads(1)
    with Processes(2) as processes:
        yield processes


def make(
    ranks: Ranks,
    algorithm: ObjectiveOptions,
    *,
    lora: bool = True,
    dtype: torch.dtype = torch.float64,
    sharded: bool = False,
    **options: Any,
) -> LocalTrainer:
    trainer = LocalTrainer(
        tiny(dtype=dtype),
        lora=LoraOptions(rank=2) if lora else None,
        options=TrainingOptions(learning_rate=1e-2, **{"micro_tokens": 40, **options}),
        algorithm=algorithm,
        ranks=ranks,
        sharded=sharded and ranks.count > 1,
    )
    if sharded and ranks.count == 1:  # sharded layers run through their own modules: compare with the same
        trainer.packed.plain, trainer.packed.flash = None, False
    return trainer


Trained = tuple[list[dict[str, float]], dict[str, torch.Tensor], list[str]]


def trained(ranks: Ranks, batches: list[Batch], algorithm: ObjectiveOptions, options: dict[str, Any]) -> Trained:
    """The metrics of each update, the state at the end, and the checksums of the versions."""
    trainer = make(ranks, algorithm, **options)
    reports, checksums = [], []
    for batch in batches:
        reports.append(dict(trainer.update(batch).metrics))
        checksums.append(trainer.weights(batch.update + 1).checksum)
    state = trainer.state() if trainer.sharding is None else trainer.sharding.gathered(trainer.state())
    return reports, state, checksums


def assert_alike(one: Trained, many: list[Trained], tolerance: float) -> None:
    first = many[0]
    for other in many[1:]:
        assert other[2] == first[2], "the ranks hold the same weights, bit for bit"
        assert all(torch.equal(tensor, first[1][name]) for name, tensor in other[1].items())
    assert first[1].keys() == one[1].keys()
    for name, tensor in one[1].items():
        worst = float((first[1][name].double() - tensor.double()).abs().max())
        assert worst <= tolerance * max(1e-3, float(tensor.double().abs().max())), (name, worst)
    for ours, theirs in zip(one[0], first[0], strict=True):
        assert theirs.keys() == ours.keys()
        for name, value in ours.items():
            if name not in TIMES and name != "micro_batches":
                assert theirs[name] == pytest.approx(value, rel=100 * tolerance, abs=tolerance), name


CUT = {"lora": False, "sharded": True}  # over the ranks
PPO = PpoOptions()
KL_REWARD = GrpoOptions(kl={"coefficient": 0.3, "place": "reward"})
BESIDE = GrpoOptions(
    anchor="proximal",
    kl={"coefficient": 0.3},
    entropy={"coefficient": 0.2},
    supervised={"coefficient": 0.4, "threshold": 1.0},
    correction={"mode": "cap", "level": "sequence", "high": 3.0},
)


@pytest.mark.parametrize(
    ("algorithm", "options", "tolerance"),
    [
        pytest.param(GrpoOptions(average="token"), {}, 1e-9, id="grpo-token-mean"),
        pytest.param(GrpoOptions(average="token"), {"dtype": torch.float32}, 2e-3, id="grpo-float32"),
        pytest.param(GrpoOptions(average="token"), {"lora": False}, 1e-9, id="grpo-full"),
        pytest.param(GrpoOptions(average="token"), {"lora": False, "dtype": torch.bfloat16}, 5e-2, id="full-bfloat16"),
        pytest.param(GrpoOptions(average="token"), {"lora": False, "dtype": torch.float16}, 5e-2, id="full-float16"),
        pytest.param(GspoOptions(average="sequence"), {}, 1e-9, id="gspo-sequence-mean"),
        pytest.param(ReinforcePlusPlusOptions(), {}, 1e-9, id="whitening"),
        pytest.param(PPO, {}, 1e-9, id="ppo"),
        pytest.param(PPO, {"optimizer_steps": 2}, 1e-9, id="ppo-two-steps"),
        pytest.param(GrpoOptions(), {"optimizer_steps": 2}, 1e-9, id="two-steps"),
        pytest.param(KL_REWARD, {}, 1e-9, id="divergence-in-the-reward"),
        pytest.param(BESIDE, {"optimizer_steps": 2}, 1e-9, id="everything-beside"),
        pytest.param(GrpoOptions(), {**CUT, "max_grad_norm": 0.1}, 1e-9, id="cut"),
        pytest.param(PPO, {**CUT, "optimizer_steps": 2}, 1e-9, id="cut-ppo"),
        pytest.param(GrpoOptions(), {**CUT, "dtype": torch.bfloat16}, 5e-2, id="cut-bfloat16"),
        pytest.param(GrpoOptions(), {**CUT, "dtype": torch.float16}, 5e-2, id="cut-float16"),
        pytest.param(GrpoOptions(), {**CUT, "checkpointing": True}, 1e-9, id="cut-checkpointing"),
    ],
)
def test_two_ranks_give_what_one_gives(
    two: Processes, algorithm: ObjectiveOptions, options: dict[str, Any], tolerance: float
) -> None:
    batches = [random_batch(update, seed=update, version=max(0, update - 1)) for update in range(2)]
    one = trained(Ranks(), batches, algorithm, options)
    assert_alike(one, two.run(trained, batches, algorithm, options), tolerance)


def trained_on_older(
    ranks: Ranks, folder: Path, batch: Batch, algorithm: ObjectiveOptions, options: dict[str, Any]
) -> Trained:
    """As `trained`, from a checkpoint and with a batch that brings older versions."""
    trainer = make(ranks, algorithm, **options)
    trainer.load(folder)
    reports = [dict(trainer.update(batch).metrics)]
    state = trainer.state() if trainer.sharding is None else trainer.sharding.gathered(trainer.state())
    return reports, state, [trainer.weights(batch.update + 1).checksum]


def continued(batch: Batch) -> Batch:
    """The same samples, of which each fourth has tokens of several versions."""
    samples = list(batch.samples)
    for index in range(0, len(samples), 4):
        own = samples[index].completion
        versions = np.sort(np.resize(np.arange(samples[index].version, batch.update + 1), len(own.tokens)))
        samples[index] = replace(samples[index], completion=replace(own, token_versions=versions.astype(np.int32)))
    return replace(batch, samples=samples)


def noisy(batch: Batch) -> Batch:
    """The same samples, recorded a little off."""
    draw = np.random.default_rng(3)
    return replace(
        batch,
        samples=[
            with_logprobs(s, s.completion.logprobs + draw.normal(0, 0.1, len(s.completion.tokens)))
            for s in batch.samples
        ],
    )


DORA, HISPO = DoraOptions(average_tokens=20), HispoOptions(average_tokens=20)
SPLIT = GrpoOptions(
    anchor="proximal",
    discrepancy_correction={"level": "turn"},
    staleness_correction={"mode": "filter", "low": 0.5},
)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        pytest.param(DORA, {}, id="dora"),
        pytest.param(DORA, {"lora": False}, id="dora-full"),
        pytest.param(DORA, CUT, id="dora-cut"),
        pytest.param(HISPO, {"optimizer_steps": 2}, id="hispo-two-steps"),
        pytest.param(HISPO, {**CUT, "optimizer_steps": 2}, id="hispo-cut-two-steps"),
        pytest.param(SPLIT, CUT, id="parts-cut"),
        pytest.param(GrpoOptions(), {}, id="comparison"),
    ],
)
def test_two_ranks_score_older_versions_as_one_does(
    two: Processes, tmp_path: Path, algorithm: ObjectiveOptions, options: dict[str, Any]
) -> None:
    """All of a batch; and two samples alone, so that a rank has none of the oldest version."""
    trainer, batch = aged(GrpoOptions(), lora=options.get("lora", True))
    trainer.save(tmp_path)
    batch = noisy(continued(batch))
    for samples in (batch.samples, [batch.samples[0], batch.samples[-1]]):
        each = replace(batch, samples=samples)
        one = trained_on_older(Ranks(), tmp_path, each, algorithm, options)
        assert "mismatch_kl_age_3" in one[0][0]
        assert_alike(one, two.run(trained_on_older, tmp_path, each, algorithm, options), 1e-9)


def missing_a_version(
    ranks: Ranks, folder: Path, batch: Batch, options: dict[str, Any]
) -> tuple[str, bool, dict[str, torch.Tensor]]:
    trainer = make(ranks, DORA, **options)
    trainer.load(folder)
    before, said = trainer.state(), ""
    try:
        trainer.update(replace(batch, versions={0: batch.versions[0]}))
    except TrainerError as error:
        said = str(error)
    unchanged = all(torch.equal(trainer.state()[name], tensor) for name, tensor in before.items())
    trainer.update(batch)
    state = trainer.state() if trainer.sharding is None else trainer.sharding.gathered(trainer.state())
    return said, unchanged, state


@pytest.mark.parametrize("options", [{}, CUT], ids=["whole", "cut"])
def test_a_version_that_is_missing_fails_every_rank_and_changes_nothing(
    two: Processes, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer, batch = aged(GrpoOptions(), lora=options.get("lora", True))
    trainer.save(tmp_path)
    alone = trained_on_older(Ranks(), tmp_path, batch, DORA, options)
    found = two.run(missing_a_version, tmp_path, batch, options)
    assert found[0][2].keys() == alone[1].keys()
    for said, unchanged, state in found:
        assert "version 1" in said
        assert unchanged
        for name, tensor in state.items():
            assert torch.allclose(tensor.double(), alone[1][name].double(), rtol=1e-7, atol=1e-9), name


@dataclass(frozen=True)
class LostOnOneRank:
    """A `WeightsRef` that rank 1 cannot fetch."""

    weights: Weights

    @property
    def checksum(self) -> str:
        return self.weights.checksum

    def fetch(self) -> Weights:
        if dist.get_rank() == 1:
            raise LostObjectError("no such file")
        return self.weights


def losing_a_version(ranks: Ranks, folder: Path, batch: Batch, options: dict[str, Any]) -> tuple[str, float]:
    trainer = make(ranks, DORA, **options)
    trainer.load(folder)
    lost = replace(batch, versions={v: LostOnOneRank(weights) for v, weights in batch.versions.items()})
    said = ""
    try:
        trainer.update(lost)
    except (LostObjectError, TrainerError) as error:
        said = str(error)
    trainer.update(batch)
    compared = make(ranks, GrpoOptions(), **options)
    compared.load(folder)
    return said, compared.update(lost).metrics["mismatch_tokens"]


@pytest.mark.parametrize("options", [{}, CUT], ids=["whole", "cut"])
def test_a_version_that_one_rank_cannot_read_leaves_no_rank_waiting(
    two: Processes, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer, batch = aged(GrpoOptions(), lora=options.get("lora", True))
    trainer.save(tmp_path)
    for said, compared in two.run(losing_a_version, tmp_path, batch, options):
        assert "no such file; `--resume` makes them again" in said
        assert compared > 0


@pytest.mark.parametrize("more", [{}, {"lora": False}, CUT, {"optimizer_steps": 2}], ids=["lora", "full", "cut", "two"])
def test_ranks_lower_the_scale_of_the_loss_together(two: Processes, more: dict[str, Any]) -> None:
    batch = random_batch(0)
    largest = max(range(len(batch.samples)), key=lambda i: len(batch.samples[i].completion.tokens))
    samples = [replace(s, reward=1e5 if i == largest else s.reward) for i, s in enumerate(batch.samples)]
    batches = [Batch(0, samples), random_batch(1, seed=1)]  # too much for float16 at one of the ranks
    options = {"dtype": torch.float16, **more}
    one = trained(Ranks(), batches, ReinforceOptions(), options)
    many = two.run(trained, batches, ReinforceOptions(), options)
    scales = [told["loss_scale"] for told in many[0][0]]
    assert scales[0] == scales[1] < 2**16, "it stays where it fell to"
    assert many[1][0][0]["loss_scale"] == scales[0]
    # Sums of both ranks and of one leave the range at other scales, so what is lost below differs too.
    assert scales[0] / one[0][0]["loss_scale"] in (0.5, 1.0, 2.0)
    assert many[0][0][0]["grad_norm"] == pytest.approx(one[0][0]["grad_norm"], rel=1e-2)
    assert many[0][2] == many[1][2]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [(GrpoOptions(), {}), (PPO, {}), (KL_REWARD, {}), (GrpoOptions(), CUT)],
    ids=["grpo", "ppo", "divergence", "cut"],
)
def test_a_rank_whose_share_is_empty_takes_part(
    two: Processes, algorithm: ObjectiveOptions, more: dict[str, Any]
) -> None:
    single = random_batch(0, groups=1, members=1)
    batches = [single, random_batch(1, groups=2, members=1)]
    options = {"optimizer_steps": 2, **more}  # in the second update each step has one sequence, and one rank none
    one = trained(Ranks(), batches, algorithm, options)
    assert_alike(one, two.run(trained, batches, algorithm, options), 1e-9)


def broken_then_whole(ranks: Ranks, algorithm: ObjectiveOptions, longest_first: bool) -> tuple[str, bool, str]:
    trainer = make(ranks, algorithm, optimizer_steps=2)
    before = trainer.state()
    batch = random_batch(0)
    lengths = [len(sample.prompt) + len(sample.completion.tokens) for sample in batch.samples]
    index = int(np.argsort(lengths)[-1 if longest_first else -2])  # of one rank's share, or the other's
    bad = batch.samples[index]
    bad = replace(bad, completion=replace(bad.completion, logprobs=bad.completion.logprobs[:-1]))
    samples = [*batch.samples[:index], bad, *batch.samples[index + 1 :]]
    said = ""
    try:
        trainer.update(Batch(0, samples))
    except TrainerError as error:
        said = str(error)
    unchanged = all(torch.equal(trainer.state()[name], tensor) for name, tensor in before.items())
    trainer.update(batch)
    return said, unchanged, trainer.weights(1).checksum


@pytest.mark.parametrize("longest_first", [False, True])
def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(two: Processes, longest_first: bool) -> None:
    found = two.run(broken_then_whole, PPO, longest_first)
    assert all(unchanged for _, unchanged, _ in found)
    assert found[0][2] == found[1][2], "they go on together"
    said = sorted((message for message, _, _ in found), key=len)
    assert "log-probabilities" in said[0]
    assert said[1].startswith("rank ")
    assert said[1].endswith(said[0])


def saved(ranks: Ranks, folder: Path, algorithm: ObjectiveOptions, options: dict[str, Any]) -> str:
    trainer = make(ranks, algorithm, **options)
    trainer.update(random_batch(0))
    trainer.save(folder)
    trainer.update(random_batch(1))
    return trainer.weights(2).checksum


def loaded(
    ranks: Ranks, folder: Path, algorithm: ObjectiveOptions, options: dict[str, Any]
) -> tuple[str, dict[str, torch.Tensor]]:
    trainer = make(ranks, algorithm, **options)
    trainer.load(folder)
    trainer.update(random_batch(1))
    state = trainer.state() if trainer.sharding is None else trainer.sharding.gathered(trainer.state())
    return trainer.weights(2).checksum, state


@pytest.mark.parametrize("options", [{}, CUT], ids=["whole", "cut"])
def test_a_checkpoint_of_two_ranks_is_gone_on_from_by_one_and_by_two(
    two: Processes, tmp_path: Path, options: dict[str, Any]
) -> None:
    checksums = two.run(saved, tmp_path / "two", PPO, options)
    again = two.run(loaded, tmp_path / "two", PPO, options)
    assert {checksum for checksum, _ in again} == set(checksums)
    _, alone = loaded(Ranks(), tmp_path / "two", PPO, options)
    assert alone.keys() == again[0][1].keys()
    for name, tensor in alone.items():
        assert torch.allclose(tensor.double(), again[0][1][name].double(), rtol=1e-7, atol=1e-9), name
    saved(Ranks(), tmp_path / "one", PPO, options)
    for name, tensor in two.run(loaded, tmp_path / "one", PPO, options)[0][1].items():
        assert torch.allclose(tensor.double(), alone[name].double(), rtol=1e-7, atol=1e-9), name


def adopted_and_exported(ranks: Ranks, folder: Path, recorded: Weights) -> tuple[str, str]:
    trainer = make(ranks, GrpoOptions(), **CUT)
    trainer.update(random_batch(0, seed=5))
    before = trainer.weights(1).checksum
    trainer.adopt(recorded)
    trainer.export(folder)
    return before, trainer.weights(1).checksum


def test_weights_that_are_cut_are_adopted_and_exported_whole(two: Processes, tmp_path: Path) -> None:
    alone = make(Ranks(), GrpoOptions(), lora=False)
    alone.update(random_batch(0))
    recorded = alone.weights(1)
    found = two.run(adopted_and_exported, tmp_path / "policy", recorded)
    assert found[0] == found[1]
    assert found[0][0] != recorded.checksum == found[0][1]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float64)
    assert checksum(dict(exported.named_parameters())) == recorded.checksum


def other_models(ranks: Ranks) -> str:
    model = tiny()
    with torch.no_grad():
        next(model.parameters()).add_(ranks.rank)
    try:
        LocalTrainer(model, ranks=ranks, sharded=False)
    except TrainerError as error:
        return str(error)
    return ""


def test_ranks_that_loaded_other_models_do_not_begin(two: Processes) -> None:
    assert all("the ranks have loaded different models" in said for said in two.run(other_models))


def other_references(ranks: Ranks) -> str:
    reference = tiny()
    with torch.no_grad():
        reference.lm_head.weight[0, 0] += ranks.rank
    algorithm = GrpoOptions(kl={"coefficient": 0.1, "reference": "another"})
    try:
        LocalTrainer(tiny(), algorithm=algorithm, reference=reference, ranks=ranks)
    except TrainerError as error:
        return str(error)
    return ""


def test_ranks_that_loaded_other_references_do_not_begin(two: Processes) -> None:
    assert all("`algorithm.kl.reference`" in said for said in two.run(other_references))


def test_only_full_weights_of_several_ranks_are_cut() -> None:
    with pytest.raises(RecipeError, match="only full weights can be sharded"):
        LocalTrainer(tiny(), sharded=True)


def not_writable(ranks: Ranks, folder: Path) -> str:
    trainer = make(ranks, GrpoOptions())
    try:
        trainer.save(folder)
    except (OSError, TrainerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_disk_that_fails_rank_0_fails_all(two: Processes, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    said = two.run(not_writable, tmp_path / "taken" / "state")
    assert said[0].startswith("NotADirectoryError")
    assert said[1].startswith("TrainerError: rank 0 of 2 failed: NotADirectoryError")


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 6))
def test_shares_are_balanced_and_lose_nothing(sizes: list[int], count: int) -> None:
    found = shares(sizes, count)
    assert sorted(index for share in found for index in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in found)
    heaviest = max(sum(sizes[index] for index in share) for share in found)
    assert heaviest <= sum(sizes) / count + max(sizes, default=0)
    assert shares(sizes, 1) == [list(range(len(sizes)))]
