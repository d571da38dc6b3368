"""A model that the engine or the trainer refuses is refused before its weights are read, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import SHAPE, build
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
)

from stretto.errors import ModelError
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.architecture_checks import check_architecture

WINDOW = MistralConfig(**SHAPE, sliding_window=48)
DYNAMIC = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
BLOOM = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)


def recipe_of(engine: str, **model: Any) -> Recipe:
    tables = {"model": {"path": "our-model", **model}, "task": {"type": "countdown-chain"}, "engine": {"type": engine}}
    return parse_recipe({**tables, "rollout": {"paradigm": "synchronous", "max_tokens": 32}})


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize(
    "config",
    [Qwen3Config(**SHAPE), Phi3Config(**SHAPE), GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)],
    ids=lambda config: config.model_type,
)
def test_a_model_that_both_can_use_is_accepted(engine: str, config: Any) -> None:
    check_architecture(recipe_of(engine), config, 8)


def test_a_mixture_is_accepted() -> None:
    check_architecture(recipe_of("native"), build("moe").config, 8)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma3TextConfig(**SHAPE), "`gemma3_text`: it has layers of type ['sliding_attention']"),
        (WINDOW, "`mistral`: its attention has `sliding_window = 48`"),
    ],
    ids=["layer types", "window"],
)
def test_a_model_that_only_the_native_engine_refuses_names_the_other_engine(config: Any, reason: str) -> None:
    with pytest.raises(ModelError) as refused:
        check_architecture(recipe_of("native"), config, 8)
    text = str(refused.value)
    assert text.startswith(f"`model.path = 'our-model'`: the native engine does not serve {reason}")
    assert text.endswith('; set `engine.type = "vllm"`, or choose another model')
    check_architecture(recipe_of("vllm"), config, 8)


@pytest.mark.parametrize(
    ("config", "natively", "trained"),
    [
        (Gemma2Config(**SHAPE), "layers of type", "`Gemma2Attention` asks its attention for `softcap`"),
        (DYNAMIC, "`rope_type = 'dynamic'`", "`LlamaForCausalLM` with `rope_type = 'dynamic'` cannot be trained"),
        (BLOOM, "0 of its 2 layers", "`BloomForCausalLM` cannot be trained packed: 0 of its 2 layers"),
        (GptOssConfig(**SHAPE), "layers of type", "`GptOssAttention` asks its attention for `s_aux`"),
    ],
    ids=["softcap", "moving angles", "own attention", "sinks"],
)
def test_a_model_that_the_trainer_refuses_is_refused_with_each_engine(config: Any, natively: str, trained: str) -> None:
    with pytest.raises(ModelError) as refused:
        check_architecture(recipe_of("native"), config, 8)
    assert natively in str(refused.value)
    assert f". Nor can it be trained with another engine: {trained}" in str(refused.value)
    assert str(refused.value).endswith("; choose another model")
    assert "vllm" not in str(refused.value)
    with pytest.raises(ModelError) as refused:
        check_architecture(recipe_of("vllm"), config, 8)
    assert str(refused.value).startswith(f"`model.path = 'our-model'`: {trained}")
    assert str(refused.value).endswith("; choose another model")


def test_a_trajectory_that_leaves_the_sliding_window_is_refused() -> None:
    check_architecture(recipe_of("vllm"), WINDOW, 16)
    check_architecture(recipe_of("vllm"), WINDOW, None)
    said = r"is 48 tokens: the longest prompt with `rollout\.max_tokens` takes 49; lower `rollout\.max_tokens`, or"
    with pytest.raises(ModelError, match=said):
        check_architecture(recipe_of("vllm"), WINDOW, 17)


def test_the_configuration_is_left_as_it_was() -> None:
    config = Qwen3Config(**SHAPE)
    before = config._attn_implementation
    check_architecture(recipe_of("native"), config, 8)
    assert config._attn_implementation == before
