"""The trainer's ranks, each a Ray actor (`rank_actor.py`), until one of them is lost.

The result of a call, over all ranks:

| ranks                                       | the call                                                             |
|---------------------------------------------|----------------------------------------------------------------------|
| all done                                    | returns the result of rank 0                                         |
| all raised                                  | raises the error of the rank that failed first; the ranks live on    |
| some raised, others did not by `GRACE_S`    | the same, but all ranks are ended: they are in different states      |
| one died, or does not meet the others       | `TrainerLostError`: all ranks are ended                              |
| some have not answered by the deadline      | `StalledError`: all ranks are ended, and so is the run               |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stretto.cluster.actor_calls import kill
from stretto.cluster.actor_placement import why_not_started
from stretto.cluster.model_files import ModelSource
from stretto.cluster.rank_actor import VERSIONS, WRITING, RankTrainerFactory, TrainerRank, WeightsHeader
from stretto.cluster.weights import RayWeightsRef, WeightsStore
from stretto.errors import RunError, StalledError, StrettoError, TrainerError, TrainerLostError, describe
from stretto.models.adapter_config import adapter_folder
from stretto.observe.progress import Silent
from stretto.recipe.schema import Recipe
from stretto.setup.base_models import starting_adapter
from stretto.setup.cluster_devices import gpus_of
from stretto.setup.teachers import teacher_sources
from stretto.setup.threads import rank_threads
from stretto.training.learning_rates import LearningRates
from stretto.training.parallel import Ranks
from stretto.training.protocol import Trainer
from stretto.types import Batch, UpdateReport, Weights, WeightsRef

log = logging.getLogger(__name__)

GRACE_S = 20.0  # for the other ranks to end a call in which one has raised
PLACE_S = 300.0  # for machines with room for all ranks, and for their processes to import what they need
EXPLAIN_S = 60.0  # after so long the log says what the ranks wait for
STORE_S = 900.0  # for rank 0 to write the file of a version; after that the driver writes it

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The options of the ranks, wherever they are placed."""

    make: Callable[[Ranks], Trainer]  # called in the process of each rank
    count: int = 1
    threads: int = 1  # of torch
    cpus: float = 1.0  # of the cluster, for each rank
    gpus: float = 0.0
    folder: str | None = None  # the run folder, which each rank must see


def rank_options(
    recipe: Recipe, source: ModelSource, folder: Path | None = None, rates: LearningRates | None = None
) -> RankOptions:
    """Returns the options for the ranks of a recipe, which load the model from `source`, of a run in `folder`.

    `rates` None: the learning rates are those of the recipe.
    """
    runtime = recipe.runtime
    found = starting_adapter(recipe, Silent())
    adapter = None if found is None else ModelSource.of(str(adapter_folder(found)), "model.adapter")
    teachers = tuple(
        ModelSource.of(str(each.adapter or each.model_path(recipe)), each.option) for each in teacher_sources(recipe)
    )
    return RankOptions(
        RankTrainerFactory(recipe, source, rates, adapter, teachers),
        count=runtime.trainers,
        threads=rank_threads(recipe),
        cpus=runtime.trainer_cpus,
        gpus=gpus_of(runtime.trainer_gpus, recipe),
        folder=None if folder is None else str(folder.resolve()),
    )


