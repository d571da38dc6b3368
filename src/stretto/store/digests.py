"""Digests of what an update trained on. This is their only definition.

A *sample's digest* covers everything of one lineage that is handed to the trainer and recorded: its ids, versions,
context, tokens, log-probabilities, supports, turns, routing, finish, weights, rewards with their parts, and the label
of its task. The *digest of an update* covers the digests of its samples in their order, with the use of each, its row
of `updates`, the failed attempts of its samples, the lineages of its trajectories that are not trained, the phases of
the run that begin with it (their recipes too), and the digest of the update before. So the digests form a chain: a row
that is changed later contradicts the digest of its update, and a digest that is changed contradicts the next one.

The journal computes the digests from the samples in memory when an update ends. `verify` computes them from the rows.
Nothing secret goes into a digest: whoever rewrites every row and every digest consistently is found only by training
or scoring again (`stretto replay`, `stretto verify --recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from stretto.store.blobs import CompletionBlobs, blob, parts_text
from stretto.types import Sample

SIZE = 16  # bytes of a digest


def sample_digest(sample: Sample) -> bytes:
    """Returns the digest of a sample in memory."""
    made = sample.completion
    return row_digest(
        int(sample.trajectory),
        int(sample.group),
        int(sample.version),
        float(sample.reward),
        None if sample.turn_rewards is None else blob(sample.turn_rewards, "<f8"),
        blob(sample.prompt, "<i4"),
        int(made.version),
        str(made.checksum),
        str(made.finish),
        CompletionBlobs.of(made),
        int(sample.lineage),
        None if sample.turn_numbers is None else blob(sample.turn_numbers, "<i4"),
        parts_text(sample.reward_parts),
        sample.task,
    )


def row_digest(
    trajectory: object,
    group: object,
    version: object,
    reward: object,
    turn_rewards: object,
    prompt: object,
    completion_version: object,
    checksum: object,
    finish: object,
    arrays: CompletionBlobs,
    lineage: object = 0,
    turn_numbers: object = None,
    reward_parts: object = None,
    task: object = None,
) -> bytes:
    """Returns the digest of a sample from its columns. A column of a type that the journal never has is no error."""
    if isinstance(reward, int | float):
        reward = float(reward) + 0.0  # SQLite has no -0.0
    parts: tuple[object, ...] = (
        turn_rewards,
        prompt,
        arrays.tokens,
        arrays.logprobs,
        arrays.token_versions,
        arrays.supports,
        arrays.turns,
    )
    sizes = [len(part) if isinstance(part, bytes) else part for part in parts]
    facts: tuple[object, ...] = (trajectory, group, version, reward, completion_version, checksum, finish, *sizes)
    if lineage != 0 or turn_numbers is not None:  # the digest of an only lineage is what it was before there were more
        size = len(turn_numbers) if isinstance(turn_numbers, bytes) else turn_numbers
        facts, parts = (*facts, lineage, size), (*parts, turn_numbers)
    if reward_parts is not None:  # likewise of a reward without parts
        facts = (*facts, "parts", reward_parts)
    if task is not None:
        facts = (*facts, "task", task)
    if isinstance(arrays.routing, bytes):  # a sample without a record has the digest that it always had
        facts, parts = (*facts, "routing", len(arrays.routing)), (*parts, arrays.routing)
    digest = blake2b(repr(facts).encode(), digest_size=SIZE)
    for part in parts:
        if isinstance(part, bytes):
            digest.update(part)
    return digest.digest()


def untrained_digest(row: Sequence[Any]) -> tuple[int, int, str]:
    """Returns trajectory, lineage and digest of a lineage that is not trained; `row` is of `UNTRAINED_OF_MEMBERS`."""
    trajectory, lineage, group, version, context, made, checksum, finish, numbers, *arrays = row[1:]
    digest = row_digest(
        trajectory, group, version, None, None, context, made, checksum, finish, CompletionBlobs(*arrays), lineage,
        numbers,
    )  # fmt: skip
    return trajectory, lineage, digest.hex()


def update_digest(
    previous: object,
    update: int,
    members: Sequence[tuple[int, int, int]],
    samples: bytes,
    *,
    failures: Sequence[tuple[int, str, int]],
    row: Sequence[object],
    untrained: Sequence[tuple[int, int, str]] = (),
    phases: Sequence[Sequence[object]] = (),
) -> str:
    """Returns the digest of an update.

    `previous` is the digest of the update before (None for the first), `members` are the trajectory, use and lineage of
    each sample, `samples` their digests one after the other. `failures` are trajectory, kind and number of the failed
    attempts of the samples, in order. `row` has the checksum of the weights, the digest of the advantages, the metrics
    and the sums of the run, as text or None. `untrained` has each lineage that is not trained (`untrained_digest`).
    `phases` are the rows of `schema.PHASES` that begin with this update.
    """
    named = [(trajectory, use, lineage) if lineage else (trajectory, use) for trajectory, use, lineage in members]
    facts = (previous, update, named, list(failures), *row, *([list(untrained)] if untrained else []))
    facts = (*facts, *(("phase", *row) for row in phases))
    return blake2b(repr(facts).encode() + samples, digest_size=SIZE).hexdigest()
