"""Decode and rollout in one sitting, each side in processes of its own, vLLM started once a (size, LoRA or not).

    python -m bench.gpu.generation --sizes 1.7B --out RESULTS --resume

For every size, and first without LoRA, then with: the native engine, then vLLM, so that the two sides of a ratio are
measured minutes apart on one device. A side whose cells are all there is not started. Cells come in the order of
`--batches`, what matters most first, filled contexts and rollouts last: a run that is cut short has the best of them.
vLLM takes minutes to start; with `--vllm-compile-cache` a later start over the same shape finds what it compiled, and
with `--wait-for` (and `--vllm-kv-gib`, so that others fit beside it) it starts while other work goes on.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.cells import Cell, add_options, from_options, integers, run_children, words
from bench.gpu.floor import measure_rates
from bench.gpu.native_side import NativeSide
from bench.gpu.shapes import add_dtype
from bench.gpu.sides import Side
from bench.gpu.vllm_engine_side import VllmEngineSide
from bench.gpu.vllm_side import VllmSide

BENCHES = ("decode", "rollout")


def parse(benches: Sequence[str], description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_dtype(parser)
    parser.add_argument("--benches", type=words, default=list(benches), help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=["native", "vllm", "vllm-engine", "both"], default="both")
    parser.add_argument("--sizes", type=words, default=["1.7B"])
    parser.add_argument("--lora", type=integers, default=[0, 1, 3], help="adapters in use; 0: base weights")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--drain-repeats", type=int, help="of a drain, which is long; default: `--repeats`")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--batches", type=integers, default=[256, 512, 64, 16, 1])
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a completion in `decode`")
    parser.add_argument("--filled", type=int, default=8_192, help="context of the filled cells; 0: none of them")
    parser.add_argument("--filled-batches", type=integers, default=[64, 16, 1, 128])
    parser.add_argument("--steps", type=int, default=64, help="timed steps of a filled cell")
    parser.add_argument("--prefills", type=products, default=[(8_192, 32), (1_024, 256)], help="tokens x prompts")
    parser.add_argument("--profile", action="store_true", help="native: print the kernels by their time")
    parser.add_argument("--no-routing", action="store_true", help="native: a mixture of experts records no routing")
    parser.add_argument("--tails", type=words, default=["short", "published"])
    parser.add_argument("--groups", type=integers, help="groups of a rollout; default: by the tail, 64, or 32 and 16")
    parser.add_argument("--sustained", type=float, default=2.0, help="completions counted, in multiples of the rows")
    parser.add_argument("--prefill-tokens", type=int, default=8_192, help="native: most tokens prefilled in a step")
    parser.add_argument("--flat-logprobs", action="store_true", help="vLLM: its faster form of log-probabilities")
    parser.add_argument("--vllm-compile-cache", type=Path, help="folder in which vLLM keeps what it compiled")
    parser.add_argument(
        "--vllm-kv-gib", type=int, help="vLLM: size of its cache; default: what 90 %% of the device hold"
    )
    parser.add_argument("--wait-for", type=Path, help="vLLM: start, and measure only when this file is there")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.sizes, options.batches, options.filled_batches, options.tails = ["tiny"], [1, 3], [2], ["tiny"]
        options.prompt, options.tokens, options.filled, options.steps, options.prefill_tokens = 8, 12, 48, 4, 64
        options.prefills = [(96, 2), (16, 4)]
    return options


def products(text: str) -> list[tuple[int, int]]:
    """Pairs of numbers: `8192x32,1024x256`."""
    pairs = [part.split("x") for part in words(text)]
    return [(int(left), int(right)) for left, right in pairs]


def main(benches: Sequence[str], description: str | None, arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(benches, description, given)
    uses_lora = sorted({lora > 0 for lora in options.lora})
    if options.side != "both" and len(options.sizes) == 1 and len(uses_lora) == 1:
        measure(options)
        return 0
    sitting = from_options(options).sitting
    sides = ["native", "vllm"] if options.side == "both" else [options.side]
    commands = []
    for size in options.sizes:
        for lora in uses_lora:
            loras = ",".join(str(n) for n in options.lora if (n > 0) == lora)
            for side in sides:
                own = ["--benches", ",".join(options.benches), "--side", side, "--sizes", size, "--lora", loras]
                python = sys.executable if side == "native" else options.vllm_python
                # What comes last counts, so that the parent's own options may stand before.
                commands.append([python, "-m", "bench.gpu.generation", *given, *own, "--sitting", sitting])
    return run_children(commands)


def longest(options: argparse.Namespace) -> int:
    """The longest context that any of the benches needs."""
    return max(int(importlib.import_module(f"bench.gpu.{name}").longest(options)) for name in options.benches)


def measure(options: argparse.Namespace) -> None:
    """One side, one size, with LoRA or without, in this process."""
    cells, size = from_options(options), options.sizes[0]
    work: list[tuple[Any, list[Cell]]] = []
    for name in options.benches:
        bench = importlib.import_module(f"bench.gpu.{name}")
        if pending := cells.pending(bench.cells_of(options.side, size, options.lora, options)):
            work.append((bench, pending))
    if not work:
        print(f"{options.side}, {size}, LoRA {options.lora}: every cell is there", flush=True)
        return
    lora = options.lora[0] > 0
    with tempfile.TemporaryDirectory() as scratch:
        rates = None
        if options.side == "native":
            rates = measure_rates(options.device, quick=options.tiny, dtype=options.dtype)
            side: Side = NativeSide(
                size,
                lora=lora,
                device=options.device,
                prefill_tokens=options.prefill_tokens,
                dtype=options.dtype,
                routing=not options.no_routing,
            )
        elif options.side == "vllm-engine":
            side = VllmEngineSide(size, lora=lora, max_context=longest(options), folder=Path(scratch))
        else:
            # Of all benches, pending or not: vLLM compiles for the context, so that a resumed run finds it again.
            context = longest(options)
            side = VllmSide(
                size,
                lora=lora,
                max_context=context,
                folder=Path(scratch),
                flat_logprobs=options.flat_logprobs,
                compile_cache=options.vllm_compile_cache,
                kv_bytes=None if options.vllm_kv_gib is None else options.vllm_kv_gib << 30,
                dtype=options.dtype,
            )
            while options.wait_for is not None and not options.wait_for.exists():
                time.sleep(0.5)
        try:
            for bench, pending in work:
                bench.measure(side, cells, pending, rates, options)
        finally:
            if isinstance(side, VllmEngineSide):
                side.close()


if __name__ == "__main__":
    raise SystemExit(main(BENCHES, __doc__))
