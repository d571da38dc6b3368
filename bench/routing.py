"""Records of routing: the mismatch of engine and trainer, the cost of a record, and what a mixture learns.

    python bench/routing.py mismatch --out bench/results/routing_mismatch.json
    python bench/routing.py parts --out bench/results/routing_parts.json
    python bench/routing.py learning --seeds 0,1,2 --steps 30 --out bench/results/routing_learning.json
    python bench/routing.py cost --out bench/results/routing_cost.json

`mismatch` samples from random mixtures in bfloat16 on the CPU and scores the same tokens by the trainer, with the
experts replayed and with free routing. It prints the mean |difference of log-probabilities| of both and their ratio.
`parts` does the same for the deepest mixture with one more rounding to bfloat16 at a time, or one fewer.
`learning` runs `recipes/moe.toml` with `training.routing` `replay` and `free` for each seed; a run whose result
is in the folder already is not run again. `cost` times decode steps with and without records, in turns.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from stretto.engines.native import fused
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.kernels import cpu_layers, experts, kernel_set
from stretto.models import decoder, expert_products
from stretto.models.float32_products import wide_logits, wide_mm
from stretto.models.tiny import random_mixture
from stretto.training.forward import PackedModel
from stretto.training.recorded_logprobs import rescore
from stretto.training.trainer import LocalTrainer
from stretto.types import Completion, Request, Sample, Sampling

ROOT = Path(__file__).parent.parent
SHAPES: dict[str, dict[str, Any]] = {
    "4 layers, 8 experts, 2 chosen": {"num_hidden_layers": 4},
    "12 layers, 32 experts, 4 chosen": {"num_hidden_layers": 12, "num_experts": 32, "num_experts_per_tok": 4},
    "24 layers, 64 experts, 8 chosen": {
        "num_hidden_layers": 24, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mismatch", "parts", "learning", "cost"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="of `parts`: the changes whose names have this in them")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "routing", help="of the runs of `learning`")
    asked = parser.parse_args()
    seeds = [int(each) for each in asked.seeds.split(",")]
    if asked.what == "mismatch":
        found = [mismatch(name, changes, seed) for name, changes in SHAPES.items() for seed in seeds]
    elif asked.what == "parts":
        found = [part for seed in seeds for part in parts(list(SHAPES)[-1], seed, asked.only)]
    elif asked.what == "cost":
        found = [cost(rows) for rows in (4, 16, 64)]
    else:
        found = learning(seeds, asked.steps, asked.folder)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
        "command": " ".join(["python", "bench/routing.py", *sys.argv[1:]]),
        "results": found,
    }  # fmt: skip
    asked.out.write_text(json.dumps(report, indent=1) + "\n")


def mismatch(name: str, changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """Samples 32 trajectories of 96 tokens from a random mixture and scores them twice."""
    model = random_mixture(seed, dtype="bfloat16", **changes).to(torch.bfloat16)
    engine = NativeEngine(model, kind="full", slots=1, rows=32, kv_tokens=8192, max_context=256)
    trainer = LocalTrainer(model)
    engine.load(trainer.policy.weights(0))
    samples = generate(engine, 32, 96)
    of: dict[str, float] = {}
    for how, routing in (("replay", trainer.routing), ("free", None)):
        trainer.routing = routing
        differences = [
            np.abs(scored - sample.completion.logprobs)
            for scored, sample in zip(rescore(trainer, samples), samples, strict=True)
        ]
        of[how] = float(np.concatenate(differences).mean())
    found = {"model": name, "seed": seed, **of, "ratio": of["free"] / of["replay"]}
    print(f"{name}, seed {seed}: replay {of['replay']:.5f}, free {of['free']:.5f}, {found['ratio']:.2f} x", flush=True)
    return found


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def after(function: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Returns `function` with a change of its result."""
    return lambda *given, **named: change(function(*given, **named))


