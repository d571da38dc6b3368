"""The pace of an instance: how fast it decodes beside the fastest. A pure function of measured speeds.

Instances of one run may differ: in their hardware, in what else runs beside them, or in which experts of a mixture
their trajectories need. A slower instance gets fewer new trajectories: work is divided in proportion to the paces. They
are in eighths, so that noise in the measurement changes nothing, and sums of them are exact.
"""

from __future__ import annotations

from collections.abc import Mapping

STEPS = 8  # paces are multiples of 1 / STEPS


def paces_of(speeds: Mapping[int, float]) -> dict[int, float]:
    """Returns the pace of each instance from its speed, in any unit: 1 for the fastest, and at least `1 / STEPS`."""
    for instance, speed in speeds.items():
        if not speed > 0:
            raise ValueError(f"the speed of instance {instance} is {speed}; it must be above 0")
    fastest = max(speeds.values(), default=1.0)
    return {instance: max(1, round(STEPS * speed / fastest)) / STEPS for instance, speed in speeds.items()}
