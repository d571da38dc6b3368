"""Records of routing: their shape, their replay through the modules of transformers, and the load of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from stretto.errors import RecipeError
from stretto.models.routing import (
    ExpertLoads,
    RoutingShape,
    RoutingTap,
    expert_elements,
    expert_metrics,
    recorded_loads,
    replayed_shape,
    replaying,
    routing_shape,
    shape_of_config,
)
from stretto.models.tiny import random_mixture, random_model, tiny_config, tiny_moe_config

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = [
    MixtralConfig(**SIZES, num_local_experts=4),
    OlmoeConfig(**SIZES, num_experts=4),
    Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24),
    Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=24, head_dim=8, decoder_sparse_step=2),
]


def made(config: Any) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_shape_of_a_record_follows_from_the_model_and_from_its_configuration_alike(config: Any) -> None:
    layers = 1 if config.model_type == "qwen3_moe" else 3
    assert routing_shape(made(config)) == shape_of_config(config) == RoutingShape(layers, 2, 4)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_model_that_replays_its_own_routing_computes_what_it_did(config: Any) -> None:
    model, tokens = made(config), torch.arange(9)[None]
    with torch.no_grad():
        expected = model(tokens).logits
    tap = RoutingTap(model)
    with torch.no_grad():
        model(tokens)
        record = tap.take().to(torch.uint8).numpy()
        with replaying(model, record):
            again = model(tokens).logits
        replayed = tap.take().to(torch.uint8).numpy()
        with replaying(model, (record + 1) % 4):
            other = model(tokens).logits
    assert record.shape[0] == 9
    assert np.array_equal(np.sort(replayed), np.sort(record))
    assert torch.allclose(again, expected, atol=1e-6)
    assert not torch.allclose(other, expected, atol=1e-4)


def test_an_id_takes_one_byte_for_up_to_256_experts_and_two_bytes_for_more() -> None:
    assert RoutingShape(48, 8, 128).bytes_per_token == 384
    assert RoutingShape(48, 8, 256).dtype == torch.uint8
    assert RoutingShape(48, 8, 512).bytes_per_token == 768


def test_the_option_is_refused_for_a_dense_model_and_for_a_router_that_is_not_known() -> None:
    assert replayed_shape(tiny_config(), "auto") is None
    assert replayed_shape(tiny_moe_config(), "auto") == RoutingShape(2, 2, 8)
    assert replayed_shape(tiny_moe_config(), "free") is None
    for option in ("replay", "free"):
        with pytest.raises(RecipeError, match=f'`training.routing = "{option}"` is for mixtures of experts'):
            replayed_shape(tiny_config(), option)
    with pytest.raises(RecipeError, match=r"`training\.keep_routing = true` is for mixtures of experts"):
        replayed_shape(tiny_config(), "auto", keeps=True)
    other = DeepseekV3Config(num_hidden_layers=2, n_routed_experts=8)
    assert replayed_shape(other, "auto") is None
    with pytest.raises(RecipeError, match="needs a router that can be recorded"):
        replayed_shape(other, "replay")


def test_the_load_of_experts_is_1_if_they_are_chosen_alike_and_the_number_of_experts_if_one_is_chosen_alone() -> None:
    alike = np.array([[[0], [0]], [[1], [0]], [[2], [0]], [[3], [0]]], dtype=np.uint8)  # layer 1 chooses expert 0
    shape = RoutingShape(2, 1, 4)
    found = expert_metrics(recorded_loads([alike[:2], alike[2:]], shape))
    assert found == {"expert_imbalance": 2.5, "expert_imbalance_max": 4.0, "expert_entropy": pytest.approx(0.5)}
    assert expert_metrics(recorded_loads([], shape)) == {}


def test_loads_are_counted_by_layer_and_begin_again() -> None:
    loads = ExpertLoads(RoutingShape(2, 2, 4), torch.device("cpu"))
    loads.add(1, torch.tensor([[0, 3], [3, 1]]))
    loads.add(1, torch.tensor([[0, 3]]))
    assert loads.taken().tolist() == [[0, 0, 0, 0], [2, 1, 0, 3]]
    assert not loads.taken().any()


def test_a_token_is_multiplied_with_its_experts_and_its_router_alone() -> None:
    assert expert_elements(random_model()) == 0
    assert expert_elements(random_mixture()) == 2 * (8 * 128 + 2 * (2 * 128 * 128 + 128 * 128))
