"""Whether what an instance handed back can be what it was asked for. What cannot is never trained on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stretto.errors import EngineError
from stretto.types import Completion, Request, Suspended

ROUNDING = 1e-3  # a log-probability may be above 0 by so much


def refuse_answer(
    answer: Completion | Suspended,
    request: Request,
    *,
    checksums: Mapping[int, str],
    vocabulary: int | None,
    continued: bool,
) -> None:
    """Raise `EngineError` where an instance answered for another trajectory, version or weights, or with garbage.

    `checksums` are those of the versions that were loaded. `continued` is whether the weights under a trajectory may
    change (`partial`): then its versions are any of these. An instance that fails here is not to be trusted with
    anything else.
    """
    asked = answer.request if isinstance(answer, Suspended) else answer
    what = f"was asked for trajectory {request.id} under version {request.version}"
    if asked.id != request.id:
        raise EngineError(f"{what}, and answered for trajectory {asked.id}")
    versions = answer.token_versions
    used = {asked.version} if versions is None else {int(version) for version in np.unique(versions)}
    if not continued and used != {request.version}:
        raise EngineError(f"{what}, and answered with tokens of versions {sorted(used)}")
    last = asked.version if versions is None or not len(versions) else int(versions[-1])
    expected = checksums.get(last)
    if expected is not None and len(answer.tokens) and answer.checksum != expected:
        raise EngineError(f"{what}, and answered with weights `{answer.checksum}`; version {last} is `{expected}`")
    if reason := _garbage(answer, request, vocabulary):
        raise EngineError(f"{what}, and answered with {reason}")


def _garbage(answer: Completion | Suspended, request: Request, vocabulary: int | None) -> str:
    tokens, logprobs = answer.tokens, answer.logprobs
    for name, values in (("token_versions", answer.token_versions), ("supports", answer.supports)):
        if values is not None and len(values) != len(tokens):
            return f"{len(tokens)} tokens and {len(values)} of `{name}`"
    if len(logprobs) != len(tokens):
        return f"{len(tokens)} tokens and {len(logprobs)} log-probabilities"
    done = isinstance(answer, Completion)
    if not int(done) <= len(tokens) <= request.sampling.max_tokens - int(not done):
        return f"{len(tokens)} tokens, where at most {request.sampling.max_tokens} were asked for"
    if not len(tokens):
        return ""
    if tokens.min() < 0 or (vocabulary is not None and tokens.max() >= vocabulary):
        return f"tokens from {tokens.min()} to {tokens.max()}, outside of the vocabulary"
    if not np.isfinite(logprobs).all() or logprobs.max() > ROUNDING:
        bad = logprobs[~(np.isfinite(logprobs) & (logprobs <= ROUNDING))][0]
        return f"a log-probability of {bad}"
    return ""
