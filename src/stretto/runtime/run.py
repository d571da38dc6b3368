"""One run in one process: put the parts together, run the loop, leave the files.

```
RUN/config.toml       the recipe, every default spelled out
RUN/metrics.jsonl     a line an update, and one an evaluation
RUN/journal.sqlite    every state change of every trajectory
RUN/checkpoints/      what a stopped or killed run needs to go on, besides the journal
RUN/versions/         the weights that trajectories under way need
RUN/policy/           the trained policy: a Hugging Face model, or a PEFT adapter
RUN/summary.json      what it all came to
RUN/reward.log        what the reward function printed, if it did
```
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from stretto import clock
from stretto.config import Recipe
from stretto.core.brain import Brain
from stretto.engines.protocol import Engine
from stretto.environments.custom import load_environment
from stretto.environments.protocol import Environment
from stretto.environments.reward_output import RewardOutput
from stretto.environments.single_turn import SingleTurn
from stretto.errors import ChecksumError, EngineError, RequestError, VersionNotResidentError
from stretto.evaluation import EvaluationResult, Evaluator, Moment
from stretto.invocation import command
from stretto.loop import Loop, Settings
from stretto.observe.metrics import JsonLines, Tally
from stretto.observe.progress import Observer, make_observer
from stretto.observe.summary import summary_table
from stretto.runtime.blocked import told_when_blocked
from stretto.runtime.control import Control
from stretto.runtime.device import as_begun, choose_device, resolved
from stretto.runtime.export import export_policy
from stretto.runtime.folder import make_folder, take_checkpoint, write_json
from stretto.runtime.inputs import Inputs
from stretto.runtime.interrupts import ignore_interrupts, stopped_by_interrupts
from stretto.runtime.parts import Desk, Parts, model_path_of, read_desk
from stretto.runtime.pool import Pool
from stretto.runtime.resuming import take_up
from stretto.runtime.roles import TrainerSeat
from stretto.runtime.seats import MakeSeats, Seats, local_seats
from stretto.runtime.showing import shown
from stretto.runtime.starting import refuse_another_recipe, refuse_nothing_to_resume, refuse_occupied, standing
from stretto.store.journal import Journal
from stretto.store.lock import Lock
from stretto.store.schema import JOURNAL_NAME, RunFacts
from stretto.store.versions import VersionFiles
from stretto.types import Weights

# Engine and trainer make thousands of short calls a second that give up the interpreter lock and want it back at once.
# A thread that waits for the lock gets it only after this long; with the usual 5 ms each starves the other.
SWITCH_S = 1e-4
EVALUATION_TRIES = 3  # on other instances, of an evaluation before or after the run


def train_from_command_line(recipe: Recipe, folder: Path, *, resume: bool, part_of_compare: bool = False) -> int:
    """Train with progress on the terminal and a closing table; returns the exit status, 130 where it was stopped.

    Ctrl-C after the run was finished changes nothing of it, and so not the status; it is ignored from then on.
    As a `part_of_compare` it leaves out what to type next: `compare` says that itself.
    """
    console = Console()
    observer = make_observer(console, recipe.training.steps)
    try:
        summary = train(recipe, folder, resume=resume, observer=observer)
    except KeyboardInterrupt:
        if standing(folder) != "finished":
            if standing(folder) == "empty" or part_of_compare:
                raise
            _say(console, f"interrupted; continue with {_again(folder)}")
            return 130
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    ignore_interrupts()
    return _close(console, summary, recipe, folder, part_of_compare)


def _close(console: Console, summary: Mapping[str, Any], recipe: Recipe, folder: Path, part_of_compare: bool) -> int:
    """Say what became of a run; the exit status."""

    say = partial(_say, console)
    if summary["stopped"]:
        hint = "" if part_of_compare else f"; continue with {_again(folder)}"
        say(f"stopped after {summary['steps']} of {recipe.training.steps} updates{hint}")
        return 130
    console.print(summary_table(summary))
    if not part_of_compare:
        say(f"try next: {command('verify', folder)}")
        say(f"try next: {command('show', folder, '--update', str(recipe.training.steps - 1))}")
    say(f"the trained policy is in {folder / 'policy'}")
    return 0


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _again(folder: Path) -> str:
    return f"the same command and `--out {folder} --resume`"


def train(recipe: Recipe, folder: Path, *, resume: bool = False, observer: Observer) -> dict[str, Any]:
    """Run a recipe to its end, or to where Ctrl-C stops it. Returns what `summary.json` holds."""
    recipe = resolved(as_begun(recipe, folder) if resume else recipe, choose_device(recipe.runtime.device))
    if resume:
        refuse_nothing_to_resume(folder)
        refuse_another_recipe(recipe, folder)
    else:
        refuse_occupied(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(observer.close)
        lock = None
        if resume:  # before anything is built, so that a second process hears at once that this one has the run
            Control(folder).open()
            lock = Lock(folder / JOURNAL_NAME)
            stack.callback(lock.close)
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_S)
        torch.set_num_threads(1)  # for the warm start, whose operations are too small to share
        transformers_logging.disable_progress_bar()
        observer.message(f"run folder: {folder}")
        model_path = model_path_of(recipe, observer)
        if recipe.runtime.type == "ray":
            from stretto.runtime.ray_cluster import connected

            observer.message(stack.enter_context(connected(recipe)))
            desk, make = _on_ray(recipe, model_path, folder, observer)
        else:
            desk = parts = Parts.build(recipe, model_path)
            make = partial(local_seats, recipe, parts, observer)
        for note in desk.inputs.notes(recipe):
            observer.message(note)
        return asyncio.run(_train(recipe, folder, make, observer, lock))


def _on_ray(recipe: Recipe, model_path: str, folder: Path, observer: Observer) -> tuple[Desk, MakeSeats]:
    """What is read here of a run on a cluster, and how the rest is made there."""
    from stretto.runtime.ray_model import ModelSource
    from stretto.runtime.ray_seats import ray_seats

    desk = read_desk(recipe, model_path)
    return desk, partial(ray_seats, recipe, desk, ModelSource.of(model_path), folder, observer)


# -- the run -----------------------------------------------------------------------------------------------------------


async def _train(
    recipe: Recipe, folder: Path, make: MakeSeats, observer: Observer, lock: Lock | None
) -> dict[str, Any]:
    """Start what runs beside the loop, run, and end all of it whatever happens; `lock` is that of a resumed run."""
    async with contextlib.AsyncExitStack() as stack:
        said = RewardOutput(folder / "reward.log", observer.message)
        stack.callback(said.close)
        versions = VersionFiles(folder / "versions", durable=recipe.runtime.durable_versions)
        seats = make(said, versions)
        stack.push_async_callback(seats.rewards.close)
        stack.push_async_callback(seats.pool.close)
        stack.callback(versions.close)
        stack.callback(seats.release)
        say, count = observer.message, recipe.runtime.instances
        await shown(seats.rewards.start(), lambda: "the reward's process to start", say)
        await shown(seats.reserve(), lambda: "the trainer's processes", say)
        filling = _fill(seats.pool, count)
        await shown(filling, lambda: f"instances to start, {len(seats.pool.engines)} of {count} have", say)
        control = Control(folder)
        if lock is None:
            lock = make_folder(recipe, folder)
            stack.callback(lock.close)
            control.open()
        # A run that was killed in its first moments has no journal yet, and simply begins.
        resume = (folder / JOURNAL_NAME).exists()
        with Journal.open(folder / JOURNAL_NAME, resume=resume, lock=lock) as journal:
            role = seats.make_trainer(journal)
            stack.callback(role.close)
            return await _run(recipe, folder, seats, journal, versions, observer, role, control)


async def _fill(pool: Pool, count: int) -> None:
    """Make the instances that a run begins with, all at once; the first error, if there is one."""
    made = await asyncio.gather(*(pool.add() for _ in range(count)), return_exceptions=True)
    for each in made:
        if isinstance(each, BaseException):
            raise each


async def _run(
    recipe: Recipe,
    folder: Path,
    seats: Seats,
    journal: Journal,
    versions: VersionFiles,
    observer: Observer,
    role: TrainerSeat,
    control: Control,
) -> dict[str, Any]:
    parts, pool = seats.desk, seats.pool
    plan, metrics = recipe.plan, JsonLines(folder / "metrics.jsonl")
    environment = _environment(seats)
    journal.begin(_facts(recipe, parts.inputs), at=clock.now())
    taking_up = take_up(
        folder,
        plan,
        prompts=parts.inputs.prompts,
        journal=journal,
        trainer=role,
        versions=versions,
        place=seats.place,
        say=observer.message,
    )
    resumed = await shown(taking_up, lambda: "the trainer to start, and its weights", observer.message)
    brain = resumed.brain
    tally = Tally(rows=plan.rows, sink=metrics, totals=resumed.totals)
    # A reward that waits for others is no environment that hangs: its pool has the deadlines.
    episode_s = None if parts.inputs.task.environment is None else recipe.runtime.stall_seconds
    evaluator = _evaluator(recipe, parts, environment, journal, episode_s)
    deadlines = recipe.runtime.instance_seconds, seats.rewards.longest_s or recipe.runtime.stall_seconds
    if evaluator is not None and brain.newest == 0 and not resumed.evaluated_before:
        with told_when_blocked(recipe.runtime.stall_seconds):
            await _evaluate_alone(deadlines, evaluator, pool, resumed.weights[0], "before", tally, observer)

    def checkpointing(loop: Loop) -> Coroutine[Any, Any, None]:
        return take_checkpoint(folder, loop, role, journal, versions)

    loop = Loop(
        brain,
        engines=pool,
        trainer=role,
        environment=environment,
        prompts=parts.inputs.prompts,
        decode=parts.decode,
        evaluator=evaluator,
        journal=journal,
        tally=tally,
        observer=observer,
        settings=Settings(
            seed=recipe.seed,
            sampling=parts.sampling,
            stall_s=recipe.runtime.stall_seconds,
            reward_s=seats.rewards.longest_s,
            episode_s=episode_s,
            checkpoint_s=recipe.runtime.checkpoint_seconds,
            instance_s=recipe.runtime.instance_seconds,
            replacements=recipe.runtime.replacements,
            rebalance_s=recipe.runtime.rebalance_seconds,
            vocabulary=parts.vocabulary,
            max_turns=parts.inputs.task.max_turns,
        ),
        weights=resumed.weights,
        flights=resumed.flights,
        kept=resumed.kept,
        versions=versions,
        checkpointing=checkpointing,
        control=control,
    )
    with stopped_by_interrupts(loop.stop), told_when_blocked(recipe.runtime.stall_seconds):
        done = await loop.run()
        if not done:
            await loop.checkpoints.save()
            return await _conclude(folder, tally, brain, journal, role, stopped=True)
    await export_policy(role, folder / "policy", recipe, templated=parts.inputs.templated)
    # Complete from here on: what becomes of the last evaluation changes nothing of what was trained.
    summary = await _conclude(folder, tally, brain, journal, role, stopped=False)
    if evaluator is not None:
        with told_when_blocked(recipe.runtime.stall_seconds):
            await _evaluate_alone(deadlines, evaluator, pool, loop.weights[plan.updates], "after", tally, observer)
        summary = await _conclude(folder, tally, brain, journal, role, stopped=False)
    versions.prune(lambda version: False)  # `policy/` has the last, and nothing needs another
    return summary


async def _conclude(
    folder: Path, tally: Tally, brain: Brain, journal: Journal, role: TrainerSeat, *, stopped: bool
) -> dict[str, Any]:
    """Write `summary.json` and the end of the session. May be done again when there is more to say."""
    counters = brain.counters
    summary = {
        **tally.summary(),
        "generation_retries": counters.generation_retries,
        "scoring_retries": counters.scoring_retries,
        "replaced_groups": counters.replaced_groups,
        "spared_groups": counters.spared_groups,
        "replayed_groups": counters.replayed_groups,
        "evaluations_skipped": counters.evaluations_skipped,
        "kv_given_back": role.kv_given_back,
        "stopped": stopped,
    }
    write_json(folder / "summary.json", summary)
    journal.finished(stopped=stopped, at=clock.now(), totals=tally.totals.sums())
    await journal.durable()
    return summary


async def _evaluate_alone(
    deadlines: tuple[float, float],
    evaluator: Evaluator,
    pool: Pool,
    weights: Weights,
    moment: Moment,
    tally: Tally,
    observer: Observer,
) -> None:
    """Evaluate while nothing else runs, before the first admission or after the last update.

    Where the instance is lost on the way, it is done by another. `deadlines` are of an instance and of a reward.
    """
    for attempt in range(EVALUATION_TRIES):
        instance, engine = next(iter(pool.engines.items()), None) or await pool.add()
        try:
            result = await _evaluate_on(engine, evaluator, weights, moment, deadlines)
            break
        except EngineError as error:
            await pool.remove(instance)
            if attempt + 1 == EVALUATION_TRIES:
                raise
            observer.message(f"instance {instance} was lost while it evaluated: {error}; another does it")
    evaluator.record(result, tally.evaluated(result))
    observer.evaluated(result)


async def _evaluate_on(
    engine: Engine, evaluator: Evaluator, weights: Weights, moment: Moment, deadlines: tuple[float, float]
) -> EvaluationResult:
    """One try. Raises `EngineError` where the instance makes no progress within its deadline, or refuses something.

    An instance that runs nothing may have to wait for a reward, which has a deadline of its own.
    """
    instance_s, reward_s = deadlines

    async def work() -> EvaluationResult:
        for version in engine.report().versions:
            with contextlib.suppress(VersionNotResidentError):  # the end of the loop may have unloaded it since
                await engine.unload(version)
        await engine.load(weights)
        result = await evaluator.evaluate(engine, weights.version, moment, weights.checksum)
        await engine.unload(weights.version)
        return result

    working = asyncio.create_task(work(), name=f"evaluation {moment}")
    before, moved_at = None, time.monotonic()
    try:
        while not (await asyncio.wait({working}, timeout=min(1.0, instance_s / 4)))[0]:
            load = engine.report()
            now = (load.steps, load.tokens, load.prefilled, evaluator.num_ended)
            if now != before:
                before, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > instance_s + (0.0 if load.running or load.queued else reward_s):
                raise EngineError(f"it made no progress for {instance_s:g} s (`runtime.instance_seconds`)")
        return await working
    except (RequestError, ChecksumError) as error:
        raise EngineError(f"it refused version {weights.version}: {error}") from error
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _environment(seats: Seats) -> Environment:
    """What plays the episodes of the task: of one turn, scored by its reward, or of its own environment."""
    spec = seats.desk.inputs.task.environment
    if spec is None:
        return SingleTurn(seats.rewards, seats.desk.decode)
    return load_environment(spec, seats.desk.tokenizer)


def _evaluator(
    recipe: Recipe, parts: Desk, environment: Environment, journal: Journal, episode_s: float | None
) -> Evaluator | None:
    if parts.inputs.held_out is None:
        return None
    wanted = recipe.evaluation
    sampling = replace(
        parts.sampling,
        temperature=recipe.rollout.temperature if wanted.temperature is None else wanted.temperature,
        max_tokens=wanted.max_tokens or recipe.rollout.max_tokens,
        supports=False,  # nothing of it is trained on
    )
    count = min(wanted.prompts, parts.inputs.held_out.num_rows)
    return Evaluator(
        parts.inputs.held_out,
        count,
        environment=environment,
        sampling=sampling,
        seed=recipe.seed,
        journal=journal,
        vocabulary=parts.vocabulary,
        max_turns=parts.inputs.task.max_turns,
        episode_s=episode_s,
    )


def _facts(recipe: Recipe, inputs: Inputs) -> RunFacts:
    plan = recipe.plan
    return RunFacts(
        paradigm=plan.paradigm.name,
        staleness=plan.staleness,
        auto=plan.auto,
        batch=plan.batch,
        group=plan.group_size,
        updates=plan.updates,
        seed=recipe.seed,
        data_rows=inputs.prompts.num_rows,
        retries=plan.retries,
        filter_limit=plan.filter_limit,
        order=recipe.task.order,
        replay_groups=plan.replay_groups,
        replay_uses=plan.replay_uses,
        templated=inputs.templated,
    )
