"""The reward for mathematics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.environments.rewards import mathematics
from stretto.environments.rewards.mathematics import boxed, last_boxed, last_number, matches, parse_number, reward

# -- numbers -----------------------------------------------------------------------------------------------------------

SAME = [
    ("18", "18"),
    ("18.00", "18"),
    ("18.", "18"),
    ("+18", "18"),
    ("-7", "-7"),
    ("- 7", "-7"),
    ("\u22127", "-7"),
    ("x = - 7", "-7"),
    ("x = 10/2 = 5", "5"),
    ("x = 1,000 + 234 = 1,234", "1234"),
    ("6 \\times 3 = 18 = 18.0", "18"),
    ("-(7)", "-7"),
    ("- (7)", "-7"),
    ("-[7]", "-7"),
    ("-(-7)", "7"),
    ("+(7)", "7"),
    ("x = -(7)", "-7"),
    (r"-\left(\frac{1}{2}\right)", "-1/2"),
    (r"\text{a loss of } - 7", "-7"),
    (".5", "0.5"),
    ("1,234", "1234"),
    ("1,234,567.50", "1234567.5"),
    (r"1{,}234", "1234"),
    (r"1\,234", "1234"),
    (r"\frac{3}{4}", "0.75"),
    (r"\dfrac{3}{4}", "3/4"),
    (r"\frac34", "3/4"),
    (r"-\frac{3}{4}", "-0.75"),
    (r"\frac{-3}{4}", "-0.75"),
    (r"\frac{1.5}{2}", "0.75"),
    ("3 / 4", "0.75"),
    ("6/8", "3/4"),
    (r"2\frac{1}{2}", "2.5"),
    ("2 1/2", "2.5"),
    (r"-2\frac{1}{2}", "-2.5"),
    (r"50\%", "50"),
    ("50%", "0.5"),
    ("50 percent", "50%"),
    ("0.5", "50%"),
    (r"\$18", "18"),
    ("$18.00", "18"),
    ("-$18", "-18"),
    ("€1,000", "1000"),
    ("18 dollars", "18"),
    (r"18\text{ dollars}", "18"),
    (r"\text{18 dollars}", "18"),
    (r"\textbf{18}", "18"),
    (r"18~\text{m/s}^{2}", "18"),
    (r"25\text{ cm}^2", "25"),
    ("25 cm^2", "25"),
    ("5kg", "5"),
    ("60 km/h", "60"),
    (r"90^\circ", "90"),
    ("90°", "90"),
    (r"3 \times 10^4", "30000"),
    (r"3 \cdot 10^{-2}", "0.03"),
    ("3 \u00d7 10^4", "30000"),
    ("3e4", "30000"),
    ("(18)", "18"),
    (r"\left(18\right)", "18"),
    (r"\(18\)", "18"),
    ("x = 18", "18"),
    ("x_1 = 18", "18"),
    ("18 T-shirts", "18"),
    ("18 e-mails", "18"),
    ("a 12-inch pipe", "12"),
    (r"\frac{10}{2} = 5", "5"),
    (r"\approx 3.14", "3.14"),
    ("18 apples.", "18"),
    ("100000000000000000001", "100000000000000000001"),
]
DIFFERENT = [
    ("18", "19"),
    ("18", "-18"),
    ("20-18", "18"),
    ("12 and 18", "18"),
    (r"\sqrt{18}", "18"),
    (r"18\pi", "18"),
    ("18x", "18"),
    ("2^5", "2"),
    ("2^5", "5"),
    (r"\frac{a}{18}", "18"),
    (r"\frac{18}{0}", "0"),
    ("18/0", "18"),
    ("0.5%", "50%"),
    ("0.005", "50%"),
    ("1.8", "18"),
    ("1.2.3", "1.2"),
    ("1,23", "123"),
    ("1e999", "1"),
    ("100000000000000000001", "100000000000000000000"),
    ("", "18"),
    ("   ", "18"),
    ("eighteen", "18"),
    ("-(5)", "5"),
    (r"-\left(\frac{1}{2}\right)", "1/2"),
    ("5", "-(5)"),
    ("-(-5)", "-5"),
    ("n-5", "5"),
    ("n-5", "-5"),
    ("n -5", "-5"),
    ("(a) - 5", "5"),
    ("5 - n", "5"),
    ("5 + a", "5"),
    ("±5", "5"),
    ("a/5", "5"),
    ("6", "x=5, y=6"),
    ("x=1, y=6", "x=5, y=6"),
    ("x=5, y=6", "6"),
    ("x = 5 and y = 6", "6"),
    ("x = 5; y = 6", "6"),
    ("x = 5 y = 6", "6"),
    ("100", "(0,100)"),
    ("0,100", "100"),
    ("1100", "(1,100)"),
    ("(1,100)", "1100"),
    ("[1,100]", "(1,100)"),
    ("[1,100)", "[1,100]"),
    (r"\{1,100\}", "1100"),
    ("n<5", "n>5"),
    ("n<5", "5"),
    ("5", "n>5"),
    ("n >= 5", "5"),
    ("n != 5", "5"),
    ("5!", "5"),
    ("5", "5!"),
    ("3i", "3"),
    ("3", "3i"),
    ("log 100", "100"),
    ("100", "log 100"),
    ("f(5)", "5"),
    ("5\u00b2", "5"),
    ("|-5|", "-5"),
    ("1011_2", "1011"),
    ("1011", "1011_2"),
    ("1011_3", "1011_2"),
]


@pytest.mark.parametrize(("found", "answer"), SAME)
def test_a_number_is_the_same_however_it_is_written(found: str, answer: str) -> None:
    assert matches(found, answer)
    assert reward("", f"So it is \\boxed{{{found}}}.", answer=answer) == 1.0


@pytest.mark.parametrize(("found", "answer"), DIFFERENT)
def test_another_number_or_an_expression_is_wrong(found: str, answer: str) -> None:
    assert not matches(found, answer)
    assert reward("", f"So it is \\boxed{{{found}}}.", answer=answer) == 0.0


@pytest.mark.parametrize(
    ("found", "answer", "same"),
    [
        (r"\frac{\sqrt{3}}{2}", r"\dfrac{\sqrt{3}}{2}", True),
        ("(1, 2)", "(1,2)", True),
        ("2x + 1", "2x+1", True),
        (r"\text{Tuesday}", "tuesday", True),
        ("x = 5, y = 6", "x=5, y=6", True),
        ("(0, 100)", "(0,100)", True),
        ("(1, 100)", "(1,100)", True),
        ("n < 5", "n<5", True),
        ("5!", "5!", True),
        ("1011_{2}", "1011_2", True),
        ("2x + 1", "2x + 2", False),
        ("(1, 2)", "(1, 3)", False),
    ],
)
def test_what_is_no_number_is_compared_as_text(found: str, answer: str, same: bool) -> None:
    assert matches(found, answer) is same


def test_a_sign_before_the_last_number_counts() -> None:
    assert reward("", "The answer is - 5.", answer="-5") == 1.0
    assert reward("", "The answer is - 5.", answer="5") == 0.0


def test_an_answer_may_be_a_number_in_the_file() -> None:
    assert reward("", r"\boxed{18}", answer=18) == 1.0
    assert reward("", r"\boxed{1/2}", answer=0.5) == 1.0


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_itself_with_separators_and_decimals(number: int) -> None:
    assert matches(f"{number:,}", str(number))
    assert matches(f"{number:,}.00", str(number))
    assert not matches(f"{number:,}", str(number + 1))


# -- where the answer is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"} \boxed {5} {", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\\boxed5", None),
        ("no box", None),
    ],
)
def test_the_last_complete_box_is_taken(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 20 - 5 = 15 eggs.", "15"),
        ("That is 10 - 15 apples", "15"),
        ("It fell by -15 degrees", "-15"),
        ("The answer is - 5.", "-5."),
        ("The answer is: **- 5**", "-5"),
        ("so x = - 5", "-5"),
        ("The answer is -(5)", "-5"),
        (r"The answer is $-\left(\frac{1}{2}\right)$", r"-\frac{1}{2}"),
        ("the sum of 3 and - 5", "-5"),
        ("- 5", "-5"),
        ("We get\n- 4 pears\n- 5 apples", "5"),
        ("**Total** - 5", "5"),
        ("20 - (5)", "5"),
        ("20 - -5", "-5"),
        ("The answer is $1,000.", "1,000."),
        ("that makes 3/4 of it", "3/4"),
        (r"it is \frac{3}{4} of it", r"\frac{3}{4}"),
        ("so ... 15!", "15"),
        ("so...15", "15"),
        ("an area of 25 cm^2", "25"),
        ("75% of H2O", "75%"),
        ("none at all", None),
    ],
)
def test_the_last_number_of_a_text_is_found(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_without_a_box_the_last_number_counts_and_boxed_wants_one() -> None:
    text = "First 3, then 4. The answer is 18."
    assert reward("", text, answer="18") == 1.0
    assert boxed("", text, answer="18") == 0.0
    assert reward("", text + r" \boxed{17}", answer="18") == 0.0
    assert boxed("", text + r" \boxed{18}", answer="18") == 1.0
    assert reward("", text + r" \boxed{}", answer="18") == 0.0
    assert reward("", r"\boxed{\boxed{18}}", answer="18") == 1.0


# -- odd text ----------------------------------------------------------------------------------------------------------

PIECES = [
    "1", "1 ", "1,", "1,234", "1/", "1e", "- ", "-1", ".", "{", "}", "\\", "\\boxed{", "\\boxed ", "\\text{",
    "\\frac{1}", "\\frac ", "1 \\times ", "a ^", "^{", "x ", "=", "%", "$", "\\,", "{,}", "10^", "\u0663",
    "\u00b2", "\x00", "é",
]  # fmt: skip


BEGINNINGS = [
    "", "1", "1 ", "1 1", "1/", "1,", "1x", "1x10", "1x10^", "1x10^{", "1x10^1", "^", "^{", "^\\circ", "a", "a^", "a^{",
    "a^{1", "-", "- (", "1 -", "-(1", "(", "(1,100", "_", "_{", "\\", "\\text", "\\text{", "\\frac", "\\frac{",
    "\\frac{1", "\\frac{1}", "\\frac{1}{", "\\frac{1}{1", "1\\frac", "\\boxed", "\\boxed{", "n!", "is -", "f(", "log",
]  # fmt: skip
REPEATED = [" ", "\n", "\t", "1", "(", ")", "{", "-", "- ", "^ ", "1 -(", ", "]


MOST_RATIO = 8  # of the times of a text and of four times as much: linear is 4, quadratic 16


def seconds_of(function: Callable[[str], object], texts: Sequence[str]) -> float:
    """The least processor time of three tries, which other processes of the machine hardly change."""
    tries = []
    for _ in range(3):
        began = time.process_time()
        for text in texts:
            function(text)
        tries.append(time.process_time() - began)
    return min(tries)


def assert_linear(beginning: str, piece: str, num_characters: int) -> None:
    """Asserts that the time of a reward grows with the length of the completion, and not with its square."""

    def completions(length: int) -> list[str]:
        text = beginning + piece * (length // len(piece))
        return [text, f"\\boxed{{{text}}}", f"{text} 18", f"18 {text}"]

    def score(completion: str) -> None:
        assert reward("", completion, answer="19") == 0.0

    few, many = seconds_of(score, completions(num_characters)), seconds_of(score, completions(4 * num_characters))
    assert many < MOST_RATIO * few + 0.01, piece


@pytest.mark.parametrize("piece", PIECES)
def test_the_time_of_an_odd_text_grows_with_its_length(piece: str) -> None:
    assert_linear("", piece, num_characters=8_000)


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_the_time_of_a_long_run_grows_with_its_length(beginning: str) -> None:
    for piece in REPEATED:
        assert_linear(beginning, piece, num_characters=1_000)


def test_the_time_of_nested_boxes_grows_with_their_number() -> None:
    few, many = ("\\boxed{" * count + "}" * count for count in (40_000, 160_000))
    assert seconds_of(last_boxed, [many]) < MOST_RATIO * seconds_of(last_boxed, [few])


@settings(deadline=None)  # machines are busy at times
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(["18", r"\frac{1}{2}", "50%", "x"]))
def test_no_text_makes_it_raise(text: str, answer: str) -> None:
    assert reward("", text, answer=answer) in (0.0, 1.0)
    assert boxed("", f"\\boxed{{{text}}}", answer=answer) in (0.0, 1.0)
    parse_number(text)


@given(st.text(max_size=60))
def test_every_text_is_its_own_answer(text: str) -> None:
    assert matches(text, text) or not text.strip()


# -- math-verify -------------------------------------------------------------------------------------------------------

EQUAL = [(r"\frac{\sqrt{12}}{2}", r"\sqrt{3}"), ("1 + 2x", "2x + 1"), (r"\pi \cdot 2", r"2\pi")]


@pytest.mark.parametrize(("found", "answer"), EQUAL)
def test_equal_expressions_are_right_if_math_verify_is_there(
    found: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert matches(found, answer)
    monkeypatch.setattr(mathematics, "_has_math_verify", lambda: False)
    assert not matches(found, answer)


def test_an_expression_for_a_number_is_not_the_number() -> None:
    assert not matches("6 * 200", "1200")
    assert not matches(r"\sqrt{16}", "4")


def test_math_verify_is_not_asked_where_it_has_no_deadline() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(matches(*EQUAL[0])))
    thread.start()
    thread.join()
    assert found == [False]


def test_an_expression_that_takes_for_ever_is_given_up() -> None:
    began = time.perf_counter()
    assert not matches(r"9^{9^{9^{9^{9}}}} + x", r"9^{9^{9^{9}}} + x")
    assert time.perf_counter() - began < 30.0  # three steps of two seconds each
