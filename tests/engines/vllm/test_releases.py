"""The releases of vLLM: those that were tried are taken, the others are refused by name."""

from __future__ import annotations

import pytest

from stretto.engines.vllm.releases import check_release, refuse_top_k
from stretto.errors import RecipeError


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.26.0", "0.32.0+cu130"])
def test_releases_that_were_tried_are_taken(version: str) -> None:
    assert check_release(version) == version


def test_truncated_sampling_needs_a_release_that_tells_what_it_leaves() -> None:
    assert check_release("0.32.0", masks=True) == "0.32.0"
    with pytest.raises(RecipeError, match=r"`rollout.top_k` is refused.*vLLM 0.26.0, which does not tell"):
        check_release("0.26.0", masks=True)


def test_truncated_sampling_needs_a_gpu() -> None:
    refuse_top_k(5, "cuda")
    refuse_top_k(0, "cpu")
    with pytest.raises(RecipeError, match=r'^`rollout\.top_k = 5` is refused .* CPU.* leave it out, .* "native"`'):
        refuse_top_k(5, "cpu")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "which is not installed"),
        ("0.24.0", "exchanges the adapters of running requests"),
        ("0.25.1", "exchanges the adapters of running requests"),
        ("0.28.0", "memory that was freed"),
        ("0.33.0", "was never tried"),
        ("1.0", "was never tried"),
    ],
)
def test_others_are_refused_with_the_reason(version: str | None, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        check_release(version)
