"""GSM8K, TRL's side: `GRPOTrainer` with vLLM colocated on the problems, model and reward of `bench.gpu.gsm8k`.

    python -m bench.gpu.trl_gsm8k --model MODEL --sweep 16:off,32:off,32:on,64:on --seconds 600 --out RESULTS
    python -m bench.gpu.trl_gsm8k --model MODEL --setting 32:on --seconds 600 --out RESULTS

Prompts, reward, LoRA, learning rate, completions an update, longest completion and temperature are those of the native
runs. Everything else is as TRL has it; the cell says what that is. TRL's code runs unchanged. Two things around it are
set: the settings of a sweep share one vLLM, and vLLM does not sample by FlashInfer, which would be compiled first.

`--sweep` tries settings for three updates each, the first of which does not count, on `--sweep-groups` groups. The
first setting is tried once before, to warm up. The fastest has the fewest seconds of training per token: rollout does
not depend on these settings, and varies more than they do. Settings that start vLLM differently are compared by all
seconds per token. A setting is `per_device_train_batch_size`
and gradient checkpointing `on` or `off`, with these added by colons: `liger` (`use_liger_kernel`), `sleep` (vLLM sleeps
while training runs), and a number, `vllm_gpu_memory_utilization`. After `--sweep-seconds` no further setting is begun.
If all settings start vLLM alike, sweep and measured run share a process, in which it is started once; else each vLLM of
the sweep has a process of its own. The measured run takes `--setting`, else the fastest setting of the sweep cells
under `--out`. A sweep may run on random weights of the same shapes: `--after FILE` lets the measured run wait until a
file is there, and TRL hands all weights to vLLM before it generates.

The clock of training stands still during evaluations, which TRL's own vLLM makes. `startup_s` is from the start of the
process to the first update, without the sweep but with its start of vLLM. The first update, which compiles, is stated
apart too: `--seconds` begins when it ends. `elapsed_s` of a point counts it, `after_first_s` does not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu import trl_runs
from bench.gpu.cells import Cell, Cells, add_options, from_options
from bench.gpu.problems import Problem, Score, load_reward, read_problems, score
from bench.gpu.trl_runs import (
    MARGIN,
    Stopwatch,
    add_run_options,
    clear_memory,
    config_of,
    lora_of,
    point,
    quiet,
    results,
    run_cells,
    said,
    synchronized,
    tiny_run,
    training_rows,
    whole_test,
)

SWEEP = "16:off,32:off,32:on,64:on"
SWEEP_UPDATES = 3
# What TRL decides where nothing is said, and what a reader needs to compare.
STATED = (
    "beta", "loss_type", "epsilon", "epsilon_high", "scale_rewards", "num_iterations", "importance_sampling_level",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "mask_truncated_completions", "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm",
    "warmup_steps", "steps_per_generation", "generation_batch_size",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is tuned for speed."""

    micro: int  # `per_device_train_batch_size`
    checkpointing: bool
    liger: bool = False
    sleep: bool = False
    memory: float = 0.3  # `vllm_gpu_memory_utilization`; TRL's own default

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From `32:off`, `64:on:liger`, `64:off:sleep:0.5`."""
        micro, *rest = text.split(":")
        if not micro.isdigit() or int(micro) < 1 or not rest or rest[0] not in ("on", "off"):
            raise argparse.ArgumentTypeError(f"`{text}` is no setting: it begins with a size and a switch, like `8:on`")
        made: dict[str, Any] = {"micro": int(micro), "checkpointing": rest[0] == "on"}
        for word in rest[1:]:
            if word in ("liger", "sleep"):
                made[word] = True
                continue
            try:
                made["memory"] = float(word)
            except ValueError:
                made["memory"] = 0.0
            if not 0.0 < made["memory"] < 1.0:
                raise argparse.ArgumentTypeError(
                    f"`{text}`: `{word}` is neither `liger` nor `sleep` nor a share of memory between 0 and 1"
                )
        return cls(**made)

    def __str__(self) -> str:
        switches = [name for name in ("liger", "sleep") if getattr(self, name)]
        return ":".join([str(self.micro), "on" if self.checkpointing else "off", *switches, f"{self.memory:g}"])

    @property
    def vllm(self) -> tuple[bool, float]:
        """What a vLLM is started with."""
        return self.sleep, self.memory

    def parameters(self) -> dict[str, int | float]:
        return {name: value if name == "memory" else int(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Setting:
        """From the parameters of a cell."""
        switches = {name: bool(parameters[name]) for name in ("checkpointing", "liger", "sleep")}
        return cls(micro=int(parameters["micro"]), memory=float(parameters["memory"]), **switches)


def settings(text: str) -> list[Setting]:
    return [Setting.parse(part) for part in text.split(",")]


# -- what is taken down ------------------------------------------------------------------------------------------------


class Recorder:
    """Follows a run of `GRPOTrainer` by its callbacks and its reward function: updates, evaluations, the time limit."""

    def __init__(
        self,
        ask: Callable[[], Score],
        *,
        reward: Callable[..., float],
        every: int,
        seconds: float,
        max_tokens: int,
        swept_s: float = 0.0,
        saved: Callable[[dict[str, Any]], None] = lambda results: None,
        now: Callable[[], float] = synchronized,
    ) -> None:
        """`ask` evaluates the policy as it is; `every = 0` never does. `saved` gets the results at every evaluation.

        `swept_s` is what of the process's life is no start-up.
        """
        self._ask, self._score, self._every, self._limit, self._swept_s = ask, reward, every, seconds, swept_s
        self._max_tokens, self._saved, self._now = max_tokens, saved, now
        self.watch = Stopwatch(now)
        self.updates: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.startup_s = 0.0
        self._began = self._scored = 0.0
        self._batch: dict[str, Any] = {}

    # -- what TRL calls

    def reward(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **_: Any
    ) -> list[float]:
        """The reward function: called once an update, when generation has ended."""
        self._scored = self._now()
        texts = [completion[0]["content"] for completion in completions]
        earned = [self._score("", text, answer=right) for text, right in zip(texts, answer, strict=True)]
        lengths = [len(ids) for ids in completion_ids]
        self._batch = {
            "tokens": sum(lengths),
            "length_mean": sum(lengths) / len(lengths),
            "length_max": max(lengths),
            "truncated": sum(length >= self._max_tokens for length in lengths) / len(lengths),
            "reward_mean": sum(earned) / len(earned),
        }
        return earned

    def train_begins(self, startup_s: float) -> None:
        """`startup_s`: since the process was started."""
        self.startup_s = startup_s - self._swept_s
        if self._every:
            self._evaluate(0)
        self.watch.run()

    def step_begins(self) -> None:
        self._began = self._now()

    def step_ends(self, step: int, last: bool) -> bool:
        """Takes an update down and evaluates if it is time to; returns whether the run is to stop."""
        ended = self._now()
        rollout, training = self._scored - self._began, ended - self._scored
        clocks = {"elapsed_s": self.watch.seconds, "rollout_s": rollout, "training_s": training}
        self.updates.append({"update": step - 1, **self._batch, **clocks})
        over = self.after_first_s() >= self._limit
        if self._every and (over or last or step % self._every == 0):
            self.watch.pause()
            self._evaluate(step)
            self.watch.run()
        return over

    # -- what it comes to

    def after_first_s(self) -> float:
        """Seconds of training since the first update ended; 0 before."""
        return self.watch.seconds - self.updates[0]["elapsed_s"] if self.updates else 0.0

    def _evaluate(self, version: int) -> None:
        began = self._now()
        found = self._ask()
        clocks = {"elapsed_s": self.watch.seconds, "after_first_s": self.after_first_s()}
        self.points.append(point(version, found, clocks, self._now() - began))
        self._saved(self.results())

    def results(self) -> dict[str, Any]:
        return results(self.startup_s, self.points, self.updates)

    def callback(self) -> Any:
        """This as a callback of `transformers`."""
        import psutil
        from transformers import TrainerCallback

        recorder = self

        class Follows(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *arguments: Any, **options: Any) -> None:
                recorder.train_begins(time.time() - psutil.Process().create_time())

            def on_step_begin(self, *arguments: Any, **options: Any) -> None:
                recorder.step_begins()

            def on_step_end(self, arguments: Any, state: Any, control: Any, **options: Any) -> Any:
                last = state.global_step >= state.max_steps
                control.should_training_stop |= recorder.step_ends(state.global_step, last)
                return control

        return Follows()


# -- TRL ---------------------------------------------------------------------------------------------------------------


def answers(trainer: Any, problems: Sequence[Problem], temperature: float, max_tokens: int) -> list[list[int]]:
    """One completion of each problem under the weights as they are, by TRL's own vLLM, else by `transformers`."""
    tokenizer = trainer.processing_class
    prompts = [
        list(tokenizer.apply_chat_template(each["messages"], add_generation_prompt=True, return_dict=False))
        for each in problems
    ]
    if not trainer.use_vllm:
        return _by_transformers(trainer, prompts, temperature, max_tokens)
    generation = trainer.vllm_generation
    generation.sync_weights()
    # TRL need not do it again before it generates: every time, adapters are merged into the base and taken out by
    # sums that round, and a run with evaluations should do that no more often than one without.
    trainer._last_loaded_step = trainer.state.global_step
    usual, generation.temperature = generation.temperature, temperature
    try:
        _, completions, _, _ = generation.generate(prompts, None, 1)
    finally:
        generation.temperature = usual
    return [list(tokens) for tokens in completions]


