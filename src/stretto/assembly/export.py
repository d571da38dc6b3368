"""The folder of a trained policy: model or adapter, a README on how to load it, and the base of a tiny model.

`train` writes it to `policy/`, and `replay` to `--out`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from safetensors import SafetensorError

from stretto.errors import RunError
from stretto.recipe.schema import Recipe
from stretto.run.protocols import TrainerBackend

BASE = "base"  # folder beside an adapter of the tiny model, whose base exists nowhere else


async def export_policy(trainer: TrainerBackend, folder: Path, recipe: Recipe, *, templated: bool) -> None:
    """Writes the trained policy for other tools to load. `templated`: a chat template made the prompts."""
    try:
        await trainer.export(folder)
        await asyncio.to_thread(_complete, folder, recipe, templated=templated)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the trained policy cannot be written to `{folder}`: {error}") from error


def _complete(folder: Path, recipe: Recipe, *, templated: bool) -> None:
    """Adds what other tools need to load the policy."""
    is_tiny = recipe.model.path == "tiny"
    if is_tiny and recipe.model.lora is not None:
        _copy_base(folder)
    if is_tiny and not templated:
        # The model never saw this template, so tools must not apply it.
        for path in folder.rglob("chat_template.jinja"):
            path.unlink()
    readme = folder / "README.md"
    readme.write_text(_readme(folder, recipe, templated=templated, with_base=(folder / BASE).is_dir()))
    # Weights are written through a private temporary file; give them the permissions of the other files.
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(readme.stat().st_mode & 0o777)


def _copy_base(folder: Path) -> None:
    """Copies the base of an adapter into its folder and refers to it there: the user's cache stays behind."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    shutil.copytree(config["base_model_name_or_path"], folder / BASE, dirs_exist_ok=True)
    config["base_model_name_or_path"] = str((folder / BASE).resolve())
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _readme(folder: Path, recipe: Recipe, *, templated: bool, with_base: bool) -> str:
    """Returns the text of the README: how to load the policy, and how its prompts were made."""
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
