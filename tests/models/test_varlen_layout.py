"""Layouts of sequences that continue a shared prefix: their keys, their gradients, and attention over both."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from stretto.models.varlen_attention import causal_varlen
from stretto.models.varlen_copies import expanded, reduced
from stretto.models.varlen_layout import Copies, ragged_arange, varlen_layout

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@st.composite
def pieces(draw):
    """Lengths of sequences and the prefixes that they continue: a family is its prefix and sequences behind it."""
    lengths, prefixes = [], []
    for family in draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)):
        place = len(lengths)
        lengths.append(draw(st.integers(1, 9)))
        prefixes.append(-1)
        lengths += draw(st.lists(st.integers(1, 9), min_size=family, max_size=family))
        prefixes += [place] * family
    return np.array(lengths), np.array(prefixes)


def whole_sequences(lengths, prefixes):
    """The tokens that each sequence attends to, as indices."""
    starts = np.cumsum(lengths) - lengths
    own = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return [
        each if prefix < 0 else np.concatenate([own[prefix], each]) for each, prefix in zip(own, prefixes, strict=True)
    ]


def copies_of(layout, tokens):
    return Copies.of(layout.copies, tokens, *layout.sizes.tolist()[1:])


@given(pieces())
def test_keys_are_those_of_the_prefix_and_the_sequences_own(made):
    lengths, prefixes = made
    layout = varlen_layout(lengths, prefixes)
    expected = whole_sequences(lengths, prefixes)
    assert layout.ends[0].diff().tolist() == lengths.tolist()
    assert layout.ends[1].diff().tolist() == [len(each) for each in expected]
    assert layout.sizes[0] >= max(len(each) for each in expected)
    assert len(layout.copies) > 1, "a compiled graph treats 0 and 1 as cases of their own"
    if (prefixes >= 0).any():
        tokens = int(lengths.sum())
        copies = copies_of(layout, tokens)
        assert copies.sources.tolist() == np.concatenate(expected).tolist()
        assert copies.sources[copies.places].tolist() == list(range(tokens))
        every = [place for place, row in zip(copies.places.tolist(), copies.rows.tolist(), strict=True) if row < 0]
        for place, row in zip(copies.places.tolist(), copies.rows.tolist(), strict=True):
            firsts = [] if row < 0 else [first for first in copies.table[row].tolist() if first >= 0]
            assert not firsts or firsts[0] <= place
            every += [first + place - firsts[0] for first in firsts]
        assert sorted(every) == list(range(len(copies.sources))), "each key counts once in a sum"
    else:
        assert layout.sizes.tolist() == [128, 0, 0]


@given(pieces(), st.sampled_from([torch.float64, torch.float32]))
def test_copies_are_rows_of_their_tokens_and_gradients_are_summed_over_them(made, dtype):
    lengths, prefixes = made
    if not (prefixes >= 0).any():
        return
    tokens = int(lengths.sum())
    layout = varlen_layout(lengths, prefixes)
    _, num_keys, most = layout.sizes.tolist()
    rows = [torch.randn(tokens, 2, 3, dtype=dtype, requires_grad=True) for _ in range(2)]
    keys = [each[np.concatenate(whole_sequences(lengths, prefixes))] for each in rows]
    for one, other in zip(expanded(*rows, layout.copies, num_keys), keys, strict=True):
        assert torch.equal(one, other)
    upstream = [torch.randn_like(each) for each in keys]
    sums = reduced(*upstream, tokens, layout.copies, most)
    for one, other in zip(sums, torch.autograd.grad(keys, rows, upstream), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def attention(lengths, prefixes, states, scale):
    """The attention of whole sequences, of which the tokens of each sequence's own are taken."""
    query, key, value = states
    parts = []
    for tokens, length in zip(whole_sequences(lengths, prefixes), lengths, strict=True):
        q, k, v = (each[tokens].transpose(0, 1) for each in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out.transpose(0, 1)[-int(length) :])
    return torch.cat(parts)


def compared(device, dtype, lengths, prefixes, size=8):
    torch.manual_seed(0)
    layout = varlen_layout(lengths, prefixes).to(device)
    states = [torch.randn(int(lengths.sum()), heads, size, device=device, dtype=dtype) for heads in (4, 2, 2)]
    upstream = torch.randn_like(states[0])
    found = []
    for wide, compute in (
        (dtype, lambda *inputs: causal_varlen(*inputs, *layout, 0.3)[0]),
        (torch.float64, lambda *inputs: attention(lengths, prefixes, inputs, 0.3)),
    ):
        inputs = [each.to(wide).requires_grad_() for each in states]
        out = compute(*inputs)
        found.append([out, *torch.autograd.grad(out, inputs, upstream.to(wide))])
    pairs = ((one.detach().double(), other.detach()) for one, other in zip(*found, strict=True))
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


LENGTHS, PREFIXES = np.array([30, 7, 1, 64, 5, 21, 3, 40]), np.array([-1, 0, 0, 0, -1, -1, 5, 5])


def test_attention_and_its_gradients_are_those_of_whole_sequences():
    assert max(compared("cpu", torch.float64, LENGTHS, PREFIXES)) < 1e-12


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_over_prefixes_is_that_of_whole_sequences(dtype):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 400, 40)
    prefixes = np.repeat(np.arange(0, 40, 8), 8)
    prefixes[::8] = -1
    assert max(compared("cuda", dtype, lengths, prefixes, size=64)) < 1e-2


def test_a_ragged_range_counts_each_length_anew():
    assert ragged_arange(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert ragged_arange(np.array([], dtype=np.int64)).tolist() == []
