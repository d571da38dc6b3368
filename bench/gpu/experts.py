"""The experts of one layer, alone: the kernels of a decode step against grouped products.

    python -m bench.gpu.experts --out bench/results/gpu/experts.json
    python -m bench.gpu.experts --tune                       # tries the shapes of the programs
    python -m bench.gpu.experts --tune --share 0/8           # only compiles an eighth of them, for the cache of Triton

One layer of Qwen3-30B-A3B with random weights and random routing, timed as the replay of a CUDA graph. Both sides
compute the same from the same experts, and are compared with float64 on some tokens. `floor_ms` is the time to read the
weights of the experts that have tokens once, at the rate of a copy that is measured in the same process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.attention import milliseconds
from bench.gpu.cells import integers, write_results
from bench.gpu.floor import measure_rates
from stretto.engines.native.kernels import expert_decode, layers
from stretto.engines.native.kernels.expert_decode import TILINGS, Tiling, choose, experts_of_few
from stretto.engines.native.kernels.experts import grouped_experts
from stretto.models.expert_products import weighted_experts

EXPERTS, CHOSEN, WIDTH, INNER = 128, 8, 2_048, 768
CHECKED = 8  # tokens that are compared with float64


class Layer(NamedTuple):
    """One layer's experts, and the tokens that go through them."""

    x: Tensor  # [T, width]
    ids: Tensor  # [T, k]
    weights: Tensor  # [T, k]
    up: Tensor
    down: Tensor

    def of(self, tokens: int) -> Layer:
        """Returns the same layer with the first tokens alone."""
        return Layer(self.x[:tokens], self.ids[:tokens], self.weights[:tokens], self.up, self.down)


def layer(tokens: int) -> Layer:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    weights, ids = choose(torch.randn(tokens, EXPERTS, device="cuda"), CHOSEN, normalized=True)
    return Layer(random(tokens, WIDTH), ids, weights, random(EXPERTS, 2 * INNER, WIDTH) * 0.02,
                 random(EXPERTS, WIDTH, INNER) * 0.04)  # fmt: skip


def grouped(own: Layer) -> Tensor:
    """The experts by grouped products, whatever the number of tokens."""
    kept, expert_decode.TILINGS = expert_decode.TILINGS, ()
    try:
        return grouped_experts(*own, layers.gate, "silu", 0)
    finally:
        expert_decode.TILINGS = kept


def few(own: Layer, gated: Tiling, down: Tiling) -> Tensor:
    return experts_of_few(*own, "silu", gated, down)


def error(own: Layer, made: Tensor) -> float:
    """The relative difference from float64, over the first tokens."""
    x, ids, weights, up, down = own.of(CHECKED)
    wanted = weighted_experts(x.double(), ids, weights.double(), up.double(), down.double(), F.silu)
    return float((made[:CHECKED] - wanted).norm() / wanted.norm())


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    whole, found = layer(max(options.tokens)), []
    rate = measure_rates("cuda").bandwidth  # which also brings the device to its full clock
    for tokens in options.tokens:
        own = whole.of(tokens)
        used = len(own.ids.unique())
        floor = used * 3 * WIDTH * INNER * 2 / rate * 1e3
        record: dict[str, Any] = {"tokens": tokens, "experts": used, "floor_ms": round(floor, 4)}
        tilings = expert_decode.tilings(tokens * CHOSEN, EXPERTS) or TILINGS[-1][1:]
        sides: list[tuple[str, Callable[[], Tensor]]] = [
            ("grouped", partial(grouped, own)),
            ("decode", partial(few, own, *tilings)),
        ]
        for name, work in sides:
            record[f"{name}_error"] = round(error(own, work()), 5)
            record[f"{name}_ms"] = round(milliseconds(work, graph=True, repeats=options.repeats), 4)
        found.append(record)
        print(" ".join(f"{key} {value}" for key, value in record.items()), flush=True)
    return found


def candidates() -> Iterator[Tiling]:
    for rows in (16, 32, 64):
        for columns, depth, warps, stages in (
            (32, 128, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3),
            (64, 128, 4, 4), (64, 128, 8, 4), (64, 256, 8, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3),
        ):  # fmt: skip
            yield Tiling(rows, columns, depth, warps, stages)


def tune(options: argparse.Namespace) -> None:
    """Prints the times of `gated` and of `down` for each shape of their programs, in milliseconds, by tokens."""
    part, parts = options.share
    whole = layer(max(options.tokens))
    usual = TILINGS[0]
    for number, tiling in enumerate(candidates()):
        if number % parts != part:
            continue
        for name in ("gated", "down"):
            own = (tiling, usual[2]) if name == "gated" else (usual[1], tiling)
            try:
                times = [
                    milliseconds(partial(few, whole.of(tokens), *own), graph=True, repeats=options.repeats)
                    for tokens in options.tokens
                ]
            except Exception as error:  # too much shared memory
                print(f"{name:5} {tuple(tiling)}: {str(error)[:80]}", flush=True)
                continue
            print(f"{name:5} {tuple(tiling)}: " + " ".join(f"{t:8.4f}" for t in times), flush=True)


def share(text: str) -> tuple[int, int]:
    part, parts = text.split("/")
    return int(part), int(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--tokens", type=integers, default=[1, 16, 64, 128, 256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="try the shapes of the programs instead")
    parser.add_argument("--share", type=share, default=(0, 1), help="tries only these shapes: part/parts")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.tune:
        tune(options)
        return
    write_results(options.out, run(options))


if __name__ == "__main__":
    main()
