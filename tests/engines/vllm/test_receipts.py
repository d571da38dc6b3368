"""Receipts: rounding passes, other weights do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stretto.engines.vllm.receipts import TOLERANCES, make_receipt
from stretto.errors import ChecksumError
from stretto.types import Probe

TOKENS = tuple(range(65))
LOGPROBS = -np.random.default_rng(0).exponential(3.0, 64).astype(np.float32)


def receipt(found: Any, dtype: str = "float32", others: Any = None) -> Any:
    return make_receipt(
        version=3,
        checksum="abc",
        probe=Probe(TOKENS, LOGPROBS),
        found=found,
        others=others or {},
        dtype=dtype,
        served_by="vllm 0.32.0",
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rounding_is_within_the_tolerance_of_each_type(dtype: str) -> None:
    noise = np.random.default_rng(1).normal(0.0, 0.5 * TOLERANCES[dtype], 64)
    made = receipt((LOGPROBS + noise).tolist(), dtype)
    assert made.mean_difference == pytest.approx(np.abs(noise).mean(), rel=1e-2)
    assert (made.version, made.checksum, made.num_tokens) == (3, "abc", 64)
    assert made.id != receipt(LOGPROBS.tolist(), dtype).id


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_shift_of_twice_the_tolerance_is_refused(dtype: str) -> None:
    with pytest.raises(ChecksumError, match="version 3 is not what the engine serves"):
        receipt((LOGPROBS + 2 * TOLERANCES[dtype]).tolist(), dtype)


def test_one_token_that_is_far_off_is_refused() -> None:
    found = LOGPROBS.copy()
    found[7] -= 0.005
    with pytest.raises(ChecksumError, match="at most"):
        receipt(found.tolist())


@pytest.mark.parametrize("found", [[], LOGPROBS[:-1].tolist(), [float("nan")] * 64])
def test_an_answer_that_is_no_answer_is_refused(found: list[float]) -> None:
    with pytest.raises(ChecksumError, match="answers the probe with"):
        receipt(found)


def test_a_probe_that_the_trainer_has_no_numbers_for_is_refused() -> None:
    probe = Probe(TOKENS, np.full(64, np.nan, dtype=np.float32))
    with pytest.raises(ChecksumError, match="version 3 is not what the engine serves"):
        make_receipt(
            version=3, checksum="abc", probe=probe, found=LOGPROBS.tolist(), others={}, dtype="float32", served_by="v"
        )


def test_a_version_that_is_loaded_again_has_the_digest_that_it_had() -> None:
    def again(**digests: Any) -> Any:
        return make_receipt(
            version=3, checksum="abc", probe=Probe(TOKENS, LOGPROBS), found=LOGPROBS.tolist(), others={},
            dtype="float32", served_by="vllm 0.32.0", layout="2 x cuda, float32", **digests,
        )  # fmt: skip

    assert again(held="aa", first_held="aa").held == "aa"
    assert again(held="aa").layout == "2 x cuda, float32"
    assert again(held=None, first_held="aa").held is None, "the release has none"
    with pytest.raises(ChecksumError, match="have the digest `bb`, and had `aa` when it was loaded before"):
        again(held="bb", first_held="aa")


def test_two_versions_that_the_trainer_tells_apart_cannot_have_one_answer() -> None:
    """In half precision one update may change less than rounding does."""
    other = Probe(TOKENS, LOGPROBS + np.float32(1e-3))
    answer = (LOGPROBS + np.float32(5e-4)).tolist()
    with pytest.raises(ChecksumError, match="exactly as version 2"):
        receipt(answer, "bfloat16", {2: (other, answer)})
    assert receipt(answer, "bfloat16", {2: (other, (LOGPROBS + np.float32(6e-4)).tolist())})
    assert receipt(answer, "bfloat16", {2: (Probe(TOKENS, LOGPROBS), answer)}), "the same weights twice"
