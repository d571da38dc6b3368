"""`train`: makes the backend of a run, runs the loop, and writes the run folder.

```
RUN/config.toml       the recipe, every default spelled out
RUN/metrics.jsonl     a line for each update and for each evaluation
RUN/journal.sqlite    every state change of every trajectory
RUN/checkpoints/      what a stopped or killed run needs to resume, besides the journal
RUN/versions/         the weights that trajectories in progress need
RUN/policy/           the trained policy: a Hugging Face model, or a PEFT adapter
RUN/summary.json      the totals of the run
RUN/reward.log        what the reward function printed, if it did
RUN/judge.sqlite      the answers of a judge and what they cost, if the task has one
RUN/run.log           all that the run said, with the time
RUN/trackers/         the ids of the run in its trackers, if it has any
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from stretto import clock
from stretto.assembly.checkpoint_writer import (
    begin_folder,
    claimed_folder,
    forget_routing,
    take_checkpoint,
    write_json,
)
from stretto.assembly.data_record import data_record, recorded_limits, refuse_other_data
from stretto.assembly.export import export_policy
from stretto.assembly.resume import Resumed, take_up, tries_to_score
from stretto.assembly.task_plays import make_evaluator, training_plays
from stretto.core.controller import Controller
from stretto.environments.custom import close_environment, start_environment
from stretto.environments.given import NOTHING_GIVEN, Given, of_task
from stretto.environments.mixed_prompts import MixedPrompts
from stretto.environments.reward_output import RewardOutput
from stretto.environments.source_digests import source_digests
from stretto.errors import StrettoError, first_line
from stretto.local.backend import local_backend
from stretto.local.components import LocalComponents
from stretto.models.loading import load_config
from stretto.observe.listeners import Listeners
from stretto.observe.metrics import JsonLines, Sinks, Tally
from stretto.observe.progress import Announcer, Observer, Silent
from stretto.observe.run_log import Logged, RunLog
from stretto.observe.start_phases import start_phase
from stretto.observe.task_metrics import TaskMetrics
from stretto.observe.trackers.catalogue import add_trackers
from stretto.observe.waiting import report_wait
from stretto.recipe.schema import Recipe
from stretto.recipe.task_checks import task_name
from stretto.run.evaluation import Evaluator
from stretto.run.first_reward import FirstReward, how_to_try
from stretto.run.folder_checks import (
    facts_of,
    refuse_nothing_to_resume,
    refuse_occupied,
)
from stretto.run.handle import RunHandle
from stretto.run.idle_evaluation import evaluate_alone
from stretto.run.interrupts import AGAIN, is_interrupt, stopped_by_interrupts
from stretto.run.loop import Loop, Settings
from stretto.run.loop_watchdog import warn_when_blocked
from stretto.run.phases import Phases
from stretto.run.pool_requests import Control
from stretto.run.protocols import Pool, TrainerBackend
from stretto.run.recipe_changes import Change, accepted_changes
from stretto.setup.backend import Backend, MakeBackend
from stretto.setup.base_models import model_path_of, starting_adapter
from stretto.setup.chosen_sizes import with_chosen_sizes
from stretto.setup.counted_models import CountedModels, count_models
from stretto.setup.device import as_begun, choose_device, resolved
from stretto.setup.factories import DriverInputs, load_driver_inputs
from stretto.setup.garbage import spare_from_collection
from stretto.setup.inputs import passed_variables, read_tasks
from stretto.setup.loaded_models import model_digests
from stretto.setup.rollout_rows import describe_rows
from stretto.setup.warm_starts import has_demonstrations
from stretto.store.checkpoint_files import keep_newest_checkpoint
from stretto.store.journal import Journal
from stretto.store.lock import Lock
from stretto.store.reader import JournalReader
from stretto.store.schema import JOURNAL_NAME
from stretto.store.traces import recorded_in, refuse_damaged
from stretto.store.version_files import VersionFiles

log = logging.getLogger(__name__)

# Engine and trainer make thousands of short calls a second that release the interpreter lock and need it back at once.
# A thread that waits for the lock gets it only after this long; with the usual 5 ms each starves the other.
SWITCH_S = 1e-4


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    give_up: Sequence[int] = (),
    given: Given = NOTHING_GIVEN,
    listeners: Listeners | None = None,
    handle: RunHandle | None = None,
) -> dict[str, Any]:
    """Runs a recipe to its end, or until Ctrl-C or `handle` stops it, and returns the contents of `summary.json`.

    The run folder must be new, or with `resume` hold a run. Another recipe than that of the run may change what
    `run/recipe_changes.py` lists, from the next update on; more `training.steps` extend a run, also a finished one. A
    resumed run fails the trajectories of `give_up` instead of training on them. `observer` reports progress; by default
    nothing is printed. `given` has what the recipe names as given from Python. `listeners` are told what happens from
    when the run folder exists.
    """
    folder, listeners = Path(folder), Listeners() if listeners is None else listeners
    handle = handle or RunHandle(folder)
    run_log = RunLog(folder)
    observer = Announcer(Logged(observer or Silent(), run_log, recipe.training.steps), listeners)
    recipe = resolved(as_begun(recipe, folder) if resume else recipe, choose_device(recipe.runtime.device))
    if resume:
        refuse_nothing_to_resume(folder)
        accepted_changes(recipe, folder)  # here and below before anything is built
    else:
        refuse_occupied(folder)
    if give_up:
        tries_to_score(folder / JOURNAL_NAME, give_up)  # refuses an unfit id before anything is built
    for part in recipe.parts:
        with of_task(part.task.label if len(recipe.parts) > 1 else None):
            passed_variables(part)  # refuses a variable that is not set, before anything is built
    add_trackers(recipe.observe, listeners, observer.message)
    with contextlib.ExitStack() as stack:
        stack.callback(observer.close)
        if resume:  # here and below before anything is built, so that a second process is refused at once
            Control(folder).open()
            lock = Lock(folder / JOURNAL_NAME)
            stack.callback(lock.close)
            refuse_damaged(folder)
        else:
            lock = stack.enter_context(claimed_folder(folder))
        stack.enter_context(run_log.attached())
        stack.enter_context(_told_the_end(listeners, handle))
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_S)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # for the warm start, whose operations are too small to share
        transformers_logging.disable_progress_bar()
        observer.message(f"run folder: {folder}")
        with start_phase(log, "data", observer.message):  # before a model is made: what is missing shows at once
            read = read_tasks(recipe, given)
        with start_phase(log, "files of the model"):
            model_path = model_path_of(recipe, observer)
            starting_adapter(recipe, observer)  # made here, if it is, so that its progress shows
        if recipe.runtime.type == "ray":
            from stretto.cluster.connection import connected

            observer.message(stack.enter_context(connected(recipe)))
        with start_phase(log, "prompts", observer.message):
            limits, device = recorded_limits(folder) if resume else None, choose_device(recipe.runtime.device)
            driver = load_driver_inputs(recipe, model_path, given, limits, read)
        if resume and (changed := refuse_other_data(folder, recipe, data_record(driver))) is not None:
            observer.message(changed)
        config, longest = load_config(model_path), driver.inputs.longest_prompt
        local = recipe.runtime.type == "local"  # on a cluster, each part counts for its own device
        counted = count_models(recipe, config, device) if local else None
        asked, recipe = recipe, with_chosen_sizes(recipe, config, longest, device, counted=counted)
        for line in describe_rows(asked, recipe):
            observer.message(line)
        changes = accepted_changes(recipe, folder) if resume else []
        phases = _phases(recipe, folder, changes)
        make = _backend_maker(recipe, model_path, driver, folder, observer, phases, counted)
        for note in driver.inputs.notes(recipe):
            observer.message(note)
        training = _train(phases, changes, handle, make, observer, listeners, lock, resume, give_up, given)
        try:
            summary = asyncio.run(training)
        except asyncio.CancelledError as error:
            if handle.interrupted:  # as Ctrl-C, from another thread
                raise KeyboardInterrupt from error
            raise
        handle.outcome = "stopped" if summary["stopped"] else "finished"
        return summary


@contextlib.contextmanager
def _told_the_end(listeners: Listeners, handle: RunHandle) -> Iterator[None]:
    """Tells the listeners how a run ended."""
    try:
        yield
    except BaseException as error:
        if handle.outcome == "running":
            handle.outcome = "stopped" if is_interrupt(error) else "failed"
        raise
    finally:
        listeners.close(handle.shown)


def _phases(recipe: Recipe, folder: Path, changes: Sequence[Change]) -> Phases:
    """Returns the phases of a run, with the one that begins now: that of a new run, or of one with changes."""
    recorded = recorded_in(folder)
    phases = Phases.recorded(folder) if recorded.begun else None
    if phases is None:
        return Phases.only(recipe)
    return phases.followed_by(recorded.finished, recipe) if changes else phases.with_current(recipe)


def _backend_maker(
    recipe: Recipe,
    model_path: str,
    driver: DriverInputs,
    folder: Path,
    observer: Observer,
    phases: Phases,
    counted: CountedModels | None,
) -> MakeBackend:
    """Returns the function that makes the backend. Engines and trainer of one process are made here already."""
    if recipe.runtime.type == "local":
        parts = LocalComponents.build(recipe, model_path, driver, phases.learning_rates, observer.message, counted)
        return partial(local_backend, recipe, parts, folder, observer)
    from stretto.cluster.backend import cluster_backend
    from stretto.cluster.model_files import ModelSource

    return partial(cluster_backend, recipe, driver, ModelSource.of(model_path), folder, observer, phases)


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """All that one run has, once its backend has started."""

    phases: Phases
    changes: Sequence[Change]  # that the last phase begins with
    folder: Path
    backend: Backend
    journal: Journal
    versions: VersionFiles
    trainer: TrainerBackend
    control: Control
    observer: Observer
    listeners: Listeners
    handle: RunHandle
    give_up: Sequence[int]  # trajectories that a resumed run fails
    given: Given

    @property
    def recipe(self) -> Recipe:
        return self.phases.current


async def _train(
    phases: Phases,
    changes: Sequence[Change],
    handle: RunHandle,
    make: MakeBackend,
    observer: Observer,
    listeners: Listeners,
    lock: Lock,
    resume: bool,
    give_up: Sequence[int],
    given: Given,
) -> dict[str, Any]:
    """Starts the backend, runs the loop, and ends everything in any case."""
    recipe, folder = phases.current, handle.folder
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(handle.cancellable())
        said = RewardOutput(folder / "reward.log", observer.message, after=folder / "config.toml")
        stack.callback(said.close)
        versions = VersionFiles(folder / "versions", durable=recipe.runtime.durable_versions)
        backend = make(said, versions)
        for each in backend.tasks.values():
            stack.push_async_callback(each.rewards.close)
            stack.push_async_callback(close_environment, each.environment)
        stack.push_async_callback(backend.pool.close)
        stack.callback(versions.close)
        stack.callback(backend.release)
        with start_phase(log, f"rewards and instances ({recipe.runtime.instances})"):
            await _start(backend, recipe.runtime.instances, observer.message)
        control = Control(folder)
        if not resume:
            begin_folder(recipe, folder)
            control.open()
        # A run that was killed in its first moments has no journal yet, and simply begins.
        begun = (folder / JOURNAL_NAME).exists()
        with Journal.open(folder / JOURNAL_NAME, resume=begun, lock=lock) as journal:
            trainer = backend.make_trainer(journal)
            stack.callback(trainer.close)
            run = _Run(
                phases,
                changes,
                folder,
                backend,
                journal,
                versions,
                trainer,
                control,
                observer,
                listeners,
                handle,
                give_up,
                given,
            )
            with _recorded_end(journal):
                return await _run(run)


@contextlib.contextmanager
def _recorded_end(journal: Journal) -> Iterator[None]:
    """Records in the journal the error or the interrupt that ends a session, where that can still be written."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(StrettoError):  # the journal itself may have failed
            journal.ended_by(_cause(error), at=clock.now())
        raise


