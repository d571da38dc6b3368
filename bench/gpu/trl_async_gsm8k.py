"""GSM8K, TRL's asynchronous side: `AsyncGRPOTrainer` and a vLLM server on one GPU.

    python -m bench.gpu.trl_async_gsm8k --model MODEL --setting 32:off --seconds 600 --out RESULTS
    python -m bench.gpu.trl_async_gsm8k --model MODEL --sweep 32:off,64:off,64:off:inflight=768:queue=256 --out RESULTS

Task, prompts, reward, LoRA, learning rate, completions an update, longest completion and temperature are those of
`bench.gpu.trl_gsm8k`. Everything else is as TRL has it; the cell says what that is. TRL's code runs unchanged but for
these: its attention is PyTorch's (`bench.gpu.tree_attention`) unless `--attention hub` asks for the kernel that TRL
downloads; an answer is taken as plain text, without tool calls; and micro-batches have a number of completions
(`token_budget=0`), since with a budget of tokens an update has no fixed number of them.

The server is a process of its own with a share of the device's memory. TRL sends it each new version as a LoRA
adapter in a folder; full weights would go over NCCL, which two processes on one GPU cannot. The server's log is
`--server-log`.

A setting is `per_device_train_batch_size` and gradient checkpointing `on` or `off`, with these added by colons: a
number, the server's share of the memory; `stale=N`, TRL's `max_staleness`; `inflight=N`, requests at the server at a
time; `queue=N`, finished completions that wait for the trainer. By default TRL has `stale=4`, `queue=1024` and as many
requests as `stale` updates need. With all of that a completion can be older than `stale` allows when its turn comes,
and TRL drops it: `dropped` counts them. `--sweep` tries settings for `--sweep-updates` updates each, the first of which
does not count, and takes the one with the most trained tokens per second. Settings with the same share share a server.

Time: generation cannot be held without changing what is measured, so nothing else runs meanwhile. The clock begins
when generation does and never stands still. A version that is to be evaluated is kept by links to the files that TRL
has published, and evaluated through the same server after training has ended. `startup_s` is from the start of the
process to the start of the clock, with the server's start (`server_s`) and without the sweep. The first update is
stated apart: `--seconds` begins when it ends. `rollout_s` of an update is how long the trainer waited for completions,
`training_s` the rest, with the sending of the adapter. `length_max` and `truncated` are of the completions that were
generated meanwhile; the rest is of those that were trained on.

`--tiny` needs a vLLM for the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu import tree_attention, trl_runs
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
from bench.gpu.vllm_server import Server, served_rank

SIDE = "trl-async"
SPARE_ADAPTERS = 2  # that TRL wants the server to hold beyond `max_staleness`
KEPT = "kept"  # folder of the versions to evaluate, beside TRL's own
# What TRL decides where nothing is said, and what a reader needs to compare.
STATED = (
    "epsilon", "epsilon_high", "token_budget", "max_staleness", "max_inflight_tasks", "queue_maxsize",
    "weight_sync_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing",
    "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "warmup_steps",
)  # fmt: skip
# Of an update, by the names that TRL logs.
LOGGED = {
    "reward_mean": "reward",
    "length_max": "completions/max_length",
    "truncated": "completions/clipped_ratio",
    "staleness_mean": "sample/staleness_mean",
    "staleness_max": "sample/staleness_max",
    "dropped": "sample/dropped_stale_total",
    "queued": "sample/rollout_queue_size",
    "inflight": "rollout/inflight",
    "generated_tokens_per_s": "rollout/generated_tok_s",
    "sync_s": "perf/weight_sync_s",
    "forward_backward_s": "perf/fwd_bwd_s",
    "importance_ratio": "ratio",
}
TOKENS, WAITED = "batch/trained_tokens_per_step", "perf/rollout_wait_s"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is tuned for speed."""

    micro: int  # `per_device_train_batch_size`
    checkpointing: bool
    memory: float = 0.3  # the server's share
    stale: int = 4  # `max_staleness`; this and the next two are TRL's own defaults
    inflight: int = -1  # `max_inflight_tasks`; -1: as many as `stale` updates need
    queue: int = 1_024  # `queue_maxsize`

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From `32:off`, `64:on:0.4`, `64:off:stale=2:inflight=768:queue=256`."""
        micro, *rest = text.split(":")
        if not micro.isdigit() or int(micro) < 1 or not rest or rest[0] not in ("on", "off"):
            raise argparse.ArgumentTypeError(f"`{text}` is no setting: it begins with a size and a switch, like `8:on`")
        made: dict[str, Any] = {"micro": int(micro), "checkpointing": rest[0] == "on"}
        for word in rest[1:]:
            name, _, value = word.partition("=")
            if name in ("stale", "inflight", "queue") and value.isdigit() and (int(value) > 0 or name == "stale"):
                made[name] = int(value)
                continue
            try:
                made["memory"] = float(word)
            except ValueError:
                made["memory"] = 0.0
            if not 0.0 < made["memory"] < 1.0:
                raise argparse.ArgumentTypeError(
                    f"`{text}`: `{word}` is neither `stale=N`, `inflight=N` nor `queue=N`, nor a share of memory "
                    "between 0 and 1"
                )
        return cls(**made)

    def __str__(self) -> str:
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        changed = [name for name in ("stale", "inflight", "queue") if getattr(self, name) != usual[name]]
        words = [f"{name}={getattr(self, name)}" for name in changed]
        return ":".join([str(self.micro), "on" if self.checkpointing else "off", f"{self.memory:g}", *words])

    def parameters(self) -> dict[str, int | float]:
        return {name: value if name == "memory" else int(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Setting:
        """From the parameters of a cell."""
        numbers = {name: int(parameters[name]) for name in ("micro", "stale", "inflight", "queue")}
        return cls(checkpointing=bool(parameters["checkpointing"]), memory=float(parameters["memory"]), **numbers)


def settings(text: str) -> list[Setting]:
    return [Setting.parse(part) for part in text.split(",")]


class Reward:
    """The reward function; TRL sends it to the process that generates."""

    def __init__(self, name: str) -> None:
        """`name`: `module:function`."""
        self._name = name

    def __call__(self, completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        scored = load_reward(self._name)
        texts = [completion[0]["content"] for completion in completions]
        return [float(scored("", text, answer=right)) for text, right in zip(texts, answer, strict=True)]


# -- what is taken down ------------------------------------------------------------------------------------------------


class Recorder:
    """Follows a run of `AsyncGRPOTrainer` by its callbacks and what it logs: updates, kept versions, the time limit."""

    def __init__(
        self,
        *,
        every: int,
        seconds: float,
        completions: int,
        swept_s: float = 0.0,
        now: Callable[[], float] = synchronized,
    ) -> None:
        """`completions` an update; `every = 0` keeps no version.

        `swept_s` is what of the process's life is no start-up.
        """
        self._every, self._limit, self._completions, self._swept_s = every, seconds, completions, swept_s
        self.watch = Stopwatch(now)
        self.updates: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.kept: dict[int, Path] = {}
        self.startup_s = 0.0

    def train_begins(self, startup_s: float, published: Path) -> None:
        """Generation has begun. `startup_s`: since the process was started; `published`: the first version's folder."""
        self.startup_s = startup_s - self._swept_s
        self._keep(0, published)
        self.watch.run()

    def step_ends(self, step: int, last: bool, published: Path) -> bool:
        """Takes an update down, whose version is published; returns whether the run is to stop."""
        self.updates.append({"update": step - 1, "elapsed_s": self.watch.seconds})
        over = self.after_first_s(self.updates[-1]["elapsed_s"]) >= self._limit
        if over or last or (self._every and step % self._every == 0):
            self._keep(step, published)
        return over

    def logged(self, step: int, logs: Mapping[str, Any]) -> None:
        """What TRL says of an update, after it has ended."""
        if TOKENS not in logs or not 0 < step <= len(self.updates):
            return  # the summary of a run
        update = self.updates[step - 1]
        before = self.updates[step - 2]["elapsed_s"] if step > 1 else 0.0
        tokens, waited = int(logs[TOKENS]), float(logs[WAITED])
        taken = update["elapsed_s"] - before
        update |= {"tokens": tokens, "length_mean": tokens / self._completions}
        update |= {"rollout_s": waited, "training_s": taken - waited}
        update |= {name: logs[key] for name, key in LOGGED.items() if logs.get(key) is not None}

    def _keep(self, version: int, published: Path) -> None:
        """Links to the files of a version: TRL removes its own, and writes none of them again."""
        if not self._every:
            return
        kept = published.parent / KEPT / f"v{version}"
        shutil.copytree(published, kept, copy_function=os.link)
        self.kept[version] = kept

    # -- what it comes to

    def after_first_s(self, elapsed_s: float) -> float:
        """Seconds of training since the first update ended; 0 before."""
        return max(0.0, elapsed_s - self.updates[0]["elapsed_s"]) if self.updates else 0.0

    def evaluated(self, version: int, found: Score, seconds: float) -> None:
        """Adds a point to the curve."""
        elapsed = self.updates[version - 1]["elapsed_s"] if version else 0.0
        clocks = {"elapsed_s": elapsed, "after_first_s": self.after_first_s(elapsed)}
        self.points.append(point(version, found, clocks, seconds))
        self.points.sort(key=lambda each: int(each["version"]))

    def results(self) -> dict[str, Any]:
        complete = [update for update in self.updates if "tokens" in update]
        found = results(self.startup_s, self.points, complete)
        if complete:
            dropped = sum(update.get("dropped", 0.0) for update in complete)
            made = dropped + self._completions * len(complete)
            ages = [update["staleness_mean"] for update in complete if "staleness_mean" in update]
            found |= {"dropped_share": dropped / made, "staleness_mean": sum(ages) / max(1, len(ages))}
        return found

    def callback(self, trainer: Any) -> Any:
        """This as a callback of `transformers`. It must be the last one, after those by which TRL publishes."""
        import psutil
        from transformers import TrainerCallback

        recorder = self

        def published() -> Path:
            return Path(trainer._lora_dir) / f"{trainer._lora_name}-v{trainer.model_version}"

        class Follows(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *arguments: Any, **options: Any) -> None:
                recorder.train_begins(time.time() - psutil.Process().create_time(), published())

            def on_step_end(self, arguments: Any, state: Any, control: Any, **options: Any) -> Any:
                last = state.global_step >= state.max_steps
                control.should_training_stop |= recorder.step_ends(state.global_step, last, published())
                return control

            def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
                recorder.logged(state.global_step, logs or {})

        return Follows()


