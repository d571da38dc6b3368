"""A judge: asks a model behind an OpenAI-compatible address for a score. Runs in a reward worker (`reward_worker.py`).

    completion -> question -> cache -> budget -> POST /chat/completions -> score -> reward
                     ^                                                      |
                     +------------- asked again: no score in it <-----------+

| what goes wrong                                | what happens                                                        |
|------------------------------------------------|---------------------------------------------------------------------|
| no answer, HTTP 429 or 5xx                     | asked again, later each time, at once if the judge is back          |
| the same, while other calls are answered       | asked again `retries` times, then this completion fails             |
| the same, for all calls, for `outage_seconds`  | the run stops (`HaltError`); no completion fails                    |
| replies that are no chat completions, from a   | asked again; after `FOREIGN_REPLIES` to one question the run stops: |
| judge that has answered nothing so far         | the address is wrong                                                |
| the budget is used up                          | calls in flight are awaited, then the run stops                     |
| the key is refused, the model is unknown       | the run stops at once                                               |
| an answer without a score                      | asked again `clarifications` times, then this completion fails      |
| another HTTP 4xx, such as a question too long  | this completion fails                                               |

Two completions with the same question share one call. The key is in no text that leaves this module.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from stretto.environments.function_specs import SpecError
from stretto.environments.rewards.judge_answers import (
    Choices,
    Question,
    Scale,
    UnclearError,
    conversation_text,
    shown,
)
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.rewards.judge_record import FILE, Answer, JudgeRecord, exhausted, key_of
from stretto.environments.scoring_errors import HaltError, ScoringError
from stretto.options import shown_variable

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0
SHOWN_AFTER_S = 2.0  # of an outage
MAX_REPLY = 16 << 20  # bytes
TRIES_AT_START = 3
FOREIGN_REPLIES = 4  # to one question, in a row, that are no chat completions
CHECK_S = 10.0  # for the list of models, if a recipe is only checked
INSTALL = "`pip install 'stretto[judge]'`"
RESUME = "then continue with `--resume`; what was generated is scored then"

Message = Mapping[str, str]


class _FailedCall(Exception):  # noqa: N818 - it never leaves this module
    """A call that may succeed if it is made again. `wait_s`: the time that the judge asks for.

    `foreign`: there was a reply, and it is no chat completion.
    """

    def __init__(
        self, reason: str, wait_s: float | None = None, *, throttled: bool = False, foreign: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s
        self.throttled = throttled
        self.foreign = foreign


class Judge:
    """Scores completions, up to `concurrency` at once."""

    def __init__(
        self,
        options: JudgeOptions,
        *,
        folder: str | None = None,
        must_answer: bool = True,
        columns: Mapping[str, str | None] | None = None,
        note: Callable[[str], None] = lambda text: None,
        option: str = "task.judge",
    ) -> None:
        """Checks the question, and asks the judge which models it has. Raises `SpecError` if it cannot be used.

        `folder` is the run folder; None: nothing is kept. `must_answer = False`, for a check: prints a line if there is
        no answer. `columns` are those of the rows. `note` gets a sentence while
        scoring waits for the judge, and an empty one afterwards. `option` is the name of the table in messages.
        """
        self._options = options
        self._option = option
        self._note = note
        self._path = None if folder is None else Path(folder) / FILE
        self._must_answer = must_answer
        self._name = f"the judge `{options.model}` at {options.address}"
        self._key = _key(options, option)
        self._question = _question(options, option, columns)
        self._scores: Scale | Choices
        if options.scale is not None:
            self._scores = Scale(*options.scale, options.pattern)
        else:
            self._scores = Choices(options.choices or {}, options.pattern)
        self._record: JudgeRecord | None = None
        self._session: Any = None  # of aiohttp; made in the event loop that uses it
        self._slots: asyncio.Semaphore
        self._asked: dict[str, asyncio.Task[Answer]] = {}  # calls in progress, by their keys
        self._num_calling = 0
        self._call_ended: asyncio.Event
        self._num_answered = 0
        self._away_since: float | None = None  # when the first call failed after the last that was answered
        self._failing: set[str] = set()  # the keys of questions whose last call failed
        self._said_away = False
        self._back: asyncio.Event  # set when a call is answered after one that failed
        asyncio.run(self._look())

    async def __call__(
        self, prompt: str, completion: str, *, messages: Sequence[Mapping[str, Any]] | None = None, **row: Any
    ) -> float:
        """Returns the reward of a completion. `messages` are those of the prompt, if it has some.

        Raises `ScoringError` if it has none, and `HaltError` for the run.
        """
        if self._session is None:
            self._begin()
        if messages is not None:
            prompt = conversation_text(messages)
        question = self._question.fill({**row, "prompt": prompt, "completion": completion})
        asked: list[Message] = [{"role": "user", "content": question}]
        if self._options.system is not None:
            asked.insert(0, {"role": "system", "content": self._options.system})
        problems = []
        for _ in range(self._options.clarifications + 1):
            answer = await self._answer(asked)
            try:
                return self._scores.reward(answer.text)
            except UnclearError as error:
                cut = ", and was cut at `max_tokens`" if answer.finish == "length" else ""
                problems.append(f"{error}{cut}")
            reminder = f"This cannot be read: {problems[-1]}. Answer with {self._scores.wanted} and nothing else."
            asked = [
                *asked,
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": reminder},
            ]
        raise ScoringError(
            f"{self._name} gave no score in {len(problems)} answers ({'; '.join(dict.fromkeys(problems))}); the last "
            f"one: {shown(answer.text)}"
        )

    # -- one question --------------------------------------------------------------------------------------------------

    async def _answer(self, messages: list[Message]) -> Answer:
        """Returns the answer to a conversation: a kept one, one that is on its way, or a new one."""
        options = self._options
        body = {
            "model": options.model,
            "messages": messages,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            **options.body,
        }
        key = key_of(options.address, body)
        if (task := self._asked.get(key)) is None:
            if (kept := self._kept.find(key)) is not None:
                return kept
            task = asyncio.create_task(self._ask(key, body), name=f"judge {key}")
            self._asked[key] = task
            task.add_done_callback(lambda _: self._ended(key))
        return await asyncio.shield(task)  # others may wait for it too

    def _ended(self, key: str) -> None:
        """Forgets a question. If no other waits for the judge to be back, a later failure begins another outage."""
        self._asked.pop(key, None)
        self._failing.discard(key)
        if not self._failing:
            self._end_outage()

    async def _ask(self, key: str, body: Mapping[str, Any]) -> Answer:
        """Asks until there is an answer, and keeps it."""
        async with self._slots:
            failures, foreign, delay_s = 0, 0, FIRST_DELAY_S
            began = time.monotonic()
            while True:
                await self._within_budget()
                num_answered = self._num_answered
                self._num_calling += 1
                try:
                    answer = await self._post(body)
                    self._came_back()
                    self._keep(key, answer)
                    return answer
                except _FailedCall as error:
                    failed = error
                finally:
                    self._num_calling -= 1
                    self._call_ended.set()
                    self._call_ended.clear()
                others = self._num_answered > num_answered  # other calls were answered meanwhile
                failures += others and not failed.throttled
                if failures > self._options.retries:
                    raise ScoringError(f"{self._name} failed {failures} times: {self._safe(failed.reason)}")
                if others and time.monotonic() - began > self._options.outage_seconds:
                    raise ScoringError(
                        f"{self._name} did not answer this question within `{self._option}.outage_seconds = "
                        f"{self._options.outage_seconds:g}`: {self._safe(failed.reason)}"
                    )
                foreign = foreign + 1 if failed.foreign else 0
                if foreign >= FOREIGN_REPLIES and not self._num_answered:
                    raise HaltError(
                        f"{self._name} is no judge: {foreign} calls in a row got {self._safe(failed.reason)}. Correct "
                        f"`{self._option}.address`, which ends before `/chat/completions`; {RESUME}"
                    )
                self._failing.add(key)
                self._is_away(failed)
                await self._pause(failed, delay_s)
                delay_s = min(LONGEST_DELAY_S, 2 * delay_s)

    async def _pause(self, failed: _FailedCall, delay_s: float) -> None:
        """Waits before the next try: as long as the judge asks for, or until another call is answered."""
        if failed.wait_s is not None:
            await asyncio.sleep(failed.wait_s + random.uniform(0, 0.1))
            return
        delay_s *= random.uniform(0.5, 1.0)
        if failed.throttled:
            await asyncio.sleep(delay_s)
            return
        waiting = asyncio.ensure_future(self._back.wait())
        try:
            await asyncio.wait([waiting], timeout=delay_s)
        finally:
            waiting.cancel()

    async def _post(self, body: Mapping[str, Any]) -> Answer:
        """Makes one call. Raises `_FailedCall`, `ScoringError` or `HaltError`."""
        import aiohttp

        try:
            async with self._session.post(self._at("chat/completions"), json=body, allow_redirects=False) as reply:
                text = await _text(reply)
                if reply.status == 200:
                    return self._read(text)
                raise self._refused(reply.status, reply.reason or "", text, reply.headers)
        except TimeoutError:
            raise _FailedCall(f"no answer within `{self._option}.seconds = {self._options.seconds:g}`") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _FailedCall(f"{type(error).__name__}: {error}") from None

    def _read(self, text: str) -> Answer:
        """Returns the answer in a reply. Raises `_FailedCall` if the reply is none of a chat."""
        try:
            reply = json.loads(text)
            choice = reply["choices"][0]
            content = choice["message"].get("content") or ""
            usage = reply.get("usage") or {}
            asked, answered = (_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise _FailedCall(f"a reply that is not a chat completion: {shown(text)}", foreign=True) from None
        budget = self._options.budget
        if budget is not None and (budget.tokens or budget.dollars) and None in (asked, answered):
            raise HaltError(
                f"{self._name} does not say how many tokens its answers have, so `{self._option}.budget` cannot be "
                f"kept: limit `calls` instead, {RESUME}"
            )
        content = str(content).encode("utf-8", "replace").decode()  # JSON can write half of a character
        return Answer(content, asked, answered, choice.get("finish_reason"))

    def _refused(self, status: int, reason: str, text: str, headers: Mapping[str, str]) -> Exception:
        """Returns the error for a reply with another status than 200."""
        said = f"HTTP {status} {reason}: {self._safe(_message(text))}".strip(": ")
        if status in (401, 403):
            variable = self._options.api_key_env
            named = (
                f"name the variable that holds its key in `{self._option}.api_key_env`"
                if variable is None
                else f"the key in the variable `{variable}` (`{self._option}.api_key_env`) is not accepted; correct it"
            )
            return HaltError(f"{self._name} refused the call ({said}): {named}, {RESUME}")
        if status == 404 or 300 <= status < 400:
            return HaltError(
                f"{self._name} is not there ({said}): check `{self._option}.model` and `{self._option}.address`, which "
                f"ends before `/chat/completions`; {RESUME}"
            )
        if status == 402 or (status == 429 and "insufficient_quota" in text):
            return HaltError(f"{self._name} wants to be paid first ({said}); add credit, {RESUME}")
        if status in (408, 409, 425, 429) or status >= 500:
            wait_s = _retry_after(headers.get("Retry-After"))
            if wait_s is not None and wait_s > self._options.outage_seconds:
                return HaltError(
                    f"{self._name} asks to wait for {wait_s:g} s ({said}), longer than `{self._option}.outage_seconds "
                    f"= {self._options.outage_seconds:g}`: wait, {RESUME}"
                )
            return _FailedCall(said, wait_s, throttled=status == 429)
        return ScoringError(f"{self._name} refused the question ({said})")

    # -- away, and back ------------------------------------------------------------------------------------------------

    def _is_away(self, failed: _FailedCall) -> None:
        """Notes that a call failed. Raises `HaltError` if no call was answered for too long."""
        now, limit_s = time.monotonic(), self._options.outage_seconds
        if self._away_since is None:
            self._away_since = now
            self._back.clear()
        away_s = now - self._away_since
        reason = self._safe(failed.reason)
        if away_s >= limit_s:
            raise HaltError(
                f"{self._name} has answered no call for {away_s:.0f} s (`{self._option}.outage_seconds = "
                f"{limit_s:g}`): {reason}. No completion was scored without it. Wait until it is back, {RESUME}"
            )
        if away_s >= SHOWN_AFTER_S:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - away_s))
            text = (
                f"scoring waits for {self._name}, which has answered no call since {since} ({reason}); the run stops "
                f"after {limit_s:g} s of that (`{self._option}.outage_seconds`)"
            )
            self._note(text)
            if not self._said_away:
                self._said_away = True
                print(text, flush=True)

    def _came_back(self) -> None:
        """Notes that a call was answered."""
        self._num_answered += 1
        if self._away_since is None:
            return
        if self._said_away:
            print(f"{self._name} answers again, after {time.monotonic() - self._away_since:.0f} s", flush=True)
        self._end_outage()
        self._back.set()

    def _end_outage(self) -> None:
        if self._away_since is not None:
            self._away_since, self._said_away = None, False
            self._note("")

    # -- costs ---------------------------------------------------------------------------------------------------------

    async def _within_budget(self) -> None:
        """Raises `HaltError` if the budget is used up, once no call is in flight: their answers are paid for."""
        budget = self._options.budget
        if budget is None:
            return
        while True:
            used = exhausted(self._kept.spent, budget)
            if used is None and (budget.calls is None or self._kept.spent.calls + self._num_calling < budget.calls):
                return
            if used is not None and not self._num_calling:
                name = f"`{self._option}.budget.{used.removeprefix('`')}"
                raise HaltError(f"the budget of {self._name} is used up, {name}. Raise it, {RESUME}")
            await self._call_ended.wait()

    @property
    def _kept(self) -> JudgeRecord:
        assert self._record is not None
        return self._record

    def _keep(self, key: str, answer: Answer) -> None:
        try:
            self._kept.add(key, answer)
        except sqlite3.Error as error:
            raise HaltError(f"`{self._path}`, the record of the judge, cannot be written: {error}; {RESUME}") from None

    # -- the connection ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Opens record and connections, in the event loop that scores."""
        self._slots = asyncio.Semaphore(self._options.concurrency)
        self._call_ended, self._back = asyncio.Event(), asyncio.Event()
        try:
            name = f"{self._options.model} {self._options.address}"
            self._record = JudgeRecord(self._path, name, keeps_answers=self._options.cache)
        except sqlite3.Error as error:
            raise HaltError(f"`{self._path}`, the record of the judge, cannot be used: {error}; {RESUME}") from None
        self._session = self._connect()

    def _at(self, path: str) -> str:
        return f"{self._options.address.rstrip('/')}/{path}"

    def _connect(self) -> Any:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._key}"} if self._key is not None else {}
        return aiohttp.ClientSession(
            headers={**headers, "User-Agent": "stretto"},
            connector=aiohttp.TCPConnector(limit=self._options.concurrency, keepalive_timeout=60.0),
            timeout=aiohttp.ClientTimeout(total=self._options.seconds),
            trust_env=True,  # proxies that `task.pass_env` names
        )

    async def _look(self) -> None:
        """Asks for the list of models, which every server of this protocol should have.

        Raises `SpecError` if it refuses the key, or there is no server and it `must_answer`. A model that is not listed
        is only mentioned: some servers know more names than they list.
        """
        import_client()
        import aiohttp

        problem, limit_s = "", self._options.seconds if self._must_answer else min(CHECK_S, self._options.seconds)
        asked = {"allow_redirects": False, "timeout": aiohttp.ClientTimeout(total=limit_s)}
        for attempt in range(TRIES_AT_START if self._must_answer else 1):
            if attempt:
                await asyncio.sleep(FIRST_DELAY_S * 2**attempt)
            try:
                async with self._connect() as session, session.get(self._at("models"), **asked) as reply:
                    text = await _text(reply)
                    if reply.status in (401, 403):
                        raise SpecError(str(self._refused(reply.status, reply.reason or "", text, reply.headers)))
                    if reply.status < 500:
                        self._read_models(reply.status, text)
                        return
                    problem = f"HTTP {reply.status} {reply.reason}"
            except TimeoutError:
                problem = f"no answer within {limit_s:g} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        if not self._must_answer:
            print(
                f"{self._name} could not be asked for its models ({self._safe(problem)}): a run needs it, so start it "
                f"before, or correct `{self._option}.address`",
                flush=True,
            )
            return
        raise SpecError(
            f"{self._name} does not answer ({self._safe(problem)}): start it, or correct `{self._option}.address`"
        )

    def _read_models(self, status: int, text: str) -> None:
        """Prints a line if a list of models has no such name, or if the reply is no such list."""
        try:
            names = [str(each["id"]) for each in json.loads(text)["data"]] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            names = None
        if names is None:
            said = f"HTTP {status}" if status != 200 else self._safe(repr(text[:80]))
            print(
                f"the list of models could not be read at {self._at('models')} ({said}), so that nothing shows that "
                f"there is a judge: check `{self._option}.address`, which ends before `/chat/completions`",
                flush=True,
            )
        elif names and self._options.model not in names:
            near = difflib.get_close_matches(self._options.model, names, n=1, cutoff=0.0)
            print(
                f"{self._options.address} does not list `{self._option}.model = {self._options.model!r}` among its "
                f"{len(names)} models; the nearest is `{near[0]}`",
                flush=True,
            )

    def _safe(self, text: str) -> str:
        """Returns a text without the key, which a server may repeat."""
        text = text if self._key is None else text.replace(self._key, "***")
        return text if len(text) <= 500 else f"{text[:500]}..."


