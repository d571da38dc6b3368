"""Writes a GGUF file as a Hugging Face model folder. `examples/smollm2.py` and `examples/qwen.py` use it.

Reading a GGUF file takes `pip install 'stretto[gguf]'`. Weights that were quantized to four bits are not the published
model: measure where yours starts, and do not compare it with published scores.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def convert(gguf: Path, out: Path, dtype: torch.dtype, *, end_of_turn: str, padding: str) -> None:
    """Reads `gguf` and writes a model folder that loads like any other, with its head tied to its embedding.

    `end_of_turn` is the token that ends an answer: files often name another one. Exits with a message if the file
    lacks a chat template or that token.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"reading a GGUF file takes {package}: `pip install 'stretto[gguf]'`")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    known = tokenizer.get_vocab()
    if tokenizer.chat_template is None or not {end_of_turn, padding} <= known.keys():
        sys.exit(f"{gguf} is not the file this was written for: no chat template, or no token `{end_of_turn}`")
    tokenizer.eos_token, tokenizer.pad_token = end_of_turn, padding

    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config: Any = quantized.config
    config.eos_token_id, config.pad_token_id = known[end_of_turn], known[padding]
    config.tie_word_embeddings = True
    # A model read from GGUF counts as quantized and refuses to be saved; one made from its configuration does not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tensors = quantized.state_dict()
    # Where the file has a head of its own, that is the more precise copy of the tied tensor.
    tensors[EMBEDDING] = tensors.pop(HEAD, tensors[EMBEDDING])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=False, assign=True)
    model.tie_weights()
    if missing := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        sys.exit(f"{gguf} lacks tensors of the model: {', '.join(missing[:4])}")
    config.dtype = dtype
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def ask(folder: Path, question: str) -> str:
    """Returns a greedy answer of the model in `folder`, to check that the conversion worked."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answer: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer
