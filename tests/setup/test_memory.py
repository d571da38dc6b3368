"""What a run is told to need in memory, against what its parts hold."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stretto.engines.native.cache import KVCache
from stretto.engines.native.expert_slots import slot_experts
from stretto.engines.native.lora_slots import SlotMask
from stretto.errors import ModelError, RecipeError
from stretto.models.loading import load_config, load_model
from stretto.models.lora import inject_lora
from stretto.models.packed_attention import layout_of
from stretto.models.shapes import shape_folder
from stretto.models.tiny import WarmStart, tiny_config, tiny_model, tiny_moe_config
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.device import CUDA
from stretto.setup.factories import make_native_engine
from stretto.setup.memory import footprint, kv_tokens
from stretto.setup.memory_report import describe_memory
from stretto.setup.memory_sizes import GIB, activation_bytes, engine_rows, kv_bytes_per_token, longest_trajectory
from stretto.training.forward import PackedModel
from stretto.training.trainer import LocalTrainer, LoraOptions

CPU = torch.device("cpu")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TOKENS = 256
BILLIONS = Qwen3Config(
    vocab_size=151_936,
    hidden_size=2048,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=6144,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
)
"""The shapes of Qwen3-1.7B."""


def recipe(dtype: str = "auto", lora: bool = False, **sections: Any) -> Recipe:
    model: dict[str, Any] = {"path": "tiny", "dtype": dtype}
    if lora:
        model["lora"] = {"rank": 4}
    return parse_recipe({"model": model, "task": {"type": "countdown-chain"}, **sections})


def test_on_the_cpu_keys_and_values_are_float32_whatever_the_weights_are() -> None:
    need = {dtype: footprint(recipe(dtype), tiny_config(), 16, CPU) for dtype in ("float32", "bfloat16")}
    assert need["float32"].kv == need["bfloat16"].kv
    assert need["float32"].base == 2 * need["bfloat16"].base


def test_full_training_in_bfloat16_has_masters_moments_and_gradients_in_float32() -> None:
    plain, half = (footprint(recipe(dtype), tiny_config(), 16, CPU) for dtype in ("float32", "bfloat16"))
    assert (plain.trained, half.trained) == (0, plain.base)
    assert half.optimizer == plain.optimizer == 2 * plain.base
    assert plain.gradients == plain.base
    assert half.gradients == plain.base + half.base, "a backward pass leaves them in bfloat16, and they are summed"
    assert footprint(recipe("float16"), tiny_config(), 16, CPU) == half


@pytest.mark.parametrize("lora", [True, False])
def test_the_weight_store_has_a_copy_of_every_live_version(lora: bool) -> None:
    made = recipe("bfloat16", lora, rollout={"staleness": 3})
    need = footprint(made, tiny_config(), 16, CPU)
    assert made.num_slots == 4
    assert need.store * 4 == need.versions * 5


@pytest.mark.parametrize("lora", [True, False])
def test_what_is_planned_for_a_version_is_what_the_trainer_publishes(lora: bool, tmp_path: Any) -> None:
    made = recipe("float32", lora)
    model = load_model(str(tiny_model(tmp_path / "tiny", warm_start=WarmStart(steps=0))), torch.float32, CPU)
    need = footprint(made, model.config, 16, CPU)
    trainer = LocalTrainer(model, lora=LoraOptions(rank=4) if lora else None)
    published = sum(tensor.numel() * tensor.element_size() for tensor in trainer.weights(0).tensors.values())
    assert published * made.num_slots == need.versions


@pytest.mark.parametrize("rank", [4, 8])
def test_slots_of_adapters_on_experts_are_planned_as_the_engine_pads_them(rank: int) -> None:
    lora = {"rank": rank, "targets": ["gate_up_proj", "down_proj"]}
    model = {"path": "tiny-moe", "dtype": "bfloat16", "lora": lora}
    made = parse_recipe({"model": model, "task": {"type": "countdown-chain"}})
    tree = Qwen3MoeForCausalLM(tiny_moe_config()).to(torch.bfloat16)
    slots = slot_experts(tree, tuple(lora["targets"]), made.num_slots, rank, SlotMask(made.num_slots, rank, CPU))
    held = sum(factor.nbytes for each in slots.values() for factor in each.factors)
    assert footprint(made, tiny_moe_config(), 16, CPU).versions == held


@pytest.mark.parametrize(("routing", "record"), [("auto", 4), ("free", 0)])
def test_records_of_routing_are_planned_beside_the_cache_if_the_engine_keeps_them(routing: str, record: int) -> None:
    made = parse_recipe(
        {"model": {"path": "tiny-moe"}, "task": {"type": "countdown-chain"}, "training": {"routing": routing}}
    )
    need, plain = footprint(made, tiny_moe_config(), 16, CPU), tiny_moe_config()
    keys_and_values = 2 * plain.num_hidden_layers * plain.num_key_value_heads * plain.head_dim * 4
    assert need.kv == need.kv_tokens * (keys_and_values + record)
    engine = make_native_engine(made, Qwen3MoeForCausalLM(plain).eval(), 256, str)
    assert (engine._cache.routing is not None) == bool(record)


def test_the_cache_has_room_for_the_longest_completion_of_evaluation() -> None:
    made = recipe(rollout={"rows": 1, "max_tokens": 8}, evaluation={"prompts": 1, "max_tokens": 500})
    assert kv_tokens(made, tiny_config(), 16) >= 516


# -- a GPU, planned anywhere -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False])
def test_on_cuda_the_cache_gets_what_the_rest_leaves_and_all_of_it_fits(lora: bool) -> None:
    made = recipe(lora=lora, rollout={"prompts": 64, "group": 8, "max_tokens": 4096})
    need = footprint(made, BILLIONS, 512, CUDA, free=100 * GIB)
    per_token = kv_bytes_per_token(BILLIONS, torch.bfloat16, records_routing=True)
    assert per_token == 28 * 2 * 8 * 128 * 2
    assert need.kv == need.kv_tokens * per_token
    assert need.kv_tokens < engine_rows(made) * longest_trajectory(made, 512), "memory is what bounds it"
    assert 0 <= 100 * GIB - need.total < per_token
    assert need.slack == 5 * GIB
    parameters = need.base // 2
    assert 1.6e9 < parameters < 1.8e9
    if not lora:
        assert need.trained + need.optimizer == 3 * 4 * parameters


def test_on_cuda_no_more_is_taken_than_every_row_can_need() -> None:
    made = recipe(lora=True)
    need = footprint(made, BILLIONS, 100, CUDA, free=140 * GIB)
    assert need.kv_tokens == engine_rows(made) * longest_trajectory(made, 100)
    cache = KVCache(28, 8, 128, need.kv_tokens // 16, torch.bfloat16, torch.device("meta"))
    assert cache.storage.numel() * 2 <= need.kv + 32 * kv_bytes_per_token(
        BILLIONS, torch.bfloat16, records_routing=True
    )


def test_a_cache_that_the_recipe_names_is_taken_or_refused_by_name() -> None:
    made = recipe(lora=True, rollout={"kv_tokens": 50_000})
    assert footprint(made, BILLIONS, 100, CUDA, free=100 * GIB).kv_tokens == 50_000
    with pytest.raises(RecipeError, match=r"`rollout.kv_tokens = 50000` needs 5.34 GiB"):
        footprint(made, BILLIONS, 100, CUDA, free=30 * GIB)


@pytest.mark.parametrize("how", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}])
def test_sorting_logits_is_planned_for_where_a_recipe_truncates(how: dict[str, Any]) -> None:
    for lora in (True, False):
        plain, cut = recipe(lora=lora), recipe(lora=lora, rollout=how)
        more = (
            footprint(cut, BILLIONS, 100, CUDA, free=140 * GIB).engine
            - footprint(plain, BILLIONS, 100, CUDA, free=140 * GIB).engine
        )
        draws = 2 if lora else 1 + cut.num_slots
        assert more == draws * engine_rows(cut) * 151_936 * 60


def test_activations_grow_with_the_micro_batch_and_shrink_with_checkpointing() -> None:
    def held(tokens: int, checkpointing: bool = False, packed: bool = True) -> int:
        return activation_bytes(
            BILLIONS, tokens, torch.bfloat16, CUDA, packed=packed, trains_head=False, checkpointing=checkpointing
        )

    assert 16 * GIB < held(8192) < 20 * GIB, "2.4 MB a token"
    assert held(16_384) - held(8192) == held(24_576) - held(16_384)
    assert held(8192, checkpointing=True) < held(8192) / 4
    assert held(8192, packed=False) > 1.6 * held(8192), "in half precision"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trained", ["attention", "experts", "all"])
def test_what_a_layer_with_experts_keeps_is_what_was_estimated(trained: str, dtype: torch.dtype) -> None:
    """On a CPU: each of a token's experts has an output as wide as the stream, and the layer is not compiled."""

    def config_of(layers: int) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(
            vocab_size=64, hidden_size=256, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
            head_dim=32, intermediate_size=512, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=96,
        )  # fmt: skip

    def kept(layers: int) -> int:
        model = Qwen3MoeForCausalLM(config_of(layers)).to(dtype)
        packed = PackedModel(model)
        if trained != "all":
            inject_lora(model, 8, 16.0, () if trained == "attention" else (*ATTENTION, "gate_up_proj", "down_proj"))
        packed.prepare(compiled=False, checkpointing=False, plain=True)
        sizes, tensors = {}, []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            tensors.append(tensor)
            return tensor

        weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
        tokens = torch.arange(TOKENS) % 64
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            packed.hidden(tokens, torch.arange(TOKENS), layout_of(np.array([TOKENS]), flash=packed.flash))
        return sum(sizes.values())

    def estimated(layers: int) -> int:
        return activation_bytes(
            config_of(layers), TOKENS, dtype, CPU, packed=True, trains_head=False, checkpointing=False
        )

    measured = kept(2) - kept(1)
    assert 0.9 * measured < estimated(2) - estimated(1) < 2 * measured


