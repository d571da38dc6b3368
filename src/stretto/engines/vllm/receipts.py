"""Receipts: the check that an engine which cannot read back its weights serves the version that was sent.

The file is confirmed by its checksum before it is loaded. Then the engine scores the trainer's probe. The results of
engine and trainer have to be the same to rounding. That finds an adapter that was never loaded, one of another version,
or a layer that a reload has left as it was.

In half precision, rounding may be larger than what one update changes. So two versions are also compared with each
other: if the trainer tells them apart and the engine gives exactly the same numbers for both, the engine serves one of
them twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.errors import ChecksumError
from stretto.types import Probe, Receipt

Array = NDArray[np.float64]

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""By type, the largest mean difference that is rounding: as in `training/recorded_logprobs.py`."""
LARGEST = 20.0  # one token may differ by so many tolerances
DISTINCT = 1e-5  # versions whose probes differ by more than this on average are told apart by the trainer


def make_receipt(
    *,
    version: int,
    checksum: str,
    probe: Probe,
    found: Sequence[float],
    others: Mapping[int, tuple[Probe, Sequence[float]]],
    dtype: str,
    served_by: str,
    layout: str = "",
    held: str | None = None,
    first_held: str | None = None,
) -> Receipt:
    """Compares the engine's answer `found` with the probe. Raises `ChecksumError` if they are of different weights.

    `others` are the probes of other versions that the engine holds, with its answers to them. `held` is the digest of
    the weights that it holds by checksums of its own, and `first_held` that of when it loaded the version before.
    """
    if held is not None and first_held is not None and held != first_held:
        raise ChecksumError(
            f"version {version} is not what the engine serves: its weights have the digest `{held}`, and had "
            f"`{first_held}` when it was loaded before"
        )
    ours, theirs = _array(found), _array(probe.logprobs)
    if len(ours) != len(theirs) or not np.isfinite(ours).all():
        raise ChecksumError(
            f"version {version} answers the probe with {len(ours)} log-probabilities, not all finite or not "
            f"{len(theirs)} of them"
        )
    differences, tolerance = np.abs(ours - theirs), TOLERANCES[dtype]
    mean, largest = float(differences.mean()), float(differences.max())
    if not (mean <= tolerance and largest <= LARGEST * tolerance):  # one that is not a number is not rounding
        raise ChecksumError(
            f"version {version} is not what the engine serves: its log-probabilities of the probe differ from the "
            f"trainer's by {mean:.2g} on average and {largest:.2g} at most, and rounding in {dtype} is at most "
            f"{tolerance:g} and {LARGEST * tolerance:g}"
        )
    for other, (their_probe, their_answer) in others.items():
        if their_probe.tokens != probe.tokens or len(their_answer) != len(ours):
            continue
        told_apart = float(np.abs(theirs - _array(their_probe.logprobs)).mean())
        if told_apart > DISTINCT and np.array_equal(ours, _array(their_answer)):
            raise ChecksumError(
                f"version {version} is not what the engine serves: it answers the probe exactly as version {other}, "
                f"and the trainer's answers differ by {told_apart:.2g} on average"
            )
    id = f"{version}-{secrets.token_hex(8)}"
    return Receipt(id, version, checksum, len(ours), mean, largest, tolerance, served_by, layout, held)


def _array(values: Sequence[float] | NDArray[np.float32]) -> Array:
    return np.asarray(values, dtype=np.float64)
