"""The reward for mathematics and the preparation of GSM8K, which are examples that recipes name."""

from __future__ import annotations

import json
import sys
import time
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))  # the examples are no part of the package

from examples import gsm8k
from examples.math_reward import boxed, last_boxed, last_number, matches, parse_number, reward

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
        ("2x + 1", "2x + 2", False),
        ("(1, 2)", "(1, 3)", False),
    ],
)
def test_what_is_no_number_is_compared_as_text(found: str, answer: str, same: bool) -> None:
    assert matches(found, answer) is same


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


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_odd_text_is_scored_in_no_time(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    began = time.perf_counter()
    for completion in (text, f"\\boxed{{{text}}}", f"{text} 18", f"18 {text}"):
        assert reward("", completion, answer="19") == 0.0
    assert time.perf_counter() - began < 5.0  # 0.5 s here; a quadratic expression takes minutes


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(["18", r"\frac{1}{2}", "50%", "x"]))
def test_no_text_makes_it_raise(text: str, answer: str) -> None:
    assert reward("", text, answer=answer) in (0.0, 1.0)
    assert boxed("", f"\\boxed{{{text}}}", answer=answer) in (0.0, 1.0)
    parse_number(text)


@given(st.text(max_size=60))
def test_every_text_is_its_own_answer(text: str) -> None:
    assert matches(text, text) or not text.strip()


# -- the files ---------------------------------------------------------------------------------------------------------

PUBLISHED = {"question": "What is 6 * 200?", "answer": "6 * 200 = <<6*200=1200>>1200\n#### 1,200"}


def published(folder: Path, **lines: str) -> Path:
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(lines.get(split, json.dumps(PUBLISHED) + "\n"), encoding="utf-8")
    return folder


def test_problems_become_rows_that_a_task_takes(tmp_path: Path) -> None:
    source = published(tmp_path / "source", train=2 * (json.dumps(PUBLISHED) + "\n"))
    assert gsm8k.main(["--from", str(source), "--out", str(tmp_path / "out")]) == 0
    counts = {}
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (tmp_path / "out" / f"{split}.jsonl").read_text().splitlines()]
        counts[split] = len(rows)
        (message,) = rows[0]["messages"]
        assert message["role"] == "user"
        assert message["content"] == PUBLISHED["question"] + (
            "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert rows[0]["answer"] == "1200"
        assert reward("", PUBLISHED["answer"], answer=rows[0]["answer"]) == 1.0
    assert counts == {"train": 2, "test": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]\n", "line 1: no JSON object"),
        ("{\n", "line 1: no JSON"),
        ('{"question": "?"}\n', "line 1: there is no text `answer`"),
        ('{"question": "?", "answer": "12"}\n', "`answer` has no number after `####`"),
        ("", "the file is empty"),
    ],
)
def test_a_file_that_is_something_else_is_refused(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = published(tmp_path / "source", test=line)
    assert gsm8k.main(["--from", str(source), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_published_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = published(tmp_path / "source")
    assert gsm8k.main(["--from", str(source), "--out", str(source)]) == 2
    assert "choose another one" in capsys.readouterr().err
    assert json.loads((source / "train.jsonl").read_text()) == PUBLISHED


def test_a_missing_folder_and_a_missing_package_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gsm8k.main(["--from", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "train.jsonl` cannot be read" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert gsm8k.main(["--out", str(tmp_path / "out")]) == 2
    assert "`pip install datasets`, or give the folder" in capsys.readouterr().err


def test_the_hub_is_asked_for_both_splits_of_the_main_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str, *, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [PUBLISHED]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert gsm8k.main(["--out", str(tmp_path / "out")]) == 0
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert len((tmp_path / "out" / "test.jsonl").read_text().splitlines()) == 1