def test_what_the_kernels_of_experts_keep_is_what_an_h200_measured() -> None:
    """12 layers of Qwen3-30B-A3B with LoRA: 31.2 GiB at 16,384 tokens a micro-batch, 47.1 GiB at 32,768."""
    config = load_config(str(shape_folder("Qwen/Qwen3-30B-A3B")))
    config.num_hidden_layers = 12

    def estimated(tokens: int, dtype: torch.dtype = torch.bfloat16, *, adapts_experts: bool = False) -> float:
        return activation_bytes(
            config, tokens, dtype, CUDA, packed=True, trains_head=False, checkpointing=False,
            adapts_experts=adapts_experts,
        ) / GIB  # fmt: skip

    more = estimated(32_768) - estimated(16_384)
    assert 15.9 < more < 1.1 * 15.9
    assert estimated(32_768, adapts_experts=True) > 2 * estimated(32_768)
    assert estimated(32_768, torch.float16) > 2 * estimated(32_768), "it has no such kernels"


def test_a_micro_batch_holds_a_whole_sequence_and_no_more_than_the_batch() -> None:
    small = {"prompts": 2, "group": 2}
    shorter, short, long = (
        footprint(recipe(lora=True, rollout={**small, "max_tokens": m}), BILLIONS, 100, CUDA, free=140 * GIB).working
        for m in (60, 300, 20_000)
    )
    assert shorter < short < long


