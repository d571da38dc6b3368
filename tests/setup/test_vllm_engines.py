"""The vLLM engine of a recipe: its options follow from the memory plan, and a model that it cannot serve is refused."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import SHAPE, build
from transformers import GPTNeoXConfig, MistralConfig, Phi3Config, Qwen3Config

import stretto.local.pool as local_pool
from stretto.engines.vllm.process import START_S
from stretto.errors import RecipeError
from stretto.local.components import LocalComponents
from stretto.models.loading import load_config
from stretto.models.shapes import shape_folder
from stretto.models.tiny import tiny_config
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.device import CUDA, device_limit, resolved
from stretto.setup.memory import footprint, free_for_instance
from stretto.setup.memory_sizes import GIB
from stretto.setup.vllm_engines import check_vllm_model, child_options, fitting_parallel, make_vllm_instance

CPU = torch.device("cpu")


def recipe_of(**sections: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"path": "tiny", "lora": {"rank": 8}},
        "task": {"type": "countdown-chain"},
        "engine": {"type": "vllm"},
        "runtime": {"device": "cpu"},
    }
    return parse_recipe({**base, **sections})


def test_the_options_of_a_child_follow_from_the_plan(tmp_path: Path) -> None:
    recipe, config = recipe_of(), tiny_config()
    config.save_pretrained(tmp_path)
    need = footprint(recipe, config, 40, CPU)
    options = child_options(recipe, str(tmp_path), need, CPU, threads=1)
    assert (options.kind, options.dtype, options.slots, options.lora_rank) == ("lora", "float32", 3, 8)
    per_token = 2 * 2 * 2 * 32 * 4
    assert options.kv_bytes >= need.kv_tokens * per_token
    assert options.kv_bytes % (options.kv_block * per_token) == 0
    assert options.max_context <= need.kv_tokens
    assert set(options.lora_targets) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_sliding_window_takes_one_more_block(tmp_path: Path) -> None:
    """vLLM refuses to start if the cache cannot hold a window that begins inside a block."""

    def blocks(window: int | None) -> int:
        config = MistralConfig(**SHAPE, sliding_window=window)
        config.save_pretrained(tmp_path)
        need = footprint(recipe_of(), config, 40, CPU)
        options = child_options(recipe_of(), str(tmp_path), need, CPU, threads=1)
        return options.kv_bytes // options.kv_block

    per_token = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4
    assert blocks(128) == blocks(None) + per_token


def test_a_child_has_the_deadlines_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster an instance has half an hour to start, and a call as long as the recipe says."""
    tiny_config().save_pretrained(tmp_path)
    asked: list[dict[str, Any]] = []

    class Process:
        def __init__(self, options: Any, **deadlines: Any) -> None:
            asked.append(deadlines)

    pytest.importorskip("ray")
    import stretto.cluster.pool as cluster_pool

    monkeypatch.setattr("stretto.setup.vllm_engines.ChildProcess", Process)
    made = recipe_of(runtime={"device": "cpu", "type": "ray", "instance_seconds": 900})
    make_vllm_instance(made, str(tmp_path), 40, decode=str)
    assert asked == [{"start_s": 1740.0, "answer_s": 900.0}]
    assert asked[0]["start_s"] < cluster_pool.START_S
    assert START_S < local_pool.START_S


def test_every_instance_has_a_copy_of_the_base() -> None:
    native = parse_recipe({"model": {"path": "tiny", "lora": {"rank": 8}}, "task": {"type": "countdown-chain"}})
    once = footprint(native, tiny_config(), 40, CPU).base
    assert footprint(recipe_of(), tiny_config(), 40, CPU).base == 2 * once
    three = recipe_of(runtime={"device": "cpu", "instances": 3})
    assert footprint(three, tiny_config(), 40, CPU).base == 4 * once


def test_heads_that_do_not_divide_are_refused_with_what_would() -> None:
    shape = {**SHAPE, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}
    config = Qwen3Config(**{**shape, "vocab_size": 190})
    engine, runtime = {"type": "vllm", "tensor_parallel": 8}, {"type": "ray"}
    with pytest.raises(RecipeError, match=r"`engine.tensor_parallel = 8` does not divide the 12 heads.*1, 2, 4, 12"):
        check_vllm_model(recipe_of(engine=engine, runtime=runtime), config)
    check_vllm_model(recipe_of(engine={**engine, "tensor_parallel": 4}, runtime=runtime), config)


