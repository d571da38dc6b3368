"""Plans for devices that are not here: whether a recipe fits, and how many would do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import Qwen3Config

from stretto.errors import RecipeError
from stretto.models.loading import load_config
from stretto.models.shapes import shape_folder
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.cluster_devices import devices_taken, packed
from stretto.setup.counted_models import count_models
from stretto.setup.device import CUDA, resolved, with_section
from stretto.setup.device_plan import PlannedModel, fit_in_one_process, fit_on_cluster, smallest_fit, smallest_size
from stretto.setup.memory import rank_footprint
from stretto.setup.memory_report import describe_memory
from stretto.setup.memory_sizes import GIB

EIGHT, SMALL = PlannedDevices(8, 141.0), PlannedDevices(8, 24.0)
PROMPT = 256


@pytest.fixture(scope="module")
def eight_billions() -> Qwen3Config:
    return load_config(str(shape_folder("Qwen/Qwen3-8B")))


def recipe(lora: bool = True, **sections: Any) -> Recipe:
    model: dict[str, Any] = {"path": "Qwen/Qwen3-8B"}
    if lora:
        model["lora"] = {"rank": 16}
    base = {
        "model": model,
        "task": {"type": "countdown-chain"},
        "rollout": {"max_tokens": 1024},
        "runtime": {"type": "ray"},
        "training": {"micro_tokens": 2048, "checkpointing": True},
    }
    return resolved(parse_recipe({**base, **sections}), CUDA)


def sized(made: Recipe, config: Any) -> PlannedModel:
    return PlannedModel(config, count_models(made, config, CUDA), PROMPT)


def test_the_shapes_that_come_with_the_package_have_the_parameters_of_their_models() -> None:
    for name, billions in {"Qwen/Qwen3-8B": 8.19, "Qwen/Qwen3-30B-A3B": 30.53}.items():
        need = rank_footprint(recipe(), load_config(str(shape_folder(name))), PROMPT, CUDA)
        assert need.base / 2e9 == pytest.approx(billions, abs=0.01)
    assert shape_folder("Qwen/Qwen3-9B") is None
    assert shape_folder("Qwen3-8B") is None


def test_a_cluster_counts_the_devices_of_instances_and_ranks(eight_billions: Qwen3Config) -> None:
    made = recipe(runtime={"type": "ray", "instances": 6, "trainers": 2})
    text = describe_memory(made, PROMPT, config=eight_billions, planned=EIGHT)
    assert "# devices: 8 x 141 GiB" in text
    assert "`runtime.instances = 6` with 1 each and `runtime.trainers = 2` with 1 each take 8 of 8 devices" in text
    seven = recipe(runtime={"type": "ray", "instances": 7, "trainers": 2})
    would_do = r"9 devices of 141 GiB would do; 8 would do with `runtime\.instances = 6`"
    with pytest.raises(RecipeError, match=rf"does not fit 8 x 141 GiB.*take 9 devices\. {would_do}"):
        describe_memory(seven, PROMPT, config=eight_billions, planned=EIGHT)


def test_devices_that_one_instance_is_cut_over_count_and_have_its_memory(eight_billions: Qwen3Config) -> None:
    vllm: dict[str, Any] = {"engine": {"type": "vllm", "tensor_parallel": 4}}
    made = recipe(**vllm, runtime={"type": "ray", "instances": 1, "trainers": 1})
    assert devices_taken(made) == 5
    instance, _ = fit_on_cluster(made, eight_billions, PROMPT, SMALL)
    assert instance.base == pytest.approx(15.26 * GIB, rel=1e-3), "one copy over four devices"
    assert 24 * GIB < instance.total < 4 * 24 * GIB
    uncut = recipe(engine={"type": "vllm"}, rollout={"max_tokens": 1024, "kv_tokens": 30_000})
    would_do = r"3 devices of 24 GiB would do, with `engine.tensor_parallel = 2`$"
    with pytest.raises(RecipeError, match=rf"an instance: 23\.40 GiB.*{would_do}"):
        fit_on_cluster(uncut, eight_billions, PROMPT, SMALL)


def test_the_fewest_devices_that_would_do_are_named_with_their_options(eight_billions: Qwen3Config) -> None:
    made = recipe(engine={"type": "vllm"}, rollout={"max_tokens": 20_000}, training={"micro_tokens": 2048})
    small = PlannedDevices(8, 21.0)
    found = smallest_fit(made, sized(made, eight_billions), small)
    assert found is None, "adapters are whole on every rank of the trainer"
    full = recipe(
        False, engine={"type": "vllm"}, rollout={"paradigm": "synchronous", "max_tokens": 1024},
        training={"micro_tokens": 2048, "checkpointing": True},
    )  # fmt: skip
    with pytest.raises(RecipeError) as refused:
        fit_on_cluster(full, eight_billions, PROMPT, PlannedDevices(2, 80.0))
    best = smallest_fit(full, sized(full, eight_billions), PlannedDevices(2, 80.0))
    assert best is not None
    ranks = best.runtime.trainers
    assert ranks > 2, "20 bytes a parameter do not fit on two"
    assert f"{devices_taken(best)} devices of 80 GiB would do, with `runtime.trainers = {ranks}`" in str(refused.value)
    assert "processes hold" not in str(refused.value), "they are not those of this machine"
    fewer = with_section(best, "runtime", trainers=ranks - 1)
    with pytest.raises(RecipeError, match="a rank of the trainer"):
        fit_on_cluster(fewer, eight_billions, PROMPT, PlannedDevices(8, 80.0))
    fit_on_cluster(best, eight_billions, PROMPT, PlannedDevices(devices_taken(best), 80.0))


def test_checkpointing_is_named_where_nothing_else_fits(eight_billions: Qwen3Config) -> None:
    made = recipe(training={"micro_tokens": 4096})
    with pytest.raises(RecipeError, match=r"2 devices of 24 GiB would do, with `training.checkpointing = true`$"):
        fit_on_cluster(made, eight_billions, PROMPT, SMALL)
    assert smallest_fit(made, sized(made, eight_billions), EIGHT) == made


def test_smaller_micro_batches_are_named_where_checkpointing_is_not_enough(eight_billions: Qwen3Config) -> None:
    made = recipe(training={"micro_tokens": 32_768})
    would_do = r"2 devices of 24 GiB would do, with `training.checkpointing = true`, `training.micro_tokens = (\d+)`$"
    with pytest.raises(RecipeError, match=would_do) as refused:
        fit_on_cluster(made, eight_billions, PROMPT, SMALL)
    assert "Lower `training.micro_tokens` (now 32768), or" in str(refused.value)
    found = smallest_fit(made, sized(made, eight_billions), SMALL)
    assert found is not None
    fit_on_cluster(found, eight_billions, PROMPT, SMALL)
    twice = with_section(found, "training", micro_tokens=2 * found.training.micro_batch_tokens)
    with pytest.raises(RecipeError, match="a rank of the trainer"):
        fit_on_cluster(twice, eight_billions, PROMPT, SMALL)


def test_a_micro_batch_of_one_trajectory_is_not_to_be_lowered(eight_billions: Qwen3Config) -> None:
    made = recipe(rollout={"max_tokens": 16_000}, training={"micro_tokens": 2048, "checkpointing": True})
    with pytest.raises(RecipeError, match=r"Lower `rollout\.max_tokens` \(now 16000\)\."):
        fit_on_cluster(made, eight_billions, PROMPT, SMALL)


def test_the_least_size_is_named_if_no_number_of_devices_would_do(eight_billions: Qwen3Config) -> None:
    made, tiny = recipe(training={"micro_tokens": 2048}), PlannedDevices(8, 12.0)
    with pytest.raises(RecipeError, match=r"No number of devices of 12 GiB would do\. 2 devices of (\d+) GiB would do"):
        fit_on_cluster(made, eight_billions, PROMPT, tiny)
    least = smallest_size(made, sized(made, eight_billions), tiny)
    assert least is not None
    found = smallest_fit(made, sized(made, eight_billions), least)
    assert found is not None
    fit_on_cluster(found, eight_billions, PROMPT, least)
    assert smallest_fit(made, sized(made, eight_billions), PlannedDevices(8, least.gib - 1)) is None


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ({"prefill_tokens": 10_000_000}, "rollout.prefill_tokens = 10000000"),
        ({"kv_tokens": 100_000_000}, "rollout.kv_tokens = 100000000"),
        ({"max_tokens": 10_000_000}, "rollout.max_tokens = 10000000"),
    ],
)
def test_an_option_that_is_too_large_for_every_size_is_named(
    eight_billions: Qwen3Config, rollout: dict[str, int], told: str
) -> None:
    made = recipe(engine={"type": "vllm"}, rollout={"max_tokens": 1024, **rollout})
    with pytest.raises(RecipeError) as refused:
        fit_on_cluster(made, eight_billions, PROMPT, EIGHT)
    largest = f"`{told}` is too large for devices of 1024 GiB, too: lower it"
    assert str(refused.value).endswith(f"No number of devices of 141 GiB would do. {largest}")


def test_a_share_that_is_too_small_is_raised_before_devices_are_added(eight_billions: Qwen3Config) -> None:
    made = recipe(engine={"type": "vllm", "gpu_memory": 0.01})
    with pytest.raises(RecipeError) as refused:
        fit_on_cluster(made, eight_billions, PROMPT, EIGHT)
    would_do = r"2 devices of 141 GiB would do, with `engine\.gpu_memory = (0\.\d+)`$"
    found = re.search(would_do, str(refused.value))
    assert found is not None, refused.value
    assert f"Raise `engine.gpu_memory` (now 0.01) to at least {found[1]}. " in str(refused.value)
    assert "weights alone" not in str(refused.value)
    fit_on_cluster(with_section(made, "engine", gpu_memory=float(found[1])), eight_billions, PROMPT, EIGHT)


def test_weights_that_do_not_fit_are_told_and_no_option_that_does_not_help(eight_billions: Qwen3Config) -> None:
    made = recipe(engine={"type": "vllm"})
    with pytest.raises(RecipeError) as refused:
        fit_on_cluster(made, eight_billions, PROMPT, PlannedDevices(8, 10.0))
    instance, _, rank = str(refused.value).partition("a rank of the trainer")
    alone = "The weights alone take 15.26 GiB: use a larger device or a smaller model"
    assert f"{alone}, or raise `engine.tensor_parallel`; " in instance
    assert f"{alone}. No number" in rank
    assert "Lower" not in str(refused.value)


def test_fewer_version_slots_are_named_where_an_instance_has_too_many(eight_billions: Qwen3Config) -> None:
    runtime = {"type": "ray", "instances": 3, "trainers": 4}
    made = recipe(False, runtime=runtime)
    with pytest.raises(RecipeError, match=r"would do, with `runtime\.slots = 1`") as refused:
        fit_on_cluster(made, eight_billions, PROMPT, PlannedDevices(8, 44.0))
    assert "`runtime.slots` (now 3 for each instance)" in str(refused.value)
    two = recipe(False, runtime={**runtime, "instances": 2})
    found = smallest_fit(two, sized(two, eight_billions), PlannedDevices(8, 44.0))
    assert found is None, "two instances of one slot do not hold the three versions"


def test_too_many_instances_are_told_how_many_there_is_room_for(eight_billions: Qwen3Config) -> None:
    vllm: dict[str, Any] = {"engine": {"type": "vllm", "tensor_parallel": 2}}
    made = recipe(**vllm, runtime={"type": "ray", "instances": 6, "trainers": 2})
    said = r"14 devices of 141 GiB would do; 8 would do with `runtime\.instances = 3`$"
    with pytest.raises(RecipeError, match=said):
        fit_on_cluster(made, eight_billions, PROMPT, EIGHT)
    fit_on_cluster(with_section(made, "runtime", instances=3), eight_billions, PROMPT, EIGHT)
    ranks = recipe(runtime={"type": "ray", "instances": 1, "trainers": 9})
    with pytest.raises(RecipeError, match=r"10 devices of 141 GiB would do$"):
        fit_on_cluster(ranks, eight_billions, PROMPT, EIGHT)


def test_full_weights_are_sharded_over_the_ranks(eight_billions: Qwen3Config) -> None:
    def rank(count: int, lora: bool = False) -> Any:
        made = recipe(lora, rollout={"paradigm": "synchronous"}, runtime={"type": "ray", "trainers": count})
        return rank_footprint(made, eight_billions, PROMPT, CUDA)

    one, four = rank(1), rank(4)
    in_layers = 1 - 2 * 151_936 * 4096 / 8.19e9
    assert four.optimizer / one.optimizer == pytest.approx(1 - in_layers * 3 / 4, rel=1e-3)
    assert rank(4, lora=True).base == rank(1, lora=True).base == one.base


def test_one_process_uses_one_device_and_is_told_how_many_a_cluster_would_need(eight_billions: Qwen3Config) -> None:
    alone = recipe(runtime={"type": "local"})
    text = describe_memory(alone, PROMPT, config=eight_billions, planned=EIGHT)
    assert "# fits 8 x 141 GiB: a run in one process uses 1 of 8 devices" in text
    with pytest.raises(RecipeError, match=r"more of them do not help it; on a cluster 2 devices of 24 GiB would do"):
        fit_in_one_process(alone, eight_billions, PROMPT, SMALL)
    with pytest.raises(RecipeError, match=r"on a cluster, too, no number of devices of 12 GiB would do\. 2 devices of"):
        fit_in_one_process(alone, eight_billions, PROMPT, PlannedDevices(8, 12.0))


@pytest.mark.parametrize(
    ("shares", "devices"),
    [([1.0, 1.0], 2), ([0.5, 0.5], 1), ([0.6, 0.6, 0.4], 2), ([0.6, 0.6, 0.6], 3), ([4.0, 0.5, 2.0], 7), ([0.0], 0)],
)
def test_fractions_share_a_device_where_they_fit(shares: list[float], devices: int) -> None:
    assert packed(shares) == devices
