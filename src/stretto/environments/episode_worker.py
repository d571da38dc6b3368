"""The process that plays episodes for `EpisodePool`: many at once, on one event loop.

- A second thread reads the messages of the pool. When the pool's process ends, for whatever reason, this one ends too.
- The event loop writes the time into memory that it shares with the pool, and with it the memory that this process
  takes and the calls of tools that hang in it. Before each step of an episode it writes the number of that episode. So
  the pool knows that the loop is blocked, and by which episode; and which episode has killed the process.
- An episode sees a `WorkerPolicy`, which passes on what it asks for, and holds it to the rules of `protocol.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import pickle
import resource
import struct
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, BinaryIO

from stretto.environments.custom import EnvironmentSpec, close_environment, load_environment, start_environment
from stretto.environments.episode_faults import asked_after_end, asked_early, contained, given_up, in_own_task
from stretto.environments.episode_pipes import (
    MAX_LINEAGE,
    MAX_TOKENS,
    Answer,
    Ask,
    Cancel,
    Close,
    Ended,
    Failed,
    FromWorker,
    Play,
    Refuse,
    Reported,
    Spent,
    ToWorker,
    common_length,
    frame_of,
)
from stretto.environments.function_specs import last_line
from stretto.environments.protocol import Environment, Outcome, token_ids, trainable
from stretto.environments.reward_pipes import greeting_frame
from stretto.environments.spending import Spending
from stretto.environments.worker_child import SandboxArguments, end, end_copy, marked, open_pipes, read_frame, send
from stretto.errors import RecipeError, RewardError, StrettoError
from stretto.types import Completion, Prompt

# When the event loop was last alive, the episode whose step it runs, bytes of memory, calls of tools that hang.
MARK = struct.Struct("<dqQQ")
_STEP = struct.Struct("<q")
NOTHING = -1
CLOSE_S = 5.0  # for `close` of the environment


class WorkerPolicy:
    """The policy of one episode in this process. It keeps the context of each lineage, as the pool does."""

    def __init__(self, prompt: Prompt, left: int, spending: Spending, say: Callable[[FromWorker], None], id: int):
        self.left = left
        self.fault: RewardError | None = None  # why the episode fails, whatever its environment does about it
        self.over = False
        self._id = id
        self._prompt = array("i", prompt.tokens)
        self._known: dict[int, array[int]] = {}
        self._spending = spending
        self._say = say
        self._answer: asyncio.Future[Completion] | None = None
        self._owner = os.getpid()

    @property
    def turn_in_progress(self) -> bool:
        return self._answer is not None

    @property
    def budget_left(self) -> float:
        return self._spending.left

    def spend(self, amount: float, what: str = "") -> None:
        said = self._spending.check(amount, what)
        self._say(Spent(self._id, said, what))  # also if it is refused: the driver records that
        self._spending.spend(said, what)

    def report(self, reward: float | Outcome) -> None:
        self._say(Reported(self._id, sendable(reward)))

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        end_copy(self._owner)
        context = _token_array(tokens)
        if self.over:
            raise asked_after_end()
        if self._answer is not None:
            self.fault = asked_early()
        if self.fault is not None:
            raise self.fault
        known = self._known.get(lineage, self._prompt)
        kept = common_length(known, context)
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._say(Ask(self._id, _lineage_number(lineage), bool(train), kept, context[kept:]))
            completion = await self._answer
        except asyncio.CancelledError:
            if not self.over:
                self.fault = self.fault or given_up()
            raise
        finally:
            self._answer = None
        context.extend(completion.tokens.tolist())
        self._known[lineage] = context
        return completion

    def answer(self, completion: Completion, left: int) -> None:
        """Ends the turn that was asked for. If nobody awaits it any more, nothing happens."""
        self.left = left
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(completion)

    def refuse(self, error: Exception) -> None:
        """Raises an error from the turn that was asked for."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _token_array(tokens: Sequence[int]) -> array[int]:
    """Returns a context as numbers of four bytes. Raises `RewardError` if it is not all token ids, or does not fit."""
    if len(tokens) > MAX_TOKENS:
        raise RewardError(
            f"the environment asked for a turn with a context of {len(tokens):,} tokens; more than {MAX_TOKENS:,} "
            "cannot be sent"
        )
    try:
        return array("i", list(tokens) if isinstance(tokens, bytes | bytearray) else tokens)
    except OverflowError as error:
        raise RewardError(f"the environment asked for a turn with a number that is no token id: {error}") from error
    except TypeError:
        return array("i", token_ids(tokens))


