"""The trained policy of a run, loaded with transformers, and prompted as it was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stretto.assembly.serve import PolicyFolder
from stretto.environments.single_turn import Decode
from stretto.errors import RunError
from stretto.models.adapters import merge_adapter, read_adapter
from stretto.models.loading import load_config, load_model, load_tokenizer
from stretto.models.stop_tokens import stop_tokens
from stretto.recipe.schema import Recipe
from stretto.setup.device import choose_device, choose_dtype
from stretto.setup.factories import decoder_of
from stretto.store.reader import JournalReader

if TYPE_CHECKING:
    from stretto.api.runs import Run

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, repr=False)
class TrainedPolicy:
    """A policy with its tokenizer. `model` is a plain model of transformers: an adapter is merged into its base."""

    model: Any
    tokenizer: Any
    recipe: Recipe
    templated: bool  # the chat template makes the prompts
    stop_tokens: tuple[int, ...]
    decode: Decode

    def generate(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> str:
        """Continues a prompt, or answers messages, and returns the text.

        The prompt is made as in training: if messages were trained on, a text is the user's message, after the system
        message of the recipe; otherwise it goes to the model as it is. Sampling is that of the recipe's `[rollout]`,
        unless given: `temperature = 0` is greedy. `seed` makes it reproducible. Stops where the rollout stopped.
        """
        rollout = self.recipe.rollout
        degree = rollout.temperature if temperature is None else temperature
        text, bare = self._prompt(prompt)
        tokens = self.tokenizer(text, add_special_tokens=bare, return_tensors="pt").to(self.model.device)
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if degree > 0:
            options = {"do_sample": True, "temperature": degree, "top_p": rollout.top_p, "top_k": rollout.top_k}
            options |= {"min_p": rollout.min_p} if rollout.min_p else {}
        if rollout.stop:
            options |= {"stop_strings": list(rollout.stop), "tokenizer": self.tokenizer}
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=seed is not None), torch.inference_mode():
            if seed is not None:
                torch.manual_seed(seed)
            made = self.model.generate(
                input_ids=tokens["input_ids"],
                attention_mask=tokens["attention_mask"],
                max_new_tokens=max_tokens or rollout.max_tokens,
                eos_token_id=list(self.stop_tokens) or None,
                pad_token_id=self.tokenizer.pad_token_id or next(iter(self.stop_tokens), 0),
                **options,
            )
        return self.decode(made[0, tokens["input_ids"].shape[1] :].tolist())

    def _prompt(self, prompt: str | Messages) -> tuple[str, bool]:
        """Returns the text of a prompt, and True if it still lacks special tokens."""
        if not self.templated:
            if not isinstance(prompt, str):
                raise RunError("this policy was trained on raw text, through no chat template: give a text")
            return prompt, True
        systems = {getattr(task, "system", None) for task in self.recipe.tasks}
        system = systems.pop() if len(systems) == 1 else None  # tasks that differ have no common one
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
        if system is not None and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": system}, *messages]
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text, False

    def __repr__(self) -> str:
        form = "messages" if self.templated else "raw text"
        return f"TrainedPolicy({type(self.model).__name__}, trained on {form})"


def load_policy(run: Run, device: str = "auto") -> TrainedPolicy:
    """Loads the policy of a finished run. Raises `RunError` if it has none."""
    if not (run.folder / "policy").is_dir():
        raise RunError(f"`{run.folder}` has no policy yet: it is written when the run is finished")
    folder, target = PolicyFolder.find(run.folder), choose_device(device)
    model: Any = load_model(folder.base, choose_dtype("auto", target), target)
    if folder.rank is not None:
        merge_adapter(model, read_adapter(folder.path))
    model.eval()
    tokenizer = load_tokenizer(folder.tokenizer)
    with JournalReader(run.folder) as reader:
        templated = reader.facts().templated
    stops = stop_tokens(folder.base, load_config(folder.base), tokenizer)
    return TrainedPolicy(model, tokenizer, run.recipe, templated, stops, decoder_of(tokenizer))
