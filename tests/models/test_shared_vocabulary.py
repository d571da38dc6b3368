"""Tokenizers of one vocabulary, and the reasons why two are not."""

import copy
import json

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from stretto.models.shared_vocabulary import shared_vocabulary
from stretto.models.tiny import tiny_tokenizer


def changed(change):
    """The tiny tokenizer after `change` to its vocabulary."""
    found = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    change(found)
    made = Tokenizer.from_str(json.dumps(found))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def test_the_same_tokenizer_shares_all_of_its_tokens():
    assert shared_vocabulary(tiny_tokenizer(), tiny_tokenizer()) == 99


def test_a_teacher_may_have_more_tokens_than_the_student_and_not_fewer():
    larger = copy.deepcopy(tiny_tokenizer())
    larger.add_tokens(["<tool>"])
    assert shared_vocabulary(tiny_tokenizer(), larger) == 99
    with pytest.raises(ValueError, match=r"the teacher lacks 1 of 100 tokens, such as '<tool>'"):
        shared_vocabulary(larger, tiny_tokenizer())


def test_a_token_under_another_number_is_named_with_both():
    def swap(found):
        vocabulary = found["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    with pytest.raises(ValueError, match=r"2 of 99 tokens have other numbers: 'a' is \d+ and \d+"):
        shared_vocabulary(tiny_tokenizer(), changed(swap))


def test_a_special_token_must_be_special_for_both():
    marked, plain = tiny_tokenizer(), tiny_tokenizer()
    marked.add_special_tokens({"additional_special_tokens": ["<call>"]})
    plain.add_tokens(["<call>"])
    with pytest.raises(ValueError, match=r"'<call>' is a special token of the student"):
        shared_vocabulary(marked, plain)


def test_text_must_be_split_in_the_same_way():
    def split_nothing(found):
        found["pre_tokenizer"] = {"type": "Whitespace"}

    with pytest.raises(ValueError, match="split the same text"):
        shared_vocabulary(tiny_tokenizer(), changed(split_nothing))
