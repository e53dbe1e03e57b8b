"""PrefixLayout against brute force over random forests, and its refusals."""

from __future__ import annotations

import dataclasses
import pickle
import random

import pytest
import torch

from pa_npu.attention import PrefixLayout
from pa_npu.attention.layout import compress
from pa_npu.attention.trie import pack
from pa_npu.families.shape import FlopsModel
from tools.groups import pairs, separate, step_flops


def random_layout(seed: int) -> PrefixLayout:
    """A forest of up to 12 segments in depth-first order, empty ones and several roots included."""
    generator = random.Random(seed)
    parents, path = [-1], [0]
    for segment in range(1, generator.randint(2, 12)):
        parent = -1 if generator.random() < 0.15 else generator.choice(path)
        parents.append(parent)
        path = [*path[: path.index(parent) + 1], segment] if parent >= 0 else [segment]
    return PrefixLayout(
        tuple(generator.choice([0, 1, 2, 3, 7, 16]) for _ in parents), tuple(parents)
    )


LAYOUTS = [random_layout(seed) for seed in range(60)]


def brute_force_mask(layout: PrefixLayout) -> torch.Tensor:
    """From the definition, token by token: an ancestor's token, or an earlier one of the own
    segment.
    """
    owner = [segment for segment, length in enumerate(layout.lengths) for _ in range(length)]
    mask = torch.zeros(len(owner), len(owner), dtype=torch.bool)
    for row, segment in enumerate(owner):
        ancestors = set()
        parent = layout.parents[segment]
        while parent >= 0:
            ancestors.add(parent)
            parent = layout.parents[parent]
        for column, other in enumerate(owner):
            mask[row, column] = other in ancestors or (other == segment and column <= row)
    return mask


def same_attention(a: PrefixLayout, b: PrefixLayout) -> bool:
    return (
        torch.equal(a.dense_mask(), b.dense_mask())
        and torch.equal(a.position_ids(), b.position_ids())
        and torch.equal(a.predictor_rows(), b.predictor_rows())
        and pairs(a) == pairs(b)
    )


def test_the_group_of_the_docstring():
    layout = PrefixLayout.from_groups([(4, [2, 3])])
    assert (layout.lengths, layout.parents) == ((4, 2, 3), (-1, 0, 0))
    assert layout.position_ids().tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert layout.predictor_rows().tolist() == [-1, 0, 1, 2, 3, 4, 3, 6, 7]
    assert (layout.total, layout.leaves, separate(layout).lengths) == (9, (1, 2), (6, 7))
    assert pairs(layout) == 10 + (2 * 4 + 3) + (3 * 4 + 6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_and_pairs_follow_the_definition(layout):
    mask = brute_force_mask(layout)
    assert torch.equal(layout.dense_mask(), mask)
    assert pairs(layout) == int(mask.sum())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sequence_reads_as_if_it_were_alone(layout):
    """Along each leaf's path: positions count from 0, each token is predicted by the one before,
    masks are causal.
    """
    for leaf in layout.leaves:
        rows = layout.path_rows(leaf)
        assert layout.position_ids()[rows].tolist() == list(range(len(rows)))
        assert layout.predictor_rows()[rows].tolist() == [-1, *rows.tolist()][: len(rows)]
        assert torch.equal(
            layout.dense_mask()[rows][:, rows], torch.ones(len(rows), len(rows)).tril().bool()
        )
    lengths = [len(layout.path_rows(leaf)) for leaf in layout.leaves]
    assert separate(layout) == PrefixLayout.from_sequences(lengths)
    assert layout.longest >= max(lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compress_changes_no_row(layout):
    assert same_attention(compress(layout), layout)
    assert len(compress(layout).leaves) == len(layout.leaves)
    assert compress(compress(layout)) == compress(layout)


def test_compress_leaves_a_single_sequence_of_a_single_response():
    assert compress(PrefixLayout.from_groups([(512, [256])])) == PrefixLayout.from_sequences([768])
    assert compress(PrefixLayout((2, 3, 1), (-1, 0, 1))) == PrefixLayout.from_sequences([6])
    assert compress(PrefixLayout((3, 0, 2, 4), (-1, 0, 1, 1))) == PrefixLayout(
        (3, 2, 4), (-1, 0, 0)
    )


def test_pad_adds_a_root_that_nobody_sees():
    layout = PrefixLayout.from_groups([(5, [2, 3]), (1, [1])])
    padded = layout.pad(8)
    assert (padded.total, padded.padding, padded.lengths[-1], padded.parents[-1]) == (16, 4, 4, -1)
    assert not padded.dense_mask()[:12, 12:].any() and not padded.dense_mask()[12:, :12].any()
    assert torch.equal(padded.position_ids()[:12], layout.position_ids())
    assert padded.predictor_rows()[12:].tolist() == [-1] * 4
    assert separate(padded) == separate(layout)
    assert padded.pad(4) is padded and layout.pad(1) is layout
    assert compress(padded).padding == 4
    with pytest.raises(ValueError, match="already ends in 4 pad tokens"):
        padded.pad(5)


@pytest.mark.parametrize("min_shared", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_trie_of_tokens_gives_every_sequence_back(seed, min_shared):
    generator = random.Random(seed)
    sequences = [
        [generator.randint(0, 2) for _ in range(generator.randint(1, 9))] for _ in range(12)
    ]
    packed = pack(sequences, min_shared)
    for sequence, leaf in zip(sequences, packed.leaves, strict=True):
        assert packed.tokens[packed.layout.path_rows(leaf)].tolist() == sequence
    assert sorted(packed.leaves) == list(packed.layout.leaves)
    shared = set(packed.layout.parents) - {-1}
    assert all(packed.layout.lengths[segment] >= min_shared for segment in shared)
    # then it is the minimal trie: as many tokens as there are distinct prefixes
    if min_shared == 1:
        prefixes = {
            tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)
        }
        assert packed.layout.total == len(prefixes)


def test_trie_shares_below_a_short_common_prefix():
    """[1] is too short to share, but the longer prefixes [1, 2, 3] and [1, 4, 5] inside it are not."""
    packed = pack([[1, 2, 3, 8], [1, 4, 5, 8], [1, 2, 3, 9], [1, 4, 5, 9]], min_shared=3)
    assert packed.layout == PrefixLayout((3, 1, 1, 3, 1, 1), (-1, 0, 0, -1, 3, 3))
    assert packed.leaves == (1, 4, 2, 5)


def test_trie_takes_long_chains():
    sequences = [list(range(length)) for length in range(1, 1100)]
    assert pack(sequences).layout.total == 1099


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((), (), "segment 0: a layout needs at least one segment"),
        ((3, 2), (-1,), "segment 1: 2 lengths for 1 parents"),
        ((3, -2), (-1, 0), "segment 1: length -2 must not be negative"),
        ((3, 2.5), (-1, 0), "segment 1: length 2.5 must be an integer"),
        ((3, 2), (-1, 1), "segment 1: parent 1 must be -1 or an earlier segment"),
        ((3, 2), (-1, -2), "segment 1: parent -2 must be -1 or an earlier segment"),
        ((3, 2, 1, 1), (-1, 0, 0, 1), "segment 3: parent 1 is not an ancestor of segment 2"),
        ((3, 2, 1), (-1, -1, 0), "segment 2: parent 0 is not an ancestor of segment 1"),
    ],
)
def test_refuses_a_bad_segment_by_its_number(lengths, parents, message):
    with pytest.raises(ValueError, match=message):
        PrefixLayout(lengths, parents)


