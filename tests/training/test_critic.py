import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from training_cases import tiny

from stretto.errors import RecipeError, TrainerError
from stretto.objectives import OBJECTIVES
from stretto.objectives.critic_options import CriticOptions
from stretto.objectives.ppo import PpoOptions
from stretto.recipe.reading import parse_recipe
from stretto.training.critic import EXPORT_FILE, PREFIX, Critic
from stretto.training.options import TrainingOptions
from stretto.training.trainer import LocalTrainer

WIDTH = 6


def critic(**options) -> Critic:
    return Critic(WIDTH, CriticOptions(**options), dtype=torch.float64)


@pytest.mark.parametrize("limit", [0.01, 0.2])
def test_its_gradient_is_clipped_to_the_norm_of_the_recipe(limit):
    made = LocalTrainer(tiny(), algorithm=PpoOptions(), options=TrainingOptions(max_grad_norm=limit))
    subject = made.critic
    assert subject is not None
    for stepped in subject.stepped:
        stepped.grad = torch.ones_like(stepped)
    subject.step()
    means = [tensor for name, tensor in subject.state().items() if "mean/" in name]
    assert torch.cat([mean.flatten() for mean in means]).norm() == pytest.approx(0.1 * limit)  # Adam's first average


def states(count: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fit_once(subject: Critic, hidden: torch.Tensor, returns: torch.Tensor) -> float:
    values = subject.values(hidden, torch.arange(len(hidden)))
    losses = subject.loss(values, values.detach(), returns)
    losses.mean().backward()
    subject.step()
    return float(losses.detach().mean())


def test_the_first_values_are_zero_and_later_ones_follow_the_returns():
    subject, hidden = critic(learning_rate=0.05), states()
    returns = torch.nn.functional.layer_norm(hidden, (WIDTH,))[:, 0] + 0.5
    assert not subject.values(hidden, torch.arange(len(hidden))).any()
    losses = [fit_once(subject, hidden, returns) for _ in range(300)]
    assert losses[-1] < 0.05 * losses[0]


def test_a_value_is_that_of_the_state_that_predicts_the_token():
    subject, hidden = critic(), states(4)
    with torch.no_grad():
        subject.weight.copy_(torch.arange(WIDTH))
        subject.bias.fill_(0.25)
    normalized = (hidden - hidden.mean(1, keepdim=True)) / (hidden.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = normalized @ subject.weight / WIDTH**0.5 + 0.25
    assert torch.allclose(subject.values(hidden, torch.tensor([3, 1])), expected[[3, 1]])


def test_a_value_does_not_depend_on_the_scale_of_the_models_states():
    subject = critic()
    with torch.no_grad():
        subject.weight.fill_(1.0).mul_(torch.arange(WIDTH))
    places = torch.arange(12)
    assert torch.allclose(subject.values(1_000 * states(), places), subject.values(states(), places), atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_only_a_shared_critic_trains_the_model(shared):
    subject = critic(shared=shared)
    with torch.no_grad():
        subject.weight.copy_(torch.arange(WIDTH))
    hidden = states().requires_grad_()
    subject.values(hidden, torch.arange(3)).sum().backward()
    assert subject.weight.grad is not None
    assert subject.bias.grad is not None
    assert (hidden.grad is not None) == shared


def test_the_clipped_loss_is_its_formula_in_value_and_gradient():
    subject = critic(clip=0.3)
    before = torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    values = torch.tensor([0.2, 0.5, 0.5, -0.9], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    losses = subject.loss(values, before, returns)
    # The third moved away from its return, so it is pulled back; the second and the fourth went far enough.
    assert losses.tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 0.7**2, 0.5 * 1.5**2, 0.5 * 0.7**2])
    losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.8, 0.0, 1.5, 0.0])
    free = values.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: subject.loss(v, before, returns), (free,))


def test_with_values_that_explain_everything_no_advantage_is_left():
    subject = critic(gamma=1.0, lam=0.95, whiten=False)
    lengths = np.array([2, 3])
    found = subject.estimate(np.array([1.0, 1.0, -1.0, -1.0, -1.0]), [1.0, -1.0], lengths, [0, 1])
    assert found.advantages.of_tokens(lengths).tolist() == [0.0] * 5
    assert found.returns.tolist() == [1.0, 1.0, -1.0, -1.0, -1.0]
    assert found.metrics == {
        "value_mean": pytest.approx(-0.2),
        "return_mean": pytest.approx(-0.2),
        "explained_variance": 1.0,
    }