# -- TRL ---------------------------------------------------------------------------------------------------------------


def async_options(
    options: argparse.Namespace, setting: Setting, groups: int, updates: int, out: Path, url: str
) -> dict[str, Any]:
    """Arguments of `AsyncGRPOConfig`: one optimizer step an update; what is not here is as TRL has it."""
    rows = groups * options.group
    if rows % setting.micro:
        raise ValueError(f"`{setting}`: {rows} completions an update are no whole number of micro-batches")
    return {
        "output_dir": str(out),
        "seed": options.seed,
        "per_device_train_batch_size": setting.micro,
        "gradient_accumulation_steps": rows // setting.micro,
        "gradient_checkpointing": setting.checkpointing,
        "num_generations": options.group,
        "max_completion_length": options.max_tokens,
        "temperature": 1.0,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": updates,
        "bf16": options.dtype == "bfloat16",
        "dtype": options.dtype,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": options.device == "cpu",
        "token_budget": 0,
        "max_staleness": setting.stale,
        "max_inflight_tasks": setting.inflight,
        "queue_maxsize": setting.queue,
        "vllm_server_base_url": url,
    }


def plain_answers(tokenizer: Any) -> Any:
    """Lets TRL take all of an answer as its text, whatever the chat template: there are no tools to call."""
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"content": {"close": tokenizer.eos_token, "content": "text"}},
    }
    return tokenizer


