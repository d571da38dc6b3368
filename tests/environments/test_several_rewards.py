"""Several rewards with weights, rewards of batches, and functions written for TRL."""

import asyncio
import struct
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from several_rewards import swapped, too_few

from stretto.environments.function_specs import SpecError
from stretto.environments.grades import Grade
from stretto.environments.reward_calls import Details, RefusedError, RewardCall, RewardSpec, refuse_weightless
from stretto.environments.reward_pool import RewardPool
from stretto.environments.thread_rewards import ThreadRewards
from stretto.errors import LateRewardError, RecipeError, RewardError
from stretto.types import RewardPart

FOLDER = str(Path(__file__).parents[1] / "cases")
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]


@pytest.fixture(autouse=True)
def _functions(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def spec(function, name=None, **options):
    return RewardSpec(function if name is None else name, f"several_rewards:{function}", **options)


@asynccontextmanager
async def started(*specs, threads=False, **options):
    it = ThreadRewards(specs, {}, **options) if threads else RewardPool(specs, **options)
    await it.start()
    try:
        yield it
    finally:
        await it.close()


def scores(specs, completions, *, row=None, details=None, threads=False, **options):
    async def run():
        async with started(*specs, threads=threads, **options) as it:
            calls = (it.score("p", completion, row or {}, details) for completion in completions)
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    return asyncio.run(run())


def values(grades):
    return [grade.reward if isinstance(grade, Grade) else grade for grade in grades]


def refusal(*specs, columns=None, **options):
    with pytest.raises(RecipeError) as raised:
        scores(specs, [], columns=columns or {}, **options)
    return str(raised.value)


in_both = pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])


# -- errors that have a likely cause -----------------------------------------------------------------------------------


@in_both
@pytest.mark.parametrize(
    ("function", "details", "words"),
    [
        ("reads_messages", None, "the row has a `prompt` that is a text, so prompt and completion are texts"),
        (
            "reads_messages",
            None,
            'give rows with `messages`, for example with `task.columns = { messages = "prompt" }`',
        ),
        ("reads_messages_later", None, "give rows with `messages`"),
        ("reads_texts", Details(MESSAGES), "the row has `messages`, so its prompt is a list of messages"),
        ("reads_texts", Details(MESSAGES), 'read `completion[0]["content"]`, or give rows with a `prompt`'),
        ("searches_texts", Details(MESSAGES), "the row has `messages`, so its prompt is a list of messages"),
        ("reads_whole_message", Details(MESSAGES), "the row has `messages`, so its prompt is a list of messages"),
        ("reads_one_message", None, "the parameter `completion_message` gets it as a message"),
    ],
)
def test_a_reward_that_gets_texts_for_messages_or_the_reverse_is_told_so(function, details, words, threads):
    (failure,) = scores([spec(function)], ["c"], details=details, threads=threads)
    assert isinstance(failure, RewardError)
    assert "the likely cause" in str(failure)
    assert words in str(failure)


@pytest.mark.parametrize(
    ("function", "details"), [("reads_messages", Details(MESSAGES)), ("reads_texts", None), ("searches_texts", None)]
)
def test_a_reward_that_gets_what_it_reads_returns(function, details):
    assert values(scores([spec(function)], ["c"], details=details)) == [1.0]


def test_an_empty_text_in_the_place_of_messages_has_the_same_likely_cause():
    (failure,) = scores([spec("reads_messages")], [""])
    assert "string index out of range" in str(failure)
    assert "give rows with `messages`" in str(failure)


def test_another_error_of_a_reward_has_no_likely_cause():
    (failure,) = scores([spec("as_trl")], ["raise"])
    assert "a bad completion" in str(failure)
    assert "likely cause" not in str(failure)


@in_both
def test_a_reward_that_reads_a_column_that_is_not_there_is_told_of_those_that_are(threads):
    (failure,) = scores(
        [spec("reads_answer")], ["c"], row={"solution": "4"}, columns={"solution": None}, threads=threads
    )
    assert "KeyError: 'answer'" in str(failure)
    assert "if `answer` should be a column: rows have the column `solution`" in str(failure)
    assert '`task.columns = { answer = "solution" }`' in str(failure)


# -- several -----------------------------------------------------------------------------------------------------------


