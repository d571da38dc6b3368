"""The interface between the loop and an engine: one rollout instance.

Contract, tested for every implementation in `tests/engines/test_contract.py`:

- A request is generated under the version that it names, from its first token to its last. A version that is not
  resident is a `VersionNotResidentError`, never a substitute.
- A trajectory's tokens and log-probabilities depend on its prompt, version, seed and sampling alone.
- `load` confirms the checksum of the weights after the copy, or raises `ChecksumError` and holds nothing. An engine
  that cannot read back what it holds returns a receipt instead, and stamps its id on what it generates.
- `unload` of a version that still has trajectories is an error.
- After `suspend`, the pending `generate` (or `resume`) of each trajectory raises `SuspendedError`, and the caller holds
  the only copy. After `abort`, it raises `AbortedError`.
- `shrink` ends no trajectory and changes no token. It leaves room for trajectories as long as any before.
- An engine that fails raises `EngineError` from every pending call and from every later one.
- An idle engine uses no processor time.

An engine declares in its `capabilities` which parts of the contract it cannot keep. The contract test checks each
declared case: what cannot be done is refused by name, or does nothing where the protocol allows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from stretto.types import Capacity, Completion, EngineStats, Receipt, Request, Suspended, Weights, WeightsRef


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The parts of the contract that an engine keeps. The defaults are all of them."""

    confirms: Literal["checksum", "receipt"] = "checksum"
    """`checksum`: `load` reads back the resident weights. `receipt`: it reads the file, and scores a probe."""
    swaps: bool = True
    """`swap` works. If not, it raises `RequestError`, and the paradigm `partial` is refused."""
    shrinks: bool = True
    """`shrink` frees memory. If not, it returns the capacity that there was."""
    carries_kv: bool = True
    """`suspend` with `kv` takes the KV along. If not, `Suspended.kv` is None, and a context is prefilled again."""
    same_draws: bool = True
    """A suspension with KV changes no draw. If not, later tokens are drawn from another seed: the distribution is the
    same, the tokens differ."""
    records_supports: bool = True
    """Truncated sampling is recorded (`Completion.supports`). If not, a request that asks for it is refused."""
    exact: bool = True
    """Log-probabilities do not depend on what else runs, bit for bit. If not, they agree to rounding."""


class Engine(Protocol):
    """One rollout instance, called from the loop's thread; no method blocks it."""

    @property
    def capacity(self) -> Capacity:
        """The limits of the engine. Only `shrink` changes them, and only `kv_tokens`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The parts of the contract that the engine keeps. They never change."""
        ...

    def report(self) -> EngineStats:
        """Returns the load and the counters at the latest step boundary."""
        ...

    async def load(self, weights: Weights | WeightsRef) -> Receipt | None:
        """Loads a version into a free slot and confirms its checksum, or returns a receipt (`Capabilities.confirms`).

        Raises `ChecksumError`, and holds nothing, if what arrived is not what was sent, or does not answer the probe
        as the trainer does.
        """
        ...

    async def swap(self, old: int, weights: Weights | WeightsRef) -> None:
        """Overwrites version `old` by `weights`; its trajectories continue under the new version, prefilled again.

        This breaks law 1 and exists for the paradigm `partial` alone; `token_versions` records it.
        """
        ...

    async def unload(self, version: int) -> None:
        """Frees a version's slot."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Generates one trajectory to its end."""
        ...

    async def resume(self, suspended: Suspended) -> Completion:
        """Continues a trajectory that was suspended, here or elsewhere, to its end."""
        ...

    async def suspend(self, ids: Sequence[int], *, kv: bool) -> list[Suspended]:
        """Takes trajectories out at the next step boundary. Skips ids that are no longer there."""
        ...

    async def abort(self, ids: Sequence[int]) -> None:
        """Throws trajectories away. Ignores ids that are no longer there."""
        ...

    async def shrink(self, share: float) -> int:
        """Keeps `share` of the KV cache and frees the rest of its memory; returns the new `capacity.kv_tokens`.

        It never falls below the need of the longest trajectory that was requested or is expected. If nothing can be
        freed, nothing happens.
        """
        ...

    async def close(self) -> None:
        """Stops the engine. Pending calls raise `EngineError`. Safe to call twice."""
        ...
