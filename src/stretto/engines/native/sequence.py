"""A trajectory in the engine (queued, waiting for its prefix, or decoding in a row), and the prefix it starts from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stretto.engines.native.cache import RoutingRead
from stretto.engines.native.host_kv import HostCopy
from stretto.types import Completion, FinishReason, Request, Sampling, Supports, Suspended

NO_TOKENS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
NO_LOGPROBS: NDArray[np.float32] = np.zeros(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class SequenceState:
    """One trajectory. `tokens`, `logprobs` and `supports` are those it had when it last entered the queue; while it has
    a row, the row has the newer ones."""

    request: Request
    arrival: int
    slot: int
    tokens: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    logprobs: NDArray[np.float32] = field(default_factory=lambda: NO_LOGPROBS)
    supports: Supports | None = None  # of its tokens, if its sampling records them
    routing: NDArray[Any] | None = None  # the experts of its first tokens, if it came with them
    routing_read: RoutingRead | None = None  # those of the tokens behind these, once it has left its row
    past_versions: NDArray[np.int32] | None = None  # of the first tokens, if other weights made them
    kv: Tensor | None = None  # on the host, while it is out of the cache
    pages: list[int] = field(default_factory=list)
    row: int = -1
    prefix: Prefix | None = None  # that it waits for
    origin: Prefix | None = None  # that it decodes from, if others of its group may follow
    started_at: float = 0.0
    prefilled: int = 0

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def order(self) -> tuple[int, int]:
        """The order of admission; the last one is preempted first."""
        return (self.request.priority, self.arrival)

    @property
    def routing_recorded(self) -> int:
        """Tokens whose experts it has a record of, apart from the cache."""
        return 0 if self.routing is None else len(self.routing)

    @property
    def has_arrived(self) -> bool:
        """False while its record of routing is on its way to the host."""
        return self.routing_read is None or self.routing_read.is_done

    def settle_routing(self) -> NDArray[Any] | None:
        """Waits for the record of its routing and returns all of it."""
        if self.routing_read is not None:
            read, self.routing_read = self.routing_read.wait(), None
            self.routing = read if self.routing is None else np.concatenate([self.routing, read])
        return self.routing

    def token_versions(self, made: int) -> NDArray[np.int32] | None:
        """Returns the version of each of its `made` tokens; None if all are of its own version."""
        if self.past_versions is None:
            return None
        own = np.full(made - len(self.past_versions), self.request.version, dtype=np.int32)
        return np.concatenate([self.past_versions, own])

    def change_version(self, version: int) -> None:
        """Changes to another version; the tokens made so far keep theirs."""
        past = self.token_versions(len(self.tokens))
        if past is None and len(self.tokens):
            past = np.full(len(self.tokens), self.request.version, dtype=np.int32)
        self.past_versions = past
        self.request = replace(self.request, version=version)

    def suspended(self, checksum: str) -> Suspended:
        """Returns its portable form, with the contents of `tokens`, `logprobs` and `kv`."""
        return Suspended(
            self.request,
            self.tokens,
            self.logprobs,
            checksum,
            self.token_versions(len(self.tokens)),
            self.kv,
            self.started_at,
            self.prefilled,
            self.supports,
            routing=self.settle_routing(),
        )

    def completion(self, finish: FinishReason, checksum: str, now: float) -> Completion:
        """Returns its completion. Its version is that of its first token."""
        versions = self.token_versions(len(self.tokens))
        return Completion(
            self.request.id,
            self.request.version if versions is None else int(versions[0]),
            self.tokens,
            self.logprobs,
            finish,
            checksum,
            versions,
            self.started_at,
            now,
            self.prefilled,
            self.supports,
            routing=self.settle_routing(),
        )


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens to prefill once for all trajectories that start with them.

    Without pages it has not begun; with `logits` it is done. It lives while a queued trajectory needs it, and while one
    of its group decodes, because the rest of the group may come a moment later.
    """

    key: Hashable
    tokens: Tensor  # [n]
    slot: int
    queued: int = 0  # trajectories in the queue that will start from it
    children: int = 0  # rows that decode from it
    waiting: list[SequenceState] = field(default_factory=list)  # admitted, each with a row reserved
    retained: list[int] = field(default_factory=list)  # until it begins: full pages that an earlier turn has left
    host: HostCopy | None = None  # until its pages are back on the device: full pages of an earlier turn
    pages: list[int] = field(default_factory=list)
    cache_slots: Tensor | None = None  # [n] int32
    done: int = 0  # tokens prefilled
    logits: Tensor | None = None  # [vocabulary], of its last token

    @property
    def order(self) -> tuple[int, int]:
        return min(t.order for t in self.waiting)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a prefix that are prefilled in this step."""

    prefix: Prefix
    tokens: Tensor  # [end - start]
    slots: Tensor  # [end] int32: the cache slots of the prefix
    start: int
    end: int
    weights_slot: int
    last: bool  # its last token's logits are wanted


@dataclass(slots=True, eq=False)
class RetainedKV:
    """KV of a trajectory that has ended, for a request that begins with all of its tokens.

    It is on the device (`pages`), on its way to the host (both), or there (`host`).
    """

    tokens: tuple[int, ...]  # of the full pages
    slot: int
    pages: list[int]
    host: HostCopy | None = None
    owner: SequenceState | None = None  # that made it, if it has a record of routing


Ended = tuple[SequenceState, FinishReason, bool]
"""A trajectory whose row has ended, the reason, and whether its last draw failed."""