def _cause(error: BaseException) -> str | None:
    """Returns the first line of an error, with its type if that is not ours; None for an interrupt."""
    if is_interrupt(error):
        return None
    if isinstance(error, SystemExit):
        return f"its process ended with status {error.code}"
    line = first_line(error)
    return line if isinstance(error, StrettoError) and line else f"{type(error).__name__}: {line}".removesuffix(": ")


async def _start(backend: Backend, instances: int, say: Callable[[str], None]) -> None:
    """Starts rewards and instances, and finds room for the trainer. Says what takes long."""
    for label, each in backend.tasks.items():
        with of_task(label if len(backend.tasks) > 1 else None):
            await report_wait(each.rewards.start(), lambda: "the reward's process to start", say)
            await report_wait(start_environment(each.environment), lambda: "the environment to start", say)
    await report_wait(backend.reserve(), lambda: "the trainer's processes", say)
    filling = _fill(backend.pool, instances)
    await report_wait(filling, lambda: f"instances to start, {len(backend.pool.engines)} of {instances} have", say)


async def _fill(pool: Pool, count: int) -> None:
    """Makes the instances that a run begins with, all at once. Raises the first error."""
    made = await asyncio.gather(*(pool.add() for _ in range(count)), return_exceptions=True)
    for each in made:
        if isinstance(each, BaseException):
            raise each


