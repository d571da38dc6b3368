"""PPO through the trainer: its critic is trained, kept and exported beside the policy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_cases import UNSTEPPED, random_batch, tiny

from stretto.errors import TrainerError
from stretto.objectives.critic_options import CriticOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.ppo import PpoOptions
from stretto.training.critic import EXPORT_FILE, PREFIX
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch

BROKEN = 4  # a sample of the second of three groups


def trainer(algorithm=None, *, lora=True, dtype=torch.float32, **options) -> LocalTrainer:
    return LocalTrainer(
        tiny(dtype=dtype),
        lora=LoraOptions(rank=2) if lora else None,
        options=TrainingOptions(learning_rate=1e-2, **options),
        algorithm=algorithm or PpoOptions(),
    )


def balanced(batch: Batch) -> Batch:
    """Rewards of 1 and -1, as many of each in every group: they are their own advantages against the group's mean."""
    return Batch(batch.update, [replace(s, reward=1.0 - 2.0 * (i % 2)) for i, s in enumerate(batch.samples)])


def test_while_values_are_zero_and_rewards_are_trusted_it_is_the_policy_gradient_of_the_rewards():
    plain = PpoOptions(critic=CriticOptions(lam=1.0, whiten=False))
    ours, theirs = trainer(plain), trainer(GrpoOptions(advantage="group-mean"))
    batch = balanced(random_batch())
    ours.update(batch)
    theirs.update(batch)
    expected = theirs.state()
    for name, tensor in ours.state().items():
        if not name.startswith(PREFIX):
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("shared", [False, True])
def test_micro_batches_do_not_change_what_is_learned(shared):
    algorithm = PpoOptions(critic=CriticOptions(shared=shared))
    whole = trainer(algorithm, dtype=torch.float64)
    cut = trainer(algorithm, dtype=torch.float64, micro_tokens=30)
    for update in range(2):
        reports = [each.update(random_batch(update)) for each in (whole, cut)]
    assert reports[0].metrics["micro_batches"] == 1 < reports[1].metrics["micro_batches"]
    states = whole.state(), cut.state()
    for name, tensor in states[0].items():
        if "value/" in name:
            assert torch.allclose(tensor, states[1][name], rtol=1e-6, atol=1e-9), name


def test_only_a_shared_critic_changes_the_policys_gradient():
    # Values are 0 in the first update, so that the head passes no gradient on; in the second they are not.
    policies = {}
    for shared in (False, True):
        subject = trainer(PpoOptions(critic=CriticOptions(shared=shared)))
        first = subject.update(random_batch(0)).metrics["grad_norm"]
        policies[shared] = first, subject.update(random_batch(1)).metrics["grad_norm"]
    assert policies[False][0] == policies[True][0]
    assert policies[False][1] != policies[True][1]


def test_a_critic_learns_to_foresee_what_the_prompt_decides():
    batch = random_batch(groups=3)
    samples = [replace(s, reward=float(s.group)) for s in batch.samples]
    subject = trainer(PpoOptions(critic=CriticOptions(learning_rate=0.05, lam=1.0)))
    subject.optimizer.options = TrainingOptions(learning_rate=UNSTEPPED)  # of the policy
    reports = [subject.update(Batch(n, [replace(s, version=n) for s in samples])).metrics for n in range(60)]
    assert reports[0]["explained_variance"] == 0.0
    assert reports[-1]["explained_variance"] > 0.7
    assert reports[-1]["value_loss"] < 0.3 * reports[0]["value_loss"]
    assert reports[-1]["value_mean"] == pytest.approx(reports[-1]["return_mean"], abs=0.2)
    assert reports[0]["critic_grad_norm"] > 0


@pytest.mark.parametrize("steps", [1, 3])
def test_a_restored_trainer_goes_on_bit_for_bit(steps, tmp_path):
    straight = trainer(optimizer_steps=steps)
    for update in range(2):
        straight.update(random_batch(update, seed=update))
    straight.save(tmp_path)
    resumed = trainer(optimizer_steps=steps)
    resumed.load(tmp_path)
    assert resumed.critic is not None
    assert resumed.critic.weight.any()
    for subject in (straight, resumed):
        subject.update(random_batch(2, seed=2))
    expected = straight.state()
    assert expected.keys() == resumed.state().keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.state().items())


@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_that_fails_leaves_policy_and_critic_as_they_were(steps):
    subject = trainer(optimizer_steps=steps)
    subject.update(random_batch(0))
    before = subject.state()
    batch = random_batch(1)
    logprobs = batch.samples[BROKEN].completion.logprobs.copy()
    logprobs[0] = np.nan
    broken = replace(batch.samples[BROKEN], completion=replace(batch.samples[BROKEN].completion, logprobs=logprobs))
    with pytest.raises(TrainerError):
        subject.update(Batch(1, [*batch.samples[:BROKEN], broken, *batch.samples[BROKEN + 1 :]]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in subject.state().items())
    assert subject.update(batch).metrics["grad_norm"] > 0


def test_a_checkpoint_of_an_objective_without_a_critic_is_refused(tmp_path):
    trainer(GrpoOptions()).save(tmp_path)
    with pytest.raises(TrainerError, match="has no critic"):
        trainer().load(tmp_path)


@pytest.mark.parametrize("lora", [True, False])
def test_the_critic_is_exported_beside_the_policy(lora, tmp_path):
    subject = trainer(lora=lora)
    subject.update(random_batch())
    subject.export(tmp_path)
    other = trainer(lora=lora)
    assert other.critic is not None
    assert subject.critic is not None
    other.critic.load(tmp_path)
    assert torch.equal(other.critic.weight, subject.critic.weight)
    trainer(GrpoOptions(), lora=lora).export(tmp_path / "plain")
    assert not (tmp_path / "plain" / EXPORT_FILE).exists()


@pytest.mark.parametrize(
    "broken",
    [
        {f"{PREFIX}value/weight": torch.zeros(3)},
        {f"{PREFIX}mean/weight": torch.zeros(3)},
        {f"{PREFIX}count/bias": None},
        {"value/": torch.zeros(3)},
        {"square/": torch.zeros(3)},
        {"version": torch.zeros(2)},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_state_that_does_not_fit_in_one_place_changes_neither_policy_nor_critic(broken):
    subject, other = trainer(), trainer()
    subject.update(random_batch(0))
    other.update(random_batch(0, seed=5))
    before, state = subject.state(), other.state()
    for name, tensor in broken.items():
        place = next(key for key in state if key == name or (name.endswith("/") and key.startswith(name)))
        state.pop(place) if tensor is None else state.update({place: tensor})
    with pytest.raises(TrainerError, match=r"does not fit|expected 1"):
        subject.restore(state)
    after = subject.state()
    assert subject.version == 1
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