def _by_transformers(
    trainer: Any, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int
) -> list[list[int]]:
    """For a host without vLLM; one prompt after another."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    completions, training = [], model.training
    model.eval()
    for prompt in prompts:
        given = torch.tensor([list(prompt)], device=model.device)
        with torch.no_grad():
            made = model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=max_tokens,
                pad_token_id=tokenizer.pad_token_id,
                **sampling,
            )
        completions.append(made[0, len(prompt) :].tolist())
    model.train(training)
    return completions


def evaluation(trainer: Any, problems: Sequence[Problem], temperature: float, options: argparse.Namespace) -> Score:
    """Scores the policy as it is on some problems."""
    tokens = answers(trainer, problems, temperature, options.max_tokens)
    texts = [trainer.processing_class.decode(each, skip_special_tokens=True) for each in tokens]
    return score(load_reward(options.reward), problems, texts, [len(each) for each in tokens], options.max_tokens)


def grpo_options(options: argparse.Namespace, setting: Setting, groups: int, updates: int, out: Path) -> dict[str, Any]:
    """Arguments of `GRPOConfig`: one optimizer step an update; what is not here is as TRL has it."""
    rows = groups * options.group
    if rows % setting.micro:
        raise ValueError(f"`{setting}`: {rows} completions an update are no whole number of micro-batches")
    wanted: dict[str, Any] = {
        "output_dir": str(out),
        "seed": options.seed,
        "per_device_train_batch_size": setting.micro,
        "gradient_accumulation_steps": rows // setting.micro,
        "gradient_checkpointing": setting.checkpointing,
        "use_liger_kernel": setting.liger,
        "num_generations": options.group,
        "max_completion_length": options.max_tokens,
        "temperature": 1.0,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": updates,
        "bf16": options.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": options.dtype},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": options.device == "cpu",
        "use_vllm": options.vllm,
    }
    if options.vllm:
        wanted |= {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": setting.memory,
            "vllm_enable_sleep_mode": setting.sleep,
            "vllm_max_model_length": options.max_prompt + options.max_tokens + MARGIN,
        }
    return wanted


def make_trainer(
    options: argparse.Namespace, setting: Setting, groups: int, updates: int, out: Path, recorder: Recorder
) -> Any:
    """TRL's trainer over the training problems."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # TRL sets them for vLLM; another trainer would take to DDP
        os.environ.pop(name, None)
    wanted = grpo_options(options, setting, groups, updates, out)
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=recorder.reward,
        args=config_of(GRPOConfig, wanted),
        train_dataset=Dataset.from_list(training_rows(options, groups, updates)),
        peft_config=lora_of(options),
        callbacks=[recorder.callback()],
    )
    return quiet(trainer)