async def _run(run: _Run) -> dict[str, Any]:
    """Runs the loop to its end, with an evaluation before and after it. Returns the summary."""
    recipe, inputs, plan = run.recipe, run.backend.driver.inputs, run.recipe.plan
    with start_phase(log, "weights, and what is in progress"):
        waiting = "the trainer to start, and its weights"
        resumed = await report_wait(_take_up(run), lambda: waiting, run.observer.message)
    run.listeners.start(run.handle.shown)  # now the folder has the recipe of this phase
    tally = Tally(
        rows=plan.rows,
        sink=Sinks(JsonLines(run.folder / "metrics.jsonl"), run.listeners),
        totals=resumed.totals,
        run=run.folder,
        tasks=TaskMetrics(
            {task.label: task.pass_reward or 1.0 for task in recipe.tasks if task.label is not None},
            inputs.prompts.epochs if isinstance(inputs.prompts, MixedPrompts) else dict[str, float],
        ),
    )
    scored = any(rollout.reward is not None for rollout in resumed.rollouts.values())
    advice = {task.label: how_to_try(task, task_name(recipe, task)) for task in recipe.tasks}
    first_reward = FirstReward(came=scored or tally.totals.steps > 0, advice=advice)
    evaluator = make_evaluator(recipe, run.backend, run.journal, first_reward)
    evaluate = partial(
        evaluate_alone,
        run.backend.pool,
        instance_s=recipe.runtime.instance_seconds,
        reward_s=run.backend.longest_answer_s(recipe.runtime.stall_seconds),
        tally=tally,
        observer=run.observer,
    )
    if evaluator is not None and resumed.controller.newest == 0 and "before" not in resumed.evaluated:
        with warn_when_blocked(recipe.runtime.stall_seconds):
            await evaluate(evaluator, resumed.weights[0], "before")
    loop = _make_loop(run, resumed, evaluator, tally, first_reward)
    spare_from_collection()
    interrupts, stopping = stopped_by_interrupts(partial(loop.stop, AGAIN)), run.handle.stopping(loop.stop)
    with interrupts, stopping, warn_when_blocked(recipe.runtime.stall_seconds):
        if not await loop.run():
            await loop.checkpoints.save()
            if loop.halted is not None:
                write_json(run.folder / "summary.json", _summary(run, tally, loop.controller, stopped=True))
                raise loop.halted
            return await _conclude(run, tally, loop.controller, stopped=True)
    template = run.backend.driver.inputs.chat_template
    await export_policy(run.trainer, run.folder / "policy", recipe, templated=inputs.templated, chat_template=template)
    if recipe.runtime.final_checkpoint:
        await loop.checkpoints.save()  # for `--resume` with more updates
        await asyncio.to_thread(keep_newest_checkpoint, run.folder / "checkpoints")
        if not keeps_routing(recipe):
            forget_routing(run.journal, run.folder / "checkpoints")
    if evaluator is not None and ("after" not in resumed.evaluated or resumed.updates < plan.updates):
        write_json(run.folder / "summary.json", _summary(run, tally, loop.controller, stopped=False))
        try:
            with warn_when_blocked(recipe.runtime.stall_seconds):
                await evaluate(evaluator, loop.weights[plan.updates], "after")
        except (asyncio.CancelledError, KeyboardInterrupt):  # the user does without the score
            await _conclude(run, tally, loop.controller, stopped=False)
            run.handle.outcome = "finished"
            raise
    summary = await _conclude(run, tally, loop.controller, stopped=False)
    run.versions.prune(lambda version: False)  # `policy/` has the last version, and nothing needs the others
    return summary


