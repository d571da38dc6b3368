"""The options of teachers: models that the policy learns to imitate on its own samples (on-policy distillation).

Torch-free; `training/teachers.py` computes the term.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from stretto.options import Options


class TeacherOptions(Options):
    """A model that never trains and that the policy comes near to: `KL(pi || teacher)` at every sampled token.

    The teacher sees the tokens that the policy sampled, in the policy's chat template and at its temperature. It may be
    larger than the policy, but needs the same tokenizer.
    """

    path: str = Field(
        min_length=1,
        description="A folder, a hub name, the `model.path` itself, or the `RUN/policy` of an earlier run: a whole "
        "model, or a LoRA adapter, which is loaded over its base (not a second time if the policy trains adapters of "
        "the same base)",
    )
    coefficient: float = Field(1.0, gt=0, description="Factor of the divergence in the loss of each token")
    tasks: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Labels of the tasks that it teaches; default: all that no other teacher names"
    )
    form: Literal["full", "sampled"] = Field(
        "full",
        description="`full`: the divergence over the whole vocabulary at each token, exact given the tokens before "
        "it. `sampled`: its estimate from the sampled token, `log pi - log teacher`, as the advantage of that token",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description='For `form = "full"`: tell apart only this many of the likeliest tokens of the teacher, and take '
        "all others together as one. Needs less memory; default: the whole vocabulary",
    )
    keep: Literal["device", "host"] = Field(
        "device",
        description="Where its weights are between two updates. `host`: in host memory; every update copies them to "
        "the GPU and gives that memory back before it trains",
    )


def teacher_index(teachers: Sequence[TeacherOptions], task: str | None) -> int | None:
    """Returns which teacher teaches a task: the one that names it, else the one that names none; None: no teacher."""
    named = (index for index, teacher in enumerate(teachers) if task is not None and task in teacher.tasks)
    return next(named, next((index for index, teacher in enumerate(teachers) if not teacher.tasks), None))


def teacher_refusals(teachers: Sequence[TeacherOptions], tasks: Sequence[str | None]) -> list[str]:
    """Returns why these teachers cannot teach the tasks with these labels (None: it has none), a sentence each."""
    found = []
    owners: dict[str | None, int] = {}
    for index, teacher in enumerate(teachers):
        option = f"algorithm.teachers[{index}]"
        for label in teacher.tasks or (None,):
            if label in owners:
                what = "every task that no other names" if label is None else f"the task {label!r}"
                found.append(
                    f"`{option}` and `algorithm.teachers[{owners[label]}]` both teach {what}: a task has one teacher; "
                    "leave one of them out, or give each its own `tasks`"
                )
            owners.setdefault(label, index)
            if label is not None and label not in tasks:
                known = [each for each in tasks if each is not None]
                instead = f"the labels are {', '.join(map(repr, known))}" if known else "the task has no label"
                found.append(f"`{option}.tasks` names {label!r}, which is no label of a task: {instead}")
        if teacher.top_k is not None and teacher.form == "sampled":
            found.append(
                f'`{option}.top_k = {teacher.top_k}` has no effect with `form = "sampled"`, which looks at one token; '
                "leave it out"
            )
    return found
