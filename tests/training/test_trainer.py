import dataclasses
import re

import numpy as np
import pytest
import torch
from training_cases import UNSTEPPED, VOCABULARY, random_batch, reference_logprobs, tiny

from stretto.environments.reward_range import MAX_REWARD
from stretto.errors import ModelError, RecipeError, TrainerError
from stretto.models.checksums import checksum
from stretto.models.loading import second_tree
from stretto.objectives.critic_options import CriticOptions
from stretto.objectives.dr_grpo import DrGrpoOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.kimi import KimiOptions
from stretto.objectives.ppo import PpoOptions
from stretto.objectives.reinforce_plus_plus import ReinforcePlusPlusOptions
from stretto.objectives.rloo import RlooOptions
from stretto.objectives.topr import ToprOptions
from stretto.training.advantages import outcome_advantages
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions
from stretto.types import Batch, Completion, Sample

BOTH = pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)], ids=["full", "lora"])


def gradients(trainer, batch):
    """The gradient that an update would step along, without the step."""
    taken = {}

    def take(*_, **__):
        taken.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        raise KeyboardInterrupt

    trainer.optimizer.step = take
    with pytest.raises(KeyboardInterrupt):
        trainer.update(batch)
    assert all(p.grad is None for p in trainer.model.parameters())
    return taken


def reference_loss(model, batch, algorithm, temperature):
    """The loss from its definition: one sequence at a time, by the model's own forward pass."""
    rewards, groups = [s.reward for s in batch.samples], [s.group for s in batch.samples]
    advantages = outcome_advantages(algorithm.advantage, rewards, groups).values
    tokens, means = [], []
    for sample, advantage in zip(batch.samples, advantages, strict=True):
        logprobs = reference_logprobs(model, sample, temperature)
        ratio = (logprobs - torch.tensor(sample.completion.logprobs, dtype=torch.float64)).exp()
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        tokens.append(loss)
        means.append(loss.mean())
    return torch.cat(tokens).mean() if algorithm.average == "token" else torch.stack(means).mean()


def naive_gradients(model, batch, algorithm, temperature):
    model.requires_grad_(True)
    loss = reference_loss(model, batch, algorithm, temperature)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def relative_error(got, expected):
    assert got.keys() == expected.keys()
    difference = sum(float((got[n] - expected[n]).square().sum()) for n in got) ** 0.5
    return difference / sum(float(g.square().sum()) for g in expected.values()) ** 0.5


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(
    ("algorithm", "temperature"),
    [
        (GrpoOptions(), 1.0),
        (GrpoOptions(average="sequence", advantage="group-mean"), 0.7),
    ],
)
def test_gradients_are_those_of_the_definition_whatever_the_micro_batches(kind, algorithm, temperature):
    batch = random_batch()
    _, expected = naive_gradients(tiny(kind, torch.float64), batch, algorithm, temperature)
    for micro_tokens in (1, 40, 10_000):
        options = TrainingOptions(micro_tokens=micro_tokens)
        model = tiny(kind, torch.float64)
        trainer = LocalTrainer(model, options=options, algorithm=algorithm, temperature=temperature)
        assert relative_error(gradients(trainer, batch), expected) < 1e-6


def test_lora_gradients_do_not_depend_on_the_order_of_samples_or_the_micro_batches():
    batch = random_batch()
    shuffled = Batch(0, [batch.samples[i] for i in np.random.default_rng(0).permutation(len(batch.samples))])

    def make(micro_tokens):
        options = TrainingOptions(micro_tokens=micro_tokens)
        return LocalTrainer(tiny(dtype=torch.float64), lora=LoraOptions(rank=4), options=options)

    expected = gradients(make(10_000), batch)
    assert all(name.endswith((".lora_A", ".lora_B")) for name in expected)
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert relative_error(gradients(make(30), batch), expected) < 1e-6
    assert relative_error(gradients(make(10_000), shuffled), expected) < 1e-6


def test_the_reported_loss_is_that_of_the_definition():
    batch = random_batch()
    loss, _ = naive_gradients(tiny(dtype=torch.float64), batch, GrpoOptions(), 1.0)
    report = LocalTrainer(tiny(dtype=torch.float64), options=TrainingOptions(micro_tokens=50)).update(batch)
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert report.metrics["micro_batches"] > 1


