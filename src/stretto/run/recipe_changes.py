"""The changes of a recipe that a resumed run accepts, and the reasons why others are refused.

A change holds from the next update on: it begins a new phase of the run (`run/phases.py`). Everything is checked from
the files of the run before anything is built, and nothing is changed here. Imports nothing heavy, to refuse at once.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import RecipeError, RunError
from stretto.recipe.task_tables import table_at
from stretto.run.command_hint import command
from stretto.run.folder_checks import OUT, DrawnRows, facts_of, standing
from stretto.store.recipe_keys import flat_keys, of_one_task
from stretto.store.schema import JOURNAL_NAME, RESTORE, RunFacts
from stretto.store.traces import recorded_in

if TYPE_CHECKING:
    from stretto.recipe.schema import Recipe

# Keys that may change, or tables of them, with the effect of a change.
MAY_CHANGE: Mapping[str, str] = {
    "training.steps": "the run ends after so many updates; a falling schedule needs `training.schedule_end` stated",
    "training.learning_rate": "the rates of later updates",
    "training.warmup_steps": "the rates of later updates",
    "training.schedule": "the rates of later updates",
    "training.schedule_start": "the rates of later updates",
    "training.schedule_end": "the rates of later updates",
    "training.final_fraction": "the rates of later updates",
    "training.micro_tokens": "the size of micro-batches, which is recorded with each update",
    "training.mismatch_samples": "what later updates measure",
    "rollout.staleness": "the bound of groups that are admitted later; those in progress keep their deadlines",
    "rollout.staleness_cap": "as `rollout.staleness`",
    "rollout.in_flight": "how many groups are started",
    "rollout.rows": "how many trajectories run at once",
    "rollout.spread": "where the members of later groups start",
    "rollout.kv_tokens": "the memory of the engines",
    "rollout.prefill_tokens": "the steps of the engines",
    "evaluation.every": "which later versions are evaluated",
    "evaluation.prompts": "later evaluations, unless the held-out rows are split from `task.path`",
    "evaluation.temperature": "later evaluations",
    "evaluation.greedy": "later evaluations",
    "evaluation.max_tokens": "later evaluations",
    "task.evaluation_path": "later evaluations, if it was set before and is set now",
    "task.evaluation_dataset": "later evaluations, as `task.evaluation_path`",
    "task.dataset.revision": "where the data set is read from: its rows must be those that the run began with",
    "task.share": "the tasks of groups that are admitted later, which count from then on",
    "task.oversample": "the tasks of groups that are admitted later, which count from then on",
    "task.pass_env": "the processes of the task",
    "task.workers": "the processes of the task",
    "task.worker_gib": "the processes of the task",
    "task.worker_episodes": "the processes of the task",
    "training.keep_routing": "which records of routing are kept from then on",
    "task.reward_seconds": "the deadline of later rewards",
    "task.reward_workers": "the processes of the task",
    "task.judge.address": "where later completions are judged; name the same model",
    "task.judge.api_key_env": "the key of the judge",
    "task.judge.concurrency": "the calls of the judge",
    "task.judge.seconds": "the calls of the judge",
    "task.judge.retries": "the calls of the judge",
    "task.judge.outage_seconds": "how long scoring waits for the judge",
    "task.judge.clarifications": "the calls of the judge",
    "task.judge.budget": "what the judge may cost",
    "task.judge.cache": "whether later answers of the judge are kept",
    "task.reward_model.device": "where the reward model runs",
    "task.reward_model.batch_tokens": "the batches of the reward model",
    "task.reward_model.threads": "the process of the reward model",
    "task.reward_model.seconds": "the deadline of later rewards",
    "task.reward_model.load_seconds": "the deadline for loading the reward model",
    "task.episode_seconds": "the deadline of later episodes",
    "task.seconds": "the deadline of later episodes",
    "task.wait_seconds": "the time that the world of later turns takes",
    "engine.tensor_parallel": "the devices of an instance",
    "engine.gpu_memory": "the memory of the engines",
    "runtime": "the execution of the run",
    "serve": "where agents find the endpoint",
    "observe": "the reports of the run",
}
_SAMPLED = "trajectories in progress were sampled with it, and a batch is scored with one value"
_OPTIMIZER = "the state of the optimizer was made with it"
_COUNTED = "`verify` counts the trajectories of the whole run by it"
_TASK = "rewards before and after would not be those of one task"
_MODEL = "it is another policy"
# The others, with the reason why they cannot change.
FIXED: Mapping[str, str] = {
    "seed": "the order of the data and the seeds of all trajectories follow from it",
    "model.path": _MODEL,
    "model.lora": _MODEL,
    "model.adapter": _MODEL,
    "model.merge_adapter": _MODEL,
    "model.dtype": "the weights of all versions have one type",
    "model.warm_start": _MODEL,
    "task.type": _TASK,
    "task.label": "groups are recorded with it",
    "task.max_tokens": _SAMPLED,
    "task.stop": _SAMPLED,
    "task.order": "the rows that were drawn follow from it",
    "task.pass_reward": "the rows that were drawn follow from it",
    "task.sandbox": "code that passed within its limits may fail within others",
    "task.path": "the rows that were drawn are those of these files",
    "task.dataset": "the rows that were drawn are those of this data set",
    "task.columns": _TASK,
    "task.too_long": "the rows that were drawn are among those that it keeps",
    "task.chat_template": _TASK,
    "task.prefill": _TASK,
    "task.reward": _TASK,
    "task.rewards": "the members of a group may be scored before and after, and are compared by one sum of rewards",
    "task.judge": _TASK,
    "task.reward_model": _TASK,
    "task.environment": _TASK,
    "task.config": _TASK,
    "task.name": _TASK,
    "task.size": "the rows that were drawn are among so many",
    "task.scoring": _TASK,
    "task.instruction": _TASK,
    "task.system": _TASK,
    "task.template": _TASK,
    "task.turns": _TASK,
    "task.lineages": _TASK,
    "task.budget": _TASK,
    "task.command": _TASK,
    "task.function": _TASK,
    "task.timeout_reward": _TASK,
    "rollout.paradigm": "the laws of a run are those of one paradigm",
    "rollout.prompts": "deadlines are counted in batches of this size",
    "rollout.group": "the numbers of trajectories follow from it",
    "rollout.redundancy": "the numbers of trajectories follow from it",
    "rollout.max_tokens": _SAMPLED,
    "rollout.temperature": _SAMPLED,
    "rollout.top_p": _SAMPLED,
    "rollout.top_k": _SAMPLED,
    "rollout.min_p": _SAMPLED,
    "rollout.stop": _SAMPLED,
    "engine.type": "`verify` expects receipts of all trajectories, or of none",
    "rollout.retries": _COUNTED,
    "rollout.filter": _COUNTED,
    "rollout.filter_limit": _COUNTED,
    "algorithm": "a run optimizes one objective",
    "training.optimizer_steps": "a run optimizes one objective",
    "training.replay": _COUNTED,
    "training.weight_decay": _OPTIMIZER,
    "training.betas": _OPTIMIZER,
    "training.epsilon": _OPTIMIZER,
    "training.max_grad_norm": _OPTIMIZER,
    "training.checkpointing": "updates that are trained again would be rounded in another way",
    "training.routing": "trajectories in progress were sampled with or without records of their experts",
    "training.compile": "updates that are trained again would be rounded in another way",
}
# Keys of a machine, whose change makes no difference to what is trained: `compare` goes on with others too.
OF_THE_MACHINE = (
    "runtime",
    "serve",
    "rollout.spread",
    "rollout.prefill_tokens",
    "task.pass_env",
    "task.workers",
    "task.worker_gib",
    "task.worker_episodes",
    "training.micro_tokens",
)
# Keys whose `auto` a run replaces by its meaning on the machine where it begins, and keeps unless the recipe says else.
RESOLVED_KEYS = ("model.dtype", "training.micro_tokens", "rollout.prefill_tokens")
CHANGING_FACTS = ("staleness", "auto", "updates")  # of a run, from phase to phase


@dataclass(frozen=True, slots=True)
class Change:
    """A key with the value that it had, and the value that it has from now on; None: left out."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"`{self.key}` {_shown(self.before)} -> {_shown(self.now)}"