def import_client() -> None:
    """Imports the HTTP client. Raises `SpecError` with the command that installs it if it is missing."""
    try:
        import aiohttp  # noqa: F401
    except ModuleNotFoundError as error:
        raise SpecError(f"a judge needs the package aiohttp: {INSTALL}") from error


def _key(options: JudgeOptions, option: str) -> str | None:
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env, "").strip()
    if not key:
        raise SpecError(
            f"`{option}.api_key_env` names {shown_variable(options.api_key_env)}, which is not set or empty"
        )
    return key


def _question(options: JudgeOptions, option: str, columns: Mapping[str, str | None] | None) -> Question:
    name, template = f"`{option}.prompt`", options.prompt
    if options.prompt_path is not None:
        name = f"`{option}.prompt_path = {options.prompt_path!r}`"
        try:
            template = Path(options.prompt_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{name} cannot be read: {error}") from error
    question = Question(template or "")
    known = {each: lacking for each, lacking in (columns or {}).items() if each != "messages"}
    if columns is not None and (problem := question.problem(known)) is not None:
        raise SpecError(f"{name}: {problem}")
    return question


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


async def _text(reply: Any) -> str:
    """Returns the body of a reply, up to `MAX_REPLY` bytes of it."""
    parts, size = [], 0
    async for part in reply.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY:
            break
    return b"".join(parts).decode("utf-8", "replace")


def _message(text: str) -> str:
    """Returns the message in an error reply, or the reply itself."""
    try:
        found = json.loads(text)
        found = found.get("error", found) if isinstance(found, dict) else text
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except ValueError:
        return text.strip().partition("\n")[0]


def _retry_after(value: str | None) -> float | None:
    """Returns the seconds that a header `Retry-After` asks for: a number, or a date."""
    if value is None:
        return None
    if re.fullmatch(r"\s*\d{1,9}(\.\d*)?\s*", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
