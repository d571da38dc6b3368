"""The options of a reward model: a classifier whose label is the reward. `models/reward_model.py` runs it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from stretto.options import Options, formed


class RewardModelOptions(Options):
    """A reward model: a sequence classifier whose label is the reward."""

    path: str = Field(min_length=1, description="A folder or a hub name, loaded with its own tokenizer and template")
    label: str | None = Field(
        None, min_length=1, description="The label that is the reward, for a model of several; default: its only one"
    )
    device: str = Field(
        "auto",
        pattern=formed(r"^(auto|cpu|cuda(:[0-9]{1,3})?)$", '"auto", "cpu", "cuda", or one GPU such as "cuda:1"'),
        description='"cpu", "cuda", or one GPU of several, such as "cuda:1"; "auto": a GPU that the run does not use, '
        "else that of the run, else the CPU",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description='Type of its weights; "auto": bfloat16 on CUDA, float32 on the CPU'
    )
    batch_tokens: int = Field(16_384, ge=1, description="Most tokens of a batch, padding included")
    max_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a conversation; default: the context of the model"
    )
    too_long: Literal["refuse", "truncate"] = Field(
        "refuse",
        description="A longer conversation: `refuse`: its scoring fails. `truncate`: its first tokens are left out",
    )
    template: dict[str, Any] = Field(default_factory=dict, description="Options of its chat template")
    threads: int = Field(1, ge=1, le=4_096, description="Torch threads of its process, on the CPU")
    seconds: float = Field(600.0, gt=0, le=86_400, description="Deadline of a completion, from when its process has it")
    load_seconds: float = Field(1_800.0, gt=0, le=86_400, description="Deadline for loading the model")