@in_both
def test_a_reward_is_the_weighted_sum_of_its_parts(threads):
    rewards = [spec("correct"), spec("length", weight=-0.5), spec("as_trl", "format", weight=0.25)]
    right, wrong = scores(rewards, ["4", "five"], row={"answer": "4"}, threads=threads)
    assert right == Grade(
        1.0 - 0.5 + 0.25,
        (RewardPart("correct", 1.0, 1.0), RewardPart("length", -0.5, 1.0), RewardPart("format", 0.25, 1.0)),
    )
    assert wrong.reward == -2.0 + 0.25


@in_both
def test_a_part_that_does_not_apply_is_left_out_and_recorded_as_absent(threads):
    (found,) = scores([spec("correct"), spec("nothing", weight=5.0)], ["4"], row={"answer": "4"}, threads=threads)
    assert found == Grade(1.0, (RewardPart("correct", 1.0, 1.0), RewardPart("nothing", 5.0, None)))


def test_a_completion_that_no_reward_applies_to_fails():
    (failure,) = scores([spec("nothing"), spec("nothing", "again")], ["c"])
    assert isinstance(failure, RewardError)
    assert "no reward applies to this completion: `nothing`, `again` returned None" in str(failure)


def test_none_of_an_only_reward_is_no_reward():
    async def run():
        async with started(RewardSpec("", "several_rewards:nothing")) as it:
            await it.score("p", "c", {})

    with pytest.raises(RewardError, match=r"returned None \(NoneType\); a reward is a finite number"):
        asyncio.run(run())


@in_both
def test_a_part_that_fails_fails_the_completion_and_never_counts_as_0(threads):
    good, bad, other = scores([spec("length"), spec("raises")], ["ab", "raise", "c"], threads=threads)
    assert values([good, other]) == [3.0, 2.0]
    assert isinstance(bad, RewardError)
    assert "`several_rewards:raises` raised KeyError: 'no such thing'" in str(bad)


def test_a_sum_that_is_too_large_fails():
    (failure,) = scores([spec("huge", weight=2.0), spec("length")], ["c"])
    assert "the weighted sum of the rewards is 2e+09, beyond 1e+09" in str(failure)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([spec("length"), spec("correct", "length")], "`task.rewards` has 2 rewards with the name `length`"),
        ([spec("length", weight=float("nan"))], "the reward `length` has `weight = nan`: a weight is a finite number"),
        ([spec("length", weight=float("inf"))], "`weight = inf`"),
        ([RewardSpec("mine", "length")], "`function = 'length'` of the reward `mine` is not a function"),
        ([], "`task.rewards` is empty"),
    ],
)
def test_rewards_that_a_task_cannot_have_are_refused(specs, words):
    with pytest.raises(RecipeError) as raised:
        RewardPool(specs)
    assert words in str(raised.value)


def test_rewards_that_are_all_only_recorded_are_refused():
    with pytest.raises(SpecError, match="every reward has `weight = 0`"):
        refuse_weightless([spec("length", weight=0.0), spec("correct", weight=0.0)])
    refuse_weightless([spec("length", weight=0.0), spec("correct")])


def test_the_reward_that_cannot_be_used_is_named():
    said = refusal(spec("length"), spec("missing", "mine"))
    assert "`task.rewards` cannot be used: the reward `mine`, `several_rewards:missing`: " in said
    assert "`several_rewards` has no `missing`" in said


# -- classes and factories ---------------------------------------------------------------------------------------------


@in_both
def test_a_class_or_a_factory_is_made_once_in_each_process(threads):
    rewards = [
        spec("Counted", "made", options={"base": 10.0, "words": ["a", "b"]}),
        spec("factory", "bonus", options={"bonus": 0.5}),
    ]
    found = scores(rewards, ["c"] * 5, threads=threads)
    assert len({grade.reward for grade in found}) == 1
    assert found[0].parts[1].value == 0.5


def test_a_class_without_options_is_made_too():
    (found,) = scores([spec("Counted", "made")], ["c"])
    assert found.reward == 1.0


def test_a_factory_that_fails_is_named_with_its_options():
    said = refusal(spec("broken_factory", "mine", options={"bonus": 1}))
    assert "`broken_factory(bonus=1)` failed: OSError: no model here (several_rewards.py:" in said
    assert "missing 1 required positional argument" in refusal(spec("factory", "mine", options={}))


