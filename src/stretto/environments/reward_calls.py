"""The rewards of a task, and how each of them is called.

A *reward spec* (`RewardSpec`) names a function, or a class or factory that makes one with options, in the process that
calls it. A `RewardCall` is such a function, ready to be called. There are two forms, told apart by the names of the
parameters, or by the option `batched`:

    single     reward(prompt, completion, **columns) -> number or None
    batched    rewards(prompts, completions, **columns) -> a list of them; every column is a list

Either may be `async`. A batched function is called as TRL's `GRPOTrainer` calls its `reward_funcs`: by keywords, and
for a row with `messages`, its prompt is these messages and its completion is a list of one assistant message. A
parameter gets what it is named after:

    prompt, completion, prompts, completions     the texts, or in a batch as above
    a column of the rows                         its value, or in a batch the list of its values; None in rows without
    messages                                     the messages of the prompt
    completion_message                           the completion as a message: thinking and tool calls apart
    completion_ids                               the tokens of the completion
    trainer_state                                batched only: `global_step` is the version that sampled the batch
    log_extra, log_metric                        batched only: functions that record nothing, and say so

`**columns` gets the prompt, the completion and the columns, nothing else. A column wins over a name of this list.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

import difflib
import inspect
import math
import reprlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from stretto.environments.built_scorers import BuiltScorer
from stretto.environments.function_specs import SpecError, defined_at, is_spec, last_line, resolve
from stretto.environments.reward_range import BEYOND, is_trainable
from stretto.environments.scoring_errors import HaltError, ScoringError, error_text

Reward = Callable[..., Any]
Columns = Mapping[str, str | None]  # each column of a task's rows -> a row that lacks it; None: all rows have it
Messages = Sequence[Mapping[str, Any]]

MESSAGES = "messages"  # the column of a row, and the parameter
NOT_FINITE = "; a reward is a finite number"
NONE_ALONE = (
    f"{NOT_FINITE}; None says that one of several rewards (`[[task.rewards]]`) does not apply, and this is the only one"
)
ABSENT = math.nan  # the value of a reward that returned None: it does not apply to this completion
ONE_AT_A_TIME = "one at a time"
DEFAULT_BATCH = 512  # completions of one call

SINGLE_NAMES = frozenset(("prompt", "completion"))
BATCH_NAMES = frozenset(("prompts", "completions"))
DETAILS = frozenset((MESSAGES, "completion_message", "completion_ids"))
SEES_COMPLETION = DETAILS - {MESSAGES}
OF_TRAINER = frozenset(("trainer_state", "log_extra", "log_metric"))


WANTS_MESSAGES, WANTS_TOKENS, WANTS_VERSION = 1, 2, 4  # bits of what a reward needs


class Details(NamedTuple):
    """The facts about a completion beside its text."""

    messages: Messages | None = None  # of the prompt; None: it has none
    tokens: bytes = b""  # of the completion, int32
    version: int = 0  # that sampled it
    prefill: str = ""  # that the answer to the messages begins with: the prompt has it, and the messages do not

    def only(self, wants: int) -> Details | None:
        """Returns what is wanted of it; None: nothing."""
        messages = self.messages if wants & WANTS_MESSAGES else None
        if messages is None and not wants & (WANTS_TOKENS | WANTS_VERSION):
            return None
        return Details(
            messages,
            self.tokens if wants & WANTS_TOKENS else b"",
            self.version if wants & WANTS_VERSION else 0,
            "" if messages is None else self.prefill,
        )


NO_DETAILS = Details()
Asked = tuple[str, str, Mapping[str, Any], Details | None]  # prompt, completion, row, details


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward of a task. Portable: any process makes the function from it."""

    name: str  # of the component; empty: it is the only reward of its task, and is not recorded apart
    target: str  # `package.module:function`
    weight: float = 1.0
    # None: the target is the function (or a class without arguments). Else the target is called with these once in
    # each process, and what it returns is the function.
    options: Mapping[str, Any] | None = None
    batched: bool | None = None  # None: told by the names of its parameters
    batch_size: int | None = None  # most completions of one call; None: `DEFAULT_BATCH`
    built: BuiltScorer | None = None  # the target is made from these; such a reward has a process to itself

    @property
    def shown(self) -> str:
        """The reward in error messages."""
        if self.built is not None:
            return f"`{self.built.option}`"
        return f"`{self.target}`" if not self.name or self.target.endswith(f":{self.name}") else f"`{self.name}`"

    def without_secrets(self) -> RewardSpec:
        """Returns the spec as it is sent to a worker, whose environment has its variables already."""
        return self if self.built is None else replace(self, built=replace(self.built, environment={}))

    def make(self, columns: Columns | None = None, note: Callable[[str], None] | None = None) -> Reward:
        """Imports the function, or makes it. Raises `SpecError`.

        A built scorer gets the `columns` of the rows, and `note`, which it tells what it waits for.
        """
        made = resolve(self.target)
        if self.built is not None:
            return self._build(made, self.built, columns, note or (lambda text: None))
        if self.options is None and not inspect.isclass(made):
            return made
        options = dict(self.options or {})
        try:
            function: Any = made(**options)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's code may raise anything
            given = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in options.items())
            raise SpecError(f"`{self.target.partition(':')[2]}({given})` failed: {last_line(error)}") from error
        if not callable(function):
            raise SpecError(f"`{self.target}` made {reprlib.repr(function)}, which cannot be called; return a function")
        found: Reward = function
        return found

    @staticmethod
    def _build(make: Reward, built: BuiltScorer, columns: Columns | None, note: Callable[[str], None]) -> Reward:
        try:
            made: Reward = make(**built.arguments, columns=columns, note=note, option=built.option)
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(last_line(error)) from error
        return made


