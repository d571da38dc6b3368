"""The gain over `synchronous` that full rows allow at best on one device, for the lengths of a GSM8K run.

    python -m bench.gpu.gsm8k_ideal bench/results/gpu/gsm8k/0.5b
    python -m bench.gpu.gsm8k_ideal bench/results/gpu/gsm8k bench/results/gpu/gsm8k/one_and_a_half_batches

Reads the cells of `bench.gpu.gsm8k`: `synchronous` runs and others of the same model. Each is compared with the
synchronous run of its seed, of its own sitting if there is one; without one it is left out.

The rollout of a synchronous update takes `fixed + b * tokens` seconds, fitted over its updates. `fixed` is the part of
the decode steps that costs the same with one row as with all of them; there are as many steps as the longest answer has
tokens. With rows that are always full there are only `tokens / rows` steps. So the ideal gain is

    (fixed + b * tokens + training) / (fixed * tokens / (rows * longest) + b * tokens + training)

Decode and training take turns in it, so that running side by side may exceed it. Prefill counts as fixed, which makes
the ideal a little too large. The error is that of the fit.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

OUTLIER = 1.25  # rollouts that took so many times the median ran beside an evaluation


@dataclass(frozen=True, slots=True)
class Ideal:
    """What one `synchronous` run says. Seconds are means of an update."""

    fixed_s: float
    fixed_error_s: float
    per_token_s: float
    training_s: float
    tokens: float
    longest: float
    batch: int  # trajectories of an update

    def gain(self, rows: int, *, errors: float = 0.0) -> float:
        """The ideal gain with `rows` rows, for a fixed part that is `errors` standard errors larger than fitted."""
        fixed = self.fixed_s + errors * self.fixed_error_s
        # The sum of both parts was measured: where more of it is fixed, less of it is due to tokens.
        moving = self.fixed_s - fixed + self.per_token_s * self.tokens + self.training_s
        return (fixed + moving) / (fixed * self.tokens / (rows * self.longest) + moving)


def fit(updates: Sequence[Mapping[str, Any]]) -> Ideal:
    """The costs of a synchronous run, from its updates without the first."""
    tokens = np.array([each["tokens"] for each in updates], dtype=np.float64)
    rollout = np.array([each["cycle_seconds"] - each["update_seconds"] for each in updates])
    kept = rollout < OUTLIER * np.median(rollout)
    if kept.sum() < 10:
        raise ValueError(f"{kept.sum()} updates are too few for a fit: it takes 10")
    design = np.stack((np.ones(int(kept.sum())), tokens[kept]), 1)
    found, *_ = np.linalg.lstsq(design, rollout[kept], rcond=None)
    residuals = rollout[kept] - design @ found
    variance = float(residuals @ residuals) / (len(residuals) - 2)
    error = math.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0])
    return Ideal(
        float(found[0]),
        error,
        float(found[1]),
        float(np.mean([each["update_seconds"] for each in updates])),
        float(tokens[kept].mean()),
        float(np.mean([each["length_max"] for each in updates])),
        round(float(np.median([each["tokens"] / each["length_mean"] for each in updates]))),
    )


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """The training cells of our side."""
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("gsm8k-native-*.json"))]
    return [cell for cell in cells if cell["bench"] == "gsm8k"]


def compared(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The gain of each run over the synchronous one, and the ideal for as many rows as an update has trajectories."""
    bases = [cell for cell in cells if cell["parameters"]["paradigm"] == "synchronous"]
    if not bases:
        raise ValueError("no cell of a `synchronous` run: `python -m bench.gpu.gsm8k --paradigms synchronous`")
    found = []
    for cell in cells:
        alike = [base for base in bases if base["parameters"].get("seed") == cell["parameters"].get("seed")]
        alike.sort(key=lambda base: base.get("sitting") != cell.get("sitting"))
        if cell in bases or not alike:
            continue
        base = alike[0]
        ideal = fit(base["results"]["by_update"][1:])
        best = ideal.gain(ideal.batch)
        gain = cell["results"]["tokens_per_s_undisturbed"] / base["results"]["tokens_per_s_undisturbed"]
        names = {name: cell["parameters"].get(name) for name in ("paradigm", "staleness", "in_flight", "seed")}
        names["one_sitting"] = base.get("sitting") == cell.get("sitting")
        spread = (ideal.gain(ideal.batch, errors=1.0) - ideal.gain(ideal.batch, errors=-1.0)) / 2
        found.append({**names, "gain": gain, "ideal": best, "ideal_error": spread, "of_ideal": gain / best})
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, nargs="+", help="the folders of the cells")
    options = parser.parse_args(arguments)
    for folder in options.cells:
        if not folder.is_dir():
            parser.error(f"there is no folder `{folder}`")
    try:
        found = compared([cell for folder in options.cells for cell in read_runs(folder)])
    except ValueError as error:
        parser.error(f"`{', '.join(map(str, options.cells))}`: {error}")
    for each in found:
        bound = f"K = {each['staleness']}" + (f", in_flight {each['in_flight']}" if each["in_flight"] else "")
        if each["seed"] is not None:
            bound += f", seed {each['seed']}"
        where = "" if each["one_sitting"] else " (another sitting)"
        print(
            f"{each['paradigm']}, {bound}: {each['gain']:.3f} x `synchronous`{where}; ideal {each['ideal']:.3f} "
            f"± {each['ideal_error']:.3f}; {each['of_ideal']:.1%} of the ideal"
        )


if __name__ == "__main__":
    main()