def bandit(trainer_model, update, seed, temperature=1.0):
    """Samples of the policy itself, rewarded for token 5."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        logits = trainer_model(input_ids=torch.tensor([[1, 2]])).logits[0, -1].float() / temperature
    chances = logits.softmax(-1)
    tokens = torch.multinomial(chances, 64, replacement=True, generator=draw)
    samples = []
    for index, token in enumerate(tokens.tolist()):
        logprob = np.array([chances[token].log()], dtype=np.float32)
        completion = Completion(index, update, np.array([token], dtype=np.int32), logprob, "stop", "")
        samples.append(Sample(index, 0, update, (1, 2), completion, float(token == 5)))
    return Batch(update, samples), float(chances[5])


@BOTH
def test_the_policy_moves_toward_what_is_rewarded(lora):
    model = tiny()  # its frozen head is wide enough for LoRA to make one token certain
    trainer = LocalTrainer(model, lora=lora, options=TrainingOptions(learning_rate=1e-2))

    def own(input_ids):
        tree = second_tree(model, share=True)
        tree.config._attn_implementation = "sdpa"
        return tree(input_ids=input_ids)

    _, before = bandit(own, 0, 0)
    for update in range(25):
        batch, _ = bandit(own, update, update)
        report = trainer.update(batch)
        assert report.mismatch_tokens == 64 - report.metrics["skipped_sequences"]
        assert report.mismatch_kl_sum < 1e-6  # every sample is of the trainer's own version
    _, after = bandit(own, 25, 0)
    assert after > max(0.5, 3 * before)


def test_lora_leaves_the_shared_base_as_it_was():
    base = tiny()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in base.named_parameters()}
    trainer = LocalTrainer(
        second_tree(base, share=True), lora=LoraOptions(rank=4), options=TrainingOptions(learning_rate=0.1)
    )
    trainer.update(random_batch())
    for name, parameter in trainer.model.named_parameters():
        if "lora_" not in name:
            assert parameter.data_ptr() == before[name][0]
            assert torch.equal(parameter, before[name][1])
            assert not parameter.requires_grad
    assert base.config._attn_implementation == "sdpa"


@BOTH
def test_the_same_batch_and_state_give_the_same_weights_bit_for_bit(lora):
    def run():
        options = TrainingOptions(learning_rate=1e-2, micro_tokens=60)
        trainer = LocalTrainer(tiny(), lora=lora, options=options)
        reports = [trainer.update(random_batch(n, seed=n)) for n in range(3)]
        return trainer.weights(3), [{**r.metrics, "seconds": 0} for r in reports]

    (one, metrics), (other, same_metrics) = run(), run()
    assert one.checksum == other.checksum
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert metrics == same_metrics


@BOTH
def test_a_restored_trainer_goes_on_bit_for_bit(lora, tmp_path):
    options = TrainingOptions(learning_rate=1e-2, warmup_steps=2, schedule="linear", steps=8)
    whole = LocalTrainer(tiny(), lora=lora, options=options)
    for update in range(4):
        if update == 2:
            whole.save(tmp_path)
        whole.update(random_batch(update, seed=update))
    # Another seed: what is restored must not lean on the values that a fresh trainer starts with.
    resumed = LocalTrainer(tiny(), lora=lora, options=options, seed=9)
    resumed.load(tmp_path)
    assert resumed.version == 2
    for update in (2, 3):
        resumed.update(random_batch(update, seed=update))
    assert resumed.weights(4).checksum == whole.weights(4).checksum


def test_adapters_are_not_taken_over_onto_another_base(tmp_path):
    """A checkpoint of them has nothing of their base in it, and on another one they are another policy."""
    saved = LocalTrainer(tiny(), lora=LoraOptions(rank=2))
    saved.update(random_batch())
    saved.save(tmp_path)
    other = tiny()
    other.model.embed_tokens.weight.data[3, 4] += 1
    trainer = LocalTrainer(other, lora=LoraOptions(rank=2))
    before = trainer.weights(0).checksum
    with pytest.raises(TrainerError, match=r"another base.*`model\.path`"):
        trainer.load(tmp_path)
    assert trainer.weights(0).checksum == before
    narrower = LocalTrainer(tiny(dtype=torch.bfloat16), lora=LoraOptions(rank=2))
    narrower.load(tmp_path)  # the same base on a device that has another type
    assert narrower.version == 1


def test_loading_a_folder_that_is_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(TrainerError, match=r"trainer\.safetensors"):
        LocalTrainer(tiny()).load(tmp_path)


@BOTH
def test_weights_are_a_copy_with_their_checksum(lora):
    trainer = LocalTrainer(tiny(), lora=lora, options=TrainingOptions(learning_rate=1e-2))
    first = trainer.weights(0)
    kept = {name: tensor.clone() for name, tensor in first.tensors.items()}
    trainer.update(random_batch())
    second = trainer.weights(1)
    assert first.checksum == checksum(kept, first.scale) != second.checksum
    assert all(torch.equal(first.tensors[name], kept[name]) for name in kept)
    assert (second.version, second.kind) == (1, "full" if lora is None else "lora")
    if lora is None:
        assert set(second.tensors) == {name for name, _ in trainer.model.named_parameters()}
    else:
        assert second.scale == 2.0
        assert second.tensors["model.layers.0.mlp.up_proj.lora_A"].shape == (4, 32)
        assert second.tensors["model.layers.0.mlp.up_proj.lora_B"].shape == (48, 4)


def test_a_version_that_the_trainer_does_not_hold_is_refused():
    trainer = LocalTrainer(tiny())
    with pytest.raises(TrainerError, match="version 1"):
        trainer.weights(1)
    with pytest.raises(TrainerError, match="update 3"):
        trainer.update(random_batch(3))


@BOTH
def test_a_batch_without_signal_steps_with_a_gradient_of_zero(lora):
    batch = random_batch()
    silent = Batch(0, [dataclasses.replace(sample, reward=1.0) for sample in batch.samples])
    trainer = LocalTrainer(tiny(), lora=lora, options=TrainingOptions(learning_rate=0.1))
    before = trainer.weights(0)
    report = trainer.update(silent)
    after = trainer.weights(1)
    assert report.metrics["grad_norm"] == 0.0
    assert report.metrics["loss"] == 0.0
    assert report.metrics["groups_without_signal"] == report.metrics["groups"] == 3
    assert before.checksum == after.checksum
    assert all(np.isfinite(value) for value in report.metrics.values())


def test_a_sample_that_cannot_be_trained_on_ends_the_update_with_nothing_changed():
    trainer = LocalTrainer(tiny(), options=TrainingOptions(micro_tokens=30))
    before = trainer.weights(0).checksum
    batch = random_batch()
    broken = dataclasses.replace(
        batch.samples[3].completion, logprobs=np.full_like(batch.samples[3].completion.logprobs, np.nan)
    )
    samples = list(batch.samples)
    samples[3] = dataclasses.replace(samples[3], completion=broken)
    without = "`--resume --give-up 3` goes on without it"
    with pytest.raises(TrainerError, match=f"loss of update 0 is nan: .* trajectory 3 .* is not finite; {without}"):
        trainer.update(Batch(0, samples))
    samples[3] = dataclasses.replace(batch.samples[3], reward=float("inf"))
    with pytest.raises(TrainerError, match="update 0 cannot be trained on trajectory 3 with the reward inf"):
        trainer.update(Batch(0, samples))
    with pytest.raises(TrainerError, match="empty batch"):
        trainer.update(Batch(0, []))
    assert trainer.weights(0).checksum == before
    assert trainer.update(batch).metrics["grad_norm"] > 0  # nothing is left of the failed ones


@pytest.mark.parametrize(
    ("reward", "algorithm"),
    [
        (1e101, GrpoOptions()),
        (1e39, DrGrpoOptions(average_tokens=20)),
        (-1e30, DrGrpoOptions(average_tokens=20)),
    ],
)
def test_a_reward_that_cannot_be_trained_on_is_named_with_its_trajectory_and_update(reward, algorithm):
    trainer = LocalTrainer(tiny(), options=TrainingOptions(micro_tokens=30), algorithm=algorithm)
    before = trainer.weights(0).checksum
    samples = list(random_batch().samples)
    samples[5] = dataclasses.replace(samples[5], reward=reward)
    named = rf"update 0 cannot be trained on trajectory 5 with the reward {re.escape(f'{reward:g}')}: "
    with pytest.raises(TrainerError, match=named + r".*; with `--resume`, rewards beyond 1e\+09 are scored again"):
        trainer.update(Batch(0, samples))
    assert trainer.weights(0).checksum == before


@pytest.mark.parametrize(
    "algorithm",
    [
        GrpoOptions(),
        DrGrpoOptions(average_tokens=20),
        RlooOptions(),
        ReinforcePlusPlusOptions(),
        KimiOptions(),
        ToprOptions(),
        PpoOptions(critic=CriticOptions(shared=True, whiten=False)),
    ],
    ids=lambda each: each.type,
)
def test_the_largest_rewards_there_may_be_are_trained_on(algorithm):
    trainer = LocalTrainer(tiny(), options=TrainingOptions(micro_tokens=30), algorithm=algorithm)
    samples = [
        dataclasses.replace(sample, reward=MAX_REWARD * (-1) ** number)
        for number, sample in enumerate(random_batch().samples)
    ]
    report = trainer.update(Batch(0, samples))
    assert all(np.isfinite(value) for value in report.metrics.values())
    assert report.metrics["grad_norm"] > 0


def exact_batch(model, update, versions, shift=0.0):
    """Samples whose log-probabilities are the model's own, plus `shift`."""
    samples = []
    for sample, version in zip(random_batch(update).samples, versions, strict=True):
        logprobs = reference_logprobs(model, sample).detach().numpy().astype(np.float32) + np.float32(shift)
        completion = dataclasses.replace(sample.completion, logprobs=logprobs, version=version)
        samples.append(dataclasses.replace(sample, completion=completion, version=version))
    return Batch(update, samples)


