"""Digests of what an update trained on. This is their only definition.

A *sample's digest* covers everything of one trajectory that is handed to the trainer and recorded: its ids, versions,
prompt, tokens, log-probabilities, supports, turns, finish, weights and rewards. The *digest of an update* covers the
digests of its samples in their order, with the use of each, its row of `updates`, the failed attempts of its samples,
and the digest of the update before. So the digests form a chain: a row that is changed later contradicts the digest of
its update, and a digest that is changed contradicts the next one.

The journal computes the digests from the samples in memory when an update ends. `verify` computes them from the rows.
Nothing secret goes into a digest: whoever rewrites every row and every digest consistently is found only by training
or scoring again (`stretto replay`, `stretto verify --recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from stretto.store.blobs import CompletionBlobs, blob
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
) -> bytes:
    """Returns the digest of a sample from its columns. A column of a type that the journal never has is no error."""
    if isinstance(reward, int | float):
        reward = float(reward) + 0.0  # SQLite has no -0.0
    parts = (turn_rewards, prompt, arrays.tokens, arrays.logprobs, arrays.token_versions, arrays.supports, arrays.turns)
    sizes = [len(part) if isinstance(part, bytes) else part for part in parts]
    facts = (trajectory, group, version, reward, completion_version, checksum, finish, *sizes)
    digest = blake2b(repr(facts).encode(), digest_size=SIZE)
    for part in parts:
        if isinstance(part, bytes):
            digest.update(part)
    return digest.digest()


def update_digest(
    previous: object,
    update: int,
    members: Sequence[tuple[int, int]],
    samples: bytes,
    *,
    failures: Sequence[tuple[int, str, int]],
    row: Sequence[object],
) -> str:
    """Returns the digest of an update.

    `previous` is the digest of the update before (None for the first), `members` are the trajectory and the use of each
    sample, `samples` their digests one after the other. `failures` are trajectory, kind and number of the failed
    attempts of the samples, in order. `row` has the checksum of the weights, the digest of the advantages, the metrics
    and the sums of the run, as text or None.
    """
    facts = (previous, update, list(members), list(failures), *row)
    return blake2b(repr(facts).encode() + samples, digest_size=SIZE).hexdigest()