def test_refuses_bad_arguments():
    layout = PrefixLayout.from_sequences([3])
    with pytest.raises(ValueError, match="segment 0: padding 2 needs a last segment"):
        PrefixLayout((3,), (-1,), padding=2)
    with pytest.raises(ValueError, match="pad: multiple 0"):
        layout.pad(0)
    with pytest.raises(ValueError, match="sequence 1: must be a non-empty list of integers"):
        pack([[1], []])


def test_is_a_value():
    layout = PrefixLayout.from_groups([(4, [2, 3])])
    layout.position_ids()
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout and hash(copy) == hash(layout) and not copy._cache
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.lengths = (1,)


def test_index_tensors_are_built_once_per_device():
    layout = PrefixLayout.from_groups([(4, [2, 3])])
    assert layout.position_ids() is layout.position_ids("cpu")
    assert layout.predictor_rows("meta") is layout.predictor_rows("meta")
    assert layout.predictor_rows("meta").device.type == "meta"


def test_flops_of_the_groups_that_everybody_quotes():
    """Ideal speed-ups of a 7B-like model, from the formulas P^2/2 + sum(R^2/2 + P R) and P + sum R."""
    shape = FlopsModel(28, 3584, 18944, 28, 4, 128, vocab_size=152064)
    for prompt, response, group, expected in (
        (256, 1024, 8, 1.19),
        (1024, 1024, 16, 1.78),
        (1024, 8192, 16, 1.09),
    ):
        layout = PrefixLayout.from_groups([(prompt, [response] * group)])
        tokens = prompt + group * response
        visible = prompt * (prompt + 1) / 2 + group * (
            response * (response + 1) / 2 + prompt * response
        )
        assert (layout.total, pairs(layout)) == (tokens, visible)
        speedup = step_flops(shape, separate(layout), group * response) / step_flops(
            shape, layout, group * response
        )
        assert speedup == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("layout", LAYOUTS[:10])
def test_flex_mask_of_the_benchmark_is_the_dense_mask(layout):
    from torch.nn.attention.flex_attention import create_mask

    from tools.bench_attention import flex_mask

    mask_function = flex_mask(layout, torch.device("cpu"))
    mask = create_mask(mask_function, 1, 1, layout.total, layout.total, device="cpu")[0, 0]
    assert torch.equal(mask, layout.dense_mask())
