"""The environment of `[task] type = "agent"`: an episode is one run of a program that calls the policy over HTTP.

    episode -> a session, whose key the program gets -> the program -> its calls -> its end -> the reward

The program knows nothing of Stretto. It finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` (or `ANTHROPIC_BASE_URL` and
`ANTHROPIC_API_KEY`) in its environment, and its task on standard input. Every call of it is a turn of the episode.

A program that fails is a failed episode, not a reward of 0: a broken installation is no property of the policy. Only
the exit status as the reward says otherwise. If the trajectory moves to another instance, the program is killed and run
again there. It gets the answers that it had, as long as it asks for the same. The first call that differs is a new one,
and what was recorded from there on is discarded.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from stretto.chat.rendering import encodable
from stretto.environments.function_specs import SpecError, is_spec, last_line, resolve
from stretto.environments.reward_environment import named_variables, worker_environment
from stretto.environments.reward_pool import RewardPool
from stretto.environments.sandbox import missing
from stretto.environments.sandbox_processes import held_parts, sandbox_folder, sandboxed
from stretto.environments.task_options import AgentOptions, EndpointOptions
from stretto.errors import LateRewardError, RecipeError, RewardError
from stretto.serve.conversations import MakeConversations, chat_conversations
from stretto.serve.http import Endpoint, Model
from stretto.serve.programs import ProgramResult, run_program
from stretto.serve.sessions import Policy, Session, Sessions, as_trained
from stretto.types import Prompt

log = logging.getLogger(__name__)

MODEL = "policy"
GRACE_S = 10.0  # for a program to end by itself after it has given its reward
ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # hosts that stand for all, and where one is reached from here
FORWARDED_PORT = 8_000  # of the endpoint inside of a sandbox, whose network is its own
TRACEBACK = "Traceback (most recent call last)"  # of Python
PROMPT_COLUMNS = ("prompt", "messages")  # of a task: for the program, not for the reward function


class EpisodePolicy(Policy, Protocol):
    """The policy of an episode (`environments/protocol.py`)."""

    @property
    def left(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """The address and the key with which an agent calls the policy."""

    base_url: str  # for clients of OpenAI; ends in `/v1`
    api_key: str
    model: str  # any other name does too
    session_url: str  # `POST {session_url}/reward` gives the reward

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables in which clients look for them."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "STRETTO_MODEL": self.model,
            "STRETTO_SESSION_URL": self.session_url,
        }


class AgentEnvironment:
    """Plays episodes by running an agent. `close` ends the endpoint."""

    deterministic = False  # an agent that is run again may ask for something else

    def __init__(
        self,
        tokenizer: Any,
        options: AgentOptions,
        conversations: MakeConversations | None = None,
        endpoint: EndpointOptions | None = None,
    ) -> None:
        """`conversations` makes those of one session; None: the chat template does. `endpoint` says where it listens.

        Raises `RecipeError` if the agent or its reward cannot be used.
        """
        self._options = options
        self._listen = endpoint or EndpointOptions()
        self._tokenizer = tokenizer
        self._conversations = conversations or chat_conversations(tokenizer)
        self._command = _checked_command(options)
        self._function = _resolved(options)
        self._variables = named_variables(options.pass_env)
        self._rewards: RewardPool | None = None
        self._sessions = Sessions(vocabulary=len(tokenizer))
        self._endpoint: Endpoint | None = None
        self._socket: Path | None = None  # that the endpoint listens on, for agents in a sandbox
        self._starting = asyncio.Lock()
        self._warned = False  # that a program failed by an exception

    async def start(self) -> Endpoint:
        """Starts the endpoint and the processes of the reward function, if that is not done yet."""
        async with self._starting:
            if self._endpoint is None:
                spec = self._options.reward
                if spec is not None and is_spec(spec):
                    self._rewards = RewardPool(
                        spec,
                        workers=self._options.reward_workers,
                        deadline_s=self._options.reward_seconds,
                        extra_environment=self._variables,
                    )
                    await self._rewards.start()
                if self._options.sandbox is not None:
                    await asyncio.to_thread(_check_sandbox, self._options)
                    self._socket = Path(tempfile.mkdtemp(prefix="stretto-endpoint-")) / "socket"
                model = Model(MODEL, lambda token: str(self._tokenizer.decode([token])))
                endpoint = Endpoint(
                    self._sessions, model, host=self._listen.host, port=self._listen.port, socket=self._socket
                )
                await endpoint.start()
                self._endpoint = endpoint
            return self._endpoint

    async def episode(self, prompt: Prompt, policy: EpisodePolicy) -> float:
        """Runs the agent once, and returns its reward."""
        endpoint = await self.start()
        session = self._sessions.open(
            as_trained(policy),
            self._conversations(prompt.tokens),
            deadline_s=self._options.seconds,
            max_tokens=len(prompt.tokens) + policy.left,
        )
        url = self._url(endpoint)
        access = ModelAccess(f"{url}/v1", session.key, MODEL, f"{url}/sessions/{session.id}")
        try:
            reward = await self._run(prompt, session, access)
            await self._sessions.close(session)
        except asyncio.CancelledError:
            session.cancel()
            raise
        finally:
            await self._sessions.close(session)
        if session.failure is not None:  # of a call that outlived the program
            raise session.failure
        return reward if isinstance(reward, float) else await self._scored(prompt, reward)

    def _url(self, endpoint: Endpoint) -> str:
        """Returns the address that an agent gets."""
        if self._socket is not None:
            return f"http://127.0.0.1:{FORWARDED_PORT}"
        if self._listen.url is not None:
            return self._listen.url.rstrip("/").removesuffix("/v1")
        loopback = ALL_ADDRESSES.get(self._listen.host)
        return endpoint.url if loopback is None else f"http://{loopback}:{endpoint.port}"

    async def close(self) -> None:
        """Ends the sessions, the endpoint and the processes of the reward function."""
        if self._endpoint is not None:
            await self._endpoint.close()
            self._endpoint = None
        if self._socket is not None:
            await asyncio.to_thread(shutil.rmtree, self._socket.parent, ignore_errors=True)
            self._socket = None
        if self._rewards is not None:
            await self._rewards.close()
            self._rewards = None

    # -- one run of the agent ------------------------------------------------------------------------------------------

    async def _run(self, prompt: Prompt, session: Session, access: ModelAccess) -> float | str:
        """Runs the agent to its end, or to that of its session. Returns the reward, or a text that is to be scored."""
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="stretto-agent-"))
        try:
            run = self._program(prompt, access, folder) if self._command is not None else self._call(prompt, access)
            running = asyncio.create_task(run, name=f"agent of session {session.id}")
            try:
                either: list[asyncio.Future[Any]] = [running, session.ended]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if session.reward is not None:
                    await asyncio.wait([running], timeout=GRACE_S)
            finally:
                running.cancel()
                await asyncio.wait([running])
            return self._outcome(session, running, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _outcome(self, session: Session, running: asyncio.Task[ProgramResult | object], folder: Path) -> float | str:
        """Returns the reward of a run that is over, or a text to be scored. Raises an error if there is none."""
        options = self._options
        if session.failure is not None:
            raise session.failure
        if session.reward is not None:
            return session.reward
        if session.ended.done() and session.ended.result() == "deadline":
            if options.timeout_reward is not None and session.num_answered:
                return options.timeout_reward
            raise LateRewardError(f"the agent did not end within `task.seconds = {options.seconds:g}`")
        result = running.result()
        ended, words = "the agent ended", ""
        if isinstance(result, ProgramResult):
            ended, words = f"the agent ended with status {result.status}", result.last_words
        if session.last_refusal is not None:
            words = f"; its last call that was refused: {session.last_refusal}{words}"
        if not session.num_answered:
            never = "has no answer of the model" if session.num_calls else "never called the model"
            raise RewardError(f"{ended} and {never}{words}")
        if options.reward == "posted":
            raise RewardError(f"{ended} and has not posted its reward to `$STRETTO_SESSION_URL/reward`{words}")
        if not isinstance(result, ProgramResult):
            return _returned(result, self._rewards is not None)
        if options.reward == "file":
            return _read_reward(folder / "reward", f"{ended}", words)
        if options.reward is None or options.reward == "exit-status":
            if result.status != 0 and TRACEBACK in result.errors and not self._warned:
                self._warned = True
                log.warning("%s, which is a reward of 0 (further ones are not shown)%s", ended, words)
            return float(result.status == 0)
        if result.status != 0:
            raise RewardError(f"{ended}{words}")
        return result.output

    async def _scored(self, prompt: Prompt, text: str) -> float:
        assert self._rewards is not None
        row = {name: value for name, value in prompt.row.items() if name not in PROMPT_COLUMNS}
        reward = await self._rewards.score(prompt.text, text, row)
        assert isinstance(reward, float), "it is one function"
        return reward

    async def _program(self, prompt: Prompt, access: ModelAccess, folder: Path) -> ProgramResult:
        assert self._command is not None
        task = encodable(json.dumps(dict(prompt.row), ensure_ascii=False, default=str)) + "\n"
        await asyncio.to_thread((folder / "task.json").write_text, task, encoding="utf-8")
        files = {"STRETTO_TASK_FILE": str(folder / "task.json"), "STRETTO_REWARD_FILE": str(folder / "reward")}
        variables = {**self._variables, **files, **access.variables}
        if self._options.sandbox is None:
            return await run_program(self._command, environment=worker_environment(variables), input_text=task)
        with sandbox_folder() as own:
            begin = sandboxed(
                own,
                self._options.sandbox.limits,
                forward=(FORWARDED_PORT, str(self._socket)),
                kept=[str(folder), str(self._socket)],
                working_folder=os.getcwd(),
            )
            environment = worker_environment(variables, own)
            return await run_program((*begin, *self._command), environment=environment, input_text=task)

    async def _call(self, prompt: Prompt, access: ModelAccess) -> object:
        function = self._function
        assert function is not None
        try:
            if inspect.iscoroutinefunction(function):
                return await function(dict(prompt.row), access)
            return await _in_thread(lambda: function(dict(prompt.row), access))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # `sys.exit` too, which would end the run
            raise RewardError(f"`{self._options.function}` raised `{last_line(error, function)}`") from error


def _check_sandbox(options: AgentOptions) -> None:
    """Raises `RecipeError` if agents cannot run in the sandbox of the options on this machine."""
    assert options.sandbox is not None
    held = held_parts(options.sandbox.limits)
    if "processes" not in held:
        raise RecipeError(
            "`task.sandbox` of an agent needs namespaces, and this machine does not let your user make them: its "
            "network would be that of the machine. Leave it out, or run on a machine that does"
        )
    if options.sandbox.strict and (gaps := missing(held)):
        raise RecipeError(f"`task.sandbox.strict = true`, and on this machine the sandbox has gaps: {'; '.join(gaps)}")


def _checked_command(options: AgentOptions) -> tuple[str, ...] | None:
    """Returns the command; `python` is the one that runs this. Raises `RecipeError` if it cannot be found."""
    if options.command is None:
        return None
    name, *arguments = options.command
    if name == "python":
        name = sys.executable
    if shutil.which(name) is None:
        raise RecipeError(
            f"`task.command` begins with `{name}`, which is no program: it is neither in `PATH` nor, as a path, in the "
            f"working directory {os.getcwd()}"
        )
    script = arguments[0] if arguments else ""
    if name == sys.executable and script.endswith(".py") and not Path(script).is_file():
        raise RecipeError(f"`task.command` names `{script}`, and there is no such file in {os.getcwd()}")
    return (name, *arguments)


def _resolved(options: AgentOptions) -> Callable[..., Any] | None:
    if options.function is None:
        return None
    if not is_spec(options.function):
        raise RecipeError(f"`task.function = {options.function!r}` is no function: write `package.module:function`")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return resolve(options.function)
    except SpecError as error:
        raise RecipeError(f"`task.function = {options.function!r}`: {error}") from error


def _returned(value: object, scored: bool) -> float | str:
    """Returns the reward that a function returned, or the text that is to be `scored`. Raises `RewardError`."""
    if scored:
        if isinstance(value, str):
            return value
        raise RewardError(f"the agent returned {value!r:.80}: `task.reward` scores a text, so return one")
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise RewardError(f"the agent returned {value!r:.80}: return its reward, a number, or set `task.reward`")


def _read_reward(path: Path, ended: str, words: str) -> float:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(100).strip()
    except OSError as error:
        raise RewardError(f"{ended} and wrote no reward to the file `$STRETTO_REWARD_FILE`{words}") from error
    try:
        return float(text)
    except ValueError as error:
        raise RewardError(f"the agent wrote {text!r} to `$STRETTO_REWARD_FILE`: write a number") from error


async def _in_thread(work: Callable[[], object]) -> object:
    """Runs a function in a thread of its own. A caller that is cancelled leaves it behind: its key does not work any
    more, so its next call fails."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[object] = loop.create_future()

    def deliver(value: object, error: BaseException | None) -> None:
        if not result.done():
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

    def run() -> None:
        value: object = None
        failed: Exception | None = None
        try:
            value = work()
        except StopIteration as error:  # which no future takes
            failed = RuntimeError(last_line(error))
        except Exception as error:
            failed = error
        except BaseException as error:  # `sys.exit`, which is for the program and not for this thread
            failed = RuntimeError(last_line(error))
        try:
            loop.call_soon_threadsafe(deliver, value, failed)
        except RuntimeError:  # the loop has ended meanwhile
            return

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await result
