"""Says which teacher teaches a sample: by the label of its task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.objectives.teacher_options import TeacherOptions, teacher_index
from stretto.types import Sample


def taught_by(samples: Sequence[Sample], teachers: Sequence[TeacherOptions]) -> NDArray[np.int64]:
    """Returns the teacher of each sample [n]; -1 if it has none."""
    by_task = {label: teacher_index(teachers, label) for label in {sample.task for sample in samples}}
    found = [by_task[sample.task] for sample in samples]
    return np.array([-1 if index is None else index for index in found], dtype=np.int64)
