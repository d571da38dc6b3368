"""Errors as people read them."""

from __future__ import annotations

import pickle

import pytest

from stretto.errors import LateRewardError, RecipeError, StrettoError, describe, first_line


@pytest.mark.parametrize("kind", [StrettoError, RecipeError, LateRewardError])
def test_a_number_of_hundreds_of_digits_is_shortened_in_every_message(kind: type[StrettoError]) -> None:
    error = kind(f"`seed = -{'7' * 150}{'8' * 151}` is too small, and 9223372036854775807 is the largest")
    said = "`seed = -777777...888888 (301 digits)` is too small, and 9223372036854775807 is the largest"
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert (str(each), describe(each), first_line(each)) == (said, said, said)
