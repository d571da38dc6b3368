"""One life of the trainer's ranks, each a Ray actor with a process of its own (`ray_rank.py`).

What a call comes to, over all ranks:

| ranks                                       | the call                                                             |
|---------------------------------------------|----------------------------------------------------------------------|
| all done                                    | returns what rank 0 says                                             |
| all raised                                  | raises the error of the rank that it came from; the ranks go on      |
| some raised, others did not by `GRACE_S`    | the same, but all ranks are ended: they are not at one point         |
| one died, or does not meet the others       | `TrainerLostError`: all ranks are ended                              |
| some have not answered by the deadline      | `StalledError`: all ranks are ended, and so is the run               |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stretto.config import Recipe
from stretto.errors import RunError, StalledError, StrettoError, TrainerError, TrainerLostError
from stretto.runtime.parts import rank_threads
from stretto.runtime.ray_cluster import gpus_of
from stretto.runtime.ray_model import ModelSource
from stretto.runtime.ray_placement import why_not_begun
from stretto.runtime.ray_rank import VERSIONS, WRITING, Facts, RankTrainer, TrainerRank
from stretto.runtime.ray_weights import PackedWeights, WeightsHandle
from stretto.training.parallel import Ranks
from stretto.training.protocol import Trainer
from stretto.types import Batch, UpdateReport, Weights

log = logging.getLogger(__name__)

GRACE_S = 20.0  # for the other ranks to end a call that one of them raised in
PLACE_S = 300.0  # for machines with room for all ranks, and for their processes to import what they need
WAITS_S = 60.0  # after so long it is said what they may be waiting for
STORE_S = 900.0  # for rank 0 to write the file of a version; after that the driver does

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What ranks are made of, wherever they are placed."""

    make: Callable[[Ranks], Trainer]  # called in the process of each
    count: int = 1
    threads: int = 1  # of torch
    cpus: float = 1.0  # of the cluster's, for each
    gpus: float = 0.0
    folder: str | None = None  # of the run, which each must see


def rank_options(recipe: Recipe, source: ModelSource, folder: Path | None = None) -> RankOptions:
    """The ranks of a recipe, which load the model from `source`, of a run in `folder`."""
    runtime = recipe.runtime
    return RankOptions(
        RankTrainer(recipe, source),
        count=runtime.trainers,
        threads=rank_threads(recipe),
        cpus=runtime.trainer_cpus,
        gpus=gpus_of(runtime.trainer_gpus, recipe),
        folder=None if folder is None else str(folder.resolve()),
    )


