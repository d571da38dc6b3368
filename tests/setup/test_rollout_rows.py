"""The groups in flight and the rows that a run on a GPU has by default, and how many rows memory has room for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config

from stretto.assembly.check import check
from stretto.errors import RecipeError
from stretto.recipe.planned_devices import PlannedDevices
from stretto.recipe.reading import load_recipe, parse_recipe
from stretto.recipe.schema import Recipe
from stretto.setup.chosen_sizes import with_chosen_sizes
from stretto.setup.counted_models import count_models
from stretto.setup.device import CUDA, device_limit, resolved
from stretto.setup.memory import footprint
from stretto.setup.memory_sizes import GIB, wanted_kv_tokens
from stretto.setup.micro_batch_size import with_micro_tokens
from stretto.setup.rollout_rows import describe_rows, with_rows

CPU = torch.device("cpu")
QWEN_0_5B = Qwen2Config(
    vocab_size=151_936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    intermediate_size=4864, tie_word_embeddings=True,
)  # fmt: skip
QWEN_1_7B = Qwen3Config(
    vocab_size=151_936, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, intermediate_size=6144, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip
PROMPT = 250  # tokens of the longest prompt
CARDS = (22, 48, 139)  # GiB


def recipe(device: torch.device = CUDA, **sections: Any) -> Recipe:
    rollout = {"prompts": 64, "group": 8, "max_tokens": 512, **sections.pop("rollout", {})}
    model = {"path": "tiny", "lora": {"rank": 32}}
    made = parse_recipe(
        {"model": sections.pop("model", model), "task": {"type": "countdown-chain"}, "rollout": rollout, **sections}
    )
    return resolved(made, device)


def chosen(made: Recipe, free_gib: float, config: Any = QWEN_0_5B) -> Recipe:
    return with_rows(made, config, PROMPT, CUDA, free=int(free_gib * GIB))


@pytest.mark.parametrize(
    ("rollout", "groups", "rows"),
    [
        ({}, 192, 1_536),
        ({"staleness": 1}, 128, 1_024),
        ({"staleness": 8}, 192, 1_536),
        ({"staleness": "auto"}, 192, 1_536),
        ({"in_flight": 100}, 100, 800),
        ({"staleness": 4, "in_flight": "full"}, 320, 2_560),
        ({"rows": 77}, 96, 77),
        ({"rows": 1_200}, 150, 1_200),
        ({"rows": 1_536}, 192, 1_536),
        ({"paradigm": "synchronous"}, 64, 512),
        ({"paradigm": "one-step-off"}, 64, 512),
        ({"paradigm": "partial"}, 192, 1_536),
        ({"paradigm": "drop"}, 96, 512),  # it would drop more
        ({"redundancy": {"groups": 70, "members": 9}}, 192, (192 + 6) * 9),
    ],
)
def test_on_a_gpu_three_batches_are_in_flight_and_all_of_them_run(
    rollout: dict[str, Any], groups: int, rows: int
) -> None:
    plan = recipe(rollout=rollout).plan
    assert (plan.in_flight, plan.rows) == (groups, rows)


@pytest.mark.parametrize(
    "made",
    [
        recipe(CPU),
        recipe(engine={"type": "vllm"}),
        recipe(runtime={"type": "ray"}),
        recipe(runtime={"deterministic": True}),
        recipe(model={"path": "tiny"}),
    ],
    ids=["CPU", "vLLM", "cluster", "deterministic", "full weights"],
)
def test_elsewhere_one_and_a_half_batches_are_in_flight_and_one_runs(made: Recipe) -> None:
    assert (made.plan.in_flight, made.plan.rows) == (96, 512)


def test_rows_are_compared_with_the_groups_in_flight_once_the_device_is_known() -> None:
    model, rollout = {"path": "tiny", "lora": {"rank": 4}}, {"rows": 300, "prompts": 16}
    made = parse_recipe({"model": model, "task": {"type": "countdown-chain"}, "rollout": rollout})
    assert resolved(made, CUDA).plan.rows == 300
    with pytest.raises(RecipeError, match=r"`rollout\.rows = 300` has no effect above 192"):
        resolved(made, CPU)


def test_a_large_device_has_a_row_for_each_trajectory_in_flight_and_says_nothing() -> None:
    asked = recipe()
    made = chosen(asked, 139)
    assert made == asked
    assert describe_rows(asked, made) == []


def test_a_small_card_has_fewer_and_says_why() -> None:
    asked = recipe()
    made = chosen(asked, device_limit(24) / GIB)
    plan = made.plan
    assert 512 <= plan.rows < 1_536
    assert plan.in_flight == max(96, plan.rows // 8)
    assert describe_rows(asked, made) == [
        f"`rollout.rows = {plan.rows}`, `rollout.in_flight = {plan.in_flight}`: memory is too short for 1536 rows: "
        "their KV would leave too little for micro-batches"
    ]


@pytest.mark.parametrize(
    ("gib", "rows", "groups", "micro_tokens"),
    [
        (16, 256, 48, 4_096),  # micro-batches are too small already
        (21, 384, 48, 8_192),
        (24, 512, 64, 8_192),
        (36, 768, 96, 16_384),
    ],
)
def test_a_second_batch_of_rows_needs_smaller_micro_batches_than_a_third(
    gib: int, rows: int, groups: int, micro_tokens: int
) -> None:
    """The recipe `gsm8k-small`. One batch of rows on 24 GiB has micro-batches of 8,192 tokens, and so have two."""
    asked, free = recipe(rollout={"prompts": 32}), device_limit(gib)
    made = with_chosen_sizes(asked, QWEN_0_5B, PROMPT, CUDA, free=free)
    assert (made.plan.rows, made.plan.in_flight) == (rows, groups)
    assert made.training.micro_tokens == micro_tokens


@pytest.mark.parametrize("rollout", [{}, {"prompts": 32}, {"staleness": 8, "in_flight": "full"}], ids=str)
def test_rows_beyond_one_batch_leave_the_micro_batches_that_are_promised_whatever_prefills_take(
    rollout: dict[str, Any],
) -> None:
    asked = recipe(rollout=rollout)
    counted, batch = count_models(asked, QWEN_0_5B, CUDA), asked.rollout.prompts * asked.rollout.group
    rows = []
    for gib in range(8, 142, 3):
        free = device_limit(gib)
        made = with_chosen_sizes(asked, QWEN_0_5B, PROMPT, CUDA, counted=counted, free=free)
        rows.append(made.plan.rows)
        promised = 0 if rows[-1] <= batch else 8_192 if rows[-1] <= 2 * batch else 16_384
        assert made.training.micro_batch_tokens >= promised, gib
    assert rows == sorted(rows)
    assert len(set(rows)) > 2


@pytest.mark.parametrize(
    ("rollout", "gib", "said"),
    [
        (
            {"prompts": 32},
            24,
            "memory is too short for 768 rows: micro-batches beside them would be below 16,384 tokens; set "
            "`rollout.rows` or `training.micro_tokens` to choose yourself",
        ),
        (
            {"prompts": 32, "staleness": 1},
            16,
            "memory is too short for 512 rows: micro-batches beside them would be below 8,192 tokens; set ",
        ),
        ({}, 16, "memory is too short for 1536 rows: their KV would leave too little for micro-batches"),
        (
            {"group": 32, "kv_tokens": 5_000_000},
            139,
            "memory is too short for 6144 rows: their buffers would take more than 5 % of the free memory",
        ),
        ({"kv_tokens": 700_000}, 139, "`rollout.kv_tokens = 700000` is too small for 1536 rows, which should have "),
    ],
)
def test_fewer_rows_name_what_is_short(rollout: dict[str, Any], gib: int, said: str) -> None:
    asked = recipe(rollout=rollout)
    [line] = describe_rows(asked, chosen(asked, device_limit(gib) / GIB))
    assert f": {said}" in line


def test_with_one_batch_of_rows_a_run_is_as_on_a_cpu() -> None:
    plan = chosen(recipe(), 8).plan
    assert (plan.in_flight, plan.rows) == (96, 512)


def test_groups_in_flight_of_the_recipe_stay_if_rows_are_fewer() -> None:
    made = chosen(recipe(rollout={"in_flight": 192}), 8)
    assert (made.plan.in_flight, made.plan.rows) == (192, 512)


@pytest.mark.parametrize("config", [QWEN_0_5B, QWEN_1_7B], ids=["0.5B", "1.7B"])
def test_more_memory_never_makes_rows_fewer(config: Any) -> None:
    asked = recipe()
    counted = count_models(asked, config, CUDA)
    free = [gib * GIB for gib in (8, *range(16, 64, 2), 96, 128, 180)]
    rows = [with_rows(asked, config, PROMPT, CUDA, counted=counted, free=each).plan.rows for each in free]
    assert rows == sorted(rows)
    assert rows[-1] == 1_536


def test_what_memory_allows_is_not_recorded(tmp_path: Path) -> None:
    """So that a run goes on with less staleness, on another device, or as it is on a smaller one."""
    begun = chosen(recipe(), 24)
    assert begun.plan.rows < 1_536
    (tmp_path / "config.toml").write_text(begun.dumps())
    again = load_recipe(tmp_path / "config.toml", ["rollout.staleness=1"])
    assert (again.plan.in_flight, again.plan.rows) == (128, 1_024)
    assert resolved(load_recipe(tmp_path / "config.toml", ['runtime.device="cpu"']), CPU).plan.rows == 512


@pytest.mark.parametrize("config", [QWEN_0_5B, QWEN_1_7B], ids=["0.5B", "1.7B"])
@pytest.mark.parametrize("card", CARDS)
def test_rows_beyond_one_batch_have_their_kv_and_do_not_make_micro_batches_small(config: Any, card: int) -> None:
    free = device_limit(card)
    one_batch = recipe(rollout={"rows": 512})

    def planned(made: Recipe) -> tuple[int, int]:
        made = with_micro_tokens(made, config, PROMPT, CUDA, free=free)
        return made.training.micro_batch_tokens, footprint(made, config, PROMPT, CUDA, free=free).kv_tokens

    try:
        planned(one_batch)
    except RecipeError:
        assert chosen(recipe(), free / GIB, config).plan.rows == 512
        return
    made = chosen(recipe(), free / GIB, config)
    micro, kv = planned(made)
    if made.plan.rows > 512:
        assert micro >= (16_384 if made.plan.rows > 1_024 else 8_192)
        assert kv >= wanted_kv_tokens(made, PROMPT + 512 + 32)


def test_a_cache_of_a_given_size_limits_the_rows() -> None:
    made = chosen(recipe(rollout={"kv_tokens": 700_000}), 139)
    assert made.plan.rows == 1_024


def test_a_number_of_the_recipe_stays() -> None:
    asked = recipe(rollout={"rows": 1_500})
    assert chosen(asked, 16) == asked


def test_check_prints_what_memory_allows(tmp_path: Path) -> None:
    QWEN_0_5B.save_pretrained(tmp_path)
    raw = {"model": {"path": str(tmp_path), "lora": {"rank": 32}}, "task": {"type": "countdown-chain"}}
    raw["rollout"] = {"prompts": 64, "group": 8, "max_tokens": 512}
    large, small = (check(parse_recipe(raw), planned=PlannedDevices(1, gib)) for gib in (139.0, 24.0))
    assert "192 groups in flight, 1536 rows" in large.memory
    assert not any("rollout.rows" in note for note in large.notes)
    assert any("memory is too short for 1536 rows: " in note for note in small.notes)
