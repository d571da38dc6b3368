"""Several streams of prompts as one."""

from __future__ import annotations

from loop_cases import Characters

from stretto.environments.data import PromptStream, Row
from stretto.environments.mixed_prompts import DrawnGroup, MixedHeldOut, MixedPrompts
from stretto.environments.prompt_order import PassRates
from stretto.environments.task_shares import Share, TaskShares

ROWS = {"math": 5, "chains": 3}


def stream(label: str, *, shuffle: bool = True, pass_rates: PassRates | None = None) -> PromptStream:
    rows = [Row(text=f"{label} {number}", columns={"of": label}) for number in range(ROWS[label])]
    return PromptStream(
        rows, Characters(), seed=3, max_prompt_tokens=64, task=label, shuffle=shuffle, pass_rates=pass_rates
    )


def mixed(**rates: PassRates) -> MixedPrompts:
    streams = {label: stream(label, pass_rates=rates.get(label)) for label in ROWS}
    return MixedPrompts(streams, TaskShares({"math": Share(0.7), "chains": Share(0.3)}))


def test_each_task_has_places_and_epochs_of_its_own() -> None:
    prompts = mixed()
    draws = [prompts.draw(group) for group in range(20)]
    for label, num_rows in ROWS.items():
        own = [draw for draw in draws if draw.task == label]
        assert [draw.place for draw in own] == list(range(len(own)))
        assert [draw.epoch for draw in own] == [place // num_rows for place in range(len(own))]
        assert sorted(draw.row_number for draw in own[:num_rows]) == list(range(num_rows)), "every row once an epoch"
    assert [sum(draw.task == label for draw in draws) for label in ROWS] == [14, 6]
    assert prompts.epochs() == {"math": 14 / 5, "chains": 2.0}
    made = prompts.prompt(7, draws[7].row_number, draws[7].task)
    assert (made.index, made.task, made.row) == (7, draws[7].task, {"of": draws[7].task})
    assert "task math: 0 of 0 groups so far, its share is 0.7" in draws[0].reason


def test_a_stream_that_recalls_its_draws_and_losses_goes_on_with_the_same() -> None:
    whole, first, second = mixed(), mixed(), mixed()
    lost = {4: 6, 5: 9, 11: 12}  # group -> the group that was drawn next

    def go(prompts: MixedPrompts, groups: range, labels: dict[int, str]) -> None:
        for group in groups:
            for each, before in lost.items():
                if before == group:
                    prompts.lost(each, labels[each])
            labels[group] = str(prompts.draw(group).task)

    one, other = dict[int, str](), dict[int, str]()
    go(whole, range(30), one)
    go(first, range(12), other)
    second.recall((DrawnGroup(group, other[group], lost.get(group)) for group in range(12) if group != 11), since=0)
    second.recall([DrawnGroup(11, other[11], None)], since=0)
    go(second, range(12, 30), other)
    assert other == one


def test_other_shares_count_from_their_first_group_on() -> None:
    before, after = mixed(), mixed()
    drawn = [DrawnGroup(group, str(before.draw(group).task), None) for group in range(10)]
    after.recall(drawn, since=10)
    after.lost(3, drawn[3].task)
    fresh = mixed()
    assert [after.draw(group).task for group in range(10, 30)] == [fresh.draw(group).task for group in range(20)]
    assert after.draw(30).place == 10 * 0.7 + 14, "places go on"


def test_rewards_go_to_the_task_that_earned_them() -> None:
    prompts = mixed(chains=PassRates(3, seed=3))
    assert prompts.follows_rewards
    assert not mixed().follows_rewards
    prompts.scored(0, 1.0, "math")
    for _ in range(3):
        prompts.scored(0, 1.0, "chains")
    prompts.settle(0)
    reasons = [draw.reason for draw in map(prompts.draw, range(40)) if draw.task == "chains" and draw.row_number == 0]
    assert any("pass rate 1.0000" in reason for reason in reasons)


def test_held_out_prompts_of_tasks_come_one_task_after_the_other() -> None:
    held_out = MixedHeldOut({label: stream(label, shuffle=False) for label in ROWS})
    made = [held_out.prompt(index) for index in range(held_out.num_rows)]
    assert [prompt.index for prompt in made] == list(range(8))
    assert [prompt.task for prompt in made] == ["math"] * 5 + ["chains"] * 3
    assert made[5].text == "chains 0"
