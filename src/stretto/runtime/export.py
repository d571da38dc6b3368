"""The folder of a policy: the trained model or adapter, how it is loaded, and for the tiny model its base beside it.

`train` leaves it in `policy/`, `replay` where `--out` says.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from safetensors import SafetensorError

from stretto.config import Recipe
from stretto.errors import RunError
from stretto.runtime.roles import TrainerSeat

BASE = "base"  # folder beside an adapter whose base nobody else has


async def export_policy(trainer: TrainerSeat, folder: Path, recipe: Recipe, *, templated: bool) -> None:
    """Write what was trained, in a form that others load. `templated`: a chat template made the prompts."""
    try:
        await trainer.export(folder)
        await asyncio.to_thread(_complete, folder, recipe, templated=templated)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the trained policy cannot be written to `{folder}`: {error}") from error


def _complete(folder: Path, recipe: Recipe, *, templated: bool) -> None:
    """Add to what the trainer wrote whatever others need to load it."""
    is_tiny = recipe.model.path == "tiny"
    if is_tiny and recipe.model.lora is not None:
        _bring_base(folder)
    if is_tiny and not templated:
        # Nothing should say that a model wants to be asked through a template that it never saw.
        for path in folder.rglob("chat_template.jinja"):
            path.unlink()
    readme = folder / "README.md"
    readme.write_text(_readme(folder, recipe, templated=templated, with_base=(folder / BASE).is_dir()))
    # Weights are written by way of a private temporary file; they are as readable as what lies beside them.
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(readme.stat().st_mode & 0o777)


def _bring_base(folder: Path) -> None:
    """Copy the base of an adapter into its folder, and name it there: the user's cache does not travel."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    shutil.copytree(config["base_model_name_or_path"], folder / BASE, dirs_exist_ok=True)
    config["base_model_name_or_path"] = str((folder / BASE).resolve())
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _readme(folder: Path, recipe: Recipe, *, templated: bool, with_base: bool) -> str:
    """How to load what is in the folder, and how it was asked."""
    lines = ["# A policy trained with Stretto", "", "```python"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if recipe.model.lora is None:
        lines += ["", f'model = AutoModelForCausalLM.from_pretrained("{folder}")']
    else:
        base = f"{folder / BASE}" if with_base else recipe.model.path
        lines += [
            "from peft import PeftModel",
            "",
            f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{folder}")',
        ]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{folder}")', "```", ""]
    if not folder.is_absolute():
        lines += [f"Paths are as seen from `{Path.cwd()}`, where it was trained.", ""]
    if templated:
        lines += [
            "It was trained on chats: prompts were made by `tokenizer.apply_chat_template(messages, "
            "add_generation_prompt=True)`.",
        ]
    else:
        lines += [
            "It was trained on raw text: a prompt went to the tokenizer as it stands in the data, through no chat "
            "template, whether the tokenizer has one or not.",
        ]
    if with_base:
        lines += ["", f"`{BASE}/` is the model that the adapter was trained on; the two travel together."]
    elif recipe.model.lora is not None:
        lines += ["", f"The adapter was trained on `{recipe.model.path}`, which is not in this folder."]
    return "\n".join(lines) + "\n"
