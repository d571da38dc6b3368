"""The size of a prefill that memory has room for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from stretto.errors import RecipeError
from stretto.models.tiny import tiny_tokenizer
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup import factories, vllm_engines
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import CUDA, as_begun, device_limit, resolved, with_section
from stretto.setup.memory import footprint
from stretto.setup.memory_report import describe_memory
from stretto.setup.memory_sizes import GIB
from stretto.setup.micro_batch_size import with_micro_tokens
from stretto.setup.prefill_chunk_size import SIZES, describe_prefill_tokens, with_prefill_tokens

CPU = torch.device("cpu")
QWEN_1_7B = Qwen3Config(
    vocab_size=151_936, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, intermediate_size=6144, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip
SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    intermediate_size=1536, tie_word_embeddings=True,
)  # fmt: skip
PROMPT = 250  # tokens of the longest prompt
CARDS = (10, 12, 14, 16, 18, 20, 22, 24, 30, 40, 48, 80, 139)  # GiB


def recipe(lora: bool = True, prefill_tokens: int | str = "auto", **sections: Any) -> Recipe:
    model: dict[str, Any] = {"path": "tiny"}
    if lora:
        model["lora"] = {"rank": 32}
    rollout = {"prompts": 64, "group": 8, "max_tokens": 512, "prefill_tokens": prefill_tokens}
    rollout |= sections.pop("rollout", {})
    return parse_recipe({"model": model, "task": {"type": "countdown-chain"}, "rollout": rollout, **sections})


COUNTED: dict[tuple[bool, int], CountedModels] = {}


def counted_of(made: Recipe, config: Any) -> CountedModels:
    """Counts a model once: all recipes here have the same adapters, or none."""
    key = made.model.lora is None, id(config)
    if key not in COUNTED:
        COUNTED[key] = count_models(made, config, CUDA)
    return COUNTED[key]


def chosen(made: Recipe, free_gib: float, config: Any = QWEN_1_7B) -> Recipe:
    counted = counted_of(made, config)
    return with_prefill_tokens(made, config, PROMPT, CUDA, counted=counted, free=int(free_gib * GIB))


def planned(made: Recipe, free_gib: float, config: Any = QWEN_1_7B) -> int | None:
    """The KV tokens of the plan with the micro-batches that memory has room for; None if the run is refused."""
    counted, free = counted_of(made, config), int(free_gib * GIB)
    made = with_micro_tokens(made, config, PROMPT, CUDA, counted=counted, free=free)
    try:
        return footprint(made, config, PROMPT, CUDA, counted=counted, free=free).kv_tokens
    except RecipeError:
        return None


def test_a_large_device_prefills_8192_tokens_at_once() -> None:
    asked = recipe()
    made = chosen(asked, 139)
    assert made.rollout.prefill_tokens == 8_192
    assert describe_prefill_tokens(asked, made) == [
        "`rollout.prefill_tokens = 8192` (auto): the largest of 8192, 4096, 2048"
    ]
    assert planned(made, 139) == planned(recipe(prefill_tokens=2_048), 139), "no row has less cache for that"


def test_a_small_card_prefills_fewer_and_says_why() -> None:
    asked = recipe(runtime={"device_gib": 22})
    made = chosen(asked, device_limit(22) / GIB)
    assert made.rollout.prefill_tokens in SIZES[1:]
    (line,) = describe_prefill_tokens(asked, made)
    size = made.rollout.prefill_tokens
    assert line == (
        f"`rollout.prefill_tokens = {size}` (auto): the workspace of a larger one would take too much of the memory"
    )


def test_more_memory_never_makes_them_smaller() -> None:
    sizes = [chosen(recipe(), free).rollout.prefill_chunk_tokens for free in CARDS]
    assert sizes == sorted(sizes)
    assert set(sizes) == set(SIZES)


@pytest.mark.parametrize("config", [QWEN_1_7B, SMOLLM2_135M], ids=["1.7B", "135M"])
@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
def test_what_fits_with_the_smallest_fits_with_the_chosen_one(config: Any, lora: bool) -> None:
    for free in CARDS:
        least = planned(recipe(lora, prefill_tokens=SIZES[-1]), free, config)
        tokens = planned(chosen(recipe(lora), free, config), free, config)
        assert (tokens is None) == (least is None), free


def test_a_cache_that_the_recipe_names_always_fits() -> None:
    for tokens in range(100_000, 1_000_000, 100_000):
        least = planned(recipe(prefill_tokens=SIZES[-1], rollout={"kv_tokens": tokens}), 80)
        assert planned(chosen(recipe(rollout={"kv_tokens": tokens}), 80), 80) == least


def test_a_plan_that_nearly_fills_a_large_device_has_smaller_prefills() -> None:
    assert chosen(recipe(), 80).rollout.prefill_tokens == 8_192
    assert chosen(recipe(lora=False, training={"micro_tokens": 32_768}), 80).rollout.prefill_tokens == 2_048


def test_several_instances_of_one_process_have_a_workspace_each() -> None:
    assert chosen(recipe(), 80).rollout.prefill_tokens == 8_192
    assert chosen(recipe(runtime={"instances": 2}), 80).rollout.prefill_tokens < 8_192


def test_a_larger_chunk_costs_few_rows_of_long_trajectories() -> None:
    """All rows at their longest would not fit any device, and never run at once."""
    long = {"max_tokens": 16_384}
    made = chosen(recipe(rollout=long), 139)
    assert made.rollout.prefill_tokens == 8_192
    least, tokens = planned(recipe(prefill_tokens=SIZES[-1], rollout=long), 139), planned(made, 139)
    assert least is not None
    assert tokens is not None
    assert tokens >= 0.97 * least


def test_chunks_that_are_padded_to_a_power_of_two_stay_small() -> None:
    asked = recipe(runtime={"deterministic": True})
    made = chosen(asked, 139)
    assert made.rollout.prefill_tokens == 2_048
    (line,) = describe_prefill_tokens(asked, made)
    assert line.endswith("(auto): `runtime.deterministic` pads each chunk to a power of two")


def test_a_number_and_a_cpu_are_left_alone() -> None:
    named = recipe(prefill_tokens=1234)
    assert chosen(named, 139) is named
    assert describe_prefill_tokens(named, named) == []
    assert with_prefill_tokens(recipe(), QWEN_1_7B, PROMPT, CPU).rollout.prefill_tokens == "auto"
    assert recipe().rollout.prefill_chunk_tokens == 2_048
    assert resolved(recipe(), CPU).rollout.prefill_tokens == 2_048
    assert resolved(recipe(), CUDA).rollout.prefill_tokens == "auto"


def test_a_resumed_run_keeps_the_number_that_it_began_with(tmp_path: Path) -> None:
    begun = chosen(resolved(recipe(), CUDA), 139)
    (tmp_path / "config.toml").write_text(begun.dumps())
    assert as_begun(recipe(), tmp_path).rollout.prefill_tokens == 8_192
    assert as_begun(recipe(prefill_tokens=77), tmp_path).rollout.prefill_tokens == 77


@pytest.mark.parametrize(("gib", "size"), [(141.0, 8_192), (9.0, 2_048)])
def test_an_instance_of_a_cluster_chooses_for_its_own_device(gib: float, size: int) -> None:
    asked = resolved(recipe(runtime={"type": "ray"}, training={"checkpointing": True, "micro_tokens": 1}), CUDA)
    text = describe_memory(asked, PROMPT, config=QWEN_1_7B, planned=PlannedDevices(8, gib))
    assert f"# `rollout.prefill_tokens = {size}` (auto): " in text
    assert "; each instance chooses for its own device\n" in text
    instance = with_prefill_tokens(asked, QWEN_1_7B, PROMPT, CUDA, free=device_limit(gib), trains=False)
    assert instance.rollout.prefill_tokens == size


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize(("gib", "size"), [(141.0, 8_192), (9.0, 2_048)])
def test_the_engine_of_an_instance_is_made_with_its_own_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, gib: float, size: int
) -> None:
    QWEN_1_7B.save_pretrained(tmp_path)
    made = list[Recipe]()
    for module in (factories, vllm_engines):
        monkeypatch.setattr(module, "choose_device", lambda wanted: CUDA)
        monkeypatch.setattr(module, "prepare_device", lambda recipe, device: None)
        monkeypatch.setattr(module, "free_for_instance", lambda recipe, device: device_limit(gib))
    monkeypatch.setattr(factories, "load_model", lambda *options: None)
    monkeypatch.setattr(factories, "load_tokenizer", lambda path: tiny_tokenizer())
    monkeypatch.setattr(factories, "make_native_engine", lambda recipe, *others: made.append(recipe))
    monkeypatch.setattr(vllm_engines, "make_vllm_engine", lambda recipe, *others, start_s: made.append(recipe))
    asked = recipe(runtime={"type": "ray"}, engine={"type": engine})
    factories.make_instance_engine(asked, str(tmp_path), PROMPT)
    assert [each.rollout.prefill_tokens for each in made] == [size]


def test_a_larger_chunk_is_among_what_may_be_lowered() -> None:
    for size, told in ((2_048, False), (32_768, True)):
        with pytest.raises(RecipeError) as refused:
            footprint(recipe(prefill_tokens=size), QWEN_1_7B, PROMPT, CUDA, free=6 * GIB)
        assert (f"`rollout.prefill_tokens` (now {size})" in str(refused.value)) == told


def test_the_workspace_is_that_of_the_number() -> None:
    engines = [
        footprint(
            with_section(recipe(), "rollout", prefill_tokens=size), QWEN_1_7B, PROMPT, CUDA, free=139 * GIB
        ).engine
        for size in SIZES
    ]
    wide = 4 * 32_768 * 2  # bytes a token: no captured forward is larger than 2,048 tokens
    assert [engine - engines[-1] for engine in engines] == [6_144 * wide, 2_048 * wide, 0]
