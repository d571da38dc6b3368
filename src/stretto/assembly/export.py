"""The folder of a trained policy: model or adapter, a README on how to load it, and the base of a tiny model.

`train` writes it to `policy/`, and `replay` to `--out`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from safetensors import SafetensorError

from stretto.chat.templates import Template, write_template
from stretto.errors import RunError
from stretto.models.adapter_config import BASE_FOLDER, CONFIG_FILE
from stretto.recipe.schema import Recipe
from stretto.run.protocols import TrainerBackend


async def export_policy(
    trainer: TrainerBackend, folder: Path, recipe: Recipe, *, templated: bool, chat_template: Template | None = None
) -> None:
    """Writes the trained policy for other tools to load.

    `templated`: a chat template made the prompts; `chat_template`: that of the recipe, if it is not the model's own.
    """
    try:
        await trainer.export(folder)
        if chat_template is not None:
            await asyncio.to_thread(write_template, chat_template, folder)
        await asyncio.to_thread(_complete, folder, recipe, templated=templated, asked=chat_template is not None)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the trained policy cannot be written to `{folder}`: {error}") from error


def _complete(folder: Path, recipe: Recipe, *, templated: bool, asked: bool) -> None:
    """Adds what other tools need to load the policy. `asked`: the recipe asks for a chat template."""
    is_tiny = recipe.model.is_tiny
    if (is_tiny or recipe.model.merge_adapter) and recipe.model.lora is not None:
        _copy_base(folder)
    if is_tiny and not templated and not asked:
        # The model never saw this template, so tools must not apply it.
        for path in folder.rglob("chat_template.jinja"):
            path.unlink()
    base = None if recipe.model.lora is None else recipe.model.path
    written = folder / "README.md"
    written.write_text(readme(folder, base=base, with_base=(folder / BASE_FOLDER).is_dir(), templated=templated))
    # Weights are written through a private temporary file; give them the permissions of the other files.
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(written.stat().st_mode & 0o777)


def _copy_base(folder: Path) -> None:
    """Copies the base of an adapter into its folder and refers to it there: the user's cache stays behind."""
    base = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"]
    shutil.copytree(base, folder / BASE_FOLDER, dirs_exist_ok=True)
    name_base(folder, str((folder / BASE_FOLDER).resolve()))


def name_base(folder: Path, base: str) -> None:
    """Changes the base that an adapter names."""
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"base_model_name_or_path": base}, indent=2) + "\n", encoding="utf-8")


def readme(place: str | Path, *, base: str | None, with_base: bool, templated: bool) -> str:
    """Returns the text of the README: how to load the policy at `place`, and how its prompts were made.

    `base` is that of an adapter; None: the policy is a whole model. `with_base`: the base is in its folder `base`.
    """
    lines = ["# A policy trained with Stretto", "", "```python"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if base is None:
        lines += ["", f'model = AutoModelForCausalLM.from_pretrained("{place}")']
    else:
        loaded = f"{place}/{BASE_FOLDER}" if with_base else base
        lines += [
            "from peft import PeftModel",
            "",
            f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{loaded}"), "{place}")',
        ]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{place}")', "```", ""]
    if isinstance(place, Path) and not place.is_absolute():
        lines += [f"Paths are relative to `{Path.cwd()}`, where this was written.", ""]
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
        lines += ["", f"`{BASE_FOLDER}/` is the model that the adapter was trained on; the two travel together."]
    elif base is not None:
        lines += ["", f"The adapter was trained on `{base}`, which is not in this folder."]
    return "\n".join(lines) + "\n"