def make_trainer(
    options: argparse.Namespace,
    setting: Setting,
    groups: int,
    updates: int,
    out: Path,
    recorder: Recorder,
    server: Server,
) -> Any:
    """TRL's asynchronous trainer over the training problems."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    if options.device == "cpu":  # it asks for the peak of a CUDA device, whatever there is
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    if options.attention == "torch":
        tree_attention.install(options.device, getattr(torch, options.dtype))
    wanted = async_options(options, setting, groups, updates, out, server.url)
    trainer = AsyncGRPOTrainer(
        model=options.model,
        reward_funcs=Reward(options.reward),
        args=config_of(AsyncGRPOConfig, wanted),
        train_dataset=Dataset.from_list(training_rows(options, groups, updates)),
        processing_class=plain_answers(AutoTokenizer.from_pretrained(options.model)),
        peft_config=lora_of(options),
    )
    if not trainer._lora_sync:
        raise RuntimeError("TRL would send full weights over NCCL, which one GPU cannot do; its warning says why")
    trainer.add_callback(recorder.callback(trainer))
    return quiet(trainer)


def stated(trainer: Any, setting: Setting, options: argparse.Namespace, server: Server) -> dict[str, Any]:
    """How TRL and its server were set up."""
    attention = tree_attention.NAME if options.attention == "torch" else tree_attention.HUB
    asked = {"server": server.command[1:], "server_environment": server.environment, "attention": attention}
    return {**said(trainer.args, STATED, str(setting), options), **asked}


# -- the server --------------------------------------------------------------------------------------------------------


class Servers:
    """One server at a time; a setting that it does for gets the one that runs."""

    def __init__(self, options: argparse.Namespace, wanted: Sequence[Setting]) -> None:
        """`wanted`: all settings that will ask."""
        self._options, self._wanted = options, list(wanted)
        self._running: tuple[float, int, Server] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._running = None
        self._stack.close()

    def get(self, setting: Setting) -> Server:
        """A server without adapters."""
        adapters = max(each.stale for each in [*self._wanted, setting] if each.memory == setting.memory)
        adapters += SPARE_ADAPTERS
        if self._running is not None and self._running[:2] == (setting.memory, adapters):
            self._running[2].clear()
            return self._running[2]
        self._stop()
        clear_memory()
        server = self._stack.enter_context(start(self._options, setting.memory, adapters))
        self._running = setting.memory, adapters, server
        return server


def start(options: argparse.Namespace, memory: float, adapters: int) -> Server:
    """A server for the model that can hold so many adapters at once."""
    length = options.max_prompt + options.max_tokens + MARGIN
    arguments = ["--dtype", options.dtype, "--max-model-len", str(length), "--seed", str(options.seed)]
    arguments += ["--max-lora-rank", str(served_rank(options.rank)), "--max-loras", str(adapters)]
    environment: dict[str, str] = {}
    if options.device == "cpu":
        arguments += ["--enforce-eager", "--max-num-seqs", "16"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
    else:
        arguments += ["--gpu-memory-utilization", f"{memory:g}"]
    return Server(
        options.model,
        log=options.server_log or options.out / "vllm-server.log",
        timeout_s=options.server_timeout,
        arguments=[*arguments, *options.server_arguments.split()],
        environment=environment,
    )


# -- evaluations -------------------------------------------------------------------------------------------------------


def evaluation(
    server: Server,
    tokenizer: Any,
    adapter: str,
    problems: Sequence[Problem],
    temperature: float,
    options: argparse.Namespace,
) -> Score:
    """Scores an adapter that the server has on some problems."""
    prompts = [
        list(tokenizer.apply_chat_template(each["messages"], add_generation_prompt=True, return_dict=False))
        for each in problems
    ]
    tokens = server.answers(prompts, adapter, temperature, options.max_tokens)
    texts = [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
    return score(load_reward(options.reward), problems, texts, [len(each) for each in tokens], options.max_tokens)


def evaluate(
    server: Server,
    tokenizer: Any,
    recorder: Recorder,
    options: argparse.Namespace,
    saved: Callable[[], None],
    last: Callable[[str], None],
) -> None:
    """Scores the versions that were kept: the last one first, in case the time is over; `last` gets its name then."""
    held_out = read_problems(options.problems, "test", options.held_out)
    newest = max(recorder.kept, default=0)
    for version in sorted(recorder.kept, key=lambda each: (each != newest, each)):
        name, began = f"version-{version}", time.perf_counter()
        server.load(name, recorder.kept[version])
        found = evaluation(server, tokenizer, name, held_out, 1.0, options)
        recorder.evaluated(version, found, time.perf_counter() - began)
        saved()
        if version == newest:
            last(name)
        server.unload(name)


# -- the measured run --------------------------------------------------------------------------------------------------


def run(
    options: argparse.Namespace,
    setting: Setting,
    cells: Cells,
    sweep: Sequence[Mapping[str, Any]],
    servers: Servers,
    swept_s: float = 0.0,
) -> None:
    """The measured run, the curve after it, and the whole test."""
    cell, whole = run_cells(SIDE, options, setting.parameters())
    if not cells.pending([cell, whole]):
        print(f"{cell.name}: there already", flush=True)
        return
    recorder = Recorder(
        every=options.every, seconds=options.seconds, completions=options.groups * options.group, swept_s=swept_s
    )
    server = servers.get(setting)
    clear_memory()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, setting, options.groups, options.updates, Path(folder), recorder, server)
        trainer.train()
        print(f"{cell.name}: {len(recorder.updates)} updates in {recorder.updates[-1]['elapsed_s']:.1f} s", flush=True)
        made = {"config": stated(trainer, setting, options, server), "sweep": list(sweep), "server_s": server.start_s}

        def saved(**more: Any) -> None:
            cells.write(cell, {**recorder.results(), **made, **more})

        saved()
        server.clear()
        problems = [] if options.test_problems == 0 else read_problems(options.problems, "test", options.test_problems)

        def ask(name: str) -> Callable[[float], Score]:
            tokenizer = trainer.processing_class
            return lambda temperature: evaluation(server, tokenizer, name, problems, temperature, options)

        def test(name: str) -> None:
            if problems:
                cells.measure(whole, lambda: whole_test(ask(name)))

        evaluate(server, trainer.processing_class, recorder, options, saved, test)
        saved(finished=True, log=trainer.state.log_history)


# -- the sweep ---------------------------------------------------------------------------------------------------------


def sweep_cell(options: argparse.Namespace, setting: Setting) -> Cell:
    return trl_runs.sweep_cell(SIDE, options, options.groups, setting.parameters())


def try_setting(options: argparse.Namespace, setting: Setting, servers: Servers) -> dict[str, Any]:
    """A few updates under a setting: the rates of those after the first, or why there are none."""
    recorder = Recorder(every=0, seconds=float("inf"), completions=options.groups * options.group)
    trainer = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            server = servers.get(setting)
            clear_memory()
            out, updates = Path(folder), options.sweep_updates
            trainer = make_trainer(options, setting, options.groups, updates, out, recorder, server)
            trainer.train()
            found = recorder.results()
            del found["startup_s"], found["evaluations"]  # of the process, and of none
            return {**found, "config": stated(trainer, setting, options, server)}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a setting that this TRL, or this host, does not have is no reason to end the sweep
            return {"failed": f"{type(error).__name__}: {error}"[:500]}
        finally:
            del trainer


def sweep_records(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each setting of the sweeps under `--out` and `--known` came to."""
    names = ("tokens_per_s", "seconds_per_update", "training_s_per_update", "length_mean", "dropped_share")
    return trl_runs.sweep_records(SIDE, options, Setting.of, names)


