"""The options of LoRA adapters: the table `[model.lora]` of a recipe. Torch-free; `models/lora.py` applies them."""

from __future__ import annotations

from pydantic import Field

from stretto.options import Options


class LoraOptions(Options):
    """Trains low-rank adapters over a frozen base instead of every parameter."""

    rank: int = Field(16, ge=1, le=65_536, description="Rank of the adapters")
    alpha: float | None = Field(None, gt=0, description="The adapters are scaled by alpha / rank; default: 2 * rank")
    targets: tuple[str, ...] = Field(
        (),
        description="Suffixes of the names of the linear modules to adapt; empty: all except the output layer. "
        "`gate_up_proj` and `down_proj` name the weights of experts, which are adapted only if they are named",
    )

    @property
    def effective_alpha(self) -> float:
        """`alpha`, or its default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """The factor of `B (A x)`."""
        return self.effective_alpha / self.rank
