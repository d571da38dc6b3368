"""AdamW with a learning-rate schedule, clipping by the global norm, and float32 masters of half-precision weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stretto.errors import RecipeError, TrainerError
from stretto.training.parallel import Ranks, local
from stretto.training.scaling import divide_gradients

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How an update is made, whatever the algorithm."""

    learning_rate: float = 1e-5
    warmup_steps: int = 0  # the rate rises linearly over this many updates
    schedule: Schedule = "constant"
    total_steps: int = 0  # updates in the run; needed by every schedule but "constant"
    final_fraction: float = 0.0  # of the learning rate, where "linear" and "cosine" end
    weight_decay: float = 0.0  # of matrices; vectors such as norms and biases do not decay
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # 0: no clipping
    micro_tokens: int = 8192  # tokens through the model at once
    optimizer_steps: int = 1  # the batch of an update is cut into so many parts of whole groups, one step each
    temperature: float = 1.0  # that the engine samples with
    max_tokens: int = 0  # longest completion of the run, which overlong ones are punished by
    seed: int = 0  # of the adapters' first values
    compile: bool | None = None  # the decoder's layers, by `torch.compile`; None: on CUDA, where the model is plain
    checkpointing: bool = False  # keep one hidden state a layer, and make the rest again in the backward pass

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise RecipeError(f"`{name} = {getattr(self, name)}` must not be negative")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise RecipeError(f'`schedule = {self.schedule!r}` is unknown: choose "constant", "linear" or "cosine"')
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise RecipeError(
                f"`schedule = {self.schedule!r}` needs `total_steps` above `warmup_steps = {self.warmup_steps}`, "
                f"and got {self.total_steps}"
            )
        if not 0 <= self.final_fraction <= 1:
            raise RecipeError(f"`final_fraction = {self.final_fraction}` must lie between 0 and 1")
        if not self.temperature > 0:
            raise RecipeError(
                f"`temperature = {self.temperature}` leaves nothing to learn from: greedy samples have no "
                "log-probability; choose one above 0"
            )
        for name in ("micro_tokens", "optimizer_steps"):
            if getattr(self, name) < 1:
                raise RecipeError(f"`{name} = {getattr(self, name)}` must be at least 1")


