"""The teachers of a recipe: where their models are, what is refused about them, and how they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stretto.errors import ModelError, RecipeError
from stretto.models.adapter_config import CONFIG_FILE, read_adapter_config
from stretto.models.adapters import install_adapter, merge_adapter, read_adapter, refuse_another_base
from stretto.models.checksums import checksum
from stretto.models.loading import load_config, load_model, load_tokenizer, second_tree
from stretto.models.lora import inject_lora
from stretto.models.shared_vocabulary import shared_vocabulary
from stretto.models.tiny import tiny_config_of, tiny_model, tiny_tokenizer
from stretto.observe.progress import Silent
from stretto.recipe.schema import Recipe
from stretto.setup.base_models import base_path_of
from stretto.setup.device import choose_dtype
from stretto.setup.memory_sizes import context_length
from stretto.training.teachers import too_many_tokens


@dataclass(frozen=True, slots=True)
class TeacherSource:
    """Where a teacher is loaded from."""

    option: str  # the key of the recipe that names it
    name: str  # as the recipe writes it
    path: str  # of the whole model; of an adapter, that of its base
    adapter: Path | None = None

    @property
    def _is_tiny(self) -> bool:
        return self.path in ("tiny", "tiny-moe")

    def config(self) -> Any:
        return tiny_config_of(self.path) if self._is_tiny else load_config(self.path, option=self.option)

    def tokenizer(self) -> Any:
        return tiny_tokenizer() if self._is_tiny else load_tokenizer(self.path, option=self.option)

    def model_path(self, recipe: Recipe) -> str:
        """Returns what to load. Makes the tiny model if it is that one: the policy's own if that is tiny, too."""
        if self.path == recipe.model.path:
            return base_path_of(recipe, Silent())
        return str(tiny_model(mixture=self.path == "tiny-moe")) if self._is_tiny else self.path


def teacher_sources(recipe: Recipe, paths: Sequence[str] | None = None) -> list[TeacherSource]:
    """Finds the teachers of a recipe. `paths` are where they lie on this machine; None: where the recipe says.

    Raises `ModelError` for a path that is neither a model nor an adapter of a known base.
    """
    asked = [teacher.path for teacher in recipe.algorithm.teachers]
    return [
        _source(f"algorithm.teachers[{index}].path", name, path)
        for index, (name, path) in enumerate(zip(asked, paths or asked, strict=True))
    ]


def _source(option: str, name: str, path: str) -> TeacherSource:
    folder = Path(path)
    if (folder / "policy").is_dir() and not (folder / "config.json").is_file():
        folder = folder / "policy"  # of a run
    if not (folder / CONFIG_FILE).is_file():
        return TeacherSource(option, name, str(folder) if folder.is_dir() else path)
    base = read_adapter_config(folder).base_path
    if base is None:
        raise ModelError(
            f"`{option} = {name!r}` is an adapter that does not name its base; put the base into "
            "`base_model_name_or_path` of its `adapter_config.json`, or merge it with `stretto export --merge`"
        )
    return TeacherSource(option, name, base, folder)


def check_teachers(recipe: Recipe, tokenizer: Any, longest_prompt: int, *, templated: bool = False) -> list[str]:
    """Compares the teachers of a recipe with the policy. Returns sentences that the user should read.

    Raises `RecipeError` if a teacher has another vocabulary or too short a context, and `ModelError` if it cannot be
    read. Reads no weights. `templated`: the policy's chat template makes the prompts.
    """
    notes = []
    for index, source in enumerate(teacher_sources(recipe)):
        options, named = recipe.algorithm.teachers[index], f"`{source.option} = {source.name!r}`"
        config, its_tokenizer = source.config(), source.tokenizer()
        try:
            shared = shared_vocabulary(tokenizer, its_tokenizer)
        except ValueError as error:
            raise RecipeError(
                f"{named} has another tokenizer than `model.path = {recipe.model.path!r}`: {error}; choose a teacher "
                "of the same family"
            ) from error
        shared = min(shared, int(config.get_text_config().vocab_size))
        if options.top_k is not None and options.top_k > shared:
            raise RecipeError(too_many_tokens(index, options.top_k, shared))
        longest, context = longest_prompt + recipe.rollout.max_tokens, context_length(config)
        if longest > context:
            raise RecipeError(
                f"{named} has a context of {context:,} tokens, and a prompt of {longest_prompt:,} with "
                f"`rollout.max_tokens = {recipe.rollout.max_tokens}` is longer; lower that, or choose another teacher"
            )
        templates = [getattr(each, "chat_template", None) for each in (tokenizer, its_tokenizer)]
        if templated and source.adapter is None and templates[0] != templates[1]:
            notes.append(
                f"{named} sees prompts in the chat template of `model.path`, which is not its own: compare the two if "
                "it was trained on chats"
            )
    return notes


def policy_vocabulary(recipe: Recipe, tokenizer: Any) -> int | None:
    """Returns the number of tokens that policy and teachers share; None if there is no teacher."""
    return max(tokenizer.get_vocab().values()) + 1 if recipe.algorithm.teachers else None


def load_teachers(
    recipe: Recipe, policy: nn.Module, device: torch.device, paths: Sequence[str] | None = None
) -> Iterator[nn.Module]:
    """Loads the teachers of a recipe, in its order. `policy` is the model that is about to be trained, unchanged.

    An adapter of the very base whose adapters are trained shares its weights: the base never changes.
    """
    dtype = choose_dtype(recipe.model.dtype, device)
    for source in teacher_sources(recipe, paths):
        if source.adapter is None:
            yield load_model(source.model_path(recipe), dtype, device, option=source.option)
            continue
        adapter = read_adapter(source.adapter)
        recorded = adapter.base_checksums.get(str(dtype).removeprefix("torch."))
        if recipe.model.lora is not None and recorded == checksum(dict(policy.named_parameters())):
            model = second_tree(policy, share=True)
            config = adapter.config
            install_adapter(model, inject_lora(model, config.rank, config.alpha, config.targets), adapter)
        else:
            model = load_model(source.model_path(recipe), dtype, device, option=source.option)
            refuse_another_base(adapter, source.path, checksum(dict(model.named_parameters())), dtype)
            merge_adapter(model, adapter)
        yield model
