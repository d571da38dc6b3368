"""The seam between the loop and whatever generates: one rollout instance.

Contract, tested for every implementation in `tests/engines/test_contract.py`:

- A request is generated under the version that it names, from its first token to its last. A version that is not
  resident is a `VersionNotResidentError`, never a substitute.
- A trajectory's tokens and log-probabilities depend on its prompt, version, seed and sampling alone.
- `load` confirms the checksum of what is resident after the copy, or raises `ChecksumError` and holds nothing.
- `unload` of a version that still has trajectories is an error.
- After `suspend`, the pending `generate` (or `resume`) of each trajectory raises `SuspendedError`, and the caller holds
  the only copy. After `abort`, it raises `AbortedError`.
- `shrink` ends no trajectory and changes nothing of what it generates, and refuses none that is as long as one before.
- An engine that fails raises `EngineError` from every pending call, and from every later one.
- An idle engine uses no processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stretto.types import Capacity, Completion, Load, Request, Suspended, Weights


class Engine(Protocol):
    """One rollout instance, called from the loop's thread; no method blocks it."""

    @property
    def capacity(self) -> Capacity:
        """What it can hold. Only `shrink` changes it, and only `kv_tokens` of it."""
        ...

    def report(self) -> Load:
        """What it is doing now, at the latest step boundary."""
        ...

    async def load(self, weights: Weights) -> None:
        """Put a version into a free slot and confirm its checksum."""
        ...

    async def swap(self, old: int, weights: Weights) -> None:
        """Overwrite version `old` by `weights`; its trajectories go on under the new version, prefilled again.

        This breaks law 1 and exists for the paradigm `partial` alone; what it did is in `token_versions`.
        """
        ...

    async def unload(self, version: int) -> None:
        """Free a version's slot."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Generate one trajectory to its end."""
        ...

    async def resume(self, suspended: Suspended) -> Completion:
        """Go on with a trajectory that was suspended, here or elsewhere, to its end."""
        ...

    async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        """Take trajectories out at the next step boundary. Ids that are no longer there are left out."""
        ...

    async def abort(self, ids: Sequence[int]) -> None:
        """Throw trajectories away. Ids that are no longer there are ignored."""
        ...

    async def shrink(self, share: float) -> int:
        """Keep `share` of the KV cache and give the rest of its memory back; returns the new `capacity.kv_tokens`.

        It never falls below what the longest trajectory needs that was asked for, or is expected: where nothing can be
        given back, nothing happens.
        """
        ...

    async def close(self) -> None:
        """Stop. Pending calls raise `EngineError`. Safe to call twice."""
        ...
