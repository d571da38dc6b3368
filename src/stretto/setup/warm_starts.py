"""Warm starts: a model or an adapter that was trained on demonstrations before its run (`model.warm_start.path`).

The result is an ordinary model folder, or with `model.lora` an adapter folder, in the user's cache. Its name has a
digest of the model, the demonstrations and the options. So it is made once, a resumed run and `replay` find it again,
and other machines get it as any other model.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stretto.chat.templates import prefill_of
from stretto.environments.demonstrations import Demonstration, load_demonstrations
from stretto.errors import RecipeError
from stretto.models.adapter_config import CONFIG_FILE
from stretto.models.adapters import adapter_digest, install_adapter, read_adapter, refuse_another_base
from stretto.models.checksums import checksum
from stretto.models.loading import load_config, load_model, load_tokenizer
from stretto.models.lora import inject_lora, lora_tensors, write_adapter
from stretto.models.stop_tokens import end_of_turn, stop_tokens
from stretto.recipe.schema import Recipe, WarmStartSection
from stretto.setup.device import choose_device, choose_dtype
from stretto.setup.inputs import asked_template, prompt_tokenizer
from stretto.setup.made_models import made_once
from stretto.setup.memory_sizes import context_length
from stretto.setup.merged_models import model_identity
from stretto.setup.threads import thread_counts
from stretto.training.supervised import SupervisedOptions, fit

FORMAT = 1  # of what the digest is made of
SHOWN_EVERY_S = 5.0
FULL_RATE, LORA_RATE = 1e-5, 2e-4  # learning rates by default


def has_demonstrations(recipe: Recipe) -> bool:
    """True if the model of a recipe is trained on demonstrations first."""
    return recipe.model.warm_start is not None and recipe.model.warm_start.path is not None


def warm_started(recipe: Recipe, base: str, say: Callable[[str], None]) -> Path:
    """Returns the folder of the model `base`, or of its adapter, after the warm start; made if it is not there yet.

    Raises `RecipeError` for demonstrations that cannot be used.
    """
    has = CONFIG_FILE if recipe.model.lora is not None else "config.json"
    name = f"warm-{_digest(recipe, base)}"
    return made_once(name, has, lambda folder: _make(recipe, base, folder, say), what="the warm-started model")


def check_demonstrations(recipe: Recipe, tokenizer: Any, config: Any, stops: tuple[int, ...]) -> list[str]:
    """Reads the demonstrations of a recipe as a run does. Returns sentences on them."""
    if not has_demonstrations(recipe):
        return []
    options = _section(recipe)
    found = _demonstrations(recipe, tokenizer, config, stops)
    steps = num_steps(options, len(found))
    notes = [
        f"warm start on `{options.path}`: {len(found):,} demonstrations of up to {max(map(len, found)):,} tokens, "
        f"{steps:,} steps of {options.batch_size}"
    ]
    if (most := recipe.rollout.max_tokens) < (longest := max(len(each.completion) for each in found)):
        notes.append(
            f"completions of `{options.path}` have up to {longest:,} tokens, and the policy may generate "
            f"`rollout.max_tokens = {most}`: it may learn to write more than it has room for"
        )
    return notes


def num_steps(options: WarmStartSection, num_demonstrations: int) -> int:
    """Returns the steps of a warm start."""
    if options.steps is not None:
        return options.steps
    return math.ceil((options.epochs or 1.0) * num_demonstrations / options.batch_size)


def _section(recipe: Recipe) -> WarmStartSection:
    assert recipe.model.warm_start is not None
    return recipe.model.warm_start


def _demonstrations(recipe: Recipe, tokenizer: Any, config: Any, stops: tuple[int, ...]) -> list[Demonstration]:
    return load_demonstrations(
        Path(str(_section(recipe).path)),
        tokenizer,
        context=context_length(config),
        end=end_of_turn(tokenizer, stops),
        system=_system(recipe),
    )


def _system(recipe: Recipe) -> str | None:
    """Returns the system message of the tasks, if it is that of all."""
    found = {getattr(task, "system", None) for task in recipe.tasks}
    return found.pop() if len(found) == 1 else None


def _digest(recipe: Recipe, base: str) -> str:
    """Names all that the result depends on."""
    options, model = _section(recipe), recipe.model
    path = Path(str(options.path))
    try:
        with path.open("rb") as file:
            data = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise RecipeError(
            f"`model.warm_start.path = {options.path!r}` cannot be read: {error.strerror}; name a `.jsonl` or "
            "`.parquet` file of demonstrations"
        ) from error
    template = asked_template(recipe, load_tokenizer(base))
    parts = {
        "format": FORMAT,
        "base": model_identity(base),
        "adapter": None if model.continued_adapter is None else adapter_digest(model.continued_adapter),
        "data": data,
        "options": options.model_dump(exclude={"path"}),
        "lora": None if model.lora is None else model.lora.model_dump(),
        "seed": None if model.lora is None else recipe.seed,  # of the adapter that is trained
        "system": _system(recipe),
        "template": template,
        "checkpointing": recipe.training.checkpointing,
        "dtype": str(_dtype(recipe)),
        "device": choose_device(recipe.runtime.device).type,
        "torch": torch.__version__,
    }
    if prefill_of(template):
        parts["prefill"] = "is left out of completions"
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _dtype(recipe: Recipe) -> torch.dtype:
    return choose_dtype(recipe.model.dtype, choose_device(recipe.runtime.device))


@dataclass(frozen=True, slots=True)
class _Trainee:
    """A model that is about to be trained on demonstrations."""

    model: Any
    names: tuple[str, ...] = ()  # of the modules that have adapters
    base_checksums: Mapping[str, str] = field(default_factory=dict)  # of the base of its adapters, by type


def _make(recipe: Recipe, base: str, folder: Path, say: Callable[[str], None]) -> None:
    """Trains on the demonstrations, and writes the model or the adapter."""
    options, lora, device = _section(recipe), recipe.model.lora, choose_device(recipe.runtime.device)
    config, tokenizer, dtype = load_config(base), load_tokenizer(base), _dtype(recipe)
    asked = prompt_tokenizer(recipe, tokenizer)  # with the chat template of the task
    demonstrations = _demonstrations(recipe, asked, config, stop_tokens(base, config, tokenizer))
    steps = num_steps(options, len(demonstrations))
    trainee = _trainee(recipe, base, device, dtype)
    shown_at = time.monotonic()

    def progress(step: int, steps: int, loss: float) -> None:
        nonlocal shown_at
        if step == 1 or step == steps or time.monotonic() - shown_at >= SHOWN_EVERY_S:
            shown_at = time.monotonic()
            say(f"warm start: step {step}/{steps}, loss {loss:.3f}")

    say(f"warm start on {len(demonstrations):,} demonstrations of `{options.path}`, once, kept in the user's cache")
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(thread_counts(recipe).trainer)
    try:
        losses = fit(
            trainee.model,
            demonstrations,
            SupervisedOptions(
                steps,
                options.batch_size,
                options.learning_rate or (FULL_RATE if lora is None else LORA_RATE),
                options.seed,
                max(recipe.training.micro_batch_tokens, max(map(len, demonstrations))),
            ),
            autocast=torch.bfloat16 if dtype != torch.float32 and lora is None else None,
            progress=progress,
        )
    finally:
        torch.set_num_threads(threads)
    if lora is None:
        trainee.model.to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        names = trainee.names
        tensors = lora_tensors(trainee.model, names)
        write_adapter(folder, tensors, options=lora, base=base, names=names, base_checksums=trainee.base_checksums)
    facts = {"demonstrations": len(demonstrations), "steps": steps, "losses": losses, **options.model_dump()}
    (folder / "warm_start.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    del trainee
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _trainee(recipe: Recipe, base: str, device: torch.device, dtype: torch.dtype) -> _Trainee:
    """Loads the model, with the adapters that are trained if the recipe has some.

    Full weights are trained in float32: small steps vanish in half precision. So are adapters, by themselves.
    """
    lora = recipe.model.lora
    working = dtype if lora is None or dtype == torch.float32 else torch.bfloat16
    model: Any = load_model(base, torch.float32 if lora is None else working, device)
    trainee = _Trainee(model)
    if lora is not None:
        own = checksum(dict(model.named_parameters()))
        names = inject_lora(model, lora.rank, lora.effective_alpha, lora.targets, recipe.seed)
        if recipe.model.continued_adapter is not None:
            adapter = read_adapter(recipe.model.continued_adapter)
            refuse_another_base(adapter, recipe.model.path, own, working)
            install_adapter(model, names, adapter)
        trainee = _Trainee(model, names, {str(working).removeprefix("torch."): own})
    if recipe.training.checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    return trainee