def _lineage_number(lineage: int) -> int:
    try:
        number = index(lineage)
    except TypeError as error:
        raise RewardError(f"the environment asked for a turn in lineage {lineage!r}, which is no number") from error
    if not -MAX_LINEAGE <= number <= MAX_LINEAGE:
        raise RewardError(f"the environment asked for a turn in lineage {number}, and there is none")
    return number


def sendable(reward: object) -> float | Outcome:
    """Returns a reward as numbers. Raises `RewardError` for anything that cannot be trained on."""
    return Outcome(tuple(map(trainable, reward.turns))) if isinstance(reward, Outcome) else trainable(reward)


class Worker:
    """Plays the episodes that the pool asks for. For the thread of the event loop, except for `receive`."""

    def __init__(self, spec: EnvironmentSpec, environment: Environment, answers: BinaryIO, marks: mmap.mmap) -> None:
        self._name = spec.name
        self._environment = environment
        self._answers = answers
        self._marks = marks
        self._owner = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._policies: dict[int, WorkerPolicy] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._frames: list[bytes] = []
        self._flushing = False
        self._thread = threading.get_ident()
        self._closing: asyncio.Task[None] | None = None

    def receive(self, requests: BinaryIO) -> None:
        """Runs in the second thread: hands the messages of the pool to the event loop."""
        try:
            while True:
                self._loop.call_soon_threadsafe(self._handle, read_frame(requests))
        except BaseException:  # for example a row that cannot be unpickled; without this thread the worker would hang
            traceback.print_exc()
            end()

    def beat(self, every_s: float) -> None:
        """Writes the time and the state of this process for the pool, now and every `every_s`."""
        MARK.pack_into(self._marks, 0, time.monotonic(), self._step, memory_bytes(), _num_hanging_calls())
        self._loop.call_later(every_s, self.beat, every_s)

    @property
    def _step(self) -> int:
        return int(_STEP.unpack_from(self._marks, 8)[0])

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Play(episode, prompt, left, budget):
                policy = WorkerPolicy(prompt, left, Spending(budget), self._say, episode)
                self._policies[episode] = policy
                self._tasks[episode] = self._loop.create_task(
                    self._play(episode, prompt, policy), name="worker episode"
                )
            case Answer(episode, completion, left):
                if episode in self._policies:
                    self._policies[episode].answer(completion, left)
            case Refuse(episode, error):
                if episode in self._policies:
                    self._policies[episode].refuse(error)
            case Cancel(episode):
                if episode in self._tasks:
                    self._policies[episode].over = True
                    self._tasks[episode].cancel()
            case Close():
                self._closing = self._loop.create_task(self._close(), name="close")

    async def _play(self, id: int, prompt: Prompt, policy: WorkerPolicy) -> None:
        """Plays one episode, whose end is the last message about it."""
        message: FromWorker
        try:
            reward = await contained(in_own_task(self._stepped(id, prompt, policy)))
            if policy.turn_in_progress:
                policy.fault = policy.fault or given_up()
            message = Ended(id, sendable(reward)) if policy.fault is None else Failed(id, str(policy.fault))
        except asyncio.CancelledError:
            message = Failed(id, "its episode was cancelled")
        except Exception as error:
            cause = policy.fault or error
            ours = isinstance(cause, StrettoError)
            message = Failed(id, str(cause) if ours else f"`{self._name}` raised {last_line(cause)}")
        policy.over = True
        del self._policies[id], self._tasks[id]
        self._say(message)

    async def _stepped(self, id: int, prompt: Prompt, policy: WorkerPolicy) -> float | Outcome:
        def enter() -> None:
            _STEP.pack_into(self._marks, 8, id)

        def leave(error: BaseException | None) -> None:
            end_copy(self._owner, error)
            _STEP.pack_into(self._marks, 8, NOTHING)

        reward: float | Outcome = await marked(self._environment.episode(prompt, policy), enter, leave)
        return reward

    def _say(self, message: FromWorker) -> None:
        """Sends a message, in one write with all others of this turn of the event loop."""
        self._frames.append(frame_of(message))
        if not self._flushing:  # after the append, so that no message of another thread is left behind
            self._flushing = True
            here = threading.get_ident() == self._thread
            (self._loop.call_soon if here else self._loop.call_soon_threadsafe)(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        frames, self._frames = self._frames, []
        send(self._answers, b"".join(frames))

    async def _close(self) -> None:
        """Ends the environment and this process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await close_environment(self._environment)
        sys.stdout.flush()
        sys.stderr.flush()
        end()


def memory_bytes() -> int:
    """Returns the bytes of memory that this process takes; the most that it took where the kernel hides that."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _num_hanging_calls() -> int:
    """Returns the number of calls of tools that hang, each in a thread of its own."""
    tools = sys.modules.get("stretto.chat.tools")  # imported if the environment has tools
    return 0 if tools is None else int(tools.num_abandoned())


async def _serve(
    spec: EnvironmentSpec,
    environment: Environment,
    requests: BinaryIO,
    answers: BinaryIO,
    marks: mmap.mmap,
    beat_s: float,
) -> None:
    owner = os.getpid()
    try:
        await start_environment(environment)
        end_copy(owner)
    except Exception as error:
        end_copy(owner, error)
        cause = str(error) if isinstance(error, StrettoError) else last_line(error)
        send(answers, greeting_frame(f"`task.environment = {spec.name!r}` could not be started: {cause}", False))
        return
    worker = Worker(spec, environment, answers, marks)
    worker.beat(beat_s)
    send(answers, greeting_frame(None, hasattr(environment, "close")))
    threading.Thread(target=worker.receive, args=(requests,), name="receive", daemon=True).start()
    await asyncio.Event().wait()  # the receiving thread ends the process


def main(mark_fd: int, sandbox: SandboxArguments | None = None) -> None:
    """Serves until the pool is gone, or says that it is to end.

    `sandbox` is that of `worker_child.py`. The first request is (specification of the environment, pickled tokenizer,
    seconds between two signs of life). The reply is the greeting (`reward_pipes.py`), whose flag says that the
    environment wants to be closed.
    """
    requests, answers, refusal = open_pipes(sandbox)
    marks = mmap.mmap(mark_fd, MARK.size)
    owner = os.getpid()
    spec, tokenizer, beat_s = read_frame(requests)
    try:
        if refusal is not None:
            raise RecipeError(refusal)
        environment = load_environment(spec, _unpickled(tokenizer))
        end_copy(owner)
    except RecipeError as error:
        end_copy(owner, error)
        send(answers, greeting_frame(str(error), False))
        sys.exit(0)
    asyncio.run(_serve(spec, environment, os.fdopen(requests.fileno(), "rb", closefd=False), answers, marks, beat_s))


def _unpickled(tokenizer: bytes) -> Any:
    try:
        return pickle.loads(tokenizer)
    except Exception as error:
        raise RecipeError(f"the tokenizer cannot be loaded in a worker process: {last_line(error)}") from error


FIRST_MARK = MARK.pack(math.inf, NOTHING, 0, 0)  # infinite: it does not live yet