def accepted_changes(recipe: Recipe, folder: Path) -> list[Change]:
    """Returns what a resumed run changes. Raises `RunError` if the run in `folder` cannot go on with this recipe.

    The error has a line for each key that cannot change, with the reason.
    """
    recorded, before = recorded_in(folder), current_recipe(folder)
    changes = _changes(before, recipe)
    problems = list(_refused(before, recipe, folder, changes))
    if problems:
        raise RunError(
            "\n  ".join(
                [
                    f"the run in `{folder}` cannot go on with this recipe:",
                    *problems,
                    f"leave that as it was (`{folder / 'config.toml'}` is the recipe of the run), or start a new run; "
                    "nothing was changed",
                ]
            )
        )
    if recorded.begun:
        _refuse_too_few_updates(
            recipe, folder, recorded.finished, changed=any(c.key == "training.steps" for c in changes)
        )
        _refuse_another_journal(recipe, folder, f"`{folder / 'config.toml'}`")
    return changes


def refuse_another_recipe(recipe: Recipe, folder: Path, instead: str) -> None:
    """Raises `RunError` if the run in a folder has another recipe, but for keys of the machine.

    `instead` is what the error tells the user to do.
    """
    before = current_recipe(folder)
    if other := _other_tasks(before, recipe, folder):
        raise RunError("\n  ".join(["this is another recipe:", other, instead]))
    changes = _changes(before, recipe)
    changed = [each.key for each in changes if _row(of_one_task(each.key, recipe.task), OF_THE_MACHINE) is None]
    if changed:
        raise RunError("\n  ".join(["this is another recipe:", *_lines(recipe, before, folder, changed), instead]))
    _refuse_another_journal(recipe, folder, f"`{folder / 'config.toml'}`")


