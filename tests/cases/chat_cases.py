"""Chat templates of three families over small tokenizers, and a policy that follows a script."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stretto.errors import RoomError
from stretto.types import Completion, FinishReason

# As Qwen 2.5 and Hermes write chats: tool calls in tags, results as messages of the user.
HERMES = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are helpful.{% endif %}

# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

# As Qwen 3: like the above, and answers before the last question of the user lose their thinking.
DROPS_THINKING = """
{%- set last = namespace(query=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'assistant' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% else %}
{%- set content = message.content %}
{%- set reasoning = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > last.query and reasoning %}<think>
{{ reasoning }}
</think>

{% endif %}{{ content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Llama 3: content is trimmed, a call is a JSON object, results have a role of their own.
LLAMA = """
{{- bos_token }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}{{ 'Functions:\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{%- endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{- message.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

TEMPLATES = {"hermes": HERMES, "drops thinking": DROPS_THINKING, "llama": LLAMA}
STOP = {"hermes": "<|im_end|>", "drops thinking": "<|im_end|>", "llama": "<|eot_id|>"}
SPECIAL = ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PLAIN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("a", "n"), ("Ċ", "Ċ"), ("1", "2")]


def chat_tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Returns a tokenizer over bytes, with a few merges, and the chat template of a family."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*letters, *(a + b for a, b in MERGES)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    stop = STOP.get(family, "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|begin_of_text|>",
        eos_token=stop,
        additional_special_tokens=[token for token in SPECIAL if token not in (stop, "<|begin_of_text|>")],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATES[family] if template is None else template,
    )
    tokenizer.add_tokens(list(PLAIN_ADDED))
    return tokenizer


class ScriptedPolicy:
    """Says what its script says, and keeps each lineage as a row of tokens with a mask of those that were sampled.

    An item of the script is a text, which ends with the stop token, tokens, or an exception.
    """

    left = 10_000

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *script: str | Sequence[int] | Exception, stop: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._script = list(script)
        self._stop = stop
        self.rows: list[tuple[list[int], list[bool]]] = []
        self.trained: list[bool] = []
        self.lineages: list[int] = []  # of each turn

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        said = self._script.pop(0) if self._script else RoomError("no room")
        if isinstance(said, Exception):
            raise said
        finish: FinishReason = "stop"
        if isinstance(said, str):
            sampled = self._tokenizer.encode(said, add_special_tokens=False)
            sampled += [self._tokenizer.eos_token_id] if self._stop else []
            finish = "stop" if self._stop else "length"
        else:
            sampled = list(said)
        assert 0 <= lineage <= len(self.rows)
        if lineage == len(self.rows):
            self.rows.append((list(tokens), [False] * len(tokens)))
            self.trained.append(train)
        else:
            row, mask = self.rows[lineage]
            assert list(tokens[: len(row)]) == row, "a lineage begins with everything that it had"
            assert train == self.trained[lineage]
            new = list(tokens[len(row) :])
            row += new
            mask += [False] * len(new)
        row, mask = self.rows[lineage]
        row += sampled
        mask += [True] * len(sampled)
        self.lineages.append(lineage)
        return Completion(0, 0, np.array(sampled, np.int32), np.zeros(len(sampled), np.float32), finish, "")


def spelled(tokenizer: PreTrainedTokenizerFast, row: tuple[list[int], list[bool]]) -> list[tuple[bool, str]]:
    """Returns a row as runs of text that were sampled, or were not."""
    runs: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(*row, strict=True):
        if not runs or runs[-1][0] != sampled:
            runs.append((sampled, []))
        runs[-1][1].append(token)
    return [(sampled, tokenizer.decode(tokens)) for sampled, tokens in runs]
