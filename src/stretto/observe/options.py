"""The options of `[observe]`: what a run records for people, the trackers that it reports to, and what they get.

Imports nothing heavy: a recipe is checked before any tracker is imported.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from stretto.environments.function_specs import is_spec
from stretto.options import Options

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "prometheus")  # each is an extra of the package

Name = Annotated[str, Field(min_length=1)]


class TensorboardOptions(Options):
    """Event files for `tensorboard --logdir`."""

    folder: Name | None = Field(None, description="Folder of the event files; default: `RUN/tensorboard`")


class WandbOptions(Options):
    """A run of Weights & Biases."""

    project: Name = Field("stretto", description="Project of the run")
    name: Name | None = Field(None, description="Name of the run; default: the name of the run folder")
    entity: Name | None = Field(None, description="User or team; default: your own")
    group: Name | None = Field(None, description="Group that the run belongs to")
    tags: tuple[Name, ...] = Field((), description="Tags of the run")
    mode: Literal["online", "offline"] | None = Field(
        None, description="`offline` writes to `RUN/wandb`; `wandb sync` uploads it later; default: as wandb decides"
    )


class TrackioOptions(Options):
    """A run of Trackio, on this machine or in a Space."""

    project: Name = Field("stretto", description="Project of the run")
    name: Name | None = Field(None, description="Name of the run; default: the name of the run folder")
    space: Name | None = Field(None, description="Space of the hub that shows the run; default: this machine")


class MlflowOptions(Options):
    """A run of MLflow."""

    uri: Name | None = Field(
        None,
        description="Tracking server, or a database such as `sqlite:///mlflow.db`; default: `MLFLOW_TRACKING_URI`, "
        "else as MLflow decides",
    )
    experiment: Name = Field("stretto", description="Experiment of the run")
    name: Name | None = Field(None, description="Name of the run; default: the name of the run folder")


class PrometheusOptions(Options):
    """Numbers of the last update over HTTP, for a Prometheus server to collect."""

    port: int = Field(9_464, ge=0, le=65_535, description="Port of `/metrics`; 0: any that is free")
    host: Name = Field("127.0.0.1", description="Address to listen on; the default is reached from this machine alone")


class ObserveOptions(Options):
    """Reports of a run to others. May change at `--resume`.

    A tracker that fails or hangs never ends or slows a run (`docs/trackers.md`).
    """

    sinks: tuple[Name, ...] = Field(
        (),
        description='Trackers: "tensorboard", "wandb", "trackio", "mlflow", "prometheus", or `package.module:Class`',
    )
    metrics: Literal["curated", "all"] = Field(
        "curated", description="`curated`: those that most people look at (`docs/trackers.md`). `all`: every number"
    )
    samples: int = Field(0, ge=0, le=1_000, description="Samples of each update that trackers get as a table")
    flush_seconds: float = Field(
        30.0, gt=0, le=3_600, description="Most that the end of a run waits for its trackers, together"
    )
    tokens: bool = Field(
        False,
        description="The journal keeps what the trainer computed for each token, for `stretto view`: 16 bytes a token "
        "that is trained on, as much again as the journal has for it without",
    )
    tensorboard: TensorboardOptions | None = Field(None, description="Options of this tracker")
    wandb: WandbOptions | None = Field(None, description="Options of this tracker")
    trackio: TrackioOptions | None = Field(None, description="Options of this tracker")
    mlflow: MlflowOptions | None = Field(None, description="Options of this tracker")
    prometheus: PrometheusOptions | None = Field(None, description="Options of this tracker")

    @field_validator("sinks")
    @classmethod
    def _refuse_unknown_sinks(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        for sink in sinks:
            if sink not in TRACKERS and not is_spec(sink):
                known = ", ".join(f'"{name}"' for name in TRACKERS)
                raise ValueError(
                    f'`observe.sinks = ["{sink}"]` must name {known}, or a class as `package.module:Class`'
                )
        if twice := sorted({sink for sink in sinks if sinks.count(sink) > 1}):
            raise ValueError(f'`observe.sinks` names "{twice[0]}" twice; name each once')
        return sinks
