"""The messages between an engine and its child process. Each is one pickled frame on a pipe.

The first frame to the child is a `Start`, and its answer is an `Answer` with `Ready`, or a `Refusal`. After that the
engine sends calls and requests. The child answers every call once, in any order, and sends `Tokens` as they come. Calls
are numbered by the engine, and so are requests (`key`): a trajectory that comes back gets another key. The pipe keeps
the order: tokens that were sent before an answer are read before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightsKind = Literal["lora", "full"]


@dataclass(frozen=True, slots=True)
class ChildOptions:
    """The options of the engine in the child."""

    model: str  # folder or hub name
    kind: WeightsKind
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    slots: int  # adapters at once
    lora_rank: int  # of the largest adapter; 0 with full weights
    rows: int
    max_context: int
    kv_bytes: int  # of the KV cache, over all devices of the instance
    kv_block: int  # tokens of one page of KV
    prefill_tokens: int  # of one step, at most
    file_bytes: int  # of the files of weights, if all instances of the run were on this machine
    lora_targets: tuple[str, ...] = ()  # the last parts of the names of the adapted layers
    tensor_parallel: int = 1
    device_share: float | None = None  # of the memory of a GPU that the child may take; None: what vLLM takes
    threads: int | None = None  # of torch, on the CPU
    stream_tokens: int = 1  # of a request, that vLLM makes before it hands them over; at its end the rest
    masks: bool = False  # requests may record what `top_k`, `top_p` and `min_p` leave of each distribution


# -- from the engine to the child --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Makes the engine in the child."""

    call: int
    options: ChildOptions


@dataclass(frozen=True, slots=True)
class Load:
    """Loads a version from a folder, after its file was read and found to have `checksum`. Answered by `Loaded`.

    Adapters are loaded beside others under a number that was never used before. Full weights replace those that are
    there.
    """

    call: int
    number: int
    kind: WeightsKind
    folder: str
    checksum: str
    scale: float
    probe: tuple[int, ...]  # the sequence to score afterwards


@dataclass(frozen=True, slots=True)
class Unload:
    """Removes an adapter, or forgets that full weights are of a version. Answered by None."""

    call: int
    number: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Generates after `prompt` until a stop token, or `max_tokens`. Answered by `Tokens` alone."""

    key: int
    number: int  # of the load that it is generated under
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_tokens: tuple[int, ...]
    priority: int
    supports: bool = False  # record what each token was drawn from


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends requests. Answered by None once no token of theirs follows."""

    call: int
    keys: tuple[int, ...]


ToChild = Start | Load | Unload | Generate | Abort


# -- from the child to the engine --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine in the child was made."""

    served_by: str  # `vllm 0.32.0`


@dataclass(frozen=True, slots=True)
class Loaded:
    """A version was loaded, and answers the probe so."""

    checksum: str  # of the file, as the child read it
    logprobs: tuple[float, ...]  # of each token of the probe after the first
    held: str | None = None  # the digest of the weights that vLLM holds, by its own checksums; None: it has none
    read_s: float = 0.0  # to read the file and compute its checksum
    load_s: float = 0.0  # for vLLM to load it
    probe_s: float = 0.0  # to score the probe


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of one request."""

    key: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # as many
    finish: Literal["stop", "length", "error"] | None = None  # None: more follow, or it was aborted
    num_cached: int = 0  # tokens of its prompt that were not prefilled; of the first piece
    error: str = ""
    supports: tuple[tuple[int, ...], ...] | None = None  # that each token was drawn from; None: they are not recorded


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of several requests."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call."""

    call: int
    value: Ready | Loaded | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that a call ended with. `damaged`: the weights are not those that were sent, or cannot be read."""

    call: int
    text: str
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine in the child is dead; the child ends."""

    text: str


FromChild = Answer | Refusal | Tokens | Failure