async def _take_up(run: _Run) -> Resumed:
    """Begins the run, or restores it from its folder."""
    inputs = run.backend.driver.inputs
    begun = recorded_in(run.folder).begun
    begins = bool(run.changes) or not begun or Phases.recorded(run.folder) is None
    resumed = await take_up(
        run.folder,
        run.recipe.plan,
        prompts=inputs.prompts,
        facts=facts_of(
            run.recipe,
            rows=inputs.rows,
            templated=inputs.templated,
            vocabulary=run.backend.driver.vocabulary,
        ),
        journal=run.journal,
        trainer=run.trainer,
        versions=run.versions,
        place=run.backend.place,
        say=run.observer.message,
        give_up=run.give_up,
        sampled_ages=run.phases.sampled_ages,
        retrained_ages=run.phases.retrained_ages,
        recipe=run.recipe.dumps() if begins else None,
        started_from=_started_from(run.recipe),
        current=run.recipe,
    )
    begin_folder(run.recipe, run.folder)  # after the journal, which a resumed run goes by
    if run.changes and begun:
        said = ", ".join(map(str, run.changes))
        run.journal.note("recipe changed", f"from update {resumed.updates} on: {said}", at=clock.now())
        run.observer.message(f"from update {resumed.updates} on: {said}")
    _compare_sources(run)
    run.journal.read_from(data_record(run.backend.driver))
    return resumed


