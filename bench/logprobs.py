"""Log-probabilities and loss from the last hidden states, fused in chunks against the naive way, one update's worth.

    python bench/logprobs.py --out bench/results/logprobs.json
    python bench/logprobs.py --device cuda --hidden 2048 --out bench/results/gpu/logprobs.json

Forward and backward through the head, the log-probability of each token under a temperature, and GRPO's loss. *Naive*
is what one writes first: all logits, `log_softmax`, `gather`. *Fused* is what the trainer does. *Supports* is the same
for tokens that were drawn by top-k. Each is measured in a process of its own: time is the least of a few repeats,
memory what the process holds at its peak beyond its inputs. The floors are a fifth of the naive memory at no more time.
The naive way needs 15 GiB.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stretto.objectives.base import Tokens
from stretto.objectives.grpo import GrpoOptions
from stretto.training.logit_supports import pack_supports
from stretto.training.logprobs import token_logprobs
from stretto.types import Supports

WAYS = ("naive", "fused", "supports")
TEMPERATURE = 0.8
MEMORY_FLOOR = 5.0  # times less than the naive way
SEQUENCES = 16


class Case:
    """Random hidden states and targets, and a head that is frozen (as with LoRA) or trained."""

    def __init__(self, options: argparse.Namespace, trained: bool) -> None:
        device = torch.device(options.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        tokens, vocabulary, width = options.tokens, options.vocabulary, options.hidden
        self.hidden = torch.randn(tokens, width, generator=generator, device=device, dtype=dtype).requires_grad_()
        self.weight = torch.randn(vocabulary, width, generator=generator, device=device, dtype=dtype) / width**0.5
        self.weight.requires_grad_(trained)
        self.targets = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)
        self.rows = torch.arange(tokens, device=device)
        self.behaviour = torch.full((tokens,), -float(np.log(vocabulary)), device=device)
        self.advantages = torch.randn(tokens, generator=generator, device=device)
        self.sequences = self.rows * SEQUENCES // tokens
        others = (self.targets.cpu().numpy()[:, None] + np.arange(options.top_k)) % vocabulary
        counts = np.full(tokens, options.top_k, np.int32)
        supports = Supports(counts, others.astype(np.int32).reshape(-1))
        self.supports = pack_supports([supports], self.targets.cpu().numpy(), device)

    def loss(self, logprobs: torch.Tensor) -> torch.Tensor:
        tokens = Tokens(
            logprobs, self.behaviour, logprobs.detach(), self.advantages, self.advantages, self.sequences,
            SEQUENCES, torch.bincount(self.sequences, minlength=SEQUENCES),
        )  # fmt: skip
        return GrpoOptions().loss(tokens)[0].mean()

    def step(self, way: str) -> torch.Tensor:
        """One forward and backward pass; the gradient of the hidden states."""
        self.hidden.grad = self.weight.grad = None
        if way == "naive":
            logits = F.linear(self.hidden, self.weight).float() / TEMPERATURE
            logprobs = logits.log_softmax(-1).gather(1, self.targets[:, None])[:, 0]
            del logits
        else:
            logprobs, _ = token_logprobs(
                self.hidden, self.weight, self.rows, self.targets, temperature=TEMPERATURE,
                supports=self.supports if way == "supports" else None,
            )  # fmt: skip
        self.loss(logprobs).backward()
        assert self.hidden.grad is not None
        return self.hidden.grad


def measure(way: str, options: argparse.Namespace, trained: bool) -> dict[str, float]:
    """Seconds and peak bytes of one way, in this process."""
    torch.set_num_threads(options.threads)
    case = Case(options, trained)
    held = memory_mark(case.hidden.device)
    seconds = [timed(lambda: case.step(way), case.hidden.device) for _ in range(options.repeats + 1)]
    return {"seconds": min(seconds[1:]), "peak_bytes": held()}


def memory_mark(device: torch.device) -> Callable[[], float]:
    """A function that says how many bytes more than now were held at the peak since."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return lambda: float(torch.cuda.max_memory_allocated(device) - before)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    return lambda: float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def in_a_process(way: str, options: argparse.Namespace, trained: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, *(["--trained"] if trained else [])]
    for name in ("device", "vocabulary", "tokens", "hidden", "repeats", "threads", "top_k"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(options: argparse.Namespace, trained: bool) -> dict[str, Any]:
    """All ways with one kind of head, and how they stand to the naive one."""
    result: dict[str, Any] = {way: in_a_process(way, options, trained) for way in WAYS}
    naive = result["naive"]
    for way in WAYS[1:]:
        own = result[way]
        own["memory_ratio"] = naive["peak_bytes"] / own["peak_bytes"]
        own["time_ratio"] = own["seconds"] / naive["seconds"]
        own["holds"] = own["memory_ratio"] >= MEMORY_FLOOR and own["time_ratio"] <= 1.0
    for way, own in result.items():
        print(
            f"{'trained' if trained else 'frozen'} head, {way:8}: {own['seconds']:7.3f} s, "
            f"{own['peak_bytes'] / 2**20:9,.0f} MiB"
            + (f", {own['memory_ratio']:.1f} x less, {own['time_ratio']:.2f} x the time" if way != "naive" else ""),
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=64, help="tokens of each support")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--trained", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options, options.trained)))
        return
    on_cuda = options.device == "cuda"
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join(["bench/logprobs.py", *sys.argv[1:]]),
        "hardware": torch.cuda.get_device_name() if on_cuda else f"{platform.machine()}, {options.threads} thread(s)",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "vocabulary": options.vocabulary,
        "tokens": options.tokens,
        "hidden": options.hidden,
        "frozen_head": compare(options, trained=False),
        "trained_head": compare(options, trained=True),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
