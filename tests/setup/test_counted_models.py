"""The models of a run are built on the meta device once, whatever is chosen and tried with their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from run_cases import recipe as run_recipe
from run_cases import run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

import stretto.assembly.check as check_module
import stretto.assembly.train as train_module
import stretto.setup.factories as factories
import stretto.setup.memory_report as memory_report
import stretto.setup.vllm_engines as vllm_engines
from stretto.assembly.check import check
from stretto.errors import RecipeError
from stretto.local.components import LocalComponents
from stretto.models.tiny import tiny_config, tiny_tokenizer
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.reading import load_recipe, parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import CUDA, device_limit, with_section
from stretto.setup.memory import footprint
from stretto.setup.memory_sizes import GIB

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 6144, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG, OTHER = (Qwen3Config(**SHAPE, num_hidden_layers=layers) for layers in (28, 2))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of layers of the models that are built to be counted."""
    found: list[int] = []
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):

        def from_config(config: Any, *args: Any, make: Any = kind.from_config, **options: Any) -> Any:
            found.append(config.num_hidden_layers)
            return make(config, *args, **options)

        monkeypatch.setattr(kind, "from_config", from_config)
    for module in (check_module, factories):
        monkeypatch.setattr(module, "check_architecture", lambda *_: None)  # it runs models of its own
    return found


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A folder with the configuration of a model, and that of another in it."""
    CONFIG.save_pretrained(tmp_path / "policy")
    OTHER.save_pretrained(tmp_path / "policy" / "other")
    return str(tmp_path / "policy")


def recipe(path: str, lora: bool = True, **sections: Any) -> Recipe:
    model = {"path": path, **({"lora": {"rank": 16}} if lora else {})}
    tables = {"model": model, "task": {"type": "countdown-chain"}, "rollout": {"prompts": 64, "max_tokens": 512}}
    return load_recipe({**tables, **sections})


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_check_counts_once(path: str, built: list[int], runtime: str) -> None:
    report = check(recipe(path, runtime={"type": runtime}), planned=PlannedDevices(2, 141.0))
    assert "# fits 2 x 141 GiB" in report.memory
    assert built == [28]


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(("gib", "said"), [(6.0, "No number of devices of 6 GiB would do"), (10.0, "devices of")])
def test_a_search_for_devices_that_would_do_does_not_count_again(
    path: str, built: list[int], runtime: str, lora: bool, gib: float, said: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        check(recipe(path, lora, runtime={"type": runtime}), planned=PlannedDevices(1, gib))
    assert said.lower() in str(refused.value).lower()
    assert built == [28]


@pytest.mark.parametrize("share", [None, 0.05])
def test_advice_to_use_another_engine_does_not_count_again(path: str, built: list[int], share: float | None) -> None:
    engine = {"type": "vllm"} if share is None else {"type": "vllm", "gpu_memory": share}
    made = recipe(path, engine=engine)
    counted = count_models(made, CONFIG, CUDA)
    with pytest.raises(RecipeError, match=r'`engine.type = "native"` would fit' if share is None else "Raise"):
        footprint(made, CONFIG, 512, CUDA, counted=counted, free=14 * GIB if share is None else 60 * GIB)
    assert built == [28]


def test_the_models_beside_the_policy_are_counted_once_too(path: str, built: list[int]) -> None:
    other = f"{path}/other"
    kl = {"coefficient": 0.1, "reference": other}
    check(recipe(path, algorithm={"kl": kl, "teachers": [{"path": other}]}), planned=PlannedDevices(1, 141.0))
    assert built == [28, 2, 2]


def test_a_plan_for_the_cpu_counts_again_only_to_try_adapters(
    path: str, built: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_report, "usable_memory", lambda: 24 * GIB)
    made = recipe(path, lora=False, runtime={"device": "cpu"})
    text = memory_report.describe_memory(made, 256, config=CONFIG)
    assert "`--set model.lora.rank=16`" in text
    assert built == [28, 28]


def test_a_plan_for_a_cluster_of_cpus_counts_once(path: str, built: list[int]) -> None:
    made = recipe(path, runtime={"type": "ray", "device": "cpu"})
    assert "# memory of the trainer" in memory_report.describe_memory(made, 256, config=CONFIG)
    assert built == [28]


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_an_instance_of_a_cluster_counts_once(
    path: str, built: list[int], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    for module in (factories, vllm_engines):
        monkeypatch.setattr(module, "choose_device", lambda wanted: CUDA)
        monkeypatch.setattr(module, "prepare_device", lambda recipe, device: None)
        monkeypatch.setattr(module, "free_for_instance", lambda recipe, device: device_limit(141.0))
    monkeypatch.setattr(factories, "load_model", lambda *options: None)
    monkeypatch.setattr(factories, "load_tokenizer", lambda path: tiny_tokenizer())
    monkeypatch.setattr(factories, "make_native_engine", lambda *options: None)
    monkeypatch.setattr(vllm_engines, "make_vllm_engine", lambda *options, start_s: None)
    factories.make_instance_engine(recipe(path, runtime={"type": "ray"}, engine={"type": engine}), path, 256)
    assert built == [28]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_run_in_one_process_counts_once(
    model: Path, tmp_path: Path, built: list[int], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The sizes are chosen as on a GPU; the run ends where the model would be loaded onto it."""
    chosen: list[Recipe] = []

    def build(recipe: Recipe, *others: Any) -> NoReturn:
        *_, counted = others
        assert isinstance(counted, CountedModels)
        chosen.append(recipe)
        raise RecipeError("stopped here")

    monkeypatch.setattr(train_module, "choose_device", lambda wanted: device)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (40 * GIB, 40 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
    monkeypatch.setattr(LocalComponents, "build", build)
    made = with_section(run_recipe(model, tmp_path), "rollout", rows=None, prefill_tokens="auto")
    with pytest.raises(RecipeError, match="stopped here"):
        run(with_section(made, "training", micro_tokens="auto"), tmp_path / "run")
    (asked,) = chosen
    assert isinstance(asked.rollout.prefill_tokens, int)
    assert isinstance(asked.training.micro_tokens, int)
    assert built == [tiny_config().num_hidden_layers]


def test_a_count_is_refused_for_a_recipe_with_other_adapters() -> None:
    made = parse_recipe({"model": {"path": "tiny", "lora": {"rank": 4}}, "task": {"type": "countdown-chain"}})
    counted = count_models(made, tiny_config(), CPU)
    with pytest.raises(AssertionError, match="other adapters"):
        footprint(with_section(made, "model", lora=None), tiny_config(), 16, CPU, counted=counted)


def test_one_count_holds_for_every_engine_and_number_of_instances() -> None:
    made = parse_recipe({"model": {"path": "tiny", "lora": {"rank": 4}}, "task": {"type": "countdown-chain"}})
    counted = count_models(made, tiny_config(), CUDA)
    for changed in (
        with_section(made, "engine", type="vllm"),
        with_section(made, "runtime", instances=3),
        with_section(made, "runtime", type="ray", instances=3),
    ):
        plans = [
            footprint(changed, tiny_config(), 16, CUDA, counted=each, free=40 * GIB, here=False)
            for each in (counted, None)
        ]
        assert plans[0] == plans[1]
