import numpy as np
import pytest

from stretto.training.loss_averaging import token_weights


def test_token_weights_give_every_token_or_every_sequence_the_same_say():
    lengths = np.array([1, 3, 0])
    assert token_weights(lengths, "token").tolist() == [0.25, 0.25, 0.25]
    assert np.allclose(token_weights(lengths, "sequence"), [1 / 3, 1 / 9, 0])
    assert token_weights(np.array([0, 0]), "token").tolist() == [1.0, 1.0]


def test_a_constant_average_depends_on_the_number_of_sequences_and_not_on_their_lengths():
    assert token_weights(np.array([1, 3, 0]), "constant", 10).tolist() == pytest.approx([1 / 30] * 3)
    assert token_weights(np.array([9, 9, 9]), "constant", 10).tolist() == pytest.approx([1 / 30] * 3)
    with pytest.raises(ValueError, match="`average_tokens`"):
        token_weights(np.array([1]), "constant")