def as_specs(rewards: str | Sequence[RewardSpec]) -> tuple[RewardSpec, ...]:
    """Returns the specs of a task; a text is that of its only reward."""
    return (RewardSpec("", rewards),) if isinstance(rewards, str) else tuple(rewards)


def refuse_specs(specs: Sequence[RewardSpec]) -> None:
    """Raises `SpecError` if a task cannot have these rewards: it names the option and says what to do."""
    if not specs:
        raise SpecError("`task.rewards` is empty: add a table `[[task.rewards]]`, or set `task.reward`")
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            raise SpecError(f"`task.rewards` has {count} rewards with the name `{name}`: give each a `name` of its own")
    if not all(math.isfinite(spec.weight) for spec in specs):
        wrong = next(spec for spec in specs if not math.isfinite(spec.weight))
        raise SpecError(f"the reward `{wrong.name}` has `weight = {wrong.weight}`: a weight is a finite number")


def refuse_weightless(specs: Sequence[RewardSpec]) -> None:
    """Raises `SpecError` if no reward of a task counts. Some may not: they are only recorded."""
    if not any(spec.weight for spec in specs):
        raise SpecError("every reward has `weight = 0`, so all trajectories would get 0: give one another weight")


def refuse_targets(specs: Sequence[RewardSpec]) -> None:
    """Raises `SpecError` if a reward is not named as a function that can be imported."""
    for spec in specs:
        if not is_spec(spec.target):
            key = f"`function = {spec.target!r}` of the reward `{spec.name}`"
            key = key if spec.name else f"`task.reward = {spec.target!r}`"
            raise SpecError(f"{key} is not a function: write it as `package.module:function`")


def late_text(specs: Sequence[RewardSpec], deadline_s: float) -> str:
    """Returns the error of a reward that does not return in time; of several, if it is unknown which."""
    shown = [spec.shown for spec in specs]
    if any(spec.built is not None for spec in specs):
        return f"{shown[0]} did not score a completion within {deadline_s:g} s"
    who = shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"
    return f"{who} did not return within `task.reward_seconds = {deadline_s:g}`"