def learning_rate(step: int, options: TrainerOptions) -> float:
    """The rate of update `step`, from 0. Never 0 within warm-up; beyond `total_steps` it stays at the end's."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / (options.warmup_steps + 1)
    if options.schedule == "constant":
        return options.learning_rate
    done = min(1.0, (step - options.warmup_steps) / (options.total_steps - options.warmup_steps))
    shape = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.learning_rate * (options.final_fraction + (1.0 - options.final_fraction) * shape)


class Optimizer:
    """Steps named parameters. One in half precision has a float32 master, which is what is stepped and saved.

    Of one that is cut over the ranks, this rank's part is stepped and saved; `ranks` are asked for the norm of all.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], options: TrainerOptions, ranks: Ranks | None = None
    ) -> None:
        self.options = options
        self.step_count = 0
        self._parameters = dict(parameters)
        self._ranks = ranks or Ranks()
        self._cut = {name for name, p in self._parameters.items() if isinstance(p, DTensor)}
        self._stepped: dict[str, torch.Tensor] = {name: _stepped(p) for name, p in self._parameters.items()}
        # Gradients go from the parameter to what is stepped where that is another tensor; values come back from it
        # where it has memory of its own.
        self._masters = [
            (p, self._stepped[name]) for name, p in self._parameters.items() if self._stepped[name] is not p
        ]
        self._copied = [(local(p.detach()), master) for p, master in self._masters if p.dtype != master.dtype]
        decayed = [p for p in self._stepped.values() if p.ndim >= 2]
        others = [p for p in self._stepped.values() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            fused=True,  # a single pass over the memory; exists for processors too
        )

    @property
    def stepped(self) -> Iterable[torch.Tensor]:
        """What is stepped, whose gradients are this rank's sums so far: the parameters, or their masters.

        Those that are cut over the ranks are not among them: their gradients are the sums over all ranks already.
        """
        return (tensor for name, tensor in self._stepped.items() if name not in self._cut)

    def collect(self) -> None:
        """Call after each backward pass: gradients of half-precision parameters are summed in float32."""
        pending = [(p, master, local(p.grad)) for p, master in self._masters if p.grad is not None]
        summed = [(master.grad, grad) for _, master, grad in pending if master.grad is not None]
        for _, master, grad in pending:
            if master.grad is None:
                master.grad = grad.to(master.dtype)
        if summed:
            torch._foreach_add_([total for total, _ in summed], [grad for _, grad in summed])
        for parameter, _, _ in pending:
            parameter.grad = None

    def unscale(self, scale: float) -> None:
        """Call after the last backward pass of a step: divide what was summed by the scale of its loss."""
        divide_gradients(self._stepped.values(), scale)

    def norm(self) -> torch.Tensor:
        """The norm of all gradients together, on the device: nothing waits for it."""
        found = {name: p.grad for name, p in self._stepped.items() if p.grad is not None}
        if not self._cut or not found:
            return nn.utils.get_total_norm(found.values()) if found else torch.zeros(())
        cut = [nn.utils.get_total_norm([grad]).double().square() for name, grad in found.items() if name in self._cut]
        own = float(torch.stack(cut).sum()) if cut else 0.0
        whole = [grad for name, grad in found.items() if name not in self._cut]
        squares = self._ranks.total(np.array([own]))[0] + float(nn.utils.get_total_norm(whole)) ** 2
        total = math.sqrt(squares) if squares >= 0 else squares  # or no number
        return torch.tensor(total, dtype=torch.float64).to(next(iter(found.values())))

    def step(
        self, norm: torch.Tensor | None = None, value: float | None = None, *, update: int | None = None
    ) -> tuple[float, float]:
        """Clip, step and clear the gradients. Returns the norm before clipping and the learning rate.

        `norm` is what `norm()` gave, and `value` the same number where it has been read from the device already. The
        rate is that of `update`, by default the number of steps so far: an update may take several. Raises
        `TrainerError` before anything has changed when the norm is not finite.
        """
        update = self.step_count if update is None else update
        norm = self.norm() if norm is None else norm
        value = float(norm) if value is None else value
        if not math.isfinite(value):
            raise TrainerError(f"the gradient's norm is {value} at update {update}: nothing was stepped")
        if self.options.max_grad_norm and value > self.options.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self._stepped.values(), self.options.max_grad_norm, norm)
        # AdamW makes them group by group: memory that runs out at the second would leave the first stepped.
        stepped = [p for p in self._stepped.values() if p.grad is not None]
        self._adam.state.update({p: _empty_moments(p) for p in stepped if not self._adam.state.get(p)})
        rate = learning_rate(update, self.options)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in self._copied], [master for _, master in self._copied])
        self.step_count += 1
        return value, rate

    def discard(self) -> None:
        """Forget the gradients summed so far."""
        for tensor in (*self._parameters.values(), *self._stepped.values()):
            tensor.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of everything that decides what the next step does, as flat tensors (`value/`, `mean/`, `square/`)."""
        tensors: dict[str, torch.Tensor] = {"step": torch.tensor(self.step_count)}
        for name, stepped in self._stepped.items():
            tensors[f"value/{name}"] = stepped.detach().clone()
            moments = self._adam.state.get(stepped)
            if moments:
                tensors[f"mean/{name}"] = moments["exp_avg"].clone()
                tensors[f"square/{name}"] = moments["exp_avg_sq"].clone()
                tensors[f"count/{name}"] = moments["step"].clone()
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave. Raises `TrainerError`, with nothing changed, if it is of other parameters."""
        self.taking(tensors)()

    def taking(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """What `restore` does once everything is checked and has its memory; it does not fail."""
        given = {key.removeprefix("value/"): t for key, t in tensors.items() if key.startswith("value/")}
        wrong = [n for n in given if n not in self._stepped]
        wrong += [n for n, p in self._stepped.items() if n not in given or not _fits(tensors, n, p)]
        if wrong or "step" not in tensors:
            raise TrainerError(
                f"the checkpoint is of another model or another `lora`: `{wrong[0] if wrong else 'step'}` does not fit"
            )
        step_count = int(tensors["step"])
        # Moments that are there are copied over, so that an update is undone without any memory.
        kept = {name: p for name, p in self._stepped.items() if f"mean/{name}" in tensors}
        moments = {p: self._adam.state.get(p) or _empty_moments(p) for p in kept.values()}

        def take() -> None:
            self.step_count = step_count
            self._adam.state.clear()
            self._adam.state.update(moments)
            with torch.no_grad():
                for name, stepped in kept.items():
                    for kind, key in (("count", "step"), ("mean", "exp_avg"), ("square", "exp_avg_sq")):
                        moments[stepped][key].copy_(tensors[f"{kind}/{name}"])
                for name, stepped in self._stepped.items():
                    stepped.copy_(given[name])
                    stepped.grad = None
                for parameter, master in self._copied:
                    parameter.copy_(master)
                for parameter, _ in self._masters:
                    parameter.grad = None

        return take


def _stepped(parameter: nn.Parameter) -> torch.Tensor:
    """What is stepped for a parameter: itself, this rank's part of it, or either in float32."""
    full = parameter.dtype in (torch.float32, torch.float64)
    if not isinstance(parameter, DTensor):
        return parameter if full else parameter.detach().float()
    part = local(parameter.detach())
    return part if full else part.float()


def _empty_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """As AdamW keeps them."""
    return {
        "step": torch.zeros((), device=parameter.device, dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _fits(tensors: Mapping[str, torch.Tensor], name: str, parameter: torch.Tensor) -> bool:
    """Whether a state has the value of a parameter, and all of its moments or none, in its shape."""
    if tensors[f"value/{name}"].shape != parameter.shape:
        return False
    moments = [tensors.get(f"{kind}/{name}") for kind in ("mean", "square", "count")]
    if all(each is None for each in moments):
        return True
    shapes = [parameter.shape, parameter.shape, torch.Size([])]
    return all(each is not None and each.shape == shape for each, shape in zip(moments, shapes, strict=True))
