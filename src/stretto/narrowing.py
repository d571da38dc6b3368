"""Weights in float16, which ends at 65,504 and knows nothing but zero below 3e-8.

Trained weights lie far inside, so a model that does not fit is told of when it is loaded, by the name of the tensor.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from stretto.checksums import all_finite
from stretto.errors import ModelError

LOST_SHARE = 0.01  # of a tensor's values that become zero, from where on it is worth a warning

_log = logging.getLogger(__name__)


def range_hint(dtype: torch.dtype) -> str:
    """What to try, at the end of a message about numbers that are not finite or not right; nothing but for float16."""
    return '; float16 ends at 65,504: try `model.dtype = "bfloat16"`' if dtype == torch.float16 else ""


@torch.no_grad()
def narrow_weights(model: Any, what: str) -> None:
    """Bring the parameters of a model to float16, in place, and what is saved beside them.

    Raises `ModelError`, which begins with `what`, where a value is beyond the range of float16.
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
