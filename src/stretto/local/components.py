"""Engines and trainer of a run in one process, which share one copy of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stretto.engines.native.capture_lock import release_cached
from stretto.engines.threaded import SteppedEngine
from stretto.engines.vllm.releases import check_release, installed_release
from stretto.models.loading import load_config, load_model, second_tree
from stretto.observe.start_phases import start_phase
from stretto.recipe.schema import Recipe
from stretto.setup.compile_cache import import_compiler
from stretto.setup.counted_models import CountedModels
from stretto.setup.device import choose_device, choose_dtype, prepare_device
from stretto.setup.factories import DriverInputs, load_driver_inputs, make_native_engine, make_trainer
from stretto.setup.memory import footprint
from stretto.setup.memory_advice import out_of_memory
from stretto.setup.threads import ThreadCounts
from stretto.setup.vllm_engines import make_vllm_engine, records_masks
from stretto.training.learning_rates import LearningRates
from stretto.training.trainer import LocalTrainer
from stretto.training.warm_up import compiles, warm_up

log = logging.getLogger(__name__)

STARTS_VLLM = {
    "cuda": "vLLM starts, which takes one to two minutes for each instance on a GPU",
    "cpu": "vLLM starts, which can take a minute for each instance",
}


@dataclass(slots=True)
class LocalComponents:
    """Made before the run writes anything, so that bad input and a lack of memory show first."""

    driver: DriverInputs
    engines: list[SteppedEngine]  # of the instances that the run begins with
    make_engine: Callable[[], SteppedEngine]  # for an instance that joins later
    trainer: LocalTrainer
    is_warm: bool = False  # the trainer has compiled what its updates need

    def next_engine(self) -> SteppedEngine:
        """Returns the engine of the next instance: one that was made before the run, or a new one.

        For one thread at a time.
        """
        return self.engines.pop(0) if self.engines else self.make_engine()

    @classmethod
    def build(
        cls,
        recipe: Recipe,
        model_path: str,
        driver: DriverInputs | None = None,
        rates: LearningRates | None = None,
        say: Callable[[str], None] = lambda text: None,
        counted: CountedModels | None = None,
    ) -> LocalComponents:
        """Loads the model, and makes engines and trainer. Raises `RecipeError` if they do not fit.

        `driver` None: the inputs are loaded too. `rates` None: the learning rates are those of the recipe.
        `say` is told of a start that takes long. `counted` are the models of the recipe; None: they are counted here.
        """
        if recipe.engine.type == "vllm":
            check_release(installed_release(), masks=records_masks(recipe))
        config, device = load_config(model_path), choose_device(recipe.runtime.device)
        dtype = choose_dtype(recipe.model.dtype, device)
        prepare_device(recipe, device)
        compiler_is_there = import_compiler(device)
        driver = load_driver_inputs(recipe, model_path) if driver is None else driver
        need = footprint(recipe, config, driver.inputs.longest_prompt, device, counted=counted)
        engines: list[SteppedEngine] = []
        uses_vllm = recipe.engine.type == "vllm"

        def make_vllm() -> SteppedEngine:
            threads = driver.threads.engine
            return make_vllm_engine(recipe, model_path, need, device, driver.decode, threads=threads)

        try:
            with start_phase(log, f"model, on {device} in {str(dtype).removeprefix('torch.')}", say):
                model = load_model(model_path, dtype, device)
            torch.set_num_threads(driver.threads.engine)  # a new engine measures how this number of threads rounds
            # The engines' module trees first: the trainer replaces linear layers in the tree that was loaded.
            if uses_vllm:
                say(STARTS_VLLM[device.type])
            room = f"with KV for {need.kv_tokens:,} tokens each"
            with start_phase(log, f"engines ({recipe.runtime.instances}, {room})", None if uses_vllm else say):
                engines.extend(
                    make_vllm() if uses_vllm else make_native_engine(recipe, model, need.kv_tokens, driver.decode)
                    for _ in range(recipe.runtime.instances)
                )
            base = None if recipe.model.lora is None or uses_vllm else second_tree(model, share=True)
            compiler_is_there()
            with start_phase(log, "trainer", say):
                trainer = make_trainer(recipe, model, model_path, rates=rates)
            is_warm = compiles(trainer) and _warmed(recipe, trainer, driver.threads, say)
        except BaseException as error:
            for engine in engines if uses_vllm else ():
                engine.close()  # it is a process
            if isinstance(error, torch.OutOfMemoryError):
                raise out_of_memory(recipe, need, driver.inputs.longest_prompt, error) from error
            raise

        def make_engine() -> SteppedEngine:
            # Weights that are being trained are no base for an engine: full training loads the model again.
            tree = load_model(model_path, dtype, device) if base is None else base
            return make_native_engine(recipe, tree, need.kv_tokens, driver.decode)

        return cls(driver, engines, make_vllm if uses_vllm else make_engine, trainer, is_warm)


def _warmed(recipe: Recipe, trainer: LocalTrainer, threads: ThreadCounts, say: Callable[[str], None]) -> bool:
    """Warms the trainer up, before any engine captures a graph. Returns False if there was no memory for that."""
    tokens = recipe.rollout.prompts * recipe.rollout.group * recipe.rollout.max_tokens
    torch.set_num_threads(threads.trainer)  # with another number, the thread of the trainer would compile again
    try:
        with start_phase(log, "first pass of the trainer, which compiles, or loads what was compiled", say):
            return warm_up(trainer, tokens) > 0
    finally:
        torch.set_num_threads(threads.engine)
        if trainer.device.type == "cuda":
            release_cached()
