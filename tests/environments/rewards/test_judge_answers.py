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
        ("3 of 4 tests pass: 7", 0.7),
        ("It has 2 faults. On a scale of 10: 7", 0.7),
    ],
)
def test_the_last_number_is_the_score(answer, reward):
    assert Scale(0, 10).reward(answer) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("8 out of 10, 3 errors", 0.8),
        ("8/10 (3 errors, 2 of them large)", 0.8),
        ("8 points out of 10 with 3 errors", 0.8),
        ("Score: 8. It has 3 errors.", 0.8),
        ("**Rating:** 8, because of 3 errors", 0.8),
        ("8\n\nThere are 3 errors in it.", 0.8),
        ("Style 8/10, facts 3/10", 0.3),
        ("The style alone is 8/10.\nScore: 4", 0.4),
        ("The style alone is 8/10.\n\n**4**", 0.4),
        ("8/10. It passes 3 of 4 tests.", 0.8),
        ("It has 2 faults. On a scale of 10, it is a 7", 0.7),
    ],
)
def test_a_number_that_is_written_as_a_score_counts_before_others(answer, reward):
    assert Scale(0, 10).reward(answer) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("no idea", "it has no number"),
        ("Style 8/10. Score: 4 points out of 5", "a score of at most 5, and not 10"),
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
        ("(A)", 1.0),
        ("The answer is B.", 0.0),
        ("I choose B, since it is a good answer.", 0.0),
        ("B! B! B!", 0.0),
    ],
)
def test_an_answer_with_one_of_the_choices_names_it(answer, reward):
    assert Choices({"A": 1.0, "B": 0.0}).reward(answer) == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("There is no doubt: Yes", 1.0),
        ("There is no doubt: yes.", 1.0),
        ("There is no doubt. **Yes.**", 1.0),
        ("There is no doubt\uff1ayes", 1.0),
        ("No doubt -> yes", 1.0),
        ("Is it yes or no? Yes!", 1.0),
        ("Yes. There is no doubt.", 1.0),
        ("**Yes.** There is no doubt.", 1.0),
        ("**Verdict:** yes\n\nThere is no fault in it.", 1.0),
        ("There is no fault in it.\n\nVerdict: **yes**", 1.0),
        ("There is no fault in it.\n\n> Yes\n\n---\n", 1.0),
        ("One could say yes to the first half.\n- No", 0.0),
        ("Style: no\nFacts: no\nOverall: yes", 1.0),
        ("Verdict: yes\nIn short: yes\nI have no doubt", 1.0),
        ('There is no doubt.\n```json\n{"verdict": "yes"}\n```', 1.0),
        ("There is no doubt. <verdict>yes</verdict>", 1.0),
        ("One may say yes to a part of it, but the answer is no.", 0.0),
        ("Not yes, so my final verdict is 'no'", 0.0),
        ("Is it correct: yes or no? No.", 0.0),
        ("<think>no, no, no</think>yes", 1.0),
        ("- Yes\n- No\n\nYes", 1.0),
        ("Yes\n- No", 0.0),
        ("<facts>yes</facts>\n<verdict>no</verdict>", 0.0),
        ("_yes_", 1.0),
        ("Verdict: _yes_", 1.0),
    ],
)
def test_a_verdict_counts_before_other_words(answer, reward):
    assert Choices({"yes": 1.0, "no": 0.0}).reward(answer) == reward
    assert Choices({"no": 0.0, "yes": 1.0}).reward(answer) == reward
    assert Choices({"Yes": 1.0, "No": 0.0}).reward(answer) == reward
    assert Choices({"YES": 1.0, "NO": 0.0}).reward(answer) == reward


