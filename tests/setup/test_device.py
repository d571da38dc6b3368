"""What `auto` comes to, and what is said where there is no GPU."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.errors import RecipeError
from stretto.models.checksums import checksum
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.reading import parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.device import (
    CUDA,
    as_begun,
    choose_device,
    choose_dtype,
    device_limit,
    free_bytes,
    on_device,
    planned_bytes,
    resolved,
)
from stretto.types import Weights

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def recipe(**sections: Any) -> Recipe:
    return parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, **sections})


@pytest.mark.parametrize("seen", [True, False])
def test_auto_is_a_gpu_where_torch_sees_one(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    assert choose_device("auto") == (CUDA if seen else CPU)
    assert choose_device("cpu") == CPU


def test_asking_for_a_gpu_that_is_not_there_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r'`runtime.device = "cuda"`, but .* use "cpu" or "auto"'):
        choose_device("cuda")


def test_the_type_follows_the_device_unless_it_is_named() -> None:
    assert choose_dtype("auto", CUDA) == torch.bfloat16
    assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("float32", CUDA) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert choose_dtype("float16", CUDA) == torch.float16


def test_a_resolved_recipe_names_device_and_type_and_parses_again() -> None:
    made = resolved(recipe(), CUDA)
    assert (made.model.dtype, made.runtime.device) == ("bfloat16", "cuda")
    again = parse_recipe(tomllib.loads(made.dumps()))
    assert (again.model.dtype, again.runtime.device) == ("bfloat16", "cuda")
    assert resolved(recipe(), CPU).model.dtype == "float32"
    assert resolved(recipe(model={"path": "tiny", "dtype": "float32"}), CUDA).model.dtype == "float32"


def test_a_run_is_resumed_in_the_type_that_it_began_in(tmp_path: Path) -> None:
    assert as_begun(recipe(), tmp_path).model.dtype == "auto"
    (tmp_path / "config.toml").write_text(resolved(recipe(), CUDA).dumps())
    assert resolved(as_begun(recipe(), tmp_path), CPU).model.dtype == "bfloat16"
    named = recipe(model={"path": "tiny", "dtype": "float32"})
    assert as_begun(named, tmp_path).model.dtype == "float32", "what is named stays, to be refused by name"


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=needs_gpu)])
def test_weights_on_another_device_have_the_same_checksum(device: torch.device) -> None:
    tensors = {"a": torch.randn(7, 5), "b": torch.randn(33).to(torch.bfloat16)}
    moved = on_device(Weights(3, "lora", tensors, checksum(tensors, 2.0), 2.0), device)
    assert {tensor.device for tensor in moved.tensors.values()} == {device}
    assert checksum(moved.tensors, moved.scale) == moved.checksum


def test_deterministic_has_no_effect_on_the_cpu_and_is_refused_there() -> None:
    recipe = parse_recipe(
        {"model": {"path": "tiny"}, "task": {"type": "countdown-chain"}, "runtime": {"deterministic": True}}
    )
    with pytest.raises(RecipeError, match=r"`runtime.deterministic = true` has no effect on the CPU"):
        resolved(recipe, torch.device("cpu"))
    assert resolved(recipe, CUDA).runtime.deterministic


def test_a_planned_device_has_what_its_context_leaves_within_the_limit_of_the_recipe() -> None:
    devices = PlannedDevices(8, 141.0)
    whole = planned_bytes(recipe(), devices)
    assert 140 << 30 < whole < 141 << 30
    assert planned_bytes(recipe(runtime={"device_gib": 24}), devices) < 24 << 30
    assert planned_bytes(recipe(runtime={"device_gib": 200}), devices) == whole


def test_what_an_earlier_run_left_in_the_cache_of_the_allocator_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cached, gib = [30], 1 << 30  # beside 10 GiB that are in use, and 1 GiB of another process
    monkeypatch.setattr("torch.cuda.empty_cache", cached.clear)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: (10 + sum(cached)) * gib)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: ((80 - 11 - sum(cached)) * gib, 80 * gib))
    assert free_bytes(recipe(), CUDA) == 69 * gib
    cached.append(30)
    assert free_bytes(recipe(runtime={"device_gib": 24}), CUDA) == device_limit(24) - 10 * gib


@needs_gpu
def test_a_second_run_of_a_process_may_take_what_the_first_one_took() -> None:
    before = free_bytes(recipe(), CUDA)
    torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    assert free_bytes(recipe(), CUDA) >= before - (64 << 20)
