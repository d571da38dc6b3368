"""A reward model: a sequence classifier whose label is the reward. Runs in a reward worker, which loads it once.

    completions --> conversation, by its own template --> tokens --> batches of similar length --> logits of the label

While a thread computes a batch, the next completions are collected. A conversation that is alone in its batch has the
same reward as in any other one, up to rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from stretto.environments.function_specs import SpecError, last_line
from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.environments.scoring_errors import HaltError, ScoringError
from stretto.errors import ModelError
from stretto.models.length_batches import length_batches
from stretto.models.loading import load_config, load_pretrained, load_tokenizer

UNLIMITED = 1 << 24  # tokenizers write a larger number for a context without a limit


@dataclass(eq=False, slots=True)
class _Item:
    """A conversation whose reward somebody waits for."""

    prompt: str
    completion: str
    messages: Sequence[Mapping[str, Any]] | None
    future: asyncio.Future[float]


class RewardModel:
    """Scores completions, as many at once as there are."""

    def __init__(
        self,
        options: RewardModelOptions,
        device: str,
        dtype: str,
        *,
        columns: Mapping[str, str | None] | None = None,
        note: Callable[[str], None] = lambda text: None,
        option: str = "task.reward_model",
    ) -> None:
        """Loads the model. Raises `SpecError` if it cannot be used.

        `columns` are those of the rows, `option` is the name of the table in messages. It never waits, so that it has
        nothing to `note`.
        """
        transformers_logging.disable_progress_bar()
        self._options = options
        self._option = option
        self._name = f"`{option}.path = {options.path!r}`"
        self._device = torch.device(device)
        if self._device.type == "cpu":
            torch.set_num_threads(options.threads)
        try:
            config = load_config(options.path, option=f"{option}.path")
            self.tokenizer = load_tokenizer(options.path, option=f"{option}.path")
            self.model = self._load(getattr(torch, dtype))
            self._label = _label(config, options, self._name)
        except ModelError as error:
            raise SpecError(str(error)) from error
        if self.tokenizer.chat_template is None and "messages" in (columns or {}):
            raise SpecError(f"{self._name} has no chat template, and rows have `messages`; give a `prompt` instead")
        self._max_tokens = self._context(config)
        self._pending: list[_Item] = []
        self._running: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")

    async def __call__(
        self, prompt: str, completion: str, *, messages: Sequence[Mapping[str, Any]] | None = None, **row: Any
    ) -> float:
        """Returns the reward of a completion. Raises `ScoringError` if it has none."""
        item = _Item(prompt, completion, messages, asyncio.get_running_loop().create_future())
        self._pending.append(item)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="reward model")
        return await item.future

    async def _run(self) -> None:
        """Scores what is pending until nothing is."""
        while self._pending:
            items, self._pending = self._pending, []
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self.score, items)
            for item, outcome in zip(items, found, strict=True):
                if item.future.done():
                    continue
                if isinstance(outcome, BaseException):
                    item.future.set_exception(outcome)
                else:
                    item.future.set_result(outcome)

    def score(self, items: Sequence[Any]) -> list[float | Exception]:
        """Returns the reward or the error of each item, which has `prompt`, `completion` and `messages`."""
        found: list[float | Exception] = [ScoringError("it was not scored")] * len(items)
        encoded: dict[int, list[int]] = {}
        for place, item in enumerate(items):
            try:
                encoded[place] = self._encode(item.prompt, item.completion, item.messages)
            except ScoringError as error:
                found[place] = error
        lengths = {place: len(tokens) for place, tokens in encoded.items()}
        for batch in length_batches(lengths, self._options.batch_tokens):
            outcomes = self._forward([encoded[place] for place in batch])
            for place, outcome in zip(batch, outcomes, strict=True):
                found[place] = outcome
        return found

    def _encode(self, prompt: str, completion: str, messages: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Returns the tokens of a conversation, rendered by the model's own template if it has one."""
        if self.tokenizer.chat_template is None:
            tokens = list(self.tokenizer.encode(prompt + completion))
        else:
            conversation = [
                *(dict(message) for message in messages or [{"role": "user", "content": prompt}]),
                {"role": "assistant", "content": completion},
            ]
            try:
                text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **self._options.template)
            except Exception as error:  # a template may raise anything
                raise ScoringError(f"the chat template of {self._name} refused the conversation: {error}") from error
            tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        if not tokens:
            raise ScoringError(f"there is nothing for {self._name} to score: the conversation has no tokens")
        if len(tokens) > self._max_tokens:
            if self._options.too_long == "refuse":
                raise ScoringError(
                    f"the conversation has {len(tokens):,} tokens for {self._name}, more than {self._max_tokens:,} "
                    f'(`{self._option}.max_tokens`); `{self._option}.too_long = "truncate"` leaves its first tokens out'
                )
            tokens = tokens[-self._max_tokens :]
        return tokens

    def _forward(self, rows: list[list[int]]) -> Sequence[float | Exception]:
        """Returns the reward or the error of each row. Halves a batch that fails: one row may be the cause."""
        failure: Exception
        try:
            return self._logits(rows)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            failure = HaltError(
                f"memory ran out while {self._name} scored {len(rows[0]):,} tokens: lower `{self._option}.max_tokens`, "
                f"or put it on another `device`; then continue with `--resume` ({error})"
            )
        except torch.AcceleratorError as error:  # all that this process computes on the device from now on fails too
            failure = HaltError(f"the device of {self._name} failed ({last_line(error)}): continue with `--resume`")
            return [failure] * len(rows)
        except Exception as error:
            failure = ScoringError(f"{self._name} failed: {last_line(error)}")
        if len(rows) == 1:
            return [failure]
        half = len(rows) // 2
        return [*self._forward(rows[:half]), *self._forward(rows[half:])]

    @torch.inference_mode()
    def _logits(self, rows: list[list[int]]) -> list[float]:
        config = self.model.config.get_text_config()
        own = config.pad_token_id
        # A model without a padding token takes the last token of a row. One that no row has marks what follows it.
        used = set().union(*rows) if own is None else set()
        pad = next(token for token in range(config.vocab_size) if token not in used) if own is None else own
        length = max(map(len, rows))
        tokens = torch.tensor([row + [pad] * (length - len(row)) for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=self._device)
        config.pad_token_id = pad
        try:
            logits = self.model(input_ids=tokens, attention_mask=mask).logits
        finally:
            config.pad_token_id = own
        rewards: list[float] = logits[:, self._label].float().tolist()
        return rewards

    def _load(self, dtype: torch.dtype) -> Any:
        """Loads the classifier. Raises `SpecError` if the files have no weights for its head."""
        options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        model, info = load_pretrained(
            AutoModelForSequenceClassification,
            self._options.path,
            "cannot be loaded as a classifier",
            f"{self._option}.path",
            **options,
        )
        if missing := sorted(info["missing_keys"]):
            found = ", ".join(getattr(model.config, "architectures", None) or ["an unknown architecture"])
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise SpecError(
                f"{self._name} is no reward model: a {type(model).__name__} needs `{missing[0]}`{more}, and the files "
                f"have no such weights, so its rewards would be random; they are those of {found}"
            )
        return model.to(self._device).eval()

    def _context(self, config: Any) -> int:
        """Returns the most tokens of a conversation. Raises `SpecError` if the recipe asks for more than there are."""
        text = config.get_text_config()
        limits = [getattr(text, "max_position_embeddings", None), getattr(self.tokenizer, "model_max_length", None)]
        context = min((int(each) for each in limits if each is not None and each < UNLIMITED), default=UNLIMITED)
        asked = self._options.max_tokens
        if asked is not None and asked > context:
            raise SpecError(f"`{self._option}.max_tokens = {asked}` is more than the context of the model, {context}")
        return asked or context


def _label(config: Any, options: RewardModelOptions, name: str) -> int:
    """Returns the place of the label that is the reward. Raises `SpecError` if there are several and none is named."""
    labels = [config.id2label[place] for place in sorted(config.id2label)]
    listed = ", ".join(f"`{label}`" for label in labels)
    if options.label is None:
        if len(labels) != 1:
            raise SpecError(f"{name} has {len(labels)} labels: name the one that is the reward, `label`: {listed}")
        return 0
    if options.label not in labels:
        raise SpecError(f"{name} has no label `{options.label}`; it has {listed}")
    return labels.index(options.label)