@pytest.mark.parametrize(
    "answer",
    [
        "yes or no",
        "- Yes\n- No",
        "Choices:\n* **Yes**\n* **No**",
        "1. Yes\n2. No",
        "yes\nno",
        "There is no reason to say yes.",
        "No one could say yes to it",
        "no or yes",
        "I say no although one may say yes",
        "It is yes, but never yes",
        "I say no, although one may say yes",
        "Correct? Yes. Complete? No.",
        "Choices: yes; no",
        "Facts: yes\nStyle: no\nThe rest is fine",
        "yes? no?",
        "There is no doubt",
        "There is no reason to say anything else.",
        "I say: not yes",
        "It isn\u2019t 'yes'",
    ],
)
def test_an_answer_without_a_clear_verdict_is_unclear(answer):
    for choices in ({"yes": 1.0, "no": 0.0}, {"Yes": 1.0, "No": 0.0}, {"YES": 1.0, "NO": 0.0}):
        with pytest.raises(UnclearError, match=r"it names .* without a clear verdict"):
            Choices(choices).reward(answer)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Yes, there is no error.", 1.0),
        ("Yes \u2014 no issues.", 1.0),
        ("No errors, so yes.", 1.0),
        ("No errors so yes.", 1.0),
        ("Yes, there is no doubt", 1.0),
        ("There is NO doubt, yes", 1.0),
        ("No it is wrong.", 0.0),
        ("No, there is no reason to say yes.", 0.0),
        ("Never yes, so no", 0.0),
    ],
)
def test_a_no_before_a_noun_and_a_word_that_is_negated_are_left_out(answer, reward):
    for choices in ({"yes": 1.0, "no": 0.0}, {"Yes": 1.0, "No": 0.0}, {"YES": 1.0, "NO": 0.0}):
        assert Choices(choices).reward(answer) == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("It is good", 1.0),
        ("It is good, and not bad", 1.0),
        ("There is no doubt that it is good", 1.0),
        ("It has no faults and is good", 1.0),
        ("It is not a good one but a bad one", 0.0),
        ("never good", None),
        ("It is no good answer", None),
        ("The style is good, but it is not good", None),
    ],
)
def test_a_negated_word_is_no_mention_of_it(answer, reward):
    choices = Choices({"good": 1.0, "bad": 0.0})
    if reward is not None:
        assert choices.reward(answer) == reward
        return
    with pytest.raises(UnclearError, match="it names good without a clear verdict"):
        choices.reward(answer)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("A good answer", None),
        ("So:\n- A fine one. A short one, too.", None),
        ("A good answer is B", 0.5),
        ("A good answer, so B", 0.5),
        ("A is a good answer", 1.0),
        ("A gives the reason.", 1.0),
        ("I prefer A since it is short", 1.0),
    ],
)
def test_an_article_at_the_start_of_a_sentence_is_no_choice(answer, reward):
    choices = Choices({"A": 1.0, "B": 0.5, "C": 0.0})
    if reward is not None:
        assert choices.reward(answer) == reward
        return
    with pytest.raises(UnclearError, match="it names A without a clear verdict"):
        choices.reward(answer)


def test_three_choices_of_a_list_are_unclear_and_two_of_them_are_not_the_list():
    choices = Choices({"A": 1.0, "B": 0.5, "C": 0.0})
    with pytest.raises(UnclearError, match="it names A, B, C without a clear verdict"):
        choices.reward("- A\n- B\n- C")
    assert choices.reward("- A\n- B") == 0.5


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("A good answer, so: B", 0.0),
        ("A is a good answer. B", 0.0),
        ("A is short, B is right.\n\nFinal verdict: [[B]]", 0.0),
        ("A is short, and B is long. Therefore the better choice is B.", 0.0),
        ("B is long; the answer is (A).", 1.0),
    ],
)
def test_a_letter_is_a_verdict_at_the_end_of_a_line(answer, reward):
    assert Choices({"A": 1.0, "B": 0.0}).reward(answer) == reward


@pytest.mark.parametrize(
    "answer",
    [
        "A. The first one is short.\nThe second, B, is right.",
        "There are two: A. It is short. B. It is long.",
        "A, B: both are good.",
        "Options: A (short) or B (long)",
        "not A",
    ],
)
def test_a_letter_before_a_sentence_may_be_a_list(answer):
    with pytest.raises(UnclearError, match="without a clear verdict"):
        Choices({"A": 1.0, "B": 0.0}).reward(answer)


def test_capitals_decide_if_there_is_no_verdict():
    choices = Choices({"YES": 1.0, "NO": 0.0})
    assert choices.reward("YES, there are no faults") == 1.0
    assert choices.reward("NO - one may say yes to the first half") == 0.0
    assert choices.reward("NO doubt: yes") == 1.0
    for answer in ("YES and NO", "Facts: yes. Style: NO."):
        with pytest.raises(UnclearError, match="without a clear verdict"):
            choices.reward(answer)


def test_choices_with_equal_rewards_count_as_one():
    choices = Choices({"yes": 1.0, "correct": 1.0, "incorrect": 0.0})
    assert choices.reward("Yes, it is correct") == 1.0
    with pytest.raises(UnclearError, match="it names yes, incorrect without a clear verdict"):
        choices.reward("Yes, it is incorrect")
    with pytest.raises(UnclearError, match="it names correct without a clear verdict"):
        choices.reward("It is not correct.")


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
    choices = Choices({"yes": 0.25, "Yes": 0.75})
    assert choices.reward("well, Yes then") == 0.75
    assert choices.reward("well, yes then") == 0.25
    with pytest.raises(UnclearError, match="it names yes, Yes without a clear verdict"):
        choices.reward("YES")


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
