"""Problems of mathematics for the benches of GSM8K: reading and scoring them, and a tiny stand-in for a CPU.

Nothing here needs the package: TRL's side may run where it is not installed.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Problem = Mapping[str, Any]  # `messages` and `answer`
Reward = Callable[..., float]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_PROBLEMS = 32  # to train on, and as many held out


@dataclass(frozen=True, slots=True)
class Score:
    """What completions of some problems came to."""

    accuracy: float
    num_problems: int
    mean_tokens: float
    truncated: float  # share that was cut off at the longest length

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_problems(folder: Path, split: str, count: int | None = None) -> list[Problem]:
    """The first `count` problems of `train` or `test`, or all of them, as the examples wrote them."""
    path = folder / f"{split}.jsonl"
    if not path.exists():
        raise ValueError(
            f"`--problems {folder}`: there is no `{path}`; `python examples/gsm8k.py` makes the one of GSM8K, and "
            "`python examples/reasoning_problems.py TASK --out FOLDER` those of other tasks"
        )
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]


def load_reward(name: str) -> Reward:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    found: Reward = getattr(importlib.import_module(module), function)
    return found


def score(
    reward: Reward, problems: Sequence[Problem], texts: Sequence[str], lengths: Sequence[int], max_tokens: int
) -> Score:
    """Scores one completion of each problem; a length counts the token that ended it."""
    earned = [reward("", text, answer=problem["answer"]) for problem, text in zip(problems, texts, strict=True)]
    cut = sum(length >= max_tokens for length in lengths)
    count = len(problems)
    return Score(sum(earned) / count, count, sum(lengths) / count, cut / count)


def digits(prompt: str, completion: str, **row: object) -> float:
    """Returns the share of characters that are digits: a reward for measuring speed.

    Members of a group nearly always differ in it, so that every sequence of a batch has a gradient to compute.
    """
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


# -- a stand-in for a CPU ----------------------------------------------------------------------------------------------


def write_tiny_problems(folder: Path) -> Path:
    """Writes sums of two digits as problems."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = []
        for _ in range(TINY_PROBLEMS):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            lines.append(json.dumps({"messages": [{"role": "user", "content": f"{a}+{b}?"}], "answer": str(a + b)}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_tiny_model(folder: Path, head_size: int = 16) -> Path:
    """Writes a random Qwen2 with two layers, and a tokenizer with a token for each byte and a chat template.

    vLLM for the CPU needs a `head_size` of 32.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    padding, _, end = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token=padding, chat_template=TEMPLATE, padding_side="left"
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=64 // head_size,
        num_key_value_heads=32 // head_size,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=ids[end],
        pad_token_id=ids[padding],
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