def test_the_plan_says_which_device_it_is_for() -> None:
    text = describe_memory(recipe(runtime={"device": "cpu"}))
    assert "# device: cpu, weights in float32" in text
    assert "# memory: base" in text


def test_a_plan_for_the_cpu_says_what_the_machine_has_and_warns_if_that_is_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stretto.setup.memory_report.usable_memory", lambda: 48 * GIB)
    options = {"rollout": {"max_tokens": 512}, "runtime": {"device": "cpu"}}
    fits = describe_memory(recipe(**options), 256)
    assert "# device: cpu, weights in float32, 48.00 GiB in this machine" in fits
    assert "warning" not in fits
    line = describe_memory(recipe(lora=True, **options), 256, config=BILLIONS).splitlines()[-1]
    assert line.startswith("# warning: the plan is larger than the memory of this machine, ")
    assert " of 48.00 GiB. " in line
    changes = dict(re.findall(r"`--set (\S+)=(\d+|true)`", line))
    assert changes.keys() == {"training.micro_tokens", "training.checkpointing", "rollout.kv_tokens"}
    lowered = {**options, "training": {"micro_tokens": int(changes["training.micro_tokens"])}}
    assert "warning" not in describe_memory(recipe(lora=True, **lowered), 256, config=BILLIONS), "the advice helps"
    cluster = {**options, "runtime": {"type": "ray", "device": "cpu"}}
    assert "this machine" not in describe_memory(recipe(lora=True, **cluster), 256, config=BILLIONS)