def test_a_width_or_a_vocabulary_that_does_not_divide_is_refused() -> None:
    """The heads of Qwen2.5-7B can be cut into 7 parts, and its feed-forward layers and its vocabulary cannot."""
    config = Qwen3Config(
        num_attention_heads=28, num_key_value_heads=4, intermediate_size=18_944, vocab_size=152_064, hidden_size=3584
    )
    assert fitting_parallel(config) == [1, 2, 4]
    config.intermediate_size, config.vocab_size = 7 * 256, 7 * 64
    assert fitting_parallel(config) == [1, 2, 4, 28]
    config.num_key_value_heads = 28
    assert fitting_parallel(config) == [1, 2, 4, 7, 14, 28]
    config.vocab_size += 1
    assert fitting_parallel(config) == [1, 2, 4]


def test_a_layer_that_vllm_cannot_adapt_is_refused_by_name() -> None:
    config = GPTNeoXConfig(vocab_size=40, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(RecipeError, match=r'`model\.lora` adapts `dense`, .*, which .* cannot; use "native"$'):
        check_vllm_model(recipe_of(), config)
    with pytest.raises(RecipeError, match=r"`gate_up_proj`, `qkv_proj` of") as refused:
        check_vllm_model(recipe_of(), Phi3Config(**SHAPE))
    could = '`model.lora.targets = ["o_proj", "down_proj"]`'
    assert could in str(refused.value), "of those that vLLM adapts, the model has two"
    lora = {"rank": 8, "targets": ["o_proj", "down_proj"]}
    check_vllm_model(recipe_of(model={"path": "tiny", "lora": lora}), Phi3Config(**SHAPE))


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(RecipeError, match="a mixture of experts"):
        check_vllm_model(recipe_of(), build("moe").config)


def test_a_mixture_that_names_its_experts_otherwise_is_refused_too() -> None:
    from transformers import AriaTextConfig

    config = AriaTextConfig(moe_num_experts=8)
    with pytest.raises(RecipeError, match="a mixture of experts"):
        check_vllm_model(recipe_of(model={"path": "aria"}, rollout={"paradigm": "synchronous"}), config)


def test_a_share_of_the_gpu_limits_the_cache_of_an_instance() -> None:
    cuda, config = torch.device("cuda", 0), load_config(str(shape_folder("Qwen/Qwen3-8B")))

    def planned(share: float | None, **runtime: Any) -> Any:
        engine = {"type": "vllm"} if share is None else {"type": "vllm", "gpu_memory": share}
        rollout, training = {"max_tokens": 16_384}, {"checkpointing": True}
        made = recipe_of(engine=engine, runtime=runtime, rollout=rollout, training=training)
        free = free_for_instance(made, cuda, PlannedDevices(8, 141.0)) if runtime else 141 * GIB
        return footprint(made, config, 40, cuda, free=free, trains=not runtime)

    whole, part = planned(None), planned(0.25)
    assert part.kv < whole.kv
    assert part.one_base + part.versions + part.engine + part.kv == pytest.approx(141 / 4 * GIB, rel=1e-3)
    alone, alone_part = planned(None, type="ray"), planned(0.25, type="ray")
    assert alone_part.total == pytest.approx(alone.total / 4, rel=1e-3)
    for runtime in ({}, {"type": "ray"}):
        with pytest.raises(
            RecipeError, match=r"leaves 0\.0 MiB for KV.*Raise `engine\.gpu_memory` \(now 0\.1\) to"
        ) as few:
            planned(0.1, **runtime)
        enough = re.search(r"to at least (0\.\d+)$", str(few.value))
        assert enough is not None, few.value
        planned(float(enough[1]), **runtime)
        with pytest.raises(RecipeError, match="Raise"):
            planned(float(enough[1]) - 0.01, **runtime)
    assert "`engine.gpu_memory = 0.1` leaves it 14.04 GiB of the device" in str(few.value)


def test_a_share_of_a_limited_gpu_is_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(vocab_size=32_000, hidden_size=2048, intermediate_size=6144, **shape)
    config.save_pretrained(tmp_path)

    def planned(card: int, **runtime: Any) -> tuple[Any, Any]:
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (card * GIB - GIB // 2, card * GIB))
        engine, training = {"type": "vllm", "gpu_memory": 0.4}, {"checkpointing": True, "micro_tokens": 1024}
        made = recipe_of(engine=engine, runtime=runtime, rollout={"max_tokens": 2048}, training=training)
        return made, footprint(made, config, 40, CUDA)

    (_, small), (made, limited) = planned(24), planned(141, device_gib=24)
    assert limited.kv == pytest.approx(small.kv, rel=0.1), "less the context, which a limit counts"
    own = limited.one_base + limited.versions + limited.engine + limited.kv
    assert own == pytest.approx(0.4 * device_limit(24), rel=1e-3)
    options = child_options(made, str(tmp_path), limited, CUDA, threads=1)
    assert options.device_share == pytest.approx(own / (141 * GIB), rel=1e-3), "vLLM counts from the whole card"
    _, beyond = planned(24, device_gib=200)
    assert beyond.kv == small.kv


def test_a_share_of_the_gpu_has_no_effect_on_the_cpu() -> None:
    made = recipe_of(engine={"type": "vllm", "gpu_memory": 0.5}, runtime={})
    with pytest.raises(RecipeError, match=r"`engine\.gpu_memory = 0\.5` has no effect on the CPU"):
        resolved(made, CPU)


def test_slots_are_planned_with_the_rank_that_vllm_has() -> None:
    def versions(rank: int, engine: str = "vllm") -> int:
        made = recipe_of(model={"path": "tiny", "lora": {"rank": rank}}, engine={"type": engine})
        return footprint(made, tiny_config(), 40, CPU).versions

    assert versions(20) == versions(32)
    assert versions(16) < versions(20)
    assert versions(20, "native") < versions(32, "native")


def test_adapters_on_experts_are_refused_by_name() -> None:
    lora = {"rank": 8, "targets": ["q_proj", "gate_up_proj"]}
    with pytest.raises(RecipeError, match=r'`gate_up_proj` of experts, which `engine\.type = "vllm"` cannot adapt'):
        check_vllm_model(recipe_of(model={"path": "tiny-moe", "lora": lora}), build("moe").config)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_vllm_is_told_before_anything_is_loaded() -> None:
    with pytest.raises(RecipeError, match=r"needs vLLM, which is not installed.*stretto\[vllm\]"):
        LocalComponents.build(recipe_of(), "no such folder")


def test_devices_beyond_the_key_value_heads_hold_copies_of_them(tmp_path: Path) -> None:
    config = Qwen3Config(**{**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 2})
    config.save_pretrained(tmp_path)
    cuda = torch.device("cuda", 0)

    def planned(devices: int) -> Any:
        made = recipe_of(engine={"type": "vllm", "tensor_parallel": devices}, runtime={"type": "ray"})
        return made, footprint(made, config, 40, cuda, free=64 * GIB, trains=False)

    (_, two), (made, eight) = planned(2), planned(8)
    assert eight.kv == 4 * two.kv
    assert eight.kv_tokens == two.kv_tokens
    assert eight.engine == 4 * two.engine, "each device has buffers of its own"
    options = child_options(made, str(tmp_path), eight, CPU, threads=1)
    assert options.kv_bytes // options.tensor_parallel * 2 >= two.kv, "a device holds one of the two heads, in float32"


def test_tokens_come_in_pieces_from_a_gpu_unless_each_has_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (40 * GIB, 40 * GIB))
    tiny_config().save_pretrained(tmp_path)
    for device, rollout, pieces in ((CPU, {}, 1), (CUDA, {}, 16), (CUDA, {"top_k": 5}, 1)):
        recipe = recipe_of(rollout=rollout, runtime={"type": "ray"})
        need = footprint(recipe, tiny_config(), 8, CPU)
        assert child_options(recipe, str(tmp_path), need, device, threads=None).stream_tokens == pieces
