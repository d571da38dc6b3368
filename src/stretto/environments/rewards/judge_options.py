"""The options of a judge: a model behind an OpenAI-compatible address that scores completions. `judge.py` asks it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from stretto.options import VARIABLE, Options, formed


class JudgeBudgetOptions(Options):
    """The most that a judge may cost in a run, its evaluations and all of its sessions included.

    When one of these is used up, the run stops at the next update boundary. Raise it and resume. Answers from the cache
    cost nothing. Tokens and dollars may be exceeded by the calls that were in flight.
    """

    calls: int | None = Field(None, ge=1, description="Answered calls")
    tokens: int | None = Field(None, ge=1, description="Tokens of questions and answers, as the judge counts them")
    dollars: float | None = Field(None, gt=0, description="Dollars, by `input_price` and `output_price`")
    input_price: float | None = Field(None, ge=0, description="Dollars for a million tokens of questions")
    output_price: float | None = Field(None, ge=0, description="Dollars for a million tokens of answers")

    @model_validator(mode="after")
    def _check(self) -> JudgeBudgetOptions:
        prices = (self.input_price, self.output_price)
        if self.dollars is not None and None in prices:
            raise ValueError("`dollars` needs both prices, `input_price` and `output_price`")
        if self.dollars is None and prices != (None, None):
            raise ValueError("`input_price` and `output_price` have no effect without `dollars`")
        if self.calls is None and self.tokens is None and self.dollars is None:
            raise ValueError("it limits nothing: set `calls`, `tokens` or `dollars`, or leave the table out")
        return self


class JudgeOptions(Options):
    """A judge: a model behind an OpenAI-compatible address that scores completions."""

    address: str = Field(
        pattern=formed(
            r"^https?://[^/\s@]+(/\S*)?$",
            "an address that begins with `http://` or `https://` and has no spaces and no name or key before an `@`, "
            "such as `http://localhost:8000/v1`",
        ),
        description="Address of the endpoint up to `/v1`, such as `https://api.openai.com/v1`",
    )
    model: str = Field(min_length=1, description="Name of the model there")
    prompt: str | None = Field(
        None,
        min_length=1,
        description="The question, with `{prompt}`, `{completion}` and columns of the row such as `{answer}` in it",
    )
    prompt_path: str | None = Field(None, min_length=1, description="File that holds the question, instead of `prompt`")
    system: str | None = Field(None, min_length=1, description="System message before the question")
    scale: tuple[float, float] | None = Field(
        None,
        description="Lowest and highest score that it may give, such as `[0, 10]`; the reward is 0 for the lowest and "
        "1 for the highest",
    )
    choices: dict[Annotated[str, Field(min_length=1)], float] | None = Field(
        None, description="Words that it may answer with, and their rewards, such as `{ A = 1.0, B = 0.0 }`"
    )
    pattern: str | None = Field(
        None,
        min_length=1,
        description="Regular expression whose last match has the score, or the word, as its only group; default: the "
        "last number of the answer, or the word that is its verdict",
    )
    api_key_env: str | None = Field(
        None, pattern=VARIABLE, description="Environment variable that holds the key; the key itself is never written"
    )
    concurrency: int = Field(64, ge=1, le=4_096, description="Most calls at once")
    seconds: float = Field(30.0, gt=0, le=86_400, description="Deadline of one call")
    retries: int = Field(4, ge=0, le=100, description="Retries of a call that fails while others are answered")
    outage_seconds: float = Field(
        600.0,
        gt=0,
        le=7 * 86_400,
        description="Time that scoring waits for a judge which answers no call; then the run stops and can be resumed",
    )
    clarifications: int = Field(
        2, ge=0, le=16, description="Times that it is asked again after an answer without a score"
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of its answers")
    max_tokens: int = Field(1_024, ge=1, description="Most tokens of an answer")
    body: dict[str, Any] = Field(
        default_factory=dict, description="More fields of the request, such as `{ seed = 1 }`; they replace the others"
    )
    budget: JudgeBudgetOptions | None = Field(None, description="Leave out for a judge without a limit")
    cache: bool = Field(
        True, description="Keep answers in `RUN/judge.sqlite`: the same question is not asked, nor paid for, twice"
    )

    @field_validator("scale", mode="before")
    @classmethod
    def _take_array(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("pattern", mode="after")
    @classmethod
    def _check_pattern(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                groups = re.compile(value).groups
            except re.error as error:
                raise ValueError(f"it is not a regular expression: {error}") from error
            if groups != 1:
                raise ValueError(f"it has {groups} groups, and needs one: the score, such as `Score: ([0-9.]+)`")
        return value

    @model_validator(mode="after")
    def _check(self) -> JudgeOptions:
        if (self.prompt is None) == (self.prompt_path is None):
            raise ValueError("a judge needs a question: set `prompt` or `prompt_path`, and not both")
        if (self.scale is None) == (self.choices is None):
            raise ValueError("set `scale = [0, 10]` or `choices = { A = 1.0, B = 0.0 }`, and not both")
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            raise ValueError(f"`scale = [{self.scale[0]:g}, {self.scale[1]:g}]`: the lowest score comes first")
        if self.choices is not None and len(set(self.choices.values())) < 2:
            raise ValueError("`choices` have one reward, so there is nothing to learn: give at least two")
        return self

    @property
    def longest_s(self) -> float:
        """The longest that one completion may take: several outages, and every retry at its deadline."""
        calls = (self.clarifications + 1) * (self.retries + 2)
        return 4 * self.outage_seconds + calls * 2 * self.seconds