def fastest(records: Sequence[Mapping[str, Any]]) -> Setting | None:
    """The setting with the most trained tokens per second; None if no setting was timed."""
    timed = [record for record in records if record.get("tokens_per_s")]
    return Setting.parse(max(timed, key=lambda record: record["tokens_per_s"])["setting"]) if timed else None


def sweep_and_run(options: argparse.Namespace, cells: Cells) -> None:
    """What the command line asks for."""
    began = time.time()
    tried = sorted(options.sweep or [], key=lambda setting: setting.memory)
    wanted = tried if options.setting is None or options.sweep_only else [*tried, options.setting]
    with Servers(options, wanted) as servers:
        for setting in tried:
            if time.time() > began + options.sweep_seconds:
                print(f"`--sweep-seconds` is over: {setting} is left out", flush=True)
                continue
            cells.measure(sweep_cell(options, setting), lambda: try_setting(options, setting, servers))  # noqa: B023 - called at once
        records = sweep_records(options)
        for record in records:
            print(json.dumps(record), flush=True)
        if options.sweep_only:
            return
        chosen = options.setting or fastest(records)
        if chosen is None:
            raise ValueError(
                f"`--out {options.out}` has no sweep to choose from: give `--setting 32:off`, or `--sweep`"
            )
        print(f"setting: {chosen}", flush=True)
        run(options, chosen, cells, records, servers, swept_s=time.time() - began if tried else 0.0)


