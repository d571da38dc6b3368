"""The question to a judge, and the score in its answer."""

import pytest

from stretto.environments.rewards.judge_answers import Choices, Question, Scale, UnclearError, conversation_text, shown


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("7", 0.7),
        ("Score: 7", 0.7),
        ("**Score:** 7.5", 0.75),
        ("7/10", 0.7),
        ("I would give it 7 out of 10.", 0.7),
        ("It has 2 faults and 13 lines.\n\nFinal score: 4", 0.4),
        ("On a scale of 0 to 10: 3", 0.3),
        ("3 (on the 0-10 scale)", 0.3),
        ("0", 0.0),
        ("10", 1.0),
        ("<think>perhaps 3, or 9</think>5", 0.5),
        ("Score: 7 (out of 10)", 0.7),
        ("**7** out of **10**", 0.7),
        ("7 points out of 10", 0.7),
        ("7 on a scale of 10", 0.7),
        ("7, on a scale from 1 to 10", 0.7),
        ("It opens with <think> and does not close it: 3", 0.3),
    ],
)
def test_the_last_number_is_the_score(answer, reward):
    assert Scale(0, 10).reward(answer) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("no idea", "it has no number"),
        ("11", "its score 11 is outside of 0 to 10"),
        ("-1", "its score -1 is outside of 0 to 10"),
        ("4/5", "a score of at most 5, and not 10"),
        ("", "it has no number"),
        ("version2", "it has no number"),
        ("1,000", "it has no number"),
        ("4 (out of 5)", "a score of at most 5, and not 10"),
        ("<think>It has 7 lines, and the best have 10", "its thoughts do not end"),
    ],
)
def test_an_answer_without_a_score_is_unclear(answer, problem):
    with pytest.raises(UnclearError, match=problem):
        Scale(0, 10).reward(answer)


def test_a_scale_may_have_negative_scores():
    assert Scale(-1, 1).reward("-1") == 0
    assert Scale(-1, 1).reward("Score: 0") == 0.5


def test_a_pattern_finds_its_last_match():
    scale = Scale(0, 10, r"Score: ([0-9.]+)")
    assert scale.reward("Score: 2 ... no, Score: 8 (of 3 lines)") == 0.8
    with pytest.raises(UnclearError, match="`pattern` does not match it"):
        scale.reward("8")
    with pytest.raises(UnclearError, match="is not a number"):
        scale.reward("Score: ...")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("A", 1.0),
        ("**B**", 0.0),
        ("A good answer, so: B", 0.0),
        ("The answer is B.", 0.0),
        ("(A)", 1.0),
    ],
)
def test_the_last_word_of_the_choices_counts(answer, reward):
    assert Choices({"A": 1.0, "B": 0.0}).reward(answer) == reward


def test_thoughts_that_were_cut_have_no_choice():
    with pytest.raises(UnclearError, match="its thoughts do not end"):
        Choices({"A": 1.0, "B": 0.0}).reward("<think>A is shorter, but")
    with pytest.raises(UnclearError, match="its thoughts do not end"):
        Scale(0, 10, r"([0-9]+)").reward("<think>\nperhaps 3")


def test_longer_choices_are_found_in_any_case_and_not_within_words():
    choices = Choices({"good": 1.0, "not good": 0.0})
    assert choices.reward("It is Not Good") == 0.0
    assert choices.reward("Good!") == 1.0
    with pytest.raises(UnclearError, match="none of good, not good"):
        choices.reward("goodness")


def test_choices_that_differ_in_case_are_different():
    assert Choices({"yes": 0.25, "Yes": 0.75}).reward("well, Yes then") == 0.75


def test_a_question_is_filled_in_and_keeps_other_braces():
    question = Question('{prompt} -> {completion}, right: {answer}; {{prompt}} and {"score": 1} stay')
    made = question.fill({"prompt": "1+1", "completion": "{answer}", "answer": 2})
    assert made == '1+1 -> {answer}, right: 2; {prompt} and {"score": 1} stay'


def test_an_unknown_placeholder_names_the_nearest_column():
    problem = Question("{completion} {anwser}").problem({"answer": None, "id": None})
    assert problem is not None
    assert "did you mean `{answer}`?" in problem
    assert "there are `{prompt}`, `{completion}`, `{id}`" in (
        Question("{completion} {zzz}").problem({"id": None}) or ""
    )


def test_a_question_without_the_completion_is_refused():
    assert "it has no `{completion}`" in (Question("{prompt}").problem({}) or "")


def test_a_column_that_some_row_lacks_is_refused():
    problem = Question("{completion} {answer}").problem({"answer": "`data.jsonl`, line 3"})
    assert problem == "it has `{answer}`, a column that `data.jsonl`, line 3 does not have"
    assert Question("{completion} {answer}").problem({"answer": None}) is None


def test_a_conversation_of_one_message_is_its_text():
    assert conversation_text([{"role": "user", "content": "hello"}]) == "hello"
    several = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert conversation_text(several) == "system: be brief\n\nuser: hello"


def test_a_long_answer_is_shown_by_its_end():
    assert shown("x" * 1000 + "end").endswith("end'")
    assert len(shown("x" * 1000)) < 500