def test_an_estimate_places_the_reward_at_the_end_or_those_of_turns_at_the_ends_of_turns():
    subject = critic(gamma=0.5, lam=1.0, whiten=False)
    lengths = np.array([3])
    plain = subject.estimate(np.zeros(3), [4.0], lengths, [0])
    assert plain.returns.tolist() == [1.0, 2.0, 4.0]
    by_turn = subject.estimate(np.zeros(3), [4.5], lengths, [0], ([[0.5, 4.0]], [[1, 2]]))
    assert by_turn.returns.tolist() == [1.5, 2.0, 4.0]


def test_a_batch_without_tokens_is_estimated_without_a_nan():
    found = critic().estimate(np.zeros(0), [1.0], np.array([0]), [0])
    assert found.advantages.values.tolist() == [0.0]
    assert all(np.isfinite(value) for value in found.metrics.values())


def test_a_critic_that_was_restored_goes_on_bit_for_bit():
    hidden, returns = states(), states(seed=1)[:, 0]
    straight = critic()
    for _ in range(3):
        fit_once(straight, hidden, returns)
    kept = straight.state()
    assert all(name.startswith(PREFIX) for name in kept)
    resumed = critic()
    resumed.restore({**kept, "step": torch.tensor(7), "value/other": torch.zeros(2)})
    for subject in (straight, resumed):
        fit_once(subject, hidden, returns)
    assert torch.equal(straight.weight, resumed.weight)
    assert torch.equal(straight.bias, resumed.bias)
    assert torch.equal(kept[f"{PREFIX}value/weight"], critic_of(kept).weight), "a state is a copy"


def critic_of(state: dict[str, torch.Tensor]) -> Critic:
    subject = critic()
    subject.restore(state)
    return subject


def test_a_checkpoint_without_a_critic_is_refused():
    with pytest.raises(TrainerError, match="has no critic"):
        critic().restore({"step": torch.tensor(1), "value/x": torch.zeros(3)})


def test_a_gradient_that_is_not_finite_steps_nothing():
    subject = critic()
    subject.values(states() * float("nan"), torch.arange(2)).sum().backward()
    with pytest.raises(TrainerError, match="nothing was stepped"):
        subject.step()
    subject.discard()
    assert subject.weight.grad is None
    assert not subject.weight.any()


def test_an_exported_critic_can_be_read_by_others_and_taken_over(tmp_path):
    subject = critic()
    fit_once(subject, states(), states(seed=1)[:, 0])
    subject.export(tmp_path)
    with safe_open(tmp_path / EXPORT_FILE, framework="pt") as file:
        assert torch.equal(file.get_tensor("weight"), subject.weight)
        assert json.loads(file.metadata()["options"])["gamma"] == 1.0
    other = critic()
    other.load(tmp_path)
    assert torch.equal(other.weight, subject.weight)
    assert torch.equal(other.bias, subject.bias)
    with pytest.raises(TrainerError, match="belongs to another model"):
        Critic(WIDTH + 1, CriticOptions()).load(tmp_path)
    with pytest.raises(TrainerError, match="holds no critic"):
        other.load(tmp_path / "nowhere")


def test_a_factor_of_a_loss_that_trains_the_head_alone_is_refused():
    with pytest.raises(ValidationError, match=r"`algorithm.critic.coefficient = 0.3` has no effect"):
        CriticOptions(coefficient=0.3)
    assert CriticOptions(coefficient=0.3, shared=True).loss_factor == 0.3
    assert (CriticOptions().loss_factor, CriticOptions(shared=True).loss_factor) == (1.0, 0.5)


def test_only_objectives_with_a_critic_take_one():
    assert OBJECTIVES["ppo"] is PpoOptions
    assert PpoOptions().advantage == "gae"
    assert [name for name, kind in OBJECTIVES.items() if kind.uses_critic] == ["ppo"]
    for name, kind in OBJECTIVES.items():
        assert ("critic" in kind.model_fields) == kind.uses_critic, name
    with pytest.raises(ValidationError, match="advantage"):
        PpoOptions(advantage="group")  # type: ignore[arg-type]


def test_a_clip_of_values_that_cannot_act_is_refused():
    recipe = {
        "model": {"path": "tiny"},
        "task": {"type": "countdown-chain"},
        "algorithm": {"type": "ppo", "critic": {"clip": 0.1}},
    }
    with pytest.raises(RecipeError, match=r"`algorithm.critic.clip = 0.1` has no effect"):
        parse_recipe(recipe)
    assert parse_recipe({**recipe, "training": {"optimizer_steps": 2}}).algorithm.critic.clip == 0.1


def test_a_critic_asked_for_by_an_objective_that_has_none_is_refused_by_name():
    recipe = {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, "algorithm": {"critic": {"lam": 0.9}}}
    with pytest.raises(RecipeError, match=r"`algorithm.critic` is not an option here"):
        parse_recipe(recipe)