def _started_from(recipe: Recipe) -> str | None:
    """Names what the policy began with, if that is more than `model.path`, for an error if it is another one now."""
    if has_demonstrations(recipe):
        return "`model.warm_start` does not lead to the weights"
    adapter = recipe.model.continued_adapter
    return None if adapter is None else f"`model.adapter = {adapter!r}` is not the adapter"


def _compare_sources(run: _Run) -> None:
    """Records the code and the models that score or teach. Says which have changed since they were recorded."""
    models = model_digests(run.recipe)
    now = dict(run.given.digests) | models
    for task in run.recipe.tasks:
        now |= source_digests(task)
    with JournalReader(run.folder) as reader:
        before = reader.sources()
    for name in sorted(name for name, digest in now.items() if before.get(name, digest) != digest):
        text = f"the source of `{name}` has changed since the run used it last: rewards are those of the new code now"
        if name in models:
            text = f"the files of `{name}` have changed since the run used them last: it is another model now"
        run.journal.note("source changed", text, at=clock.now())
        run.observer.message(text)
    run.journal.scored_by(now)


def _make_loop(
    run: _Run,
    resumed: Resumed,
    evaluator: Evaluator | None,
    tally: Tally,
    first_reward: FirstReward,
) -> Loop:
    driver, runtime = run.backend.driver, run.recipe.runtime
    return Loop(
        resumed.controller,
        engines=run.backend.pool,
        trainer=run.trainer,
        tasks=training_plays(run.recipe, run.backend),
        prompts=driver.inputs.prompts,
        decode=driver.decode,
        evaluator=evaluator,
        journal=run.journal,
        tally=tally,
        observer=run.observer,
        settings=Settings(
            seed=run.recipe.seed,
            stall_s=runtime.stall_seconds,
            reward_s=run.backend.longest_reward_s,
            checkpoint_s=runtime.checkpoint_seconds,
            instance_s=runtime.instance_seconds,
            replacements=runtime.replacements,
            rebalance_s=runtime.rebalance_seconds,
            vocabulary=driver.vocabulary,
            sampled_ages=run.phases.sampled_ages,
            records_tokens=run.recipe.observe.tokens,
        ),
        weights=resumed.weights,
        rollouts=resumed.rollouts,
        kept=resumed.kept,
        versions=run.versions,
        checkpointing=lambda loop: take_checkpoint(
            run.folder,
            loop,
            run.trainer,
            run.journal,
            run.versions,
            ages=run.phases.retrained_ages,
            keeps_routing=keeps_routing(run.recipe),
        ),
        control=run.control,
        first_reward=first_reward,
        scoring_wait=lambda: run.backend.scoring_wait,
    )


def keeps_routing(recipe: Recipe) -> bool:
    """True if records of routing are kept: the recipe says so, or trains on groups again that it has trained on."""
    return recipe.training.keep_routing or recipe.training.replay is not None


async def _conclude(run: _Run, tally: Tally, controller: Controller, *, stopped: bool) -> dict[str, Any]:
    """Writes `summary.json` and the end of the session."""
    summary = _summary(run, tally, controller, stopped=stopped)
    write_json(run.folder / "summary.json", summary)
    run.journal.finished(stopped=stopped, at=clock.now(), totals=tally.totals.sums())
    await run.journal.durable()
    return summary


def _summary(run: _Run, tally: Tally, controller: Controller, *, stopped: bool) -> dict[str, Any]:
    counters = controller.counters
    return {
        **tally.summary(),
        "in_flight": run.recipe.plan.in_flight,
        "rows": run.recipe.plan.rows,
        "generation_retries": counters.generation_retries,
        "scoring_retries": counters.scoring_retries,
        "replaced_groups": counters.replaced_groups,
        "spared_groups": counters.spared_groups,
        "replayed_groups": counters.replayed_groups,
        "evaluations_skipped": counters.evaluations_skipped,
        "kv_given_back": run.trainer.kv_given_back,
        "stopped": stopped,
    }
