"""Weights & Biases. Without a network, `observe.wandb.mode = "offline"` writes to `RUN/wandb` for `wandb sync`.

The numbers of updates are drawn over the number of the update, and those of evaluations over the version. A resumed run
has the same id, and continues the same run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import RecipeError
from stretto.observe.listeners import Outcome
from stretto.observe.options import WandbOptions
from stretto.observe.trackers.sample_rows import Row
from stretto.observe.trackers.tracker import TrackedRun, Tracker

INIT_S = 60.0  # a server that does not answer for this long at the start is given up
WITHOUT_SERVER = ("offline", "dryrun", "disabled")  # values of WANDB_MODE
STEPS = {"update": "update/number", "evaluation": "evaluation/version"}  # the axes, by kind of line


class WandbTracker(Tracker):
    """Sends to Weights & Biases."""

    _handle: Any = None  # wandb's run

    @property
    def _own(self) -> WandbOptions:
        return self._options.wandb or WandbOptions()

    @property
    def destination(self) -> str:
        if self._handle is not None:
            offline = f"`wandb sync {Path(self._handle.dir).parent}`"
            return offline if self._is_offline else str(self._handle.url or offline)
        return f"project `{self._own.project}`"

    @property
    def _is_offline(self) -> bool:
        return (self._own.mode or os.environ.get("WANDB_MODE")) in WITHOUT_SERVER

    def check(self) -> None:
        """Raises `RecipeError` if no key is to be found. Asks no server, which may be out of reach for now."""
        if not self._is_offline and not _has_key():
            raise RecipeError(
                '`observe.sinks` names "wandb", which has no key: log in with `wandb login`, set `WANDB_API_KEY`, or '
                'set `observe.wandb.mode = "offline"`'
            )

    def open(self, run: TrackedRun) -> dict[str, str]:
        import wandb

        own = self._own
        try:
            self._handle = wandb.init(
                project=own.project,
                entity=own.entity,
                group=own.group,
                name=own.name or run.name,
                tags=list(own.tags) or None,
                dir=str(run.folder.absolute()),
                config=dict(run.recipe),
                allow_val_change=True,  # a resumed run may have another recipe
                mode=own.mode,
                id=run.ids.get("id"),
                resume="allow",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    init_timeout=INIT_S,
                    finish_timeout=self._options.flush_seconds,
                ),
            )
        except wandb.errors.CommError as error:
            if not (isinstance(error, wandb.errors.AuthenticationError) or "error 401" in str(error)):
                raise
            raise ValueError(
                f"the server refused its key; log in again with `wandb login --relogin` ({error})"
            ) from error
        for kind, axis in STEPS.items():
            self._handle.define_metric(axis, hidden=True)
            self._handle.define_metric(f"{kind}/*", step_metric=axis)
        return {"id": self._handle.id}

    def log(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        self._handle.log({STEPS[kind]: step, **{f"{kind}/{name}": value for name, value in numbers.items()}})

    def table(self, update: int, rows: Sequence[Row]) -> None:
        import wandb

        made = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._handle.log({STEPS["update"]: update, "samples": made})

    def close(self, outcome: Outcome, summary: Mapping[str, Any]) -> None:
        for name in ("eval_before", "eval_after", "tokens_per_second", "wall_seconds"):
            if summary.get(name) is not None:
                self._handle.summary[name] = summary[name]
        self._handle.finish(exit_code=1 if outcome == "failed" else 0)


def _has_key() -> bool:
    """Tells if there may be a key where wandb looks for one: in the environment, or in the file of `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    asked = os.environ.get("NETRC")
    files = [Path(asked)] if asked else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return any(file.expanduser().is_file() for file in files)
