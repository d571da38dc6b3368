"""Tiny models, made on the spot: a 0.3 M parameter Qwen3 over characters, warmed up on the quickstart's task.

A model that knows nothing earns no reward and cannot learn from it. The warm start shows it both ways to answer, the
chain and the blind guess, so that it begins at about 0.4 and learning which way pays is left to reinforcement.
`tiny-moe` is the same as a mixture of 8 experts, of which each token uses 2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from stretto.environments.countdown import chain, draw
from stretto.models.user_cache import user_cache

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
FORMAT = 2  # of the folder; raise it when what is made changes

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

Progress = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, loss)."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Supervised training before the run. `steps = 0` leaves the weights random."""

    steps: int = 400
    problems: int = 20  # per step
    learning_rate: float = 4e-3  # peak of a cosine
    blind: float = 0.6  # share of the answers that guess without a chain
    slips: float = 0.02  # share of wrong running values in chains


VALUES: dict[str, Any] = {
    "vocab_size": 3 + len(CHARACTERS),
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,  # the usual 0.02 does not learn to copy in so few steps
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "dtype": "float32",
}
MIXTURE_VALUES: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


def tiny_config(**changes: Any) -> Qwen3Config:
    """The configuration of the tiny model; `changes` replace single values."""
    return Qwen3Config(**{**VALUES, **changes})


def tiny_moe_config(**changes: Any) -> Qwen3MoeConfig:
    """The configuration of the tiny mixture of experts; a token uses as many weights as in the tiny model."""
    return Qwen3MoeConfig(**{**VALUES, **MIXTURE_VALUES, **changes})


