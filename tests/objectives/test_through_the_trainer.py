"""An update's gradient, from the weights of a model to the norm that is reported, for every objective."""

import numpy as np
import pytest
import torch
from objective_cases import VARIANTS, Data, options_of
from objective_reference import reference

# Its tests have a folder of their own, and their cases are those that a trainer needs.
from training_cases import random_batch, reference_logprobs, tiny

from stretto.training.advantages import outcome_advantages
from stretto.training.loss_averaging import token_weights
from stretto.training.trainer import LocalTrainer, TrainingOptions


def expected_gradient(options, batch):
    """Loss and gradient norm by the model's own forward passes, one sequence alone, and the plain reference."""
    model = tiny(dtype=torch.float64)
    samples = batch.samples
    current = torch.cat([reference_logprobs(model, sample) for sample in samples])
    lengths = [len(sample.completion.tokens) for sample in samples]
    rewards = [sample.reward for sample in samples]
    advantages = outcome_advantages(options.advantage, rewards, [sample.group for sample in samples]).values
    now = current.detach().numpy()
    data = Data(
        current=now,
        behaviour=np.concatenate([sample.completion.logprobs for sample in samples]).astype(np.float64),
        proximal=now,
        sampled=now,  # the batch is of the version that is trained
        advantages=np.repeat(advantages, lengths),
        rewards=np.repeat(rewards, lengths),
        lengths=lengths,
    )
    shares = token_weights(np.array(lengths), options.average, options.average_tokens)[data.owner]
    losses, slopes = reference(options, data, shares)
    current.backward(torch.tensor(slopes))
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
    return float(np.dot(losses, shares)), float(norm)


# The advantages of `ppo` are a critic's, and without a teacher `distill` computes nothing.
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("ppo", "distill")])
def test_an_update_has_the_gradient_of_the_formula_however_it_is_cut_into_micro_batches(name):
    options = options_of(name, VARIANTS[name][-1])
    batch = random_batch(groups=3, members=3, longest=12)
    loss, norm = expected_gradient(options, batch)
    for micro_tokens in (20, 10_000):
        trainer = LocalTrainer(
            tiny(dtype=torch.float64), options=TrainingOptions(micro_tokens=micro_tokens), algorithm=options
        )
        metrics = trainer.update(batch).metrics
        assert (metrics["micro_batches"] > 3) == (micro_tokens == 20)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