# -- the command line --------------------------------------------------------------------------------------------------


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_run_options(parser)
    parser.add_argument("--setting", type=Setting.parse, help="as in `32:off`; default: the fastest of the sweep")
    parser.add_argument("--sweep", type=settings, help="settings to try, with commas between them")
    parser.add_argument("--sweep-updates", type=int, default=6, help="updates of each setting")
    parser.add_argument("--sweep-seconds", type=float, default=float("inf"), help="after which no setting is begun")
    parser.add_argument("--sweep-only", action="store_true")
    parser.add_argument("--attention", choices=("torch", "hub"), default="torch", help="hub: the kernel TRL downloads")
    parser.add_argument("--server-log", type=Path, help="default: `vllm-server.log` under `--out`")
    parser.add_argument("--server-timeout", type=float, default=400.0, help="seconds for the server's start")
    parser.add_argument("--server-arguments", default="", help="more arguments for vLLM, as one word")
    return parser


def make_tiny(options: argparse.Namespace, scratch: Path) -> None:
    """Turns the options into those of a run that takes a minute or two on a CPU, most of it for vLLM's start."""
    tiny_run(options, scratch, head_size=32)
    options.max_prompt = 64


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of().parse_args(list(sys.argv[1:] if arguments is None else arguments))
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    cells = from_options(options)
    with tempfile.TemporaryDirectory() as scratch:
        if options.tiny:
            make_tiny(options, Path(scratch))
        sweep_and_run(options, cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
