"""Checks of what an instance answers. An answer that cannot be that to its request is never trained on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stretto.errors import EngineError
from stretto.types import Completion, KVRef, Request, Suspended

ROUNDING = 1e-3  # a log-probability may be above 0 by so much


def refuse_output(
    answer: Completion | Suspended,
    request: Request,
    *,
    checksums: Mapping[int, str],
    vocabulary: int | None,
    continued: bool,
) -> None:
    """Raises `EngineError` if an instance answered for another trajectory, version or weights, or with garbage.

    `checksums` are those of the versions that were loaded. With `continued` the weights under a trajectory may change
    (`partial`): its versions are then any of these, none after a newer one. The caller loses an instance that fails
    here: it is not trusted with anything else.
    """
    asked = answer.request if isinstance(answer, Suspended) else answer
    what = f"was asked for trajectory {request.id} under version {request.version}"
    if asked.id != request.id:
        raise EngineError(f"{what}, and answered for trajectory {asked.id}")
    if reason := _shape(answer, request):
        raise EngineError(f"{what}, and answered with {reason}")
    versions = answer.token_versions if len(answer.tokens) else None
    used = {asked.version} if versions is None else {int(version) for version in np.unique(versions)}
    if not continued and used != {request.version}:
        raise EngineError(f"{what}, and answered with tokens of versions {sorted(used)}")
    if versions is not None and len(back := np.flatnonzero(versions[1:] < versions[:-1])):
        newer, older = versions[back[0] : back[0] + 2].tolist()
        raise EngineError(f"{what}, and answered with a token of version {older} after one of version {newer}")
    last = asked.version if versions is None else int(versions[-1])
    expected = checksums.get(last)
    if expected is not None and len(answer.tokens) and answer.checksum != expected:
        raise EngineError(f"{what}, and answered with weights `{answer.checksum}`; version {last} is `{expected}`")
    if reason := _garbage(answer, request, vocabulary):
        raise EngineError(f"{what}, and answered with {reason}")


def _shape(answer: Completion | Suspended, request: Request) -> str:
    """Returns what is wrong with the type, shape or length of its arrays; empty if nothing is."""
    arrays = {"tokens": ("iu", answer.tokens), "logprobs": ("f", answer.logprobs)}
    if answer.token_versions is not None:
        arrays["token_versions"] = ("iu", answer.token_versions)
    for name, (kinds, values) in arrays.items():
        if not (isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds):
            kind = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
            return f"`{name}` as {kind}, which is no row of {'numbers' if kinds == 'f' else 'integers'}"
    num_tokens = len(answer.tokens)
    for what, row in (
        ("log-probabilities", answer.logprobs),
        ("of `token_versions`", answer.token_versions),
        ("of `supports`", answer.supports),
    ):
        if row is not None and len(row) != num_tokens:
            return f"{num_tokens} tokens and {len(row)} {what}"
    kv = answer.kv if isinstance(answer, Suspended) else None
    context = len(request.prompt) + num_tokens
    routing = answer.routing
    if routing is not None and (num_tokens or isinstance(answer, Completion)):
        if not isinstance(routing, np.ndarray) or routing.ndim != 3 or routing.dtype not in (np.uint8, np.int16):
            return "`routing` that is no array [tokens, layers, k] of experts"
        if len(routing) != context - 1:
            return f"routing of {len(routing)} tokens, where {context - 1} tokens of {context} have some"
    # The shape of KV that is still on another machine is checked by the engine that resumes with it.
    if kv is not None and not isinstance(kv, KVRef) and (kv.ndim != 5 or kv.shape[2] != context - 1):
        return f"KV of {tuple(kv.shape)}, where {context - 1} tokens of {context} have some"
    return ""


def _garbage(answer: Completion | Suspended, request: Request, vocabulary: int | None) -> str:
    tokens, logprobs = answer.tokens, answer.logprobs
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
