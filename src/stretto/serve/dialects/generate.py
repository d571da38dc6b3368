"""`POST /inference/v1/generate`: token ids in and out, as vLLM has it, for clients that render messages themselves.

Tokens continue the row that they begin with, so what was sampled stays as it was. The answer always has the
log-probabilities of the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto.serve.call_errors import InvalidCallError
from stretto.serve.dialects import dialect
from stretto.serve.dialects.chat import usage
from stretto.serve.dialects.dialect import Asked, Body, Dialect
from stretto.serve.sessions import Answer

MAX_TOKEN = 2**31 - 1


def read(body: Body) -> Asked:
    """Reads a request. Raises `InvalidCallError`."""
    tokens = body.get("token_ids")
    if not isinstance(tokens, list) or not tokens or not all(_is_token(token) for token in tokens):
        raise InvalidCallError("`token_ids` is no list of token ids: send at least one, each a whole number")
    dialect.refuse(body, "stream", "an answer of tokens is not streamed", False)
    dialect.refuse(body, "features", "only tokens of text can be continued")
    parameters = body.get("sampling_params") or {}
    if not isinstance(parameters, Mapping):
        raise InvalidCallError(f"`sampling_params` is {parameters!r:.80}: send an object")
    dialect.refuse(parameters, "n", "one answer is given to a call; call several times", 1)
    model = dialect.text(body, "model", "")
    return Asked(
        model=model,
        tokens=tuple(tokens),
        sampling=dialect.sampling(parameters, max_tokens=("max_tokens",)),
        train=dialect.trains(body, model),
    )


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN


def write(answer: Answer, asked: Asked, _: Callable[[int], str]) -> dict[str, Any]:
    choice = {
        "index": 0,
        "token_ids": answer.tokens.tolist(),
        "logprobs": dialect.logprobs(answer, lambda token: f"token_id:{token}"),
        "finish_reason": answer.finish,
    }
    return {
        "request_id": answer.id,
        "model": asked.model,
        "prompt_token_ids": answer.prompt_tokens.tolist(),
        "choices": [choice],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "usage": usage(answer),
    }


GENERATE = Dialect("/inference/v1/generate", read, write, None, dialect.openai_error)