def tiny_config_of(path: str) -> Qwen3Config | Qwen3MoeConfig:
    """The configuration of the model that is created for `model.path`: "tiny" or "tiny-moe"."""
    return tiny_moe_config() if path == "tiny-moe" else tiny_config()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline, and nothing added on the way in or out."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(
    folder: Path | None = None,
    *,
    seed: int = 0,
    warm_start: WarmStart | None = None,
    progress: Progress | None = None,
    mixture: bool = False,
) -> Path:
    """A Hugging Face model folder of the tiny model, or of the tiny `mixture`, made if it is not there yet.

    Without `folder` it lives in the user's cache, named by a hash of all that determines it. It appears there as a
    whole or not at all, so two processes may ask for it at once.
    """
    warm_start = warm_start if warm_start is not None else WarmStart()
    target = folder if folder is not None else user_cache() / f"tiny-{recipe_hash(seed, warm_start, mixture=mixture)}"
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        model: nn.Module = random_mixture(seed) if mixture else random_model(seed)
        tokenizer = tiny_tokenizer()
        warm_up(model, tokenizer, seed=seed, options=warm_start, progress=progress)
        model.save_pretrained(scratch)  # type: ignore[operator]
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        _place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _place(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        # Another process was first, and what it made is the same; anything else in the way is the caller's to know.
        if not (target / "config.json").exists():
            raise


def recipe_hash(seed: int, warm_start: WarmStart, *, mixture: bool = False) -> str:
    """Names everything that the weights depend on."""
    recipe = {
        "format": FORMAT,
        "seed": seed,
        "warm_start": dataclasses.asdict(warm_start),
        "config": (tiny_moe_config() if mixture else tiny_config()).to_diff_dict(),
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()[:16]


def random_model(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """The tiny model with random weights; the caller's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(tiny_config(**changes)).eval()


def random_mixture(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """The tiny mixture with random weights; the caller's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(tiny_moe_config(**changes)).eval()


def warm_up(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    options: WarmStart,
    progress: Progress | None = None,
) -> list[float]:
    """Train on demonstrations of the quickstart's task, on the completion's tokens alone; returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
    batches = _batches(tokenizer, seed, options)
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    losses: list[float] = []
    model.train()
    for step in range(options.steps):
        rate = options.learning_rate * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10)
        loss = torch.zeros(())
        optimizer.zero_grad()
        for part in next(batches):
            hidden = model.model(input_ids=part.tokens, use_cache=False).last_hidden_state  # type: ignore[operator]
            kept = part.weights > 0
            logprobs = F.log_softmax(model.lm_head(hidden[kept]), dim=-1)  # type: ignore[operator]
            targets = part.targets[kept]
            right = logprobs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
            right = torch.where(targets == ANY_DIGIT, logprobs[:, digits].mean(dim=1), right)
            share = -(right * part.weights[kept]).sum()
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
        if progress is not None:
            progress(step + 1, options.steps, losses[-1])
    model.eval()
    return losses


ANY_DIGIT = -1  # a target: each of the ten digits, alike
SLICE_TOKENS = 75  # a forward and backward pass costs as much as so many tokens, whatever is in it
FIRST_VALUE = 5  # place in a chain of the first running value, the only one that takes a look at the prompt ...
FIRST_VALUE_WEIGHT = 2.0  # ... and therefore the last to be learned


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: list[int]
    targets: list[int]  # of each token the next one
    weights: list[float]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Rows of similar length, padded: all of shape [rows, length]. Over a whole step the weights sum to 1."""

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def _batches(tokenizer: PreTrainedTokenizerFast, seed: int, options: WarmStart) -> Iterator[list[_Slice]]:
    """Endless batches, each in slices of similar length: padded as one, a long-tailed batch is mostly padding.

    Each problem is answered both ways, weighted by their shares, and a guess is all ten digits at once: the same
    expectation as drawing one way and one digit, without the noise of the draw.
    """
    random = Random(f"warm start {seed}")
    guess = [*tokenizer.encode("="), ANY_DIGIT, tokenizer.eos_token_id]
    while True:
        rows = []
        for _ in range(options.problems):
            problem = draw(random)
            head = tokenizer.encode(problem.prompt)
            steps = [*tokenizer.encode(chain(problem, random, options.slips)), tokenizer.eos_token_id]
            rows.append(_row(head, steps, 1 - options.blind))
            rows[-1].weights[len(head) - 1 + FIRST_VALUE] *= FIRST_VALUE_WEIGHT
            rows.append(_row(head, guess, options.blind, shown=tokenizer.encode(f"={random.randrange(10)}")))
        rows.sort(key=lambda row: len(row.tokens))
        total = sum(sum(row.weights) for row in rows)
        yield [_pad(part, total) for part in _cut(rows)]


def _row(head: list[int], answer: list[int], weight: float, shown: list[int] | None = None) -> _Row:
    before = len(head) - 1
    shown = answer[:-1] if shown is None else shown
    return _Row(head + shown, [0] * before + answer, [0.0] * before + [weight] * len(answer))


def _cut(rows: list[_Row]) -> list[list[_Row]]:
    """Cut rows sorted by length into slices so that padding and the fixed cost of a slice are least together."""
    lengths = [len(row.tokens) for row in rows]
    best: list[tuple[int, int]] = [(0, 0)]  # of the first so many rows: cost, and where their last slice begins
    for end in range(1, len(rows) + 1):
        costs = ((best[start][0] + (end - start) * lengths[end - 1] + SLICE_TOKENS, start) for start in range(end))
        best.append(min(costs))
    parts = []
    end = len(rows)
    while end > 0:
        start = best[end][1]
        parts.append(rows[start:end])
        end = start
    return parts


def _pad(rows: list[_Row], total: float) -> _Slice:
    length = max(len(row.tokens) for row in rows)
    tokens = torch.zeros((len(rows), length), dtype=torch.int64)
    targets = torch.zeros((len(rows), length), dtype=torch.int64)
    weights = torch.zeros((len(rows), length))
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)] = torch.tensor(row.tokens)
        targets[place, : len(row.targets)] = torch.tensor(row.targets)
        weights[place, : len(row.weights)] = torch.tensor(row.weights) / total
    return _Slice(tokens, targets, weights)