def is_async(reward: Reward) -> bool:
    """Tells if calling it returns a coroutine. Works for `functools.partial` and callable objects too."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


class RefusedError(Exception):
    """A returned value that is no reward. The text says what was returned."""


# -- parameters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function, as far as they can be given by name."""

    signature: inspect.Signature | None  # None: of a builtin, which has none
    names: frozenset[str] = frozenset()
    takes_all: bool = True  # it has `**columns`
    defaults: frozenset[str] = field(default_factory=frozenset)  # names that have one

    @classmethod
    def of(cls, reward: Reward) -> Parameters:
        """Reads the parameters of a function."""
        try:
            signature = inspect.signature(reward)
        except (TypeError, ValueError):  # a builtin without a signature
            return cls(None)
        every = list(signature.parameters.values())
        named = [each for each in every if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        return cls(
            signature,
            frozenset(each.name for each in named),
            any(each.kind is each.VAR_KEYWORD for each in every),
            frozenset(each.name for each in named if each.default is not each.empty),
        )

    def takes(self, name: str) -> bool:
        """Tells if an argument of this name can be given."""
        return self.takes_all or name in self.names


def _is_batched(spec: RewardSpec, parameters: Parameters) -> bool:
    """Tells if a function is called with batches. Raises `SpecError` if its parameters say both."""
    if spec.batched is not None:
        return spec.batched
    one, many = parameters.names & SINGLE_NAMES, parameters.names & BATCH_NAMES
    if one and many:
        both = " and ".join(f"`{name}`" for name in sorted(one | many))
        raise SpecError(
            f"it has parameters of both forms, {both}: name them `prompts` and `completions` for batches or `prompt` "
            "and `completion` for one completion at a time, or say `batched = true` or `false` in `[[task.rewards]]`"
        )
    return bool(many) or (not one and "completion_ids" in parameters.names)


# -- one reward --------------------------------------------------------------------------------------------------------


class RewardCall:
    """Calls one reward function, and turns what it returns into numbers."""

    def __init__(self, spec: RewardSpec, function: Reward, columns: Columns | None = None) -> None:
        """`columns` are those of the task's rows, if they are known. Raises `SpecError` if it cannot be called."""
        self.spec = spec
        self.function = function
        self.asynchronous = is_async(function)
        self._parameters = parameters = Parameters.of(function)
        self.batched = _is_batched(spec, parameters)
        if spec.batch_size is not None and not self.batched:
            raise SpecError(
                f"`batch_size = {spec.batch_size}` has no effect: it is called with one completion at a time, by the "
                "names of its parameters; leave it out, or set `batched = true`"
            )
        self.batch_size = spec.batch_size or DEFAULT_BATCH
        own = BATCH_NAMES if self.batched else SINGLE_NAMES
        # By name, if the function uses a name of its form. Else by position, whatever they are called.
        seen = own & parameters.names - {"prompt", "prompts"} | parameters.names & SEES_COMPLETION
        named = bool(parameters.names & own) and (parameters.takes_all or bool(seen))
        self._by_name = named or (self.batched and (parameters.takes_all or "completion_ids" in parameters.names))
        self._own = frozenset(name for name in own if parameters.takes(name)) if self._by_name else frozenset()
        known = frozenset() if columns is None else frozenset(columns) - {MESSAGES}
        extras = DETAILS | OF_TRAINER if self.batched else DETAILS
        self._extras = (parameters.names & extras) - known - {
            name for name in ("log_extra", "log_metric") if name in parameters.defaults
        }  # fmt: skip
        self._known = None if columns is None else known
        self._said = self._said_size = False
        self._refuse_positional()
        if columns is not None:
            self._refuse_signature(columns)

    @property
    def wants(self) -> int:
        """The details of a completion that it needs, as bits."""
        messages = self.batched or MESSAGES in self._extras
        tokens, version = "completion_ids" in self._extras, "trainer_state" in self._extras
        return WANTS_MESSAGES * messages | WANTS_TOKENS * tokens | WANTS_VERSION * version

    @property
    def form(self) -> str:
        """The form in words, for people who check a recipe."""
        how = f"in batches of up to {self.batch_size}" if self.batched else ONE_AT_A_TIME
        return f"{how}, async" if self.asynchronous else how

    def call(self, asked: Asked) -> Any:
        """Calls a function of the single form and returns what it returns."""
        prompt, completion, row, details = asked
        if self.spec.built is not None and details is not None and details.messages is not None:
            completion = details.prefill + completion  # a judge sees the messages, which do not end with the prefill
        names = self._parameters.names
        given = dict(row) if self._parameters.takes_all else {name: row[name] for name in row if name in names}
        if self._extras:
            for name in self._extras:
                if name not in row:
                    self._add_detail(given, name, asked)
        if not self._by_name:
            return self.function(prompt, completion, **given)
        if "prompt" in self._own:
            given["prompt"] = prompt
        if "completion" in self._own:
            given["completion"] = completion
        return self.function(**given)

    def _add_detail(self, given: dict[str, Any], name: str, asked: Asked) -> None:
        """Adds what a parameter of the single form is named after; nothing if the row has no messages."""
        details = asked[3] or NO_DETAILS
        if name == MESSAGES:
            if details.messages is not None:
                given[name] = [dict(message) for message in details.messages]
        else:
            given[name] = _detail(name, asked)

    def call_batch(self, asked: Sequence[Asked]) -> Any:
        """Calls a function of the batched form and returns what it returns. All completions are of one version."""
        parameters = self._parameters
        columns = self._known
        if columns is None:
            columns = frozenset(name for _, _, row, _ in asked for name in row)
        given: dict[str, Any] = {}
        for name in columns:
            if parameters.takes(name):
                given[name] = [row.get(name) for _, _, row, _ in asked]
        for name in self._extras:
            if name not in given:
                given[name] = self._of_batch(name, asked)
        prompts: list[Any] = []
        completions: list[Any] = []
        for prompt, completion, _, details in asked:
            messages = None if details is None else details.messages
            if messages is None:
                prompts.append(prompt)
                completions.append(completion)
            else:
                prompts.append([dict(message) for message in messages])
                completions.append([{"role": "assistant", "content": completion}])
        if not self._by_name:
            return self.function(prompts, completions, **given)
        if "prompts" in self._own:
            given["prompts"] = prompts
        if "completions" in self._own:
            given["completions"] = completions
        return self.function(**given)

    def _of_batch(self, name: str, asked: Sequence[Asked]) -> Any:
        if name == "trainer_state":
            return TrainerState((asked[0][3] or NO_DETAILS).version)
        if name in OF_TRAINER:
            return self._not_logged
        if name == MESSAGES:
            return [None if (of := each[3]) is None else of.messages for each in asked]
        return [_detail(name, each) for each in asked]

    def _not_logged(self, name: str, *_: object) -> None:
        """Takes the place of TRL's `log_extra` and `log_metric`."""
        if not self._said:
            self._said = True
            print(
                f"{self.spec.shown} logs {name!r}, which is not recorded: make it a reward of its own, with "
                "`weight = 0` if it is to be recorded and not to count"
            )

    def chunks(self, asked: Sequence[Any], details: Callable[[Any], Details | None]) -> Iterator[list[Any]]:
        """Divides completions into batches. `details` returns those of a completion."""
        by_version: dict[int, list[Any]] = {}
        if "trainer_state" in self._extras:
            for each in asked:
                by_version.setdefault((details(each) or NO_DETAILS).version, []).append(each)
        else:
            by_version[0] = list(asked)
        size = self.batch_size
        for some in by_version.values():
            yield from (some[start : start + size] for start in range(0, len(some), size))

    # -- what it returned ----------------------------------------------------------------------------------------------

    def number(self, value: Any) -> float:
        """Returns a reward as a number, `ABSENT` for None. Raises `RefusedError` for anything else."""
        if type(value) is float and is_trainable(value):
            return value
        if value is None and self.spec.name:
            return ABSENT
        if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
            if inspect.iscoroutine(value):
                value.close()
            raise self._refused(value, NONE_ALONE if value is None else NOT_FINITE)
        number = float(value)
        if is_trainable(number):
            return number
        raise self._refused(value, f", {BEYOND}" if math.isfinite(number) else NOT_FINITE)

    def values(self, returned: Any, count: int) -> list[Any]:
        """Returns what a batched function returned for each completion. Raises `RefusedError` if it is no such list."""
        wanted = f"; a batched reward returns a list with one number for each of the {count} completions of its batch"
        if isinstance(returned, str | bytes | Mapping | AbstractSet) or not hasattr(returned, "__iter__"):
            if inspect.iscoroutine(returned):
                returned.close()
            self._warn_of_size(reprlib.repr(returned), count)
            raise self._refused(returned, wanted)
        found = list(returned)
        if len(found) != count:
            self._warn_of_size(f"{len(found)} values", count)
            raise RefusedError(f"{self.spec.shown} returned {len(found)} values{wanted}")
        return found

    def _warn_of_size(self, returned: str, count: int) -> None:
        """Prints once that a batch is scored again because of what was returned for it."""
        if count > 1 and not self._said_size:
            self._said_size = True
            print(
                f"{self.spec.shown} returned {returned} for a batch of {count} completions, so that these are scored "
                f"again one at a time: {count + 1} calls instead of one, for every such batch; return a list with one "
                "number for each completion",
                flush=True,
            )

    def failure(self, error: BaseException, asked: Sequence[Asked] = ()) -> str:
        """Returns the text of an error that the function raised, or of a value that was refused.

        `asked` are the completions that it was called with; their form may be the cause.
        """
        if isinstance(error, ScoringError | HaltError):
            return error_text(error)
        if isinstance(error, RefusedError):
            return str(error)
        hint = self._hint_of_column(error) or (self._hint_of_form(error, asked[0]) if asked else "")
        return f"{self.spec.shown} raised {last_line(error)}{hint}"

    def _hint_of_column(self, error: BaseException) -> str:
        """Returns what to do about a `KeyError` for a name that is no column; nothing for another error."""
        name = error.args[0] if isinstance(error, KeyError) and error.args else None
        if self._known is None or not isinstance(name, str) or name in self._known or not self._parameters.takes_all:
            return ""
        return f"; if `{name}` should be a column: {_columns_text(self._known)}{_rename_hint([name], self._known)}"

    def _hint_of_form(self, error: BaseException, asked: Asked) -> str:
        """Returns the likely cause of an error that comes from texts in the place of messages, or the reverse."""
        text = str(error)
        if not isinstance(error, TypeError | AttributeError | IndexError):
            return ""
        if self.batched and asked[3] is not None and asked[3].messages is not None:
            if not any(word in text for word in ("'list'", "'dict'", "list indices must be integers")):
                return ""
            return (
                "; the likely cause: the row has `messages`, so its prompt is a list of messages and its completion a "
                'list of one assistant message, as in TRL: read `completion[0]["content"]`, or give rows with a '
                "`prompt` that is a text"
            )
        indexed = "string indices must be integers" in text or "string index out of range" in text
        if not self.batched:
            if not indexed:
                return ""
            return (
                "; the likely cause: a reward that is called with one completion at a time gets it as a text, and no "
                "messages; the parameter `completion_message` gets it as a message"
            )
        if not indexed and "'str' object has no attribute" not in text:
            return ""
        return (
            "; the likely cause: the row has a `prompt` that is a text, so prompt and completion are texts, and no "
            'messages: give rows with `messages`, for example with `task.columns = { messages = "prompt" }`'
        )

    def _refused(self, value: Any, why: str = NOT_FINITE) -> RefusedError:
        return RefusedError(f"{self.spec.shown} returned {reprlib.repr(value)} ({type(value).__name__}){why}")

    # -- its signature -------------------------------------------------------------------------------------------------

    def _refuse_positional(self) -> None:
        """Raises `SpecError` if a parameter can only be given by position, and is not the one that comes there."""
        signature = self._parameters.signature
        every = () if signature is None else signature.parameters.values()
        only = [each.name for each in every if each.kind is each.POSITIONAL_ONLY]
        in_order = ("prompts", "completions") if self.batched else ("prompt", "completion")
        if tuple(only) != in_order[: len(only)]:
            raise SpecError(
                f"`def {self.spec.target.partition(':')[2]}{signature}`{defined_at(self.function)} has parameters that "
                "cannot be given by their names, because they stand before `/`; remove the `/`, so that each gets what "
                "it is named after"
            )

    def _refuse_signature(self, columns: Columns) -> None:
        """Raises `SpecError` if the function cannot be called with rows of these columns."""
        parameters = self._parameters
        if parameters.signature is None:
            return
        taken = sorted((SINGLE_NAMES | BATCH_NAMES) & self._own & set(columns))
        if taken:
            raise SpecError(f"the rows have a column `{taken[0]}`, which the call itself uses; rename the column")
        first, second = ("prompts", "completions") if self.batched else ("prompt", "completion")
        names = [name for name in columns if name != MESSAGES and parameters.takes(name)]
        names += sorted(name for name in self._extras if name != MESSAGES or name in columns)
        positional = () if self._by_name else (first, second)
        own = [name for name in (first, second) if name in self._own]
        name = self.spec.target.partition(":")[2]
        written = f"def {name}{parameters.signature}"
        where = defined_at(self.function)
        try:
            parameters.signature.bind(*positional, **dict.fromkeys([*own, *names]))
        except TypeError as error:
            called = ", ".join([*positional, *own, *(f"{each}=..." for each in names)])
            said = _columns_text(columns)
            if MESSAGES in self._extras and MESSAGES not in columns:
                said += ", and their prompts are texts without `messages`"
            plain = name if name.isidentifier() else "reward"  # a lambda has no name
            hint = "" if self.batched else f" or, for batches, `def {plain}(prompts, completions, **columns)`"
            missing = _missing(parameters.signature, positional, [*own, *names])
            renames = _rename_hint([each for each in missing if each not in self._extras], columns)
            said += f"{renames}; or write" if renames else "; write"
            raise SpecError(
                f"`{written}`{where} cannot be called as `{name}({called})`: {error}; {said} "
                f"`def {plain}({first}, {second}, **{'columns' if self.batched else 'row'})`{hint}"
            ) from error
        if self.batched:
            return
        for column in names:
            if (lacking := columns.get(column)) is not None:
                try:
                    rest = [each for each in (*own, *names) if each != column]
                    parameters.signature.bind(*positional, **dict.fromkeys(rest))
                except TypeError as error:
                    raise SpecError(
                        f"`{written}`{where} takes the column `{column}`, which {lacking} does not "
                        "have; add it to that row, or give the parameter a default"
                    ) from error


def _missing(signature: inspect.Signature, positional: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the parameters without a default that a call does not give."""
    try:
        given = signature.bind_partial(*positional, **dict.fromkeys(names)).arguments
    except TypeError:
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        each.name
        for each in signature.parameters.values()
        if each.kind in named and each.default is each.empty and each.name not in given
    ]


def _columns_text(columns: Iterable[str]) -> str:
    """Returns the columns that a reward can ask for, in words."""
    have = [f"`{each}`" for each in sorted(columns) if each != MESSAGES]
    if not have:
        return "rows have no other columns"
    return f"rows have the column{'s' * (len(have) > 1)} {', '.join(have)}"


def _rename_hint(missing: Sequence[str], columns: Iterable[str]) -> str:
    """Returns how a column gets the name that a function asks for; nothing if there is none to rename."""
    have = sorted(set(columns) - {MESSAGES})
    if not missing or not have:
        return ""
    near = {name: difflib.get_close_matches(name, have, n=1, cutoff=0.0)[0] for name in missing}
    table = ", ".join(f'{name} = "{theirs}"' for name, theirs in near.items())
    return f"; if a column has that under another name, rename it, such as `task.columns = {{ {table} }}`"


class TrainerState(SimpleNamespace):
    """The part of TRL's `trainer_state` that is known where rewards are computed."""

    def __init__(self, global_step: int) -> None:
        super().__init__(global_step=global_step)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`trainer_state.{name}` is not known to a reward; `trainer_state.global_step` is")


def _detail(name: str, asked: Asked) -> Any:
    """Returns the tokens of a completion, or the completion as a message."""
    prompt, completion, row, details = asked
    if name == "completion_ids":
        tokens = array("i")
        tokens.frombytes((details or NO_DETAILS).tokens)
        return tokens.tolist()
    from stretto.chat.answers import read_answer  # not of the standard library, so only where it is needed

    return read_answer(prompt, completion, has_tools=bool(row.get("tools")))
