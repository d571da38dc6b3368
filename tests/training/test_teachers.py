"""Teachers in the trainer: the gradient of an update against the equations, and who teaches which sample."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_cases import UNSTEPPED, VOCABULARY, random_batch, reference_logprobs, tiny

from stretto.errors import ModelError
from stretto.models.lora_options import LoraOptions
from stretto.objectives import OBJECTIVES
from stretto.objectives.teacher_options import TeacherOptions
from stretto.training.trainer import LocalTrainer, TrainingOptions
from stretto.types import Batch

DOUBLE = {"dtype": torch.float64}
FORMS = [{}, {"top_k": 4}, {"form": "sampled"}]


def labelled(batch: Batch, label) -> Batch:
    """The batch with `label(sample)` as the task of each sample."""
    return replace(batch, samples=[replace(sample, task=label(sample)) for sample in batch.samples])


def larger(seed: int = 5, **changes):
    """A teacher: another width, more layers, and a vocabulary with more padding than the policy's."""
    changes = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": VOCABULARY + 6, **changes}
    model = tiny(kind="llama", **DOUBLE, **changes)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def trainer(teachers, models, kind="distill", temperature=1.0, lora=None, **options):
    algorithm = OBJECTIVES[kind](teachers=tuple(TeacherOptions(path="a", **each) for each in teachers), **options)
    training = TrainingOptions(micro_tokens=40, learning_rate=UNSTEPPED, max_grad_norm=0.0)
    return LocalTrainer(
        tiny(**DOUBLE), options=training, algorithm=algorithm, teachers=models, lora=lora, temperature=temperature
    )


def log_distributions(model, sample, temperature, shared):
    ids = torch.tensor([*sample.prompt, *sample.completion.tokens.tolist()])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt) - 1 : -1, :shared]
    return (logits / temperature).log_softmax(-1)


def token_losses(student, teacher, sample, temperature, form, shared=VOCABULARY):
    """The loss of each token of a sample from the equations, by the models' own forward passes."""
    with torch.no_grad():
        other = log_distributions(teacher, sample, temperature, shared)
    if form.get("form") == "sampled":
        own = reference_logprobs(student, sample, temperature)
        of_teacher = other.gather(1, torch.tensor(sample.completion.tokens.astype(np.int64))[:, None])[:, 0]
        behaviour = torch.tensor(sample.completion.logprobs.astype(np.float64))
        weight = (own - behaviour).exp().clamp(max=2.0).detach()
        # The policy gradient with the advantage log teacher - log pi.
        return weight * (own - of_teacher).detach() * own
    own = log_distributions(student, sample, temperature, shared)
    if "top_k" in form:
        likeliest = other.topk(form["top_k"]).indices
        outside = torch.ones_like(other, dtype=torch.bool).scatter_(1, likeliest, False)
        own, other = (
            torch.cat([each.gather(1, likeliest), each.masked_fill(~outside, -torch.inf).logsumexp(-1)[:, None]], 1)
            for each in (own, other)
        )
    return (own.exp() * (own - other)).sum(-1)


