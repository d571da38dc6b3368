import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_cases import random_batch, reference_logprobs, tiny
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from stretto.errors import ModelError
from stretto.models.loading import second_tree
from stretto.models.packed_attention import layout_of, packed_attention
from stretto.training.forward import PackedModel
from stretto.training.packing import micro_batch

LENGTHS = np.array([3, 70, 1, 300, 64, 2])
LAYOUT = layout_of(LENGTHS)


def states(heads):
    return torch.randn(1, heads, int(LENGTHS.sum()), 8, dtype=torch.float64, requires_grad=True)


def test_packed_attention_and_its_gradients_are_those_of_each_sequence_alone():
    torch.manual_seed(0)
    assert len(LAYOUT.buckets) > 1
    inputs = [states(4), states(2), states(2)]
    out, _ = packed_attention(nn.Module(), *inputs, None, scaling=0.3, packed_layout=LAYOUT)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, upstream)
    parts = []
    for start, length in zip(np.cumsum(LENGTHS) - LENGTHS, LENGTHS, strict=True):
        q, k, v = (x[:, :, start : start + length] for x in inputs)
        alone = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        parts.append(alone.transpose(1, 2))
    expected = torch.cat(parts, dim=1)
    assert torch.allclose(out, expected, atol=1e-12)
    for one, other in zip(got, torch.autograd.grad(expected, inputs, upstream), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize(
    "wish",
    [
        {"softcap": 50.0},
        {"s_aux": torch.zeros(4)},
        {"dropout": 0.1},
        {"sliding_window": 299},
        {"is_causal": False},
        {"position_bias": torch.zeros(1)},
    ],
)
def test_what_attention_cannot_honour_is_refused(wish):
    with pytest.raises(ModelError):
        packed_attention(nn.Module(), states(4), states(2), states(2), None, packed_layout=LAYOUT, **wish)


def test_a_mask_and_a_missing_layout_are_refused():
    with pytest.raises(ModelError, match="attention_mask"):
        packed_attention(nn.Module(), states(4), states(2), states(2), torch.zeros(1), packed_layout=LAYOUT)
    with pytest.raises(ModelError, match="packed_layout"):
        packed_attention(nn.Module(), states(4), states(2), states(2), None)


def test_a_sliding_window_that_no_sequence_leaves_changes_nothing():
    inputs = [states(4), states(2), states(2)]
    plain, _ = packed_attention(nn.Module(), *inputs, None, packed_layout=LAYOUT)
    windowed, _ = packed_attention(nn.Module(), *inputs, None, packed_layout=LAYOUT, sliding_window=300)
    assert torch.equal(plain, windowed)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_are_those_of_the_models_own_forward_pass(kind, temperature):
    model = tiny(kind, torch.float64)
    packed = PackedModel(second_tree(model, share=True))
    samples = random_batch().samples
    micro = micro_batch(samples, range(len(samples)), np.zeros(12), np.zeros(12), dtype=torch.float64)
    got, entropies = packed.logprobs(micro, temperature)
    expected = torch.cat([reference_logprobs(model, sample, temperature) for sample in samples])
    assert torch.allclose(got, expected, atol=1e-10)
    assert entropies.min() > 0
    assert model.config._attn_implementation != packed.model.config._attn_implementation


def test_a_window_larger_than_the_sequences_trains_as_the_model_itself_computes():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MistralForCausalLM(MistralConfig(vocab_size=23, intermediate_size=32, sliding_window=64, **shape)).eval()
    samples = random_batch().samples
    micro = micro_batch(samples, range(12), np.zeros(12), np.zeros(12))
    got, _ = PackedModel(second_tree(model, share=True)).logprobs(micro, 1.0)
    expected = torch.cat([reference_logprobs(model, sample) for sample in samples])
    assert torch.allclose(got, expected, atol=1e-4)


def test_an_architecture_with_capped_attention_is_refused_before_training():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=23, intermediate_size=32, head_dim=8, **shape)).eval()
    with pytest.raises(ModelError, match="softcap"):
        PackedModel(model)


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    ],
)
def test_angles_that_change_with_the_longest_neighbour_are_refused_before_training(rotary):
    model = tiny("llama", max_position_embeddings=64, rope_parameters={"rope_theta": 10_000.0, **rotary})
    with pytest.raises(ModelError, match=f"rope_type = '{rotary['rope_type']}'"):
        PackedModel(model)


def test_a_model_that_mixes_neighbours_beside_attention_is_refused():
    class Leaky(nn.Module):
        def forward(self, states):
            return states.cumsum(-2)

    model = tiny()
    model.model.layers[0].mlp = Leaky()
    with pytest.raises(ModelError, match="side by side"):
        PackedModel(model)