def test_mismatch_counts_only_tokens_of_the_trainers_own_version():
    model = tiny()
    trainer = LocalTrainer(second_tree(model, share=False), options=TrainingOptions(learning_rate=UNSTEPPED))
    trainer.update(random_batch(0))
    trainer.update(random_batch(1))
    versions = [2] * 5 + [1] * 4 + [0] * 3
    batch = exact_batch(model, 2, versions, shift=-0.1)
    report = trainer.update(batch)
    count = sum(len(s.completion.tokens) for s in batch.samples[:5])
    assert report.mismatch_tokens == count
    assert report.mismatch_kl_sum == pytest.approx(count * (np.exp(0.1) - 1 - 0.1), rel=1e-3)
    assert report.metrics["ratio_mean"] == pytest.approx(np.exp(0.1), rel=1e-4)
    assert report.metrics["staleness_mean"] == pytest.approx((4 + 6) / 12)
    assert report.metrics["staleness_max"] == 2


def test_mismatch_follows_the_versions_of_tokens_where_a_trajectory_has_several():
    model = tiny()
    trainer = LocalTrainer(second_tree(model, share=False), options=TrainingOptions(learning_rate=UNSTEPPED))
    trainer.update(random_batch(0))
    batch = exact_batch(model, 1, [0] * 12)
    count = 0
    samples = []
    for sample in batch.samples:
        length = len(sample.completion.tokens)
        versions = (np.arange(length) >= 2).astype(np.int32)
        count += max(0, length - 2)
        # Only the tokens of version 0 are off; the rest is exact.
        logprobs = sample.completion.logprobs - np.where(versions == 0, np.float32(0.5), np.float32(0))
        completion = dataclasses.replace(sample.completion, token_versions=versions, logprobs=logprobs)
        samples.append(dataclasses.replace(sample, completion=completion))
    report = trainer.update(Batch(1, samples))
    assert report.mismatch_tokens == count
    assert report.mismatch_kl_sum < 1e-6