def reason_against(key: str) -> str | None:
    """Returns why a key cannot change in a run; None if it may. Raises `KeyError` for a key that no table has.

    A key of one of several tasks is given as that of one: `task.share`.
    """
    found = _row(key, (*MAY_CHANGE, *FIXED))
    if found is None:
        raise KeyError(key)
    return FIXED.get(found)


def _other_tasks(before: Recipe, now: Recipe, folder: Path) -> str:
    """Returns a line if tasks were added or removed; empty if not."""
    was, are = ([task.label for task in each.tasks] if isinstance(each.task, tuple) else None for each in (before, now))
    if was == are:
        return ""
    names = [
        "one `[task]`" if labels is None else "the tasks " + ", ".join(f"`{label}`" for label in labels)
        for labels in (are, was)
    ]
    return (
        f"it has {names[0]}, and the run in `{folder}` was started with {names[1]}: tasks are not added, removed "
        "or reordered, because rows and shares of a run are counted by the tasks that it began with"
    )


def _row(key: str, table: Sequence[str]) -> str | None:
    """Returns the entry of a table for a key: the key itself, or a table that it is in."""
    parts = key.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in table), None)


# -- the recipe of the run ---------------------------------------------------------------------------------------------


def current_recipe(folder: Path) -> Recipe:
    """Returns the recipe that a run has now: of the last phase in its journal, or of `config.toml` if it has none.

    Raises `RunError` if the two files are of different runs, or `config.toml` cannot be read.
    """
    from stretto.recipe.reading import parse_recipe

    path = folder / "config.toml"
    try:
        written = parse_recipe(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecipeError) as error:  # the second: of TOML and of UTF-8 too
        raise RunError(
            f"`{path}`, the recipe that the run was started with, cannot be read: {error}; put it back as it was, or "
            "start a new run"
        ) from error
    if not recorded_in(folder).begun:
        return written
    from stretto.run.phases import Phases

    _refuse_another_journal(written, folder, f"`{path}`")
    phases = Phases.recorded(folder)
    return written if phases is None else phases.parts[-1][1]


