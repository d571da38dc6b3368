"""Weights in float16, whose largest value is 65,504 and which rounds to zero below 3e-8.

Trained weights lie far inside. A model that does not fit is refused when it is loaded, with the name of the tensor.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from stretto.errors import ModelError
from stretto.models.checksums import all_finite

LOST_SHARE = 0.01  # a warning is logged if more than this share of a tensor's values become zero

_log = logging.getLogger(__name__)


def range_hint(dtype: torch.dtype) -> str:
    """Returns advice for the end of a message about wrong or infinite numbers; empty unless the type is float16."""
    return '; float16 ends at 65,504: try `model.dtype = "bfloat16"`' if dtype == torch.float16 else ""


@torch.no_grad()
def narrow_weights(model: Any, what: str) -> None:
    """Converts the parameters and saved buffers of a model to float16, in place.

    Raises `ModelError`, which begins with `what`, if a value is beyond the range of float16.
    """
    for name, parameter in model.named_parameters():
        values = parameter.data
        narrow = values.to(torch.float16)
        if not all_finite([narrow]):
            raise ModelError(
                f"{what}: `{name}` has values up to {float(values.abs().max()):.3g}, and float16 ends at 65,504: use "
                '`model.dtype = "bfloat16"`'
            )
        present = int(values.count_nonzero())
        lost = present - int(narrow.count_nonzero())
        if lost > LOST_SHARE * present:
            share = 100 * lost / present
            _log.warning(
                "%s: %.1f %% of the values of `%s` are too small for float16 and become zero; "
                '`model.dtype = "bfloat16"` keeps them', what, share, name
            )  # fmt: skip
        parameter.data = narrow
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.float16)
    model.config.dtype = torch.float16