def test_a_warning_for_the_cpu_names_adapters_or_a_smaller_model_if_the_weights_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu, small = {"runtime": {"device": "cpu"}}, {"prompts": 1, "group": 2, "max_tokens": 16}
    monkeypatch.setattr("stretto.setup.memory_report.usable_memory", lambda: 16 * GIB)
    full = describe_memory(recipe(rollout=small, **on_cpu), 16, config=BILLIONS).splitlines()[-1]
    assert "`--set model.lora.rank=16`" in full
    monkeypatch.setattr("stretto.setup.memory_report.usable_memory", lambda: 4 * GIB)
    assert "use a larger device or a smaller model" in describe_memory(
        recipe(rollout=small, **on_cpu), 16, config=BILLIONS
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_cache_for_few_of_the_rows_is_noted_with_what_makes_room(checkpointing: bool) -> None:
    def notes(kv_tokens: int) -> list[str]:
        rollout = {"rows": 16, "prompts": 4, "group": 4, "max_tokens": 68, "kv_tokens": kv_tokens}
        training = {"checkpointing": checkpointing}
        text = describe_memory(recipe(rollout=rollout, training=training, runtime={"device": "cpu"}), 28)
        return [line for line in text.splitlines() if "note" in line]

    assert notes(4 * 128) == []
    (note,) = notes(4 * 128 - 1)
    assert "room for 3 trajectories of full length (128 tokens) at once, and there are 16 rows" in note
    assert ("training.checkpointing" in note) != checkpointing


def test_on_a_cluster_instances_and_trainer_are_planned_apart() -> None:
    text = describe_memory(recipe(runtime={"type": "ray", "device": "cpu"}))
    instance, trainer = (line for line in text.splitlines() if line.startswith("# memory of"))
    assert instance.startswith("# memory of an instance: base")
    assert "KV" in instance
    assert "optimizer" not in instance
    assert trainer.startswith("# memory of the trainer: base")
    assert "optimizer" in trainer
    assert not any(word in trainer for word in ("versions", "KV", "engine", "slack"))


def test_what_does_not_fit_on_one_gpu_together_may_fit_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.setup.memory_report.tiny_config_of", lambda path: BILLIONS)
    monkeypatch.setattr("stretto.setup.memory_report.choose_device", lambda name: CUDA)
    monkeypatch.setattr("stretto.setup.memory_report.describe_device", lambda device: "a GPU")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (40 * GIB, 40 * GIB))
    with pytest.raises(RecipeError, match="the run does not fit"):
        describe_memory(recipe())
    assert "# memory of the trainer" in describe_memory(recipe(runtime={"type": "ray"}))
    with pytest.raises(RecipeError, match=r"the run does not fit: 8\.00 GiB"):
        describe_memory(recipe(runtime={"type": "ray", "instance_gpus": 0.2}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_plan_for_a_gpu_has_its_free_memory() -> None:
    text = describe_memory(recipe(lora=True))
    assert "# device: cuda (" in text
    assert "weights in bfloat16" in text
    assert "GiB free" in text


def test_a_model_of_its_own_to_stay_near_and_several_steps_are_planned_for() -> None:
    kl = {"coefficient": 0.1}
    own = footprint(recipe(algorithm={"kl": kl | {"reference": "tiny"}}), tiny_config(), 16, CPU)
    assert own.reference == own.base
    assert footprint(recipe(lora=True, algorithm={"kl": kl}), tiny_config(), 16, CPU).reference == 0
    one, several = (
        footprint(recipe(lora=True, training={"optimizer_steps": n}), tiny_config(), 16, CPU) for n in (1, 4)
    )
    assert (one.undo, several.undo) == (0, several.optimizer * 3 // 2)


def test_the_passes_of_a_critic_of_several_steps_and_of_a_reference_are_planned_for() -> None:
    def need(type: str = "grpo", steps: int = 1, **beside: Any) -> Any:
        made = recipe(lora=True, algorithm={"type": type, **beside}, training={"optimizer_steps": steps})
        return footprint(made, tiny_config(), 16, CPU)

    plain, a_value_a_token = need(), 16 * 8 * 256 * 4
    critic = need("ppo")
    assert critic.undo == need(steps=4).undo == 3 * plain.optimizer // 2, "a critic that fails undoes the policy's step"
    assert critic.working - plain.working == 2 * a_value_a_token, "values and returns"
    assert need(steps=4).working - plain.working == a_value_a_token
    assert need("ppo", 4, kl={"coefficient": 0.1}).working - plain.working == 4 * a_value_a_token


def test_a_model_to_stay_near_that_is_not_there_is_named_by_its_option() -> None:
    made = recipe(algorithm={"kl": {"coefficient": 0.1, "reference": "./nowhere"}})
    with pytest.raises(ModelError, match=r"`algorithm\.kl\.reference = '\./nowhere'`: there is no folder"):
        footprint(made, tiny_config(), 16, CPU)


def test_an_engine_has_rows_for_the_greedy_answers_of_an_evaluation_too() -> None:
    def rows(**evaluation: Any) -> int:
        return engine_rows(recipe(rollout={"rows": 32}, evaluation=evaluation))

    assert rows(prompts=0) == 32
    assert (rows(prompts=3), rows(prompts=3, greedy=True)) == (35, 38)
    assert rows(prompts=64) == rows(prompts=64, greedy=True) == 40, "a quarter more, however many prompts there are"


# -- several instances -------------------------------------------------------------------------------------------------


def test_instances_divide_rows_and_cache_and_each_has_its_own_slots() -> None:
    one, four = recipe(lora=False), recipe(lora=False, runtime={"instances": 4})
    alone, shared = footprint(one, tiny_config(), 16, CPU), footprint(four, tiny_config(), 16, CPU)
    assert shared.versions == 4 * alone.versions
    assert shared.store == alone.store
    assert engine_rows(one) // 2 <= engine_rows(four) < engine_rows(one), "twice its share, and evaluation's rows"
    assert shared.kv == 4 * shared.kv_tokens * kv_bytes_per_token(tiny_config(), records_routing=True)
    single = footprint(recipe(lora=False, runtime={"instances": 4, "slots": 1}), tiny_config(), 16, CPU)
    assert single.versions * 3 == shared.versions


def test_on_cuda_instances_share_what_is_left_for_the_cache() -> None:
    made = recipe(lora=True, rollout={"prompts": 64, "group": 8, "max_tokens": 4096}, runtime={"instances": 2})
    need = footprint(made, BILLIONS, 512, CUDA, free=100 * GIB)
    per_token = kv_bytes_per_token(BILLIONS, torch.bfloat16, records_routing=True)
    assert need.kv == 2 * need.kv_tokens * per_token
    assert 0 <= 100 * GIB - need.total < 2 * per_token
    with pytest.raises(RecipeError, match=r"on each of `runtime.instances = 2`"):
        footprint(made, BILLIONS, 512, CUDA, free=30 * GIB)
    named = recipe(lora=True, rollout={"kv_tokens": 100_000}, runtime={"instances": 2})
    assert footprint(named, BILLIONS, 100, CUDA, free=140 * GIB).kv_tokens == 50_000


def test_on_cuda_every_instance_with_adapters_has_the_matrices_of_the_layers_for_itself() -> None:
    one, three = recipe(lora=True), recipe(lora=True, runtime={"instances": 3})
    alone, shared = (footprint(made, BILLIONS, 100, CUDA, free=140 * GIB) for made in (one, three))
    matrices = 28 * (2048 * (16 + 2 * 8 + 16) * 128 + 3 * 2048 * 6144)
    assert shared.base - alone.base == 2 * matrices * 2
    assert footprint(three, tiny_config(), 16, CPU).base == footprint(one, tiny_config(), 16, CPU).base
    full = recipe(runtime={"instances": 3})
    assert footprint(full, BILLIONS, 100, CUDA, free=140 * GIB).base == alone.base, "they have slots of their own"


def test_on_cuda_every_slot_of_full_weights_has_what_its_captured_steps_and_prefills_hold() -> None:
    few, many = (recipe(rollout={"staleness": staleness, "prefill_tokens": 4_096}) for staleness in (1, 3))
    more = [footprint(made, BILLIONS, 100, CUDA, free=200 * GIB).engine for made in (few, many)]
    assert engine_rows(few) == engine_rows(many)
    logits, prefill = (engine_rows(few) + 32) * 151_936 * 4, 2_048 * 6 * 6_144 * 2
    assert more[1] - more[0] == (many.num_slots - few.num_slots) * (logits + prefill)


def test_an_instance_without_a_trainer_beside_it_has_the_trainers_memory_for_its_cache() -> None:
    made = recipe(lora=True, rollout={"prompts": 64, "max_tokens": 4_000})
    both = footprint(made, BILLIONS, 100, CUDA, free=40 * GIB)
    alone = footprint(made, BILLIONS, 100, CUDA, free=40 * GIB, trains=False)
    assert alone.optimizer == alone.gradients == alone.working == alone.trained == alone.store == 0
    assert (alone.base, alone.versions) == (both.base, both.versions)
    assert alone.kv_tokens > both.kv_tokens
