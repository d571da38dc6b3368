"""Batches of rows of similar length."""

from stretto.models.length_batches import length_batches


def test_batches_hold_rows_of_similar_length_within_the_limit() -> None:
    lengths = dict(enumerate([5, 100, 7, 6, 90, 300]))
    assert length_batches(lengths, 200) == [[5], [1, 4], [2, 3, 0]]
    assert length_batches({}, 200) == []