# -- batches -----------------------------------------------------------------------------------------------------------


@in_both
@pytest.mark.parametrize("function", ["as_trl", "as_trl_later"])
def test_completions_that_arrive_together_are_scored_in_one_call(function, threads):
    found = scores([spec(function, "mine")], ["size"] * 50, threads=threads)
    assert values(found) == [50.0] * 50


def test_a_batch_has_at_most_its_size():
    found = scores([spec("as_trl", "mine", batch_size=8)], ["size"] * 20)
    assert values(found) == [8.0] * 16 + [4.0] * 4


@in_both
@pytest.mark.parametrize("function", ["as_trl", "as_trl_later"])
def test_of_a_batch_that_raises_only_the_bad_completion_fails(function, threads):
    *good, bad = scores([spec(function, "mine")], [*["ok"] * 20, "raise"], threads=threads)
    assert values(good) == [1.0] * 20
    assert "`mine` raised ValueError: a bad completion" in str(bad)


@pytest.mark.parametrize(("bad", "words"), [("text", r"returned '1.0' \(str\); a reward is"), ("nan", r"returned nan")])
def test_a_value_that_is_no_reward_fails_its_completion_alone(bad, words):
    good, failure = scores([spec("as_trl", "mine")], ["ok", bad])
    assert good.reward == 1.0
    with pytest.raises(RewardError, match=words):
        raise failure


def test_of_a_batch_that_hangs_only_the_bad_completion_fails():
    *good, bad = scores([spec("as_trl", "mine")], [*["ok"] * 10, "hang"], deadline_s=0.5)
    assert values(good) == [1.0] * 10
    assert isinstance(bad, LateRewardError)
    assert "`mine` did not return within `task.reward_seconds = 0.5`" in str(bad)


def test_of_a_batch_that_hangs_in_a_thread_only_the_bad_completion_fails():
    *good, bad = scores([spec("as_trl", "mine")], [*["ok"] * 10, "hang"], deadline_s=0.5, threads=True)
    assert values(good) == [1.0] * 10
    assert isinstance(bad, LateRewardError)


@in_both
def test_of_an_async_batch_that_is_late_only_the_bad_completion_fails(threads):
    *good, bad = scores([spec("as_trl_later", "mine")], [*["ok"] * 10, "wait"], deadline_s=0.5, threads=threads)
    assert values(good) == [1.0] * 10
    assert isinstance(bad, LateRewardError)


def test_of_a_batch_that_ends_its_process_only_the_bad_completion_fails():
    *good, bad = scores([spec("as_trl", "mine")], [*["ok"] * 10, "die"])
    assert values(good) == [1.0] * 10
    assert isinstance(bad, RewardError)


@in_both
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("too_few", "returned 0 values; a batched reward returns a list with one number for each of the 1 completions"),
        ("mapping", "(dict); a batched reward returns a list"),
        ("one_text", "returned '1' (str); a batched reward returns a list"),
        ("one_number", "returned 1.0 (float); a batched reward returns a list"),
        ("unordered", "(set); a batched reward returns a list"),
    ],
)
def test_a_batched_function_that_returns_no_list_of_its_completions_fails_them(function, words, threads):
    for failure in scores([spec(function, "mine")], ["a", "b", "c"], threads=threads):
        assert isinstance(failure, RewardError)
        assert words in str(failure)


def test_a_batch_of_the_wrong_size_is_told_of_once_with_what_it_costs(capsys):
    call = RewardCall(spec("too_few", "mine"), too_few)
    for _ in range(2):
        with pytest.raises(RefusedError, match="returned 7 values"):
            call.values([1.0] * 7, 8)
    said = capsys.readouterr().out
    assert said.count("returned 7 values for a batch of 8 completions") == 1
    assert "9 calls instead of one" in said
    with pytest.raises(RefusedError):
        RewardCall(spec("too_few", "mine"), too_few).values([], 1)
    assert capsys.readouterr().out == "", "one completion is not scored again"


def test_parameters_that_have_no_names_for_callers_are_refused():
    def turned(completion, answer, /):
        return 1.0

    def in_order(prompt, completion, /, answer):
        return 1.0

    with pytest.raises(SpecError, match=r"cannot be given by their names, because they stand before `/`; remove the"):
        RewardCall(spec("turned"), turned, {"answer": None})
    RewardCall(spec("in_order"), in_order, {"answer": None})