def _rows_of(facts: RunFacts) -> dict[str | None, DrawnRows]:
    """Returns the rows of each task of a run, by its label."""
    if not facts.tasks:
        return {None: DrawnRows(facts.data_rows, facts.dropped_rows, facts.prompt_limit)}
    return {label: DrawnRows(num, dropped, limit) for label, num, _, dropped, limit in facts.tasks}


def _refuse_another_journal(recipe: Recipe, folder: Path, name: str) -> None:
    """Raises `RunError` if the journal in a run's folder is not that of a recipe, which is called `name`."""
    if not recorded_in(folder).begun:
        return
    from stretto.store.reader import JournalReader

    with JournalReader(folder) as reader:
        found = reader.facts()
    wanted = facts_of(
        recipe,
        rows=_rows_of(found),
        templated=found.templated,
        vocabulary=found.vocabulary,
    )
    names = [
        each.name
        for each in fields(RunFacts)
        if each.name not in CHANGING_FACTS and getattr(found, each.name) != getattr(wanted, each.name)
    ]
    if names:
        lines = [f"`{each}` is {getattr(found, each)!r} in it, and {getattr(wanted, each)!r} here" for each in names]
        first = f"`{folder / JOURNAL_NAME}` is the journal of another run than {name}:"
        last = f"{RESTORE}, or start a new run with another {OUT}; nothing was changed"
        raise RunError("\n  ".join([first, *lines, last]))


