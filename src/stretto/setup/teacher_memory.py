"""The memory that the teachers of a recipe need on the trainer's device, in bytes. Nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.models.lora import WEIGHTS_FILE
from stretto.objectives.teacher_options import TeacherOptions
from stretto.recipe.schema import Recipe
from stretto.setup.memory_sizes import micro_batch_tokens
from stretto.setup.parameter_counts import meta_model, num_parameters
from stretto.setup.teachers import TeacherSource, teacher_sources
from stretto.training.distribution_divergence import CHUNK_ELEMENTS, CHUNK_ELEMENTS_TRAINED_HEAD

LAYER_WIDTHS = 16  # elements a token that the pass of one layer makes, in widths of the model
BLOCKS = 4  # of logits: two models, what a reduction makes of one, and the derivative in half precision


@dataclass(frozen=True, slots=True)
class TeachersFootprint:
    """Bytes of all teachers together."""

    resident: int = 0  # weights that stay on the device
    scoring: int = 0  # the most that scoring a batch needs beside them
    scores: int = 0  # of a whole batch, kept until it is trained on
    training: int = 0  # blocks of logits while the policy trains


@dataclass(frozen=True, slots=True)
class TeacherSize:
    """A teacher, counted without its weights."""

    options: TeacherOptions
    width: int  # of its stream
    vocabulary: int
    weights: int  # bytes
    resident: int  # of `weights`, bytes that stay on the device between two updates


def teacher_sizes(recipe: Recipe, dtype: torch.dtype) -> tuple[TeacherSize, ...]:
    """Returns the sizes of the teachers of a recipe, in its order, with weights in `dtype`."""
    sizes = []
    for options, source in zip(recipe.algorithm.teachers, teacher_sources(recipe), strict=True):
        config = source.config()
        text = config.get_text_config()
        weights, resident = _weights(recipe, options, source, config, dtype)
        sizes.append(TeacherSize(options, int(text.hidden_size), int(text.vocab_size), weights, resident))
    return tuple(sizes)


def teachers_footprint(
    recipe: Recipe, teachers: tuple[TeacherSize, ...], dtype: torch.dtype, device: torch.device, longest: int
) -> TeachersFootprint:
    """Returns what the teachers of a recipe need. `longest` are the most tokens of a trajectory."""
    if not teachers:
        return TeachersFootprint()
    plan, resident, scoring, blocks = recipe.plan, 0, 0, 0
    rows = (plan.batch + plan.replay_groups) * plan.group_size * recipe.max_lineages
    per_token = []
    for teacher in teachers:
        resident += teacher.resident
        tokens = micro_batch_tokens(recipe, longest)
        passing = tokens * LAYER_WIDTHS * teacher.width * dtype.itemsize
        scoring = max(scoring, teacher.weights - teacher.resident + passing)
        chunks = CHUNK_ELEMENTS if recipe.model.lora is not None else CHUNK_ELEMENTS_TRAINED_HEAD
        logits = min(chunks[device.type], tokens * teacher.vocabulary)
        if teacher.options.form == "full":
            blocks = max(blocks, BLOCKS * logits * torch.float32.itemsize)
        per_token.append(_score_bytes(teacher, dtype))
    # Every sample has one teacher: at worst the one whose scores are largest.
    return TeachersFootprint(resident, scoring, rows * recipe.rollout.max_tokens * max(per_token), blocks)


def _score_bytes(teacher: TeacherSize, dtype: torch.dtype) -> int:
    """The data kept of each token until it is trained on."""
    options = teacher.options
    if options.form == "sampled":
        return torch.float32.itemsize
    if options.top_k is not None:
        return options.top_k * (torch.float32.itemsize + torch.int32.itemsize) + torch.float32.itemsize
    return teacher.width * dtype.itemsize


def _weights(
    recipe: Recipe, options: TeacherOptions, source: TeacherSource, config: Any, dtype: torch.dtype
) -> tuple[int, int]:
    """The bytes of a teacher's weights, and of those that stay on the device between two updates."""
    if source.adapter is not None and recipe.model.lora is not None and _may_share(recipe, source):
        size = (source.adapter / WEIGHTS_FILE).stat().st_size
        return size, size
    model = meta_model(config)
    weights = num_parameters(model) * dtype.itemsize
    if options.keep == "device":
        return weights, weights
    keeps_head = options.form == "full" and options.top_k is None
    return weights, model.get_output_embeddings().weight.numel() * dtype.itemsize * keeps_head


def _may_share(recipe: Recipe, source: TeacherSource) -> bool:
    """True if the base of an adapter is most likely that of the policy. The checksum of the weights decides later."""
    beside = source.adapter is not None and Path(source.path).parent == source.adapter
    return (beside and recipe.model.path == "tiny") or Path(source.path).name == Path(recipe.model.path).name
