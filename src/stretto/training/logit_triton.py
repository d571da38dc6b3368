"""The Triton kernels of `logit_kernels`. Imported only to run them, because Triton is not installed everywhere."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scaled(raw, slope, inside, outside, CAPPED: tl.constexpr):  # noqa: N803
    """The scaled logits, and the factor of their slope due to the cap."""
    if CAPPED:
        bounded = 1.0 - 2.0 / (tl.exp(2.0 * raw * inside) + 1.0)  # tanh; correct at both infinities of the exponential
        return bounded * outside, 1.0 - bounded * bounded
    else:
        return raw * slope, 1.0


@triton.jit
def reduce_kernel(
    logits,  # [rows, VOCABULARY]
    deltas,  # same shape; may be the logits
    targets,
    logprobs,
    normalizers,
    entropies,
    slope,
    inside,
    outside,
    VOCABULARY: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    DELTA: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program for each row: the sums of the softmax in one pass, the derivative in a second."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * VOCABULARY
    target = tl.load(targets + row)
    chosen, _first = _scaled(tl.load(line + target).to(tl.float32), slope, inside, outside, CAPPED)
    highest = float("-inf")
    total = 0.0  # sum of exp(logit - highest)
    moment = 0.0  # sum of logit * exp(logit - highest)
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        valid = columns < VOCABULARY
        raw = tl.load(line + columns, mask=valid, other=0.0).to(tl.float32)
        scaled, _ = _scaled(raw, slope, inside, outside, CAPPED)
        above = tl.maximum(highest, tl.max(tl.where(valid, scaled, float("-inf")), 0))
        shrink = tl.exp(highest - above)
        masses = tl.where(valid, tl.exp(scaled - above), 0.0)
        total = total * shrink + tl.sum(masses, 0)
        moment = moment * shrink + tl.sum(masses * scaled, 0)
        highest = above
    normalizer = highest + tl.log(total)
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(normalizers + row, normalizer)
    tl.store(entropies + row, normalizer - moment / total)
    if DELTA:
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            valid = columns < VOCABULARY
            raw = tl.load(line + columns, mask=valid, other=0.0).to(tl.float32)
            scaled, bend = _scaled(raw, slope, inside, outside, CAPPED)
            delta = (tl.where(columns == target, 1.0, 0.0) - tl.exp(scaled - normalizer)) * slope * bend
            tl.store(deltas + row * VOCABULARY + columns, delta.to(deltas.dtype.element_ty), mask=valid)


@triton.jit
def deltas_kernel(
    logits,  # [rows, VOCABULARY]
    deltas,  # same shape; may be the logits
    targets,
    normalizers,
    factors,
    slope,
    inside,
    outside,
    VOCABULARY: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program for each block of a row: the derivative times the row's factor."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < VOCABULARY
    place = row * VOCABULARY + columns
    raw = tl.load(logits + place, mask=valid, other=0.0).to(tl.float32)
    scaled, bend = _scaled(raw, slope, inside, outside, CAPPED)
    hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    delta = (hit - tl.exp(scaled - tl.load(normalizers + row))) * (slope * tl.load(factors + row)) * bend
    tl.store(deltas + place, delta.to(deltas.dtype.element_ty), mask=valid)
