"""Options of the tasks that have rows: where the rows are, and how they become prompts."""

from __future__ import annotations

from typing import Annotated, Any, Self, get_args

from pydantic import Field, field_validator, model_validator

from stretto.options import Options

Name = Annotated[str, Field(min_length=1)]


class DatasetOptions(Options):
    """A data set of the Hugging Face hub, or a folder with one. Needs the extra `datasets`."""

    name: str = Field(
        min_length=1,
        description="Name on the hub, such as `openai/gsm8k`, or a folder: one of `save_to_disk`, or one "
        "that `load_dataset` reads",
    )
    config: str | None = Field(
        None, min_length=1, description="Configuration of the data set, such as `main`; default: its only one"
    )
    split: str | None = Field(
        None, min_length=1, description='Split, or a part of one such as `train[:1000]`; default: `"train"`'
    )
    revision: str | None = Field(
        None, min_length=1, description="Commit, branch or tag on the hub; default: the newest, or the one in the cache"
    )


class ChatTemplateOptions(Options):
    """Options that turn messages of a task into text. The exported policy carries the template with all of it."""

    chat_template: str | None = Field(
        None,
        min_length=1,
        description="File with a Jinja template, the name of one of the tokenizer's templates, or a template itself; "
        "default: the tokenizer's own",
    )
    template: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template, such as `{ enable_thinking = false }`"
    )
    prefill: str | None = Field(
        None,
        min_length=1,
        description="Text that every answer begins with, such as `<think>`. It is part of the prompt, after the "
        "template's own opening of an answer",
    )


class RowsOptions(ChatTemplateOptions):
    """The rows of a task, and how they become prompts."""

    path: Name | tuple[Name, ...] | None = Field(
        None,
        description="File with a column `prompt` or `messages`: `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`; also "
        "a pattern such as `data/*.parquet`, or a list of both",
    )
    dataset: DatasetOptions | None = Field(None, description="Data set of the hub, instead of `path`")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description='Columns by our name and theirs, such as `{ prompt = "question" }`; the others keep their names',
    )
    evaluation_path: Name | tuple[Name, ...] | None = Field(
        None, description="Held-out prompts, named as in `path`; default: split from the rows"
    )
    evaluation_dataset: DatasetOptions | None = Field(
        None, description="Data set of held-out prompts, instead of `evaluation_path`"
    )
    system: str | None = Field(
        None, description="System message, not empty; every `prompt` becomes a user message after it"
    )

    @field_validator("columns")
    @classmethod
    def _refuse_reserved(cls, columns: dict[str, str]) -> dict[str, str]:
        if "completion" in columns:
            raise ValueError(
                "`task.columns.completion`: the name `completion` is reserved for what the model generates; choose "
                f"another one for `{columns['completion']}`, such as `task.columns = {{ answer = "
                f'"{columns["completion"]}" }}`'
            )
        return columns

    @field_validator("system")
    @classmethod
    def _refuse_empty(cls, system: str | None) -> str | None:
        if system is not None and not system.strip():
            raise ValueError(
                "it is empty: write the system message there, or leave it out; "
                '`task.columns = { messages = "prompt" }` makes every `prompt` a user message without one'
            )
        return system

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        for path, dataset in (("path", "dataset"), ("evaluation_path", "evaluation_dataset")):
            if getattr(self, path) is not None and getattr(self, dataset) is not None:
                raise ValueError(f"`task.{path}` and `task.{dataset}` are both given: rows come from one; remove one")
            if getattr(self, path) == ():
                raise ValueError(f"`task.{path}` is an empty list; name at least one file")
        if self.path is None and self.dataset is None:
            raise ValueError(
                "`task.path` is missing: name a file of rows there, or a data set of the hub with "
                '`task.dataset = { name = "openai/gsm8k" }`'
            )
        return self

    @property
    def other_too_long(self) -> tuple[str, ...]:
        """The choices for prompts that are too long, beside refusing them."""
        field = type(self).model_fields.get("too_long")
        return () if field is None else tuple(each for each in get_args(field.annotation) if each != "refuse")

    @property
    def rows_name(self) -> str:
        """The rows of the task in messages."""
        return _named(self.path, self.dataset) or ""

    @property
    def evaluation_name(self) -> str | None:
        """The rows to evaluate on in messages; None: they are split from the others."""
        return _named(self.evaluation_path, self.evaluation_dataset)


def _named(path: str | tuple[str, ...] | None, dataset: DatasetOptions | None) -> str | None:
    if dataset is not None:
        return f"`{dataset.name}`"
    if isinstance(path, tuple):
        return f"`{path[0]}`" + (f" and {len(path) - 1} more" if len(path) > 1 else "")
    return None if path is None else f"`{path}`"
