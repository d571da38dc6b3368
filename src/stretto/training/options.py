"""The options of the trainer: the table `[training]` of a recipe. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stretto.options import Options

MICRO_TOKENS = 8_192  # of `micro_tokens = "auto"` where no memory is planned for
LEAST_MICRO_TOKENS = 1_024  # smaller micro-batches are never tried where memory is short


class TrainingOptions(Options):
    """Updates of the policy, whatever the algorithm."""

    steps: int = Field(100, ge=1, description="Number of updates")
    optimizer_steps: int = Field(
        1, ge=1, description="Optimizer steps an update; each trains on a mini-batch of whole groups"
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning-rate schedule after the warm-up"
    )
    schedule_start: int | None = Field(
        None, ge=0, description="Update at which the schedule leaves the peak; default: `warmup_steps`"
    )
    schedule_end: int | None = Field(
        None,
        ge=1,
        description="Update from which on the learning rate is the final one; a run of more `steps` needs it stated at "
        "`--resume`; default: `steps`",
    )
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="Learning rate at the end of the schedule, as a fraction of the peak"
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay of AdamW for matrices; vectors such as norms and biases do not decay"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="Betas of AdamW"
    )
    epsilon: float = Field(1e-8, gt=0, description="Epsilon of AdamW")
    max_grad_norm: float = Field(
        1.0,
        ge=0,
        description="Clip the gradient to this norm, a critic's apart from the policy's; 0: no clipping",
    )
    mismatch_samples: int = Field(
        4,
        ge=0,
        description="Sequences of older versions on which engine and trainer are compared, every fourth update (full "
        "weights: every eighth); with an objective that scores every token under its own version, all are",
    )
    micro_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Most tokens of a packed micro-batch. `auto`: on the GPU of one process as many as memory has room "
        "for beside the rollout (`stretto check` prints the number), otherwise 8,192",
    )
    checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: much less memory, about a third more time"
    )
    routing: Literal["auto", "replay", "free"] = Field(
        "auto",
        description="Experts of the tokens in training. `replay`: those that the engine recorded when it sampled; "
        "`free`: those that the trainer's router chooses, and nothing is recorded; `auto`: `replay` if the router can "
        "be recorded (Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE)",
    )
    keep_routing: bool = Field(
        False,
        description="Keep the records of routing after the run, for `stretto replay` and `verify --recompute`; "
        "otherwise they are deleted once no update can need them",
    )
    compile: bool | None = Field(
        None, description="Compile the decoder layer; default: only on CUDA in half precision, for plain decoders"
    )

    @model_validator(mode="after")
    def _warm_up_ends(self) -> TrainingOptions:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"`training.warmup_steps = {self.warmup_steps}` never ends in a run of `training.steps = "
                f"{self.steps}`; use fewer"
            )
        return self

    @model_validator(mode="after")
    def _keeps_what_is_recorded(self) -> TrainingOptions:
        if self.keep_routing and not self.records_routing:
            raise ValueError(
                '`training.keep_routing = true` has nothing to keep with `training.routing = "free"`, which records no '
                "routing; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _schedule_falls(self) -> TrainingOptions:
        start, end = self.schedule_bounds
        if start < self.warmup_steps:
            raise ValueError(
                f"`training.schedule_start = {start}` lies in the warm-up of `training.warmup_steps = "
                f"{self.warmup_steps}`; start later, or leave it out"
            )
        if start >= end:
            named = "" if self.schedule_end is not None else ", which is `training.steps`"
            raise ValueError(
                f"`training.schedule_start = {start}` is not before `training.schedule_end = {end}`{named}; start "
                "earlier, or end later"
            )
        return self

    @property
    def records_routing(self) -> bool:
        """True if engines record the experts of the tokens that are trained on, if they can."""
        return self.routing != "free"

    @property
    def schedule_bounds(self) -> tuple[int, int]:
        """The updates at which the schedule leaves the peak, and at which it has reached its end."""
        start = self.warmup_steps if self.schedule_start is None else self.schedule_start
        return start, self.steps if self.schedule_end is None else self.schedule_end

    @property
    def micro_batch_tokens(self) -> int:
        """The budget of a micro-batch. A run replaces `auto` by a number before it makes its trainer."""
        return MICRO_TOKENS if self.micro_tokens == "auto" else self.micro_tokens
