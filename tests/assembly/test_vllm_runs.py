"""Whole runs with the vLLM engine: with a fake of the package, and with the real one where it is installed.

The fake computes with transformers (`tests/cases/fake_vllm`). The real one runs in `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_cases import agents
from interruption_cases import Dies
from run_cases import Heard, assert_verifies, recipe, rows, run
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

import stretto
from stretto.engines.vllm.process import MEMORY_FOLDER
from stretto.errors import RecipeError
from stretto.models.tiny import tiny_config, tiny_moe_config, tiny_tokenizer
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "cases" / "fake_vllm"
IS_INSTALLED = importlib.util.find_spec("vllm") is not None
TINY = (
    "model.lora={rank = 4}",
    "task.size=64",
    "task.template=",  # the tiny tokenizer knows no thinking
    "rollout.prompts=2",
    "rollout.group=2",
    "rollout.max_tokens=8",
    "training.steps=2",
    "evaluation.every=1",
    "evaluation.prompts=2",
    'runtime.type="local"',
    "runtime.instances=1",
    "runtime.trainers=",
    'runtime.device="cpu"',
    "runtime.engine_threads=1",
    "runtime.trainer_threads=1",
)

# Random weights earn no reward for sums. So runs have a task on which chance earns some, and versions differ.
EARNING = 'task={type = "file", path = "prompts.jsonl", reward = "our_rewards:letters"}'


@pytest.fixture(
    params=["fake", pytest.param("real", marks=pytest.mark.skipif(not IS_INSTALLED, reason="vLLM is not installed"))]
)
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has runs use the fake package, or the real one."""
    if request.param == "fake":
        use_fake(monkeypatch)
    return str(request.param)


def use_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAKE))
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights of tiny shapes, of the architectures of the recipes."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "qwen3-8b-vllm": Qwen3ForCausalLM(tiny_config(tie_word_embeddings=False)),
        "qwen3-30b-a3b": Qwen3MoeForCausalLM(tiny_moe_config(tie_word_embeddings=False)),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return {name: folder / name for name in made}


def tiny(name: str, models: dict[str, Path], *more: str) -> Recipe:
    """A recipe for eight GPUs, for one process and a tiny model."""
    return load_recipe(ROOT / "recipes" / f"{name}.toml", (f'model.path="{models[name]}"', *TINY, *more))


def num_policies(folder: Path) -> int:
    """The number of different weights that the versions of a run have."""
    return int(rows(folder, "SELECT COUNT(DISTINCT checksum) FROM versions")[0][0])