def test_metrics_of_an_exact_batch_say_that_it_is_on_policy():
    model = tiny()
    batch = exact_batch(model, 0, [0] * 12)
    metrics = LocalTrainer(second_tree(model, share=False)).update(batch).metrics
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio_min"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0.0
    assert 0 < metrics["entropy"] < np.log(VOCABULARY)
    assert metrics["tokens"] == sum(len(s.completion.tokens) for s in batch.samples)
    assert metrics["num_sequences"] == 12
    assert metrics["truncated"] == np.mean([s.completion.finish == "length" for s in batch.samples])
    assert metrics["reward_mean"] == np.mean([s.reward for s in batch.samples])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_trains_in_full_and_by_lora(half):
    for lora in (None, LoraOptions(rank=4)):
        trainer = LocalTrainer(tiny(dtype=half), lora=lora, options=TrainingOptions(learning_rate=1e-2))
        before = trainer.weights(0)
        trainer.update(random_batch())
        after = trainer.weights(1)
        assert {tensor.dtype for tensor in after.tensors.values()} == {half}
        assert before.checksum != after.checksum


def test_a_model_made_under_inference_mode_is_refused():
    with torch.inference_mode():
        model = tiny()
    with pytest.raises(ModelError, match="inference_mode"):
        LocalTrainer(model)


def test_a_temperature_of_nothing_is_refused():
    with pytest.raises(RecipeError, match=r"`temperature = 0\.0` leaves nothing to learn from"):
        LocalTrainer(tiny(), temperature=0.0)
