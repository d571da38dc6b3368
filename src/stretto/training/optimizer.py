"""AdamW with a learning-rate schedule, clipping by the global norm, and float32 master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stretto.errors import TrainerError
from stretto.training.learning_rates import LearningRates
from stretto.training.loss_scaling import divide_gradients
from stretto.training.options import TrainingOptions
from stretto.training.parallel import Ranks, local

SMALL_EPSILON = 1e-20  # below it, AdamW may divide by almost nothing in float32


class Optimizer:
    """Steps named parameters. A half-precision parameter has a float32 master, which is stepped and saved instead.

    Of a sharded parameter, this rank's shard is stepped and saved; `ranks` compute the norm of the whole gradient.
    `rates` are the learning rates of a run with several phases; None: those of `options`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: TrainingOptions,
        ranks: Ranks | None = None,
        rates: LearningRates | None = None,
    ) -> None:
        self.options = options
        self.rates = rates or LearningRates(((0, options),))
        self.step_count = 0
        self.steps_begun = 0  # in this process; one that has begun may have changed weights, also if it failed
        self._parameters = dict(parameters)
        self._ranks = ranks or Ranks()
        self._sharded = {name for name, p in self._parameters.items() if isinstance(p, DTensor)}
        self._stepped: dict[str, torch.Tensor] = {name: _stepped(p) for name, p in self._parameters.items()}
        # If another tensor than the parameter is stepped, gradients go to that tensor; if it is a copy, its values come
        # back.
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
            eps=options.epsilon,
            fused=True,  # a single pass over the memory, on CPUs too
        )

    @property
    def stepped(self) -> Iterable[torch.Tensor]:
        """The tensors that are stepped, parameters or their masters; their gradients are this rank's sums so far.

        Sharded parameters are left out: their gradients are already summed over all ranks.
        """
        return (tensor for name, tensor in self._stepped.items() if name not in self._sharded)

    def collect(self) -> None:
        """Adds the gradients of half-precision parameters to float32 sums. Call after each backward pass."""
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
        """Divides the summed gradients by the loss scale. Call after the last backward pass of a step."""
        divide_gradients(self._stepped.values(), scale)

    def norm(self) -> torch.Tensor:
        """The norm of the whole gradient, on the device, without waiting for it."""
        found = {name: p.grad for name, p in self._stepped.items() if p.grad is not None}
        if not self._sharded or not found:
            return nn.utils.get_total_norm(found.values()) if found else torch.zeros(())
        sharded = [
            nn.utils.get_total_norm([grad]).double().square() for name, grad in found.items() if name in self._sharded
        ]
        own = float(torch.stack(sharded).sum()) if sharded else 0.0
        whole = [grad for name, grad in found.items() if name not in self._sharded]
        squares = self._ranks.total(np.array([own]))[0] + float(nn.utils.get_total_norm(whole)) ** 2
        total = math.sqrt(squares) if squares >= 0 else squares  # NaN stays NaN
        return torch.tensor(total, dtype=torch.float64).to(next(iter(found.values())))

    def step(
        self, norm: torch.Tensor | None = None, value: float | None = None, *, update: int | None = None
    ) -> tuple[float, float]:
        """Clips, steps and clears the gradients. Returns the norm before clipping and the learning rate.

        `norm` is the result of `norm()`, and `value` the same number if it has been read from the device already. The
        learning rate is that of `update`, by default the number of steps so far; an update may have several steps.
        Raises `TrainerError`, with nothing changed, if the norm is not finite.
        """
        update = self.step_count if update is None else update
        norm = self.norm() if norm is None else norm
        value = float(norm) if value is None else value
        if not math.isfinite(value):
            raise TrainerError(f"the gradient's norm is {value} at update {update}: nothing was stepped")
        if self.options.max_grad_norm and value > self.options.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self._stepped.values(), self.options.max_grad_norm, norm)
        # AdamW allocates moments group by group: running out of memory at the second would leave the first stepped.
        stepped = [p for p in self._stepped.values() if p.grad is not None]
        self._adam.state.update({p: _empty_moments(p) for p in stepped if not self._adam.state.get(p)})
        rate = self.rates.at(update)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self.steps_begun += 1
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in self._copied], [master for _, master in self._copied])
        self.step_count += 1
        return value, rate

    def weight_norm(self) -> torch.Tensor:
        """The norm of this rank's weights, on the device, without waiting for it.

        Not finite if a weight is not, or if one is above about 1e19 in float32.
        """
        norms: list[torch.Tensor] = []
        for half in (False, True):
            same = [local(p.detach()) for p in self._parameters.values() if (p.dtype.itemsize < 4) == half]
            if same:
                norms += torch._foreach_norm(same, 2, torch.float32 if half else None)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
        return total

    @property
    def may_overflow(self) -> bool:
        """True if a single step can make weights that are not finite.

        With usual options a step changes a weight by little more than the learning rate.
        """
        options = self.options
        return self.rates.largest * max(1.0, options.weight_decay) > 1.0 or options.epsilon < SMALL_EPSILON

    def discard(self) -> None:
        """Discards the gradients summed so far."""
        for tensor in (*self._parameters.values(), *self._stepped.values()):
            tensor.grad = None

    def state(self, device: str | None = None) -> dict[str, torch.Tensor]:
        """Returns a copy of everything that the next step depends on, as tensors named `value/`, `mean/`, `square/`.

        It is made on `device`, one tensor at a time; None: where the tensors are.
        """

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(tensor.device if device is None else device, copy=True)

        tensors: dict[str, torch.Tensor] = {"step": torch.tensor(self.step_count)}
        for name, stepped in self._stepped.items():
            tensors[f"value/{name}"] = copy(stepped)
            moments = self._adam.state.get(stepped)
            if moments:
                tensors[f"mean/{name}"] = copy(moments["exp_avg"])
                tensors[f"square/{name}"] = copy(moments["exp_avg_sq"])
                tensors[f"count/{name}"] = copy(moments["step"])
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores `state()`. Raises `TrainerError`, with nothing changed, if it is of other parameters."""
        self.prepare_restore(tensors)()

    def prepare_restore(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Checks a state, allocates memory, and returns the function that restores it, which cannot fail."""
        given = {key.removeprefix("value/"): t for key, t in tensors.items() if key.startswith("value/")}
        wrong = [n for n in given if n not in self._stepped]
        wrong += [n for n, p in self._stepped.items() if n not in given or not _fits(tensors, n, p)]
        if wrong or "step" not in tensors:
            raise TrainerError(
                f"the checkpoint is of another model or another `lora`: `{wrong[0] if wrong else 'step'}` does not fit"
            )
        step_count = int(tensors["step"])
        # Existing moments are overwritten in place, so undoing an update needs no memory.
        kept = {name: p for name, p in self._stepped.items() if f"mean/{name}" in tensors}
        moments = {p: self._adam.state.get(p) or _empty_moments(p) for p in kept.values()}

        def restore() -> None:
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

        return restore


def _stepped(parameter: nn.Parameter) -> torch.Tensor:
    """The tensor that is stepped for a parameter: itself, this rank's shard of it, or either in float32."""
    full = parameter.dtype in (torch.float32, torch.float64)
    if not isinstance(parameter, DTensor):
        return parameter if full else parameter.detach().float()
    part = local(parameter.detach())
    return part if full else part.float()


def _empty_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state that AdamW keeps of a parameter, at its start."""
    return {
        "step": torch.zeros((), device=parameter.device, dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _fits(tensors: Mapping[str, torch.Tensor], name: str, parameter: torch.Tensor) -> bool:
    """Checks that a state has a parameter's value, and all of its moments or none, in its shape."""
    if tensors[f"value/{name}"].shape != parameter.shape:
        return False
    moments = [tensors.get(f"{kind}/{name}") for kind in ("mean", "square", "count")]
    if all(each is None for each in moments):
        return True
    shapes = [parameter.shape, parameter.shape, torch.Size([])]
    return all(each is not None and each.shape == shape for each, shape in zip(moments, shapes, strict=True))