def expected_gradient(teacher, batch, temperature, form):
    student = tiny(**DOUBLE)
    losses = torch.cat([token_losses(student, teacher, sample, temperature, form) for sample in batch.samples])
    losses.mean().backward()
    return {name: p.grad for name, p in student.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("form", FORMS)
def test_the_norm_of_an_updates_gradient_is_that_of_the_equations(form, temperature):
    batch, teacher = random_batch(groups=3, members=3, longest=12), larger()
    expected = expected_gradient(larger(), batch, temperature, form)
    norm = float(torch.sqrt(sum(each.square().sum() for each in expected.values())))
    made = trainer([form], [teacher], temperature=temperature)
    metrics = made.update(batch).metrics
    assert metrics["micro_batches"] > 1
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
    with torch.no_grad():
        whole = torch.cat([token_losses(tiny(**DOUBLE), larger(), s, temperature, form) for s in batch.samples])
    if form.get("form") != "sampled":
        assert metrics["teacher_kl"] == pytest.approx(float(whole.mean()), rel=1e-6)
        assert metrics["loss"] == pytest.approx(float(whole.mean()), rel=1e-6)
        assert 0.0 <= metrics["teacher_agreement"] <= 1.0
    else:
        assert "teacher_agreement" not in metrics


@pytest.mark.parametrize("form", FORMS)
def test_each_weight_moves_as_the_equations_say(form):
    """The first step of AdamW is the sign of the gradient, so that each entry is compared and not only the norm."""
    batch = random_batch(groups=2, members=3, longest=10)
    expected = expected_gradient(larger(), batch, 1.0, form)
    algorithm = OBJECTIVES["distill"](teachers=(TeacherOptions(path="a", **form),))
    options = TrainingOptions(learning_rate=1e-3, micro_tokens=30, max_grad_norm=0.0)
    made = LocalTrainer(tiny(**DOUBLE), options=options, algorithm=algorithm, teachers=[larger()])
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.update(batch)
    for name, parameter in made.model.named_parameters():
        grad = expected[name]
        clear = grad.abs() > 1e-6 * grad.abs().max()
        moved = (before[name] - parameter.detach())[clear]
        torch.testing.assert_close(moved, 1e-3 * grad[clear].sign(), rtol=0.02, atol=1e-9)


def test_a_teacher_beside_a_reward_adds_its_gradient_times_its_coefficient():
    batch, coefficient = random_batch(groups=3, members=3, longest=12), 0.3
    alone = trainer([], [], "grpo")
    both = trainer([{"coefficient": coefficient}], [larger()], "grpo")
    taught = trainer([{}], [larger()])
    losses = {name: made.update(batch).metrics["loss"] for name, made in
              (("alone", alone), ("both", both), ("taught", taught))}  # fmt: skip
    assert losses["both"] == pytest.approx(losses["alone"] + coefficient * losses["taught"], rel=1e-9)


def test_each_task_has_its_teacher_and_others_have_none():
    batch = labelled(random_batch(groups=4, members=2, longest=12), lambda s: ("math", "code", "other", None)[s.group])
    one, other = larger(5), larger(6, hidden_size=32)
    teachers = [{"tasks": ("math",)}, {"tasks": ("code", "more"), "form": "sampled", "coefficient": 2.0}]
    metrics = trainer(teachers, [one, other], "naive").update(batch).metrics
    student = tiny(**DOUBLE)
    found, counts = [], []
    for label, teacher, form in (("math", larger(5), {}), ("code", larger(6, hidden_size=32), {"form": "sampled"})):
        own = [sample for sample in batch.samples if sample.task == label]
        losses = torch.cat([token_losses(student, teacher, sample, 1.0, form).detach() for sample in own])
        found.append(losses)
        counts.append(len(losses))
    assert metrics["teacher_kl_0"] == pytest.approx(float(found[0].mean()), rel=1e-6)
    mean = (counts[0] * metrics["teacher_kl_0"] + counts[1] * metrics["teacher_kl_1"]) / sum(counts)
    assert metrics["teacher_kl"] == pytest.approx(mean, rel=1e-9)
    assert "teacher_agreement_1" not in metrics
    plain = trainer([], [], "naive").update(batch).metrics["loss"]
    taught = [trainer([each], [model], "naive").update(batch).metrics["loss"] - plain for each, model in
              zip(teachers, (larger(5), larger(6, hidden_size=32)), strict=True)]  # fmt: skip
    assert metrics["loss"] == pytest.approx(plain + sum(taught), rel=1e-9)


def test_one_teacher_without_tasks_teaches_all_that_others_do_not():
    batch = labelled(random_batch(groups=2, members=2), lambda s: ("math", "rest")[s.group])
    teachers = [{"tasks": ("math",)}, {}]
    both = trainer(teachers, [larger(5), larger(6)]).update(batch).metrics
    assert {"teacher_kl_0", "teacher_kl_1"} <= both.keys()
    swapped = trainer(teachers[::-1], [larger(6), larger(5)]).update(batch).metrics
    assert swapped["loss"] == pytest.approx(both["loss"], rel=1e-12)


def test_sequences_that_only_a_teacher_trains_are_computed_and_those_without_any_are_not():
    batch = random_batch(groups=4, members=2, longest=12)
    batch = replace(batch, samples=[replace(sample, reward=1.0) for sample in batch.samples])
    batch = labelled(batch, lambda s: "math" if s.group == 0 else None)
    metrics = trainer([{"tasks": ("math",)}], [larger()], "grpo").update(batch).metrics
    assert metrics["skipped_sequences"] == 6
    assert metrics["grad_norm"] > 0
    assert trainer([{}], [larger()], "grpo").update(batch).metrics["skipped_sequences"] == 0
    assert trainer([{"tasks": ("math",)}], [larger()]).update(batch).metrics["skipped_sequences"] == 6


def test_masked_tokens_are_not_taught():
    batch = random_batch(groups=3, members=3)
    cut = [sample.completion.finish == "length" for sample in batch.samples]
    assert any(cut)
    metrics = trainer([{}], [larger()], mask_truncated=True).update(batch).metrics
    assert metrics["skipped_sequences"] == sum(cut)
    with torch.no_grad():
        kept = [s for s, is_cut in zip(batch.samples, cut, strict=True) if not is_cut]
        losses = torch.cat([token_losses(tiny(**DOUBLE), larger(), sample, 1.0, {}) for sample in kept])
    assert metrics["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)


def test_rewards_change_nothing_under_distillation_alone_and_no_advantage_is_reported():
    batch = random_batch()
    paid = replace(batch, samples=[replace(sample, reward=7.0 * index) for index, sample in enumerate(batch.samples)])
    reports = []
    for each in (batch, paid):
        made = trainer([{}], [larger()])
        reports.append(made.update(each).metrics)
    assert reports[0]["grad_norm"] == reports[1]["grad_norm"]
    assert reports[0]["reward_mean"] != reports[1]["reward_mean"]
    assert not [name for name in reports[0] if name.startswith("advantage") or name == "groups_without_signal"]


def test_several_optimizer_steps_and_adapters_learn_from_a_teacher():
    algorithm = OBJECTIVES["distill"](teachers=(TeacherOptions(path="a"),))
    options = TrainingOptions(learning_rate=3e-3, optimizer_steps=3, micro_tokens=64)
    made = LocalTrainer(
        tiny(), lora=LoraOptions(rank=8), options=options, algorithm=algorithm, teachers=[larger().float()]
    )
    batch = random_batch(groups=6, members=2)
    first, *_, last = [made.update(replace(batch, update=update)).metrics["teacher_kl"] for update in range(12)]
    assert last < 0.5 * first


def test_the_teacher_never_changes_and_the_same_batch_gives_the_same_weights():
    checksums = []
    teacher = larger()
    before = {name: p.detach().clone() for name, p in teacher.named_parameters()}
    for _ in range(2):
        algorithm = OBJECTIVES["distill"](teachers=(TeacherOptions(path="a"),))
        made = LocalTrainer(
            tiny(**DOUBLE), options=TrainingOptions(learning_rate=1e-2), algorithm=algorithm, teachers=[larger()]
        )
        made.update(random_batch())
        checksums.append(made.weights(1).checksum)
        for name, parameter in made.teachers.members[0]._packed.model.named_parameters():
            assert torch.equal(parameter, before[name])
            assert parameter.grad is None
    assert checksums[0] == checksums[1]


def test_tokens_that_no_tokenizer_has_are_not_taught():
    """A padding row of the policy's head can be drawn; a teacher without that row does not know it."""
    batch = random_batch(groups=2, members=2, longest=8)
    vocabulary = VOCABULARY - 3
    drawn = np.concatenate([sample.completion.tokens for sample in batch.samples])
    assert (drawn >= vocabulary).any()
    for form in FORMS:
        made = trainer([form], [larger(vocab_size=vocabulary)])
        metrics = made.update(batch).metrics
        assert np.isfinite(metrics["loss"])
        assert np.isfinite(metrics["grad_norm"])


def test_a_vocabulary_counts_only_as_far_as_the_tokenizer_goes():
    batch = random_batch(groups=2, members=2, longest=8)
    samples = [
        replace(sample, completion=replace(sample.completion, tokens=sample.completion.tokens % 10))
        for sample in batch.samples
    ]
    batch, shared = replace(batch, samples=samples), 10
    algorithm = OBJECTIVES["distill"](teachers=(TeacherOptions(path="a"),))
    made = LocalTrainer(tiny(**DOUBLE), algorithm=algorithm, teachers=[larger()], vocabulary=shared)
    with torch.no_grad():
        losses = [token_losses(tiny(**DOUBLE), larger(), sample, 1.0, {}, shared) for sample in batch.samples]
    assert made.update(batch).metrics["teacher_kl"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-6)


def test_a_trainer_refuses_other_teachers_than_its_objective_names():
    with pytest.raises(ModelError, match="names 1 teachers, and 0 models"):
        trainer([{}], [])
    with pytest.raises(ModelError, match=r"`algorithm.teachers\[0\].top_k = 24` is more than the vocabulary of 23"):
        trainer([{"top_k": 24}], [larger()])