def _changes(before: Recipe, now: Recipe) -> list[Change]:
    """Returns the keys whose values differ. What `auto` became is no difference.

    A number in the place of a recorded `auto` is one for a key that may change: the run of a cluster records `auto`.
    """
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    ignored = {
        key
        for key in (*RESOLVED_KEYS, "runtime.device")
        if new.get(key) == "auto" or (old.get(key) == "auto" and (key == "runtime.device" or reason_against(key)))
    }
    return [
        Change(key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if key not in ignored and old.get(key) != new.get(key)
    ]


_SCORERS = (("judge", "task.judge."), ("model", "task.reward_model."))  # a key of `task.rewards`, and its own table


def _scored_alike(before: Any, now: Any) -> bool:
    """Tells if rewards differ by nothing but what may change of a judge or a reward model, such as a budget."""

    def fixed(rewards: Any) -> Any:
        found = copy.deepcopy(rewards)
        for table in found:
            for key, prefix in _SCORERS:
                own = table.get(key) or {}
                for name in [name for name in own if f"{prefix}{name}" in MAY_CHANGE]:
                    del own[name]
        return found

    return bool(before) and bool(now) and fixed(before) == fixed(now)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refused(before: Recipe, now: Recipe, folder: Path, changes: Sequence[Change]) -> Iterator[str]:
    """Returns a sentence for each change that a run cannot make."""
    if other := _other_tasks(before, now, folder):
        yield other
        return

    values = {each.key: (each.before, each.now) for each in changes}

    def reason(key: str) -> str | None:
        row = of_one_task(key, now.task)
        if row == "task.rewards" and key in values and _scored_alike(*values[key]):
            return None
        return reason_against(row)

    fixed = [each.key for each in changes if reason(each.key) is not None]
    for key, line in zip(*_causes_and_lines(now, before, folder, fixed), strict=True):
        yield f"{line}: {reason(key) or 'other keys lose their effect by that'}"
    changed = {each.key for each in changes}
    held_out = [
        key
        for key in sorted(changed)
        if _is_held_out(key, now) and not (_holds_out(before, key) and _holds_out(now, key))
    ]
    if held_out:
        for line in _lines(now, before, folder, held_out[-1:]):
            yield f"{line}: held-out rows are split from those to train on, so other rows would be trained on"
    if "training.steps" in changed and now.training.schedule != "constant" and now.training.schedule_end is None:
        steps, (_, end) = now.training.steps, before.training.schedule_bounds
        yield (
            f"`training.steps` is {steps}, and the schedule `{now.training.schedule}` was to end at update {end}: "
            f"state its end too. `--set training.schedule_end={steps}` stretches it to the new end; with "
            f"`--set training.schedule_start=N` it falls from the peak at update N again; "
            f"`--set training.schedule_end={end}` stays at its final rate from update {end} on; "
            '`--set training.schedule="constant"` ends it'
        )


def _holds_out(recipe: Recipe, key: str) -> bool:
    """True if the rows to evaluate on, that a key is about, are not taken from those to train on."""
    from stretto.environments.data_options import RowsOptions

    tasks: Sequence[Any] = recipe.tasks
    if isinstance(recipe.task, tuple) and key.startswith("task."):
        tasks = [task for task in tasks if task.label == key.split(".")[1]]
    return all(not isinstance(task, RowsOptions) or task.evaluation_name is not None for task in tasks)


def _is_held_out(key: str, recipe: Recipe) -> bool:
    """Tells if a key says which rows are held out."""
    return key == "evaluation.prompts" or of_one_task(key, recipe.task).startswith("task.evaluation_")


def _refuse_too_few_updates(recipe: Recipe, folder: Path, done: int, *, changed: bool) -> None:
    """Raises `RunError` if a run has no update left, or if their number changed and groups are started for more."""
    steps = recipe.training.steps
    if standing(folder) == "finished" and steps <= done:
        raise RunError(
            f"the run in `{folder}` is finished with {done} updates, so there is nothing to resume: to extend it, give "
            f"more, such as `--set training.steps={2 * done}`; see `{command('show', folder)}`"
        )
    if not changed:
        return
    from stretto.store.reader import JournalReader

    with JournalReader(folder) as reader:
        least = reader.least_updates()
    if steps < least:
        begun = f" and has started groups for update {least - 1}" if least > done else ""
        raise RunError(
            f"`training.steps = {steps}` is too few: the run in `{folder}` has done {done} updates{begun}; use at "
            f"least {least}; nothing was changed"
        )


def _lines(recipe: Recipe, before: Recipe, folder: Path, changed: Sequence[str]) -> list[str]:
    """Returns what is another, a line for each key that differs by itself."""
    return _causes_and_lines(recipe, before, folder, changed)[1]


def _causes_and_lines(
    recipe: Recipe, before: Recipe, folder: Path, changed: Sequence[str]
) -> tuple[list[str], list[str]]:
    was, now = _flat(tomllib.loads(before.dumps())), _flat(tomllib.loads(recipe.dumps()))
    causes = _causes(recipe, was, changed) if changed else []
    return causes, [
        f"`{key}` is {repr(now[key]) if key in now else 'left out'}, and the run in `{folder}` was started "
        + (f"with {was[key]!r}" if key in was else "without it")
        for key in causes
    ]


def _causes(recipe: Recipe, before: Mapping[str, Any], changed: Sequence[str]) -> list[str]:
    """Returns the keys that differ by themselves, without those that follow from others, such as a default."""
    from stretto.recipe.reading import ineffective_in, parse_recipe

    written = tomllib.loads(recipe.source_toml())
    by_hand = _flat(written)
    own = [key for key in changed if key in by_hand]
    as_before = _with(written, {key: before.get(key) for key in own})
    try:
        undone = _flat(tomllib.loads(parse_recipe(as_before).dumps()))
    except RecipeError:  # without the others it is not a recipe: then all of them are named
        return list(changed)

    def follows(key: str) -> bool:
        if undone.get(key) == before.get(key):
            return True
        return key in before and tuple(key.split(".")) in ineffective_in(_with(written, {key: before[key]}))

    return [key for key in changed if key in own or not follows(key)] or list(changed)


def _with(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested tables with other values; None removes a key."""
    result = copy.deepcopy(dict(values))
    for key, value in changes.items():
        *path, last = key.split(".")
        table: Any = result
        if isinstance(result.get("task"), list) and path[:1] == ["task"]:
            table, path = table_at(result, path[:2]), path[2:]
        for part in path:
            table = table.setdefault(part, {})
        table.pop(last, None)
        if value is not None:
            table[last] = value
    return result


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested tables as one, with dotted keys. A key without a value is left out."""
    return {key: value for key, value in flat_keys(values) if value is not None}


def _shown(value: Any) -> str:
    return "left out" if value is None else f"{value:g}" if isinstance(value, float) else f"{value}"