@contextmanager
def patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Puts other values at `(owner, name, value)` while the context is open."""
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def rounded_stream(stream: Tensor, added: Tensor | None, *given: Any) -> Tensor:
    """`cpu_layers.add_norm` with a residual stream that is rounded at every addition."""
    stream.copy_(rounded(stream))
    if added is not None:
        stream.copy_(rounded(stream + rounded(added)))
    return cpu_layers.add_norm(stream, None, *given)


def wide_expert(x: Tensor, weight: Tensor, *given: Any) -> Tensor:
    """A linear layer of one expert in the engine, not rounded."""
    return F.linear(x.float(), weight.float())


def wide_product(x: Tensor, factor: Tensor, ends: Tensor) -> Tensor:
    """`grouped_product` of the trainer, not rounded."""
    return F.grouped_mm(x.float(), factor.float(), offs=ends)


def changes() -> dict[str, list[tuple[Any, str, Any]]]:
    """Returns what is patched for each change: of the engine, of the trainer, or of both."""
    plain, own = kernel_set.CPU, functools.partial(replace, kernel_set.CPU)
    double_gate = lambda both, *given: F.silu(both.chunk(2, 1)[0]) * both.chunk(2, 1)[1]  # noqa: E731
    modules = functools.partialmethod(PackedModel.prepare, plain=False)
    return {
        "as it is": [],
        "products of experts not rounded, both": [
            (experts, "_slotted", wide_expert),
            (expert_products, "grouped_product", wide_product),
        ],
        "router's logits rounded, both": [
            (experts, "wide_mm", after(wide_mm, rounded)),
            (decoder, "wide_linear", lambda x, weight: F.linear(x, weight).float()),
        ],
        "router's logits rounded, engine": [(experts, "wide_mm", after(wide_mm, rounded))],
        "sum of experts rounded, engine": [(kernel_set, "CPU", own(experts=after(plain.experts, rounded)))],
        "activation rounded before its product, engine": [(kernel_set, "CPU", own(gate=double_gate))],
        "logits rounded, engine": [(fused, "wide_logits", after(wide_logits, rounded))],
        "residual stream rounded, engine": [(kernel_set, "CPU", own(add_norm=rounded_stream))],
        "the modules of transformers, trainer": [(PackedModel, "prepare", modules)],
        "as it was: all of these": [
            (experts, "wide_mm", after(wide_mm, rounded)),
            (kernel_set, "CPU", own(experts=after(plain.experts, rounded), gate=double_gate, add_norm=rounded_stream)),
            (fused, "wide_logits", after(wide_logits, rounded)),
            (PackedModel, "prepare", modules),
        ],
    }  # fmt: skip


def parts(name: str, seed: int, only: str) -> list[dict[str, Any]]:
    """Measures the mismatch of one mixture with each change alone."""
    found = []
    for label, places in changes().items():
        if only not in label:
            continue
        with patched(*places):
            found.append({"change": label, **mismatch(f"{name}; {label}", SHAPES[name], seed)})
    return found


def generate(engine: NativeEngine, count: int, length: int) -> list[Sample]:
    """Generates trajectories in groups of 8 from random prompts of 20 tokens."""
    prompts = {group: tuple(np.random.default_rng(group).integers(3, 99, 20).tolist()) for group in range(count // 8)}
    for index in range(count):
        engine.add(Request(index, 0, prompts[index // 8], index, Sampling(length), group=index // 8))
    done: list[Completion] = []
    while engine.has_work:
        done += [each for each in engine.step() if isinstance(each, Completion)]
    return [Sample(each.id, each.id // 8, 0, prompts[each.id // 8], each, 0.0) for each in done]


def cost(rows: int) -> dict[str, Any]:
    """Times 60 decode steps of the tiny mixture with and without records, seven times in turns."""
    model = random_mixture(0)
    weights = LocalTrainer(random_mixture(0)).policy.weights(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    engines = {}
    for records in seconds:
        engines[records] = NativeEngine(
            model, kind="full", slots=1, rows=rows, kv_tokens=128 * rows, max_context=128, records_routing=records
        )
        engines[records].load(weights)
    for _ in range(7):
        for records, engine in engines.items():
            for index in range(rows):
                engine.add(Request(index, 0, tuple(range(3, 19)), index, Sampling(64, routing=records)))
            for _ in range(3):
                engine.step()
            began = time.perf_counter()
            for _ in range(60):
                engine.step()
            seconds[records].append(time.perf_counter() - began)
            while engine.has_work:
                engine.step()
    # Neighbours on the machine make a turn slower, never faster.
    share = min(seconds[True]) / min(seconds[False]) - 1
    print(f"{rows} rows: records cost {share:.1%} of decode", flush=True)
    return {"rows": rows, "with_s": min(seconds[True]), "without_s": min(seconds[False]), "share": share}


def learning(seeds: list[int], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Trains the tiny mixture with and without replay."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for seed in seeds:
        for routing in ("replay", "free"):
            run = folder / f"{routing}-{seed}"
            if not (run / "summary.json").is_file():
                settings = {
                    "seed": seed,
                    "training.routing": routing,
                    "training.steps": steps,
                    "evaluation.every": "",
                    "evaluation.prompts": 128,
                }
                options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
                command = [sys.executable, "-m", "stretto", "train", "recipes/moe.toml", "-q", "--out", str(run)]
                subprocess.run([*command, *options], check=True, cwd=ROOT)
            summary = json.loads((run / "summary.json").read_text())
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            loads = [line["expert_imbalance"] for line in lines if "expert_imbalance" in line]
            found.append(
                {
                    "seed": seed, "routing": routing, "steps": steps,
                    "before": summary["eval_before"], "after": summary["eval_after"],
                    "mismatch_kl": summary.get("mismatch_kl"),
                    "expert_imbalance": [loads[0], loads[-1]] if loads else None,
                }
            )  # fmt: skip
            print(found[-1], flush=True)
    for routing in ("replay", "free"):
        scores = [each["after"] for each in found if each["routing"] == routing]
        print(f"{routing}: {statistics.mean(scores):.3f} after {steps} updates", flush=True)
    return found


if __name__ == "__main__":
    main()