class RankGroup:
    """One life of the ranks: a seat that is over when one of them is lost."""

    kv_given_back = 0  # engines are elsewhere, and have no memory that a rank could use

    def __init__(self, options: RankOptions, *, deadline_s: float) -> None:
        self.failure: StrettoError | None = None  # why it is over
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
        # Rank 0 writes what the driver reads: where there is room for it, it is on the same machine.
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
        """Wait until every rank has a process somewhere; what takes long is said, and at last an error."""
        self.check()
        ready = asyncio.ensure_future(
            self._answers("placing the ranks of the trainer", [actor.ready.remote() for actor in self._actors])
        )
        try:
            for wait_s in (WAITS_S, PLACE_S - WAITS_S):
                if (await asyncio.wait({ready}, timeout=wait_s))[0]:
                    await ready
                    return
                why = await asyncio.to_thread(why_not_begun, self._actors, self._asks())
                log.warning("the ranks of the trainer have not begun: %s", why)
            raise self._over(TrainerError(f"the ranks of the trainer have not begun after {PLACE_S:g} s: {why}"))
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
        """Have the ranks meet and make their trainers."""
        await self.place()
        if self._options.folder is not None:
            await self._all("looking for the run folder", "sees", self._options.folder)
        name, (host, port) = "starting the ranks of the trainer", ("", 0)
        if len(self._actors) > 1:
            host, port = (await self._answers(name, [self._actors[0].open.remote(self.deadline_s)]))[0]
        calls = [actor.start.remote(host, port, self.deadline_s) for actor in self._actors]
        started = await self._answers(name, calls)
        self.version, self.processes = started[0][0], tuple(process for _, process in started)

    async def update(self, batch: Batch) -> tuple[UpdateReport, Weights]:
        placed = await asyncio.to_thread(ray.put, batch)
        said, ref = await self._handed(f"update {batch.update}", "update", placed)
        report, facts = said
        self.version = batch.update + 1
        return report, _handle(facts, ref)

    async def weights(self, version: int) -> Weights:
        facts, ref = await self._handed(f"taking the weights of version {version}", "weights", version)
        return _handle(facts, ref)

    async def base_checksum(self) -> str | None:
        found: str | None = (await self._all("taking the checksum of the base", "base_checksum"))[0]
        return found

    async def save(self, folder: Path) -> None:
        await self.capture()
        await self.write(folder)

    async def capture(self) -> int:
        """Have the ranks copy their state; the version that it is of."""
        await self._all("copying the trainer's state", "capture")
        return self.version

    async def write(self, folder: Path) -> None:
        """Have rank 0 write what was captured, while the ranks go on."""
        self.check()
        folder = folder.resolve()
        call = self._actors[0].write.options(concurrency_group=WRITING).remote(str(folder))
        await self._answers("saving the trainer", [call])
        _seen(folder)

    def store(self, ref: Any, folder: Path) -> bool:
        """Have rank 0 write the file of a version; False where it is gone. Blocks, so not for the loop's thread."""
        if self.failure is not None:
            return False
        call = self._actors[0].store.options(concurrency_group=VERSIONS).remote(ref, str(folder.resolve()))
        try:
            ray.get(call, timeout=STORE_S)
        except RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, RayError):  # else what it was to write is lost
                raise cause if isinstance(cause, OSError) else OSError(f"{type(cause).__name__}: {cause}") from None
            log.warning("rank 0 has not written a version: %s", type(cause).__name__)
            return False
        except RayError as error:
            log.warning("rank 0 has not written a version: %s: %s", type(error).__name__, _line(error))
            return False
        return True

    async def load(self, folder: Path) -> None:
        self.version = (await self._all("loading the trainer", "load", str(folder.resolve())))[0]

    async def adopt(self, weights: Weights) -> None:
        handle: Any = weights  # of either kind
        name = f"adopting the weights of version {weights.version}"
        if isinstance(handle, WeightsHandle):
            ref = handle.ref
        else:
            ref = await asyncio.to_thread(lambda: ray.put(PackedWeights.pack(weights)))
        await self._all(name, "adopt", ref)

    async def export(self, folder: Path) -> None:
        folder = folder.resolve()
        await self._all("exporting the policy", "export", str(folder))
        _seen(folder)

    def close(self) -> None:
        self.end(TrainerLostError("the trainer is closed"))

    def end(self, why: StrettoError) -> None:
        """End every rank; what is asked for from now on raises `why`. Safe to call twice."""
        if self.failure is not None:
            return
        self.failure = why
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)

    async def _all(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank; what each returned."""
        self.check()
        return await self._answers(name, [getattr(actor, method).remote(*arguments) for actor in self._actors])

    async def _handed(self, name: str, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method that hands something over: what rank 0 says, and a reference to what stays where it is."""
        self.check()
        calls = [getattr(actor, method).options(num_returns=2).remote(*arguments) for actor in self._actors]
        said = await self._answers(name, [first for first, _ in calls])
        return said[0], calls[0][1]

    def check(self) -> None:
        """Raise why it is over, if it is."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    async def _answers(self, name: str, calls: list[Any]) -> list[Any]:
        """What the calls came to, by the table above. Cancelling it does not undo them."""
        tasks = [asyncio.ensure_future(_result(call)) for call in calls]
        try:
            _, late = await asyncio.wait(tasks, timeout=self.deadline_s, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(task.done() and task.exception() is not None for task in tasks)
            if late and failed:
                _, late = await asyncio.wait(tasks, timeout=min(GRACE_S, self.deadline_s))
            elif late:
                slow = ", ".join(str(rank) for rank, task in enumerate(tasks) if task in late)
                raise self._over(
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
        """The error of a call that raised at some rank; the group is over unless all ranks raised, and are there."""
        causes = {rank: _cause(error) for rank, error in enumerate(errors) if error is not None}
        gone = {rank: cause for rank, cause in causes.items() if isinstance(cause, RayError | TrainerLostError)}
        if gone:
            said = "; ".join(f"rank {rank}: {type(cause).__name__}: {_line(cause)}" for rank, cause in gone.items())
            return self._over(TrainerLostError(f"{name} failed, and the trainer with it: {said}"))
        # Where one rank fails, the others only say that it did.
        own = [cause for cause in causes.values() if not _line(cause).startswith("rank ")] or list(causes.values())
        error = own[0]
        if not isinstance(error, StrettoError | OSError):
            error = TrainerError(f"{name} failed: {type(error).__name__}: {_line(error)}")
        return self._over(error) if len(causes) < len(errors) else error

    def _over(self, why: Result) -> Result:
        self.end(why if isinstance(why, StrettoError) else TrainerError(str(why)))
        return why


def _handle(facts: Facts, ref: Any) -> Weights:
    """The weights as the loop knows them: by version, kind, checksum and scale alone."""
    return cast(Weights, WeightsHandle(facts.version, facts.kind, facts.checksum, facts.scale, ref))


def _seen(folder: Path) -> None:
    if not folder.exists():
        raise RunError(
            f"rank 0 of the trainer has written `{folder}`, and it is not here: with `runtime.trainers` on another "
            "machine, the run folder has to lie on a file system that all of them see; give it with `--out`"
        )


def _cause(error: BaseException) -> BaseException:
    """What was raised in the actor, where something was."""
    return error.cause if isinstance(error, RayTaskError) else error


def _line(error: BaseException) -> str:
    """The line that says what happened; of an actor that could not even be made, Ray says it last."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if "creation task" in lines[0] else lines[0]


async def _result(reference: Any) -> Any:
    return await reference