def test_none_of_an_only_reward_says_where_none_is_allowed():
    with pytest.raises(
        RefusedError, match=r"None says that one of several rewards \(`\[\[task.rewards\]\]`\) does not"
    ):
        RewardCall(RewardSpec("", "several_rewards:swapped"), swapped).number(None)


def test_any_iterable_of_numbers_is_a_batch_of_rewards():
    assert values(scores([spec("generated")], ["c", "d", "c"])) == [1.0, 0.0, 1.0]


# -- parameters --------------------------------------------------------------------------------------------------------


def test_parameters_are_given_by_their_names():
    assert values(scores([spec("swapped")], ["c"])) == [1.0]


def test_a_function_as_trl_has_it_gets_chats_tokens_and_the_step():
    said = []
    details = Details(MESSAGES, struct.pack("<3i", 1, 2, 4), 3)
    found = scores(
        [spec("of_trl")], ["four"] * 3, row={"answer": 42}, details=details, columns={"answer": None, "messages": None},
        on_output=said.append,
    )  # fmt: skip
    assert values(found) == [7 + 3 + 0.2] * 3
    assert [line for line in said if "logs 'share', which is not recorded" in line], "and says what it does not do"


def test_completions_of_different_versions_are_different_batches_for_a_function_that_asks_for_the_step():
    async def run():
        async with started(spec("of_trl"), columns={"answer": None, "messages": None}) as it:
            calls = (it.score("p", "c", {"answer": ""}, Details(MESSAGES, b"", version)) for version in (1, 2, 1, 5))
            return await asyncio.gather(*calls)

    assert values(asyncio.run(run())) == [1.0, 2.0, 1.0, 5.0]


def test_a_function_of_tokens_alone_is_one_of_batches():
    details = Details(None, struct.pack("<3i", 1, 2, 4), 3)
    assert values(scores([spec("only_ids")], ["c"] * 2, details=details)) == [3.0, 3.0]


def test_messages_and_the_completion_as_a_message_go_to_parameters_of_these_names_alone():
    text = '<think>hm</think>\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    details = Details(MESSAGES)
    both = [spec("with_messages"), spec("hidden", weight=100.0)]
    (found,) = scores(both, [text], details=details, columns={"messages": None})
    assert found.reward == 2 + 10 + 0.5 + 100
    said = refusal(spec("with_messages"), columns={"answer": None})
    assert "and their prompts are texts without `messages`" in said
    said = refusal(spec("with_messages"), columns={"messages": "rows.jsonl:7"})
    assert "takes the column `messages`, which rows.jsonl:7 does not have" in said


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (spec("both"), "it has parameters of both forms, `completions` and `prompt`"),
        (spec("length", batch_size=4), "`batch_size = 4` has no effect"),
        (spec("as_trl", "mine", batched=False), "cannot be called as"),
    ],
)
def test_the_form_of_a_function_is_told_by_its_parameters_or_by_the_option(made, words):
    assert words in refusal(made)


def test_a_function_with_other_names_is_called_by_position_with_one_completion_unless_it_is_said_to_be_batched():
    (failure,) = scores([spec("other_names")], ["c"], columns={})
    assert "returned [1.0] (list); a reward is a finite number" in str(failure)
    assert values(scores([spec("other_names", batched=True)], ["a", "b"], columns={})) == [2.0, 2.0]


def test_a_column_that_the_call_needs_for_itself_is_refused():
    assert "the rows have a column `completions`" in refusal(spec("as_trl", "mine"), columns={"completions": None})


def test_a_column_that_some_rows_lack_is_none_in_a_batch():
    async def run():
        async with started(spec("of_trl"), columns={"answer": "rows.jsonl:2", "messages": None}) as it:
            details = Details(MESSAGES)
            calls = (it.score("p", "c", row, details) for row in ({"answer": "ab"}, {}))
            return await asyncio.gather(*calls)

    assert values(asyncio.run(run())) == [0.2, 0.4], "the length of `None` as text"


def test_the_pool_tells_how_each_reward_is_called():
    async def run():
        async with started(spec("length"), spec("as_trl", "a", batch_size=9), spec("as_trl_later", "b")) as it:
            return it.forms

    assert asyncio.run(run()) == ("one at a time", "in batches of up to 9", "in batches of up to 512, async")