class RankGroup:
    """A `TrainerBackend` that ends when one of its ranks is lost."""

    kv_given_back = 0  # engines run in other processes, and have no memory that a rank could use

    def __init__(self, options: RankOptions, *, deadline_s: float) -> None:
        self.failure: StrettoError | None = None  # why the ranks were ended
        self.version = 0
        self.processes: tuple[int, ...] = ()  # of the ranks
        self.deadline_s = deadline_s  # of each call
        self._options = options
        actor = ray.remote(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={WRITING: 1, VERSIONS: 1},
        )(TrainerRank)
        # Rank 0 writes what the driver reads, so it is on the same machine if there is room.
        here = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True, _spill_on_unavailable=True
        )
        self._actors = [
            actor.options(scheduling_strategy="DEFAULT" if rank else here).remote(
                options.make, rank, options.count, options.threads
            )
            for rank in range(options.count)
        ]

    async def place(self) -> None:
        """Returns once every rank has a process. Logs the reason after `EXPLAIN_S`, and raises it after `PLACE_S`."""
        self.check()
        ready = asyncio.ensure_future(
            self._answers("placing the ranks of the trainer", [actor.ready.remote() for actor in self._actors])
        )
        try:
            for wait_s in (EXPLAIN_S, PLACE_S - EXPLAIN_S):
                if (await asyncio.wait({ready}, timeout=wait_s))[0]:
                    await ready
                    return
                why = await asyncio.to_thread(why_not_started, self._actors, self._asks())
                log.warning("the ranks of the trainer have not begun: %s", why)
            raise self._end_with(TrainerError(f"the ranks of the trainer have not begun after {PLACE_S:g} s: {why}"))
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    def _asks(self) -> str:
        each = self._options
        return (
            f"{each.count} (`runtime.trainers`) ask for {each.cpus:g} CPUs and {each.gpus:g} GPUs each "
            "(`runtime.trainer_cpus`, `runtime.trainer_gpus`)"
        )

    async def start(self) -> None:
        """Has the ranks meet and make their trainers."""
        await self.place()
        if self._options.folder is not None:
            await self._all("looking for the run folder", "check_folder", self._options.folder)
        name, (host, port) = "starting the ranks of the trainer", ("", 0)
        if len(self._actors) > 1:
            host, port = (await self._answers(name, [self._actors[0].open.remote(self.deadline_s)]))[0]
        calls = [actor.start.remote(host, port, self.deadline_s) for actor in self._actors]
        started = await self._answers(name, calls)
        self.version, self.processes = started[0][0], tuple(process for _, process in started)

    async def update(self, batch: Batch) -> tuple[UpdateReport, RayWeightsRef]:
        placed = await asyncio.to_thread(ray.put, batch)
        (report, header), ref = await self._all_with_object(f"update {batch.update}", "update", placed)
        self.version = batch.update + 1
        return report, _reference(header, ref)

    async def weights(self, version: int) -> RayWeightsRef:
        name = f"taking the weights of version {version}"
        return _reference(*await self._all_with_object(name, "weights", version))

    async def base_checksum(self) -> str | None:
        found: str | None = (await self._all("taking the checksum of the base", "base_checksum"))[0]
        return found

    async def save(self, folder: Path) -> None:
        await self.capture()
        await self.write(folder)

    async def capture(self) -> int:
        """Has the ranks copy their state. Returns the version of that state."""
        await self._all("copying the trainer's state", "capture")
        return self.version

    async def write(self, folder: Path) -> None:
        """Has rank 0 write the captured state, while the ranks continue."""
        self.check()
        folder = folder.resolve()
        call = self._actors[0].write.options(concurrency_group=WRITING).remote(str(folder))
        await self._answers("saving the trainer", [call])
        _refuse_unseen(folder)

    def store(self, ref: Any, folder: Path) -> bool:
        """Has rank 0 write the file of a version. Returns False if it cannot. Blocks: not for the loop's thread."""
        if self.failure is not None:
            return False
        call = self._actors[0].store.options(concurrency_group=VERSIONS).remote(ref, str(folder.resolve()))
        try:
            ray.get(call, timeout=STORE_S)
        except RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, RayError):  # else the weights are lost
                raise cause if isinstance(cause, OSError) else OSError(describe(cause)) from None
            log.warning("rank 0 has not written a version: %s", type(cause).__name__)
            return False
        except RayError as error:
            log.warning("rank 0 has not written a version: %s: %s", type(error).__name__, _telling_line(error))
            return False
        return True

    async def load(self, folder: Path) -> None:
        self.version = (await self._all("loading the trainer", "load", str(folder.resolve())))[0]

    async def adopt(self, weights: Weights | WeightsRef) -> None:
        reference = await WeightsStore().reference(weights)
        await self._all(f"adopting the weights of version {weights.version}", "adopt", reference.ref)

    async def export(self, folder: Path) -> None:
        folder = folder.resolve()
        await self._all("exporting the policy", "export", str(folder))
        _refuse_unseen(folder)

    def close(self) -> None:
        self.end(TrainerLostError("the trainer is closed"))

    def end(self, why: StrettoError) -> None:
        """Ends every rank. Later calls raise `why`. Safe to call twice."""
        if self.failure is not None:
            return
        self.failure = why
        if ray.is_initialized():
            for actor in self._actors:
                kill(actor)

    async def _all(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """Calls a method at every rank. Returns what each returned."""
        self.check()
        return await self._answers(name, [getattr(actor, method).remote(*arguments) for actor in self._actors])

    async def _all_with_object(self, name: str, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Calls a method with two results at every rank. Returns rank 0's first, and a reference to its second."""
        self.check()
        calls = [getattr(actor, method).options(num_returns=2).remote(*arguments) for actor in self._actors]
        first = await self._answers(name, [first for first, _ in calls])
        return first[0], calls[0][1]

    def check(self) -> None:
        """Raises the reason if the ranks were ended."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    async def _answers(self, name: str, calls: list[Any]) -> list[Any]:
        """Returns the results of the calls, or raises by the table above. Cancelling it does not undo them."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, late = await asyncio.wait(tasks, timeout=self.deadline_s, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(task.done() and task.exception() is not None for task in tasks)
            if late and failed:
                _, late = await asyncio.wait(tasks, timeout=min(GRACE_S, self.deadline_s))
            elif late:
                slow = ", ".join(str(rank) for rank, task in enumerate(tasks) if task in late)
                raise self._end_with(
                    StalledError(
                        f"{name} has not ended after {self.deadline_s:g} s (`runtime.update_seconds`): of "
                        f"{len(tasks)} ranks, there is no answer of {slow}. If it needs longer, raise "
                        "`runtime.update_seconds`"
                    )
                )
            errors = {rank: task.exception() for rank, task in enumerate(tasks) if task.done()}
            if not any(errors.values()):
                return [task.result() for task in tasks]
            raise self._failed(name, [errors.get(rank) for rank in range(len(tasks))])
        finally:
            for task in tasks:
                task.cancel()

    def _failed(self, name: str, errors: list[BaseException | None]) -> BaseException:
        """Returns the error of a call that raised at some ranks. Ends the ranks unless all of them raised and live."""
        causes = {rank: _cause(error) for rank, error in enumerate(errors) if error is not None}
        gone = {rank: cause for rank, cause in causes.items() if isinstance(cause, RayError | TrainerLostError)}
        if gone:
            said = "; ".join(
                f"rank {rank}: {type(cause).__name__}: {_telling_line(cause)}" for rank, cause in gone.items()
            )
            return self._end_with(TrainerLostError(f"{name} failed, and the trainer with it: {said}"))
        # If one rank fails, the others only report that it did.
        own = [cause for cause in causes.values() if not _telling_line(cause).startswith("rank ")] or list(
            causes.values()
        )
        error = own[0]
        if not isinstance(error, StrettoError | OSError):
            error = TrainerError(f"{name} failed: {type(error).__name__}: {_telling_line(error)}")
        return self._end_with(error) if len(causes) < len(errors) else error

    def _end_with(self, why: Result) -> Result:
        self.end(why if isinstance(why, StrettoError) else TrainerError(str(why)))
        return why


def _reference(header: WeightsHeader, ref: Any) -> RayWeightsRef:
    return RayWeightsRef(header.version, header.kind, header.checksum, header.scale, ref)


def _refuse_unseen(folder: Path) -> None:
    if not folder.exists():
        raise RunError(
            f"rank 0 of the trainer has written `{folder}`, and it is not here: with `runtime.trainers` on another "
            "machine, the run folder has to lie on a file system that all of them see; give it with `--out`"
        )


def _cause(error: BaseException) -> BaseException:
    """Returns the exception that was raised in the actor, if the call ended with one."""
    return error.cause if isinstance(error, RayTaskError) else error


def _telling_line(error: BaseException) -> str:
    """Returns the line that says what happened: the first, or the last if Ray could not even create the actor."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if "creation task" in lines[0] else lines[0]