def stated(trainer: Any, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """How TRL was set up: what was asked for, and its own values for the rest."""
    return said(trainer.args, STATED, str(setting), options)


def run(
    options: argparse.Namespace,
    setting: Setting,
    cells: Cells,
    sweep: Sequence[Mapping[str, Any]],
    swept_s: float = 0.0,
) -> None:
    """The measured run, its cell at every evaluation, and the whole test after it."""
    cell, whole = run_cells("trl", options, setting.parameters())
    if not cells.pending([cell, whole]):
        print(f"{cell.name}: there already", flush=True)
        return
    held_out = read_problems(options.problems, "test", options.held_out)
    trainers: list[Any] = []

    def saved(results: dict[str, Any]) -> None:
        made = {"config": stated(trainers[0], setting, options), "sweep": list(sweep)}
        cells.write(cell, {**results, **made})

    recorder = Recorder(
        lambda: evaluation(trainers[0], held_out, 1.0, options),
        reward=load_reward(options.reward),
        every=options.every,
        seconds=options.seconds,
        max_tokens=options.max_tokens,
        swept_s=swept_s,
        saved=saved,
    )
    clear_memory()
    with tempfile.TemporaryDirectory() as folder:
        trainers.append(make_trainer(options, setting, options.groups, options.updates, Path(folder), recorder))
        trainers[0].train()
        saved({**recorder.results(), "finished": True, "log": trainers[0].state.log_history})
        print(f"{cell.name}: {len(recorder.updates)} updates in {recorder.watch.seconds:.1f} s", flush=True)
        if options.test_problems != 0:
            problems = read_problems(options.problems, "test", options.test_problems)
            cells.measure(whole, lambda: test_results(trainers[0], problems, options))


def test_results(trainer: Any, problems: Sequence[Problem], options: argparse.Namespace) -> dict[str, Any]:
    """The whole test after training, sampled at temperature 1 and greedy."""
    return whole_test(lambda temperature: evaluation(trainer, problems, temperature, options))


# -- the sweep ---------------------------------------------------------------------------------------------------------


def sweep_cell(options: argparse.Namespace, setting: Setting) -> Cell:
    return trl_runs.sweep_cell("trl", options, options.sweep_groups, setting.parameters())


class SharedVllm:
    """One vLLM for every trainer of this process, which can run as many rows as the measured run needs."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._made: Any = None
        self._make: Callable[..., Any] | None = None
        self.start_s = 0.0

    def install(self) -> None:
        """Takes the place of vLLM's `LLM` in TRL."""
        from trl.generation import vllm_generation

        self._make, vllm_generation.LLM = vllm_generation.LLM, self.given

    def given(self, **wanted: Any) -> Any:
        """The vLLM; it is started for the first trainer that asks."""
        if self._made is None:
            assert self._make is not None, "`install` comes first"
            began = time.perf_counter()
            self._made = self._make(**{**wanted, "max_num_seqs": self._most_rows})
            self.start_s = time.perf_counter() - began
        elif wanted["enable_sleep_mode"]:
            self._made.wake_up()  # a trainer sends it to sleep when it is made, as it did when the last one was done
        return self._made


def try_setting(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """A few updates under a setting: the seconds of those after the first, or why there are none."""
    if setting.liger and importlib.util.find_spec("liger_kernel") is None:
        return {"failed": "liger-kernel is not installed"}
    recorder = Recorder(
        lambda: Score(0.0, 0, 0.0, 0.0),
        reward=load_reward(options.reward),
        every=0,
        seconds=float("inf"),
        max_tokens=options.max_tokens,
    )
    trainer = None
    clear_memory()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = make_trainer(options, setting, options.sweep_groups, SWEEP_UPDATES, Path(folder), recorder)
            with unpatched():
                trainer.train()
            results = recorder.results()
            del results["startup_s"], results["evaluations"]  # of the process, and of none
            return {**results, "config": stated(trainer, setting, options)}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a setting that this TRL, or this host, does not have is no reason to end the sweep
            return {"failed": f"{type(error).__name__}: {error}"[:500]}
        finally:
            del trainer


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Takes back what is changed meanwhile in the modules of `transformers`' models, as Liger does for all of them."""
    modules = {
        name: dict(vars(module))
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
    }
    try:
        yield
    finally:
        for name, held in modules.items():
            vars(sys.modules[name]).update(held)


def sweep_here(options: argparse.Namespace, cells: Cells, until: float) -> SharedVllm | None:
    """Tries settings that share one vLLM, none of them begun after `until`; returns that vLLM."""
    shared = None
    if options.vllm:
        shared = SharedVllm(options.group * max(options.groups, options.sweep_groups))
        shared.install()
    if cells.pending([sweep_cell(options, setting) for setting in options.sweep]):
        try_setting(options, options.sweep[0])  # what vLLM and torch do once must not count for any setting
    for setting in options.sweep:
        if time.time() > until:
            print(f"`--sweep-seconds` is over: {setting} is left out", flush=True)
            continue
        cells.measure(sweep_cell(options, setting), lambda: try_setting(options, setting))  # noqa: B023 - called at once
    return shared


def sweep_records(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each setting of the sweeps under `--out` and `--known` came to."""
    names = ("seconds_per_update", "training_s_per_update", "length_mean")
    return trl_runs.sweep_records("trl", options, Setting.of, names)


def fastest(records: Sequence[Mapping[str, Any]]) -> Setting | None:
    """The setting with the fewest seconds per token, by the rule above; None if no setting was timed."""
    timed = [record for record in records if record.get("seconds_per_update")]
    if not timed:
        return None
    alike = len({Setting.parse(record["setting"]).vllm for record in timed}) == 1
    counted = "training_s_per_update" if alike else "seconds_per_update"
    return Setting.parse(min(timed, key=lambda record: record[counted] / record["length_mean"])["setting"])


def sweep_apart(options: argparse.Namespace, given: Sequence[str], sitting: str) -> None:
    """Runs the sweep, a process for each vLLM."""
    until = time.time() + options.sweep_seconds
    by_vllm: dict[tuple[bool, float], list[Setting]] = {}
    for setting in options.sweep:
        by_vllm.setdefault(setting.vllm, []).append(setting)
    for group in by_vllm.values():
        own = ["--sweep", ",".join(map(str, group)), "--sweep-until", str(until), "--sitting", sitting]
        subprocess.run([sys.executable, "-m", "bench.gpu.trl_gsm8k", *given, *own], check=False)


def wait_for(path: Path) -> None:
    """Returns once a file is there."""
    while not path.exists():
        time.sleep(0.2)


# -- the command line --------------------------------------------------------------------------------------------------


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_run_options(parser)
    parser.add_argument("--setting", type=Setting.parse, help="as in `32:off`; default: the fastest of the sweep")
    parser.add_argument("--sweep", type=settings, nargs="?", const=settings(SWEEP), help=f"default: `{SWEEP}`")
    parser.add_argument("--sweep-groups", type=int, default=64, help="prompts an update in the sweep")
    parser.add_argument("--sweep-seconds", type=float, default=float("inf"), help="after which no setting is begun")
    parser.add_argument("--sweep-only", action="store_true")
    parser.add_argument("--after", type=Path, help="file that the measured run waits for")
    parser.add_argument("--sweep-until", type=float, help=argparse.SUPPRESS)  # of a process of the sweep
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True)
    return parser


def make_tiny(options: argparse.Namespace, scratch: Path) -> None:
    """Turns the options into those of a run that takes seconds on a CPU, without vLLM."""
    tiny_run(options, scratch)
    options.vllm = False


def sweep_and_run(options: argparse.Namespace, given: Sequence[str], cells: Cells) -> None:
    """What the command line asks for, in this process as far as one vLLM does for it."""
    if options.sweep_until is not None:
        sweep_here(options, cells, options.sweep_until)
        return
    began, vllm_s = time.time(), 0.0
    if options.sweep:
        if len({setting.vllm for setting in options.sweep}) == 1 and not options.sweep_only:
            shared = sweep_here(options, cells, began + options.sweep_seconds)
            vllm_s = 0.0 if shared is None else shared.start_s
        else:
            sweep_apart(options, given, cells.sitting)
    records = sweep_records(options)
    for record in records:
        print(json.dumps(record), flush=True)
    if options.sweep_only:
        return
    setting = options.setting or fastest(records)
    if setting is None:
        raise ValueError(f"`--out {options.out}` has no sweep to choose from: give `--setting 32:on`, or `--sweep`")
    print(f"setting: {setting}", flush=True)
    if options.after is not None:
        wait_for(options.after)
    run(options, setting, cells, records, swept_s=time.time() - began - vllm_s)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser_of().parse_args(given)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    cells = from_options(options)
    with tempfile.TemporaryDirectory() as scratch:
        if options.tiny:
            make_tiny(options, Path(scratch))
        sweep_and_run(options, given, cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