# -- the recipes for eight GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-8b-vllm", "qwen3-30b-a3b"])
def test_a_recipe_for_eight_gpus_is_planned_from_the_shape_of_its_model_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("stretto.models.hub.is_offline_mode", lambda: True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    text = str(stretto.check(name, devices="8x141GiB"))
    assert "# fits 8 x 141 GiB: `runtime.instances = 6` with 1 each and `runtime.trainers = 2` with 1 each" in text
    assert "take 8 of 8 devices" in text
    assert "is the one that comes with the package" in text
    path = load_recipe(name).model.path
    assert f"the weights of `{path}` are not here" in text
    assert f"the tokenizer of `{path}` is not here, so prompts and rewards were not checked" in text
    with pytest.raises(RecipeError, match=r"does not fit 4 x 141 GiB.*take 8 devices\. 8 devices of 141 GiB would do"):
        stretto.check(name, devices="4x141GiB")


def test_an_instance_over_several_devices_is_counted_and_must_divide_the_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.models.hub.is_offline_mode", lambda: True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    changes = {"engine.tensor_parallel": 2, "runtime.instances": 3}
    text = str(stretto.check("qwen3-8b-vllm", changes, devices="8x141GiB"))
    assert "`runtime.instances = 3` with 2 each and `runtime.trainers = 2` with 1 each take 8 of 8 devices" in text
    assert "on 2 devices" in text
    with pytest.raises(RecipeError, match=r"`engine.tensor_parallel = 3` does not divide the 32 heads and 8 key-value"):
        stretto.check("qwen3-8b-vllm", changes | {"engine.tensor_parallel": 3}, devices="8x141GiB")
    with pytest.raises(RecipeError, match=r'`devices` are GPUs, and `runtime.device = "cpu"` uses none'):
        stretto.check("qwen3-8b-vllm", {"runtime.device": "cpu"}, devices="8x141GiB")


def test_a_folder_with_a_configuration_alone_is_planned_and_its_weights_are_missed(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    change = {"model.path": str(tmp_path)}
    text = str(stretto.check("qwen3-8b-vllm", change, devices="8x141GiB"))
    assert f"`model.path = '{tmp_path}'` has no weights (`*.safetensors`): `train` needs them" in text
    assert f"the tokenizer of `{tmp_path}` is not here" in text
    assert "comes with the package" not in text
    with pytest.raises(stretto.StrettoError, match="has no tokenizer that can be loaded"):
        stretto.check("qwen3-8b-vllm", change | {"runtime.device": "cpu"})


def test_the_8b_recipe_makes_two_updates_on_a_tiny_model(vllm: str, models: dict[str, Path], tmp_path: Path) -> None:
    heard = Heard()
    summary = run(tiny("qwen3-8b-vllm", models, EARNING), tmp_path / "run", observer=heard)
    assert summary["steps"] == 2
    assert heard.said.count("vLLM starts, which can take a minute for each instance") == 1
    assert num_policies(tmp_path / "run") == 3
    assert "8 of the completions by receipt" in assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT DISTINCT served_by, layout FROM receipts") == [
        ("vllm 0.32.0", "1 x cpu, float32")
    ]
    ((versions, digests),) = rows(
        tmp_path / "run", "SELECT COUNT(DISTINCT version), COUNT(DISTINCT held) FROM receipts"
    )
    assert versions >= 2
    assert digests == 1, "that of the base"
    assert summary["eval_after"] is not None


def test_the_mixture_recipe_makes_two_updates_on_a_tiny_model(models: dict[str, Path], tmp_path: Path) -> None:
    summary = run(tiny("qwen3-30b-a3b", models, EARNING), tmp_path / "run")
    assert summary["steps"] == 2
    assert num_policies(tmp_path / "run") == 3
    assert_verifies(tmp_path / "run")


# -- the check of a release --------------------------------------------------------------------------------------------


@pytest.mark.skipif(IS_INSTALLED, reason="vLLM is installed")
def test_a_check_in_one_process_refuses_a_missing_vllm(models: dict[str, Path]) -> None:
    made = tiny("qwen3-8b-vllm", models)
    with pytest.raises(RecipeError, match=r"needs vLLM, which is not installed.*stretto\[vllm\]"):
        stretto.check(made)
    elsewhere = str(stretto.check(made, {"runtime.device": "auto"}, devices="1x24GiB"))
    assert 'On this machine `engine.type = "vllm"` needs vLLM, which is not installed' in elsewhere
    on_cluster = str(stretto.check(made, {"runtime.type": "ray", "runtime.device": "cpu"}))
    assert 'On this machine `engine.type = "vllm"` needs vLLM' in on_cluster


@pytest.mark.parametrize(("release", "why"), [("0.28.0", "captured graphs"), ("0.31.0", "was never tried")])
def test_a_check_names_a_release_that_is_refused(
    release: str, why: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.assembly.check.installed_release", lambda: release)
    made = tiny("qwen3-8b-vllm", models)
    with pytest.raises(RecipeError, match=why):
        stretto.check(made)
    assert why in str(stretto.check(made, {"runtime.device": "auto"}, devices="1x24GiB"))


def test_a_check_says_which_vllm_is_there(vllm: str, models: dict[str, Path]) -> None:
    """And reads the prompts and the reward of the recipe."""
    assert "vLLM 0.32.0 is installed here, a release that is accepted" in str(
        stretto.check(tiny("qwen3-8b-vllm", models))
    )


# -- truncated sampling ------------------------------------------------------------------------------------------------


def test_training_gets_what_top_k_and_top_p_leave(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(monkeypatch)
    monkeypatch.setattr("stretto.engines.vllm.releases.MASK_DEVICES", ("cuda", "cpu"))  # the fake stands in for a GPU
    made = tiny("qwen3-8b-vllm", models, EARNING, "rollout.top_k=5", "rollout.top_p=0.9", "evaluation.greedy=true")
    run(made, tmp_path / "run")
    assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT COUNT(*), COUNT(supports) FROM completions") == [(8, 8)]


def test_top_k_is_refused_on_the_cpu_before_a_child_starts(
    vllm: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.setup.vllm_engines.ChildProcess", None)
    made = tiny("qwen3-8b-vllm", models, "rollout.top_k=5")
    for refuse in (stretto.check, lambda made: run(made, tmp_path / "run")):
        with pytest.raises(RecipeError, match=r"`rollout\.top_k = 5` is refused .* on the CPU"):
            refuse(made)
    stretto.check(made, {"runtime.device": "auto"}, devices="1x24GiB")


@pytest.mark.skipif(not IS_INSTALLED, reason="vLLM is not installed")
def test_the_real_vllm_has_no_mask_on_the_cpu(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.engines.vllm.releases.MASK_DEVICES", ("cuda", "cpu"))
    with pytest.raises(RecipeError, match=r"`rollout\.top_k` needs the sampling mask of vLLM"):
        run(tiny("qwen3-8b-vllm", models, "rollout.top_k=5"), tmp_path / "run")


# -- receipts ----------------------------------------------------------------------------------------------------------


def test_receipts_of_full_weights_have_the_digest_of_what_vllm_holds(vllm: str, model: Path, tmp_path: Path) -> None:
    changes = ('engine.type="vllm"', 'rollout.paradigm="synchronous"', "training.steps=2")
    run(recipe(model, tmp_path, *changes, lora=False), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    found = dict(rows(tmp_path / "run", "SELECT version, held FROM receipts WHERE layout = '1 x cpu, float32'"))
    assert len(set(found.values())) == len(found) == 3, "each version has its own"


# -- agents, resumed runs, a cluster -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_agents_are_served_over_the_endpoint(vllm: str, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    summary = run(agents(model, tmp_path, 'engine.type="vllm"', "training.steps=2"), tmp_path / "run")
    assert summary["trained_trajectories"] == 16
    assert summary["eval_after"] is not None
    assert "16 of the completions by receipt" not in assert_verifies(tmp_path / "run"), "an agent has several"
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM completions WHERE receipts IS NULL") == [(0,)]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(monkeypatch)
    made = tiny("qwen3-8b-vllm", models, EARNING, "training.steps=3")
    with pytest.raises(KeyError):
        run(made, tmp_path / "run", observer=Dies(at=0))
    assert run(made, tmp_path / "run", resume=True)["steps"] == 3
    assert "12 of the completions by receipt" in assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM sessions") == [(2,)]


@pytest.mark.slow
def test_instances_on_a_cluster_have_a_child_each(models: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    changes = ('runtime.type="ray"', 'runtime.address="local"', "runtime.instances=2", "runtime.instance_cpus=0.5")
    more = ("runtime.trainer_cpus=0.5", "runtime.engine_threads=", "runtime.trainer_threads=", "evaluation.every=")
    made = tiny("qwen3-8b-vllm", models, EARNING, *changes, *more)
    (tmp_path / "recipe.toml").write_text(made.source_toml())
    path = os.pathsep.join([str(FAKE), *sys.path])
    before = set(MEMORY_FOLDER.glob("stretto-vllm-*"))
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "train", "recipe.toml", "--out", "run"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "8 of the completions by receipt" in assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT COUNT(DISTINCT instance) FROM receipts") == [(2,)]
    deadline = time.monotonic() + 30
    while left := set(MEMORY_FOLDER.glob("stretto-vllm-*")) - before:  # perhaps those of another test
        assert time.monotonic() < deadline, f"children have left {left}"
        time.sleep(0.1)


# -- comparing ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not IS_INSTALLED, reason="vLLM is not installed")
def test_a_comparison_has_a_row_for_the_real_engine(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # for the runs' processes
    (tmp_path / "recipe.toml").write_text(
        tiny("qwen3-8b-vllm", models, "training.steps=1", "evaluation.every=").source_toml()
    )
    found = stretto.compare(
        tmp_path / "recipe.toml", folder=tmp_path / "out", paradigms=["multi-version"], engines=["native", "vllm"]
    )
    assert [row["engine"] for row in found] == ["native", "vllm"]
    assert_verifies(tmp_path / "out" / "multi-version-vllm")
