"""Arrays behind placeholder tokens travel once per group, reach the rows that stand for them, and part samples of equal tokens."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from pa_npu.agents.tree import num_unique
from pa_npu.checkpoints.ahead import AheadIteration, read_ahead, write_ahead
from pa_npu.control.channel import StoreChannel
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.iterations_ahead import CARRIED_KEY, carried_of
from pa_npu.coordinator.served_run import ServedRun
from pa_npu.coordinator.token_budget import carried_fields
from pa_npu.data.prompts import Prompt
from pa_npu.rewards.functions import RewardResult
from pa_npu.samples.attachments import Attachment, Placeholders, described
from pa_npu.samples.columns import Column, GroupFormatError, RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import Microbatch, build_microbatches, cut, pack
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.types import Sample, SampleBuilder, group_lengths
from pa_npu.samples.wire import FORMAT_VERSION, from_bytes, to_bytes
from tests.helpers.attachments import (
    IMAGE,
    assert_same_attachments,
    attached_groups,
    group_of,
    image,
    shows,
    two_images,
)
from tests.unit.samples.test_types import ENVELOPE_BYTES, assert_same, signed


@given(group=attached_groups(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_attachments_survive_the_wire_bit_for_bit_whole_and_in_pieces(
    group: Group, data: st.DataObject
) -> None:
    sent = to_bytes(group)
    parsed = from_bytes(sent)
    assert_same(group, parsed)
    assert_same_attachments(group, parsed)
    assert to_bytes(parsed) == sent
    first = data.draw(st.integers(0, group.num_samples - 1))
    piece = group[first : data.draw(st.integers(first + 1, group.num_samples))]
    assert_same_attachments(piece, from_bytes(to_bytes(piece)))
    for number, sample in enumerate(piece.samples([""] * piece.num_samples)):
        # a sample of the group is a group of its own
        assert shows(sample.placeholders) == shows(group[first + number :][:1].placeholders)
    assert_same_attachments(group_of(group.samples([""] * group.num_samples)), group)


def seen(microbatch: Microbatch, row: int) -> list[tuple[Any, ...]]:
    """What a packed row sees, by position: tokens, and what those stand for that are placeholders."""
    stands_for: dict[int, tuple[Any, ...]] = {}
    for packed in microbatch.attachments:
        arrays = {
            name: (str(array.dtype), tuple(array.shape), array.numpy().tobytes())
            for name, array in packed.arrays.items()
        }
        for placeholder, place in zip(packed.rows.tolist(), packed.places.tolist(), strict=True):
            assert placeholder not in stands_for, "a row stands for one run"
            stands_for[placeholder] = (packed.length, place, arrays)
    visible = microbatch.layout.dense_mask()[row].nonzero().flatten()
    visible = visible[microbatch.layout.position_ids()[visible].argsort()]
    tokens = microbatch.tokens[visible].tolist()
    rows = visible.tolist()
    return [(token, stands_for.get(place)) for token, place in zip(tokens, rows, strict=True)]


def expected(pieces: list[Group]) -> list[list[tuple[Any, ...]]]:
    """The same from the groups: what stands before each trained token of each sample."""
    before = []
    for piece in pieces:
        for sample in piece.samples([""] * piece.num_samples):
            stands_for: list[Any] = [None] * len(sample.tokens)
            for run in sample.placeholders:
                arrays = {
                    attachment.name: (
                        f"torch.{attachment.array.dtype}",
                        attachment.array.shape,
                        attachment.array.tobytes(),
                    )
                    for attachment in run.attachments
                }
                for place in range(run.length):
                    stands_for[run.start + place] = (run.length, place, arrays)
            tokens = list(zip(sample.tokens.tolist(), stands_for, strict=True))
            before += [tokens[:place] for place in np.flatnonzero(sample.trained)]
    return before


@given(
    groups=st.lists(attached_groups(), min_size=1, max_size=2),
    shared=st.booleans(),
    in_pieces_of=st.integers(1, 4),
    pad=st.sampled_from([1, 8]),
)
@settings(max_examples=80, deadline=None)
def test_each_target_follows_from_its_own_tokens_and_its_own_arrays(
    groups: list[Group], shared: bool, in_pieces_of: int, pad: int
) -> None:
    pieces = [
        piece
        for index, group in enumerate(groups)
        for piece in cut(replace(group, index=index), in_pieces_of)
    ]
    microbatch = pack(pieces, shared, pad).to("cpu")
    targets = [seen(microbatch, row) for row in microbatch.rows.tolist()]
    assert targets == expected(pieces)
    contents = [tuple(sorted(attachment.digests.items())) for attachment in microbatch.attachments]
    lengths = [attachment.length for attachment in microbatch.attachments]
    assert len(set(zip(contents, lengths, strict=True))) == len(contents), "each once"
    tensors = {
        digest: packed.arrays[name].data_ptr()
        for packed in microbatch.attachments
        for name, digest in packed.digests.items()
    }
    for packed in microbatch.attachments:
        for name, digest in packed.digests.items():
            assert packed.arrays[name].data_ptr() == tensors[digest], "one array, one tensor"
        assert packed.rows.dtype == packed.places.dtype == torch.int64
        assert packed.rows.tolist() == sorted(packed.rows.tolist())


PROMPT, RUN_START, RUN_LENGTH = 7, 2, 4


def packed_rows(*images: int) -> int:
    """Packed rows of samples with these images in equal prompts, and with equal answers."""
    samples = [two_images(number, number) for number in images]
    assert len({sample.tokens.tobytes() for sample in samples}) == 1, "equal tokens"
    group = from_bytes(to_bytes(group_of(samples)))
    (microbatch,) = build_microbatches(group, len(images), True, 1)
    return microbatch.layout.total


def parting_from_the_image_on(monkeypatch: pytest.MonkeyPatch) -> None:
    length = len(two_images(0, 0).tokens)
    behind = length - PROMPT
    assert packed_rows(5, 5) == PROMPT + 2 * behind, "equal arrays share the prompt"
    assert packed_rows(5, 6) == RUN_START + 2 * (length - RUN_START), "others up to the image"


def test_samples_of_equal_tokens_share_up_to_the_first_placeholder_of_different_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parting_from_the_image_on(monkeypatch)
    # negative control: with digests left out of the keys two images are one, without an error
    for module in ("group", "types"):
        monkeypatch.setattr(
            f"pa_npu.samples.{module}.prefix_keys", lambda tokens, placeholders: tokens
        )
    with pytest.raises(AssertionError, match="others up to the image"):
        parting_from_the_image_on(monkeypatch)


@pytest.mark.parametrize(
    ("runs", "others"),
    [
        ([Placeholders(2, 4, image(1))], []),
        ([Placeholders(2, 4, image(1))], [Placeholders(3, 4, image(1))]),
        ([Placeholders(2, 4, image(1))], [Placeholders(2, 3, image(1))]),
        ([Placeholders(2, 4, image(1))], [Placeholders(2, 4, image(1)[:1])]),
        (
            [Placeholders(2, 4, image(1))],
            [Placeholders(2, 2, image(1)), Placeholders(4, 2, image(1))],
        ),
        (
            [Placeholders(0, 2, image(1)), Placeholders(2, 4, image(1))],
            [Placeholders(0, 2, image(1))],
        ),
    ],
    ids=["none", "later", "shorter", "one array less", "two runs", "one run less"],
)
def test_whatever_differs_of_placeholders_parts_samples_there(
    runs: list[Placeholders], others: list[Placeholders]
) -> None:
    samples = []
    for placeholders in (runs, others):
        sample = SampleBuilder(np.full(8, IMAGE, np.int32), placeholders=placeholders)
        sample.write(np.array([20, 21], np.int32), np.zeros(2, np.float32), 0)
        samples.append(sample.finish(True, ""))
    (microbatch,) = build_microbatches(group_of(samples), 2, True, 1)
    assert microbatch.layout.total == 2 + 2 * 8, "shared are two tokens"
    assert num_unique(samples) == 2 + 2 * 8
    assert [seen(microbatch, row) for row in microbatch.rows.tolist()] == expected(
        [group_of(samples)]
    )


def test_what_is_shared_is_what_costs_are_counted_by() -> None:
    """Branches of a session: the second continues the first's image, or one in its place."""

    def branch(number: int) -> Sample:
        return replace(two_images(number, number), turns=("a turn",))  # type: ignore[arg-type]

    length = len(branch(1).tokens)
    assert group_lengths([branch(1), branch(1)]) == (PROMPT, [length - PROMPT, 0])
    assert group_lengths([branch(1), branch(2)]) == (PROMPT, [length - PROMPT] * 2)
    assert num_unique([branch(1), branch(1)]) == length
    assert num_unique([branch(1), branch(2), branch(1)]) == length + length - RUN_START


def test_a_columns_context_is_that_of_the_samples_own_image() -> None:
    """Samples of equal tokens and different images have other values from the image on."""
    expert_choices = Column(
        "expert_choices", "uint8", (2,), "engine", "the router", tokens="context"
    )
    columns = RunColumns((expert_choices,))
    group = group_of([two_images(1, 1), two_images(2, 2)])
    values = np.arange(2 * len(group.tokens)).reshape(-1, 2).astype(np.uint8)
    values[group.lengths[0] : group.lengths[0] + RUN_START] = values[:RUN_START]
    group = replace(group, columns={expert_choices: values})
    arrived = from_bytes(to_bytes(group, columns), columns)
    np.testing.assert_array_equal(arrived.columns[expert_choices], values)


def test_attachments_travel_once_per_group_whatever_number_of_samples_shows_them() -> None:
    def of(num_samples: int, *, attached: bool) -> Group:
        samples = [two_images(1, 2, seed) for seed in range(num_samples)]
        if not attached:
            samples = [replace(sample, placeholders=()) for sample in samples]
        return group_of(samples)

    array_bytes = sum(attachment.array.nbytes for attachment in of(1, attached=True).attachments)
    assert array_bytes == 2 * 16 * 6 * 4 + 3 * 8, "two images, and one grid that both have"
    attached, bare = len(to_bytes(of(8, attached=True))), len(to_bytes(of(8, attached=False)))
    bindings = 8 * 4 * 12
    assert array_bytes + bindings < attached - bare < array_bytes + bindings + 500


def test_a_group_without_attachments_has_the_bytes_that_it_had() -> None:
    group = group_of([replace(two_images(1, 2, seed), placeholders=()) for seed in range(3)])
    sent = to_bytes(group)
    assert set(load(sent[ENVELOPE_BYTES:])) == {"numbers", "spans", "values", "tokens", "logprobs"}
    assert struct.unpack_from("<4sH", sent) == (b"PAGR", FORMAT_VERSION)
    old = bytearray(sent)
    struct.pack_into("<H", old, 4, 3)
    assert from_bytes(old).placeholders == () and to_bytes(from_bytes(old)) == sent


NOT_CONTIGUOUS = np.zeros((4, 6), np.float32)[:, ::2]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("a b", np.zeros(2, np.float32), "'a b': its name must be an identifier"),
        ("pixels", [1.0], "pixels: must be a numpy array, found list"),
        ("pixels", np.zeros(2, np.complex64), "pixels: its type complex64 must be .* float32"),
        ("pixels", np.zeros(2, ">f4"), "pixels: its type >f4 must be little endian"),
        ("pixels", np.array(["a"]), "pixels: its type <U1 must be"),
        ("pixels", NOT_CONTIGUOUS, r"pixels: its array \[4, 3\] is not contiguous"),
    ],
)
def test_an_array_that_cannot_travel_is_refused_where_it_is_attached(
    name: str, array: Any, message: str
) -> None:
    with pytest.raises(GroupFormatError, match=f"^attachment {message}"):
        Attachment(name, array)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (
            lambda: [Placeholders(-1, 2, image(1))],
            "from token -1 on, 2 tokens: .* token 0 or later",
        ),
        (
            lambda: [Placeholders(0, 0, image(1))],
            "from token 0 on, 0 tokens: .* at least one token",
        ),
        (lambda: [Placeholders(0, 1, ())], "at least one attachment"),
        (lambda: [Placeholders(5, 4, image(1))], "token 5 on, 4 tokens: must lie within 8 tokens"),
        (
            lambda: [Placeholders(2, 4, image(1)), Placeholders(5, 2, image(2))],
            "from token 5 on, 2 tokens: overlap those from token 2 on, 4 tokens",
        ),
        (
            lambda: [Placeholders(2, 4, image(1)), Placeholders(2, 2, image(1))],
            "from token 2 on, 4 tokens: overlap those from token 2 on, 2 tokens",
        ),
        (
            lambda: [Placeholders(2, 4, image(1)), Placeholders(2, 4, image(2)[:1])],
            "from token 2 on, 4 tokens: two attachments of the run have the name pixels",
        ),
    ],
)
def test_placeholders_that_no_tokens_can_have_are_one_line(runs: Any, message: str) -> None:
    with pytest.raises(GroupFormatError, match=message) as raised:
        SampleBuilder(np.full(8, IMAGE, np.int32), placeholders=runs())
    assert "\n" not in str(raised.value)


def test_arrays_of_other_names_that_are_given_for_the_same_tokens_join_the_run() -> None:
    pixels, grid = image(1)
    sample = SampleBuilder(
        np.full(8, IMAGE, np.int32),
        placeholders=[Placeholders(2, 4, (pixels,)), Placeholders(2, 4, (grid,))],
    )
    sample.write(np.array([1], np.int32), np.zeros(1, np.float32), 0)
    assert shows(sample.finish(True, "").placeholders) == shows(
        [Placeholders(2, 4, (grid, pixels))]
    )


def test_a_group_refuses_placeholders_across_samples_and_of_tokens_that_the_policy_wrote() -> None:
    group = group_of([two_images(1, 2), two_images(1, 2)])
    length = int(group.lengths[0])
    line = r"^group 0 of iteration 0 \(prompt 0\) placeholders from token"
    with pytest.raises(GroupFormatError, match=f"{line} {length - 1} on, .* within sample 0"):
        replace(group, placeholders=[Placeholders(length - 1, 2, image(1))])
    with pytest.raises(GroupFormatError, match=f"{line} {2 * length - 1} on, .* within"):
        replace(group, placeholders=[Placeholders(2 * length - 1, 2, image(1))])
    with pytest.raises(GroupFormatError, match=f"{line} {PROMPT - 1} on, .* the policy wrote"):
        replace(group, placeholders=[Placeholders(PROMPT - 1, 2, image(1))])


def tampered(name: str, change: Any) -> bytes:
    """A group's bytes with another tensor in them, under a checksum that is right."""
    tensors = load(to_bytes(group_of([two_images(1, 2)]))[ENVELOPE_BYTES:])
    before = tensors.pop(name)
    after = change(before.copy())
    if after is not None:
        tensors[name] = after
    return signed(save(tensors))


def with_value(place: int, value: Any) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array.flat[place] = value
        return array

    return change


def nothing(array: np.ndarray) -> None:
    return None


# numbers of arrays by first use: grid 0, pixels of the first image 1, of the second 2
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("attachments/1/pixels", with_value(3, 0.5), r"attachment 1 \(pixels\) has the digest"),
        (
            "attachments/1/pixels",
            lambda a: a.reshape(-1),
            r"attachment 1 \(pixels\) has the digest",
        ),
        ("attachments/1/pixels", lambda a: a.view("<i4"), r"attachment 1 \(pixels\) has the dig"),
        ("digests", with_value(3, 0), r"attachment 0 \(grid\) has the digest"),
        ("digests", lambda a: a[:2], r"attachments \[0, 1, 2\] for 2 digests"),
        ("digests", lambda a: a[:, :8], r"digests is U8 \[3, 8\], expected U8 \[n, 16\]"),
        ("digests", nothing, "column attachments/./[a-z]+ is unknown"),
        ("attachments/1/pixels", nothing, r"attachments \[0, 2\] for 3 digests"),
        ("placeholders", nothing, "3 attachments, of which 0 have placeholders"),
        ("placeholders", lambda a: a[:2], "3 attachments, of which 2 have placeholders"),
        ("placeholders", with_value(2, 7), "stand for attachment 7, of 3"),
        ("placeholders", with_value(2, -1), "stand for attachment -1, of 3"),
        ("placeholders", with_value(0, -3), "from token -3 on"),
        ("placeholders", with_value(1, 2**31 - 1), "must lie within 21 tokens"),
        ("placeholders", with_value(0, 3), "overlap those from token 2 on"),
        ("placeholders", with_value(2, 1), "two attachments of the run have the name pixels"),
        ("placeholders", lambda a: a.astype(np.int64), r"placeholders is I64 \[4, 3\], expected"),
    ],
)
def test_attachments_that_are_not_those_that_were_sent_are_refused(
    name: str, change: Any, message: str
) -> None:
    with pytest.raises(GroupFormatError, match=message) as raised:
        from_bytes(tampered(name, change))
    assert "\n" not in str(raised.value)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_hostile_bytes_of_attachments_raise_nothing_but_group_format_errors(
    data: st.DataObject,
) -> None:
    payload = bytearray(to_bytes(group_of([two_images(1, 2)]))[ENVELOPE_BYTES:])
    header_bytes = struct.unpack_from("<Q", payload)[0]
    for _ in range(data.draw(st.integers(1, 4))):
        # names, types and shapes stand in the header
        last = data.draw(st.sampled_from([header_bytes, len(payload) - 1]))
        payload[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    try:
        group = from_bytes(signed(bytes(payload)))
    except GroupFormatError as error:
        assert "\n" not in str(error)
        return
    assert_same_attachments(group, from_bytes(to_bytes(group)))


def test_an_array_that_was_changed_after_it_was_attached_is_named_where_it_arrives() -> None:
    group = group_of([two_images(1, 2)])
    group.attachments[1].array[0, 0] += 1
    with pytest.raises(GroupFormatError, match=r"attachment 1 \(pixels\) .* was changed after"):
        from_bytes(to_bytes(group))


def test_a_buffer_hands_attachments_to_the_microbatches_of_each_piece_once() -> None:
    """Bytes are counted as those of tokens are; a piece has the images of its own samples alone."""
    group = group_of([two_images(number, 7, number) for number in (1, 1, 2, 2)])
    buffer = RolloutBuffer(StoreChannel(dist.HashStore()), "run", 1)
    buffer.put(group, 0, 0)
    microbatches = MicrobatchIterator(
        buffer,
        replica=0,
        num_replicas=1,
        iteration=0,
        groups=1,
        order="prompt",
        responses_per_microbatch=2,
        shared_prompt=True,
        pad_multiple=8,
        timeout_s=5.0,
    )
    first, second = microbatches
    microbatches.finish()
    assert microbatches.traffic.buffer_bytes == len(to_bytes(group))
    pixels = [attachment.digest for attachment in group.attachments if attachment.name == "pixels"]
    carried = [
        [attachment.digests["pixels"] for attachment in batch.attachments]
        for batch in (first, second)
    ]
    assert carried == [[pixels[0], pixels[1]], [pixels[2], pixels[1]]]
    shared, in_each = first.attachments
    assert (len(shared.rows), len(in_each.rows)) == (RUN_LENGTH, 2 * RUN_LENGTH)
    assert in_each.places.tolist() == [0, 1, 2, 3] * 2
    for packed in first.attachments:
        assert (first.tokens[packed.rows] == IMAGE).all()


def scored_group(samples: list[Sample]) -> ScoredGroup:
    ones = np.ones(len(samples), np.float32)
    prompt = Prompt(0, samples[0].tokens[:PROMPT], "4", "what is it", {}, "data")
    result = RewardResult(ones, {"math": ones}, ones > 0, ())
    return ScoredGroup(prompt, samples, result)


def test_groups_with_attachments_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    scored = scored_group([two_images(1, 2, 0), two_images(1, 3, 1)])
    group = scored.group(0, 4, 0)
    carried = {"groups": [carried_fields(scored)], "group_tokens": 8.0}
    ahead = AheadIteration(4, {CARRIED_KEY: carried}, [], {}, [to_bytes(group)])
    write_ahead(tmp_path, [ahead])
    (read,) = read_ahead(tmp_path)
    ((restored,), group_tokens) = carried_of(read)
    assert group_tokens == 8.0
    assert_same_attachments(restored.group(0, 4, 0), group)
    assert to_bytes(restored.group(0, 4, 0)) == to_bytes(group)
    newer = bytearray(to_bytes(group))
    struct.pack_into("<H", newer, 4, FORMAT_VERSION + 1)
    write_ahead(tmp_path, [replace(ahead, groups=[bytes(newer)])])
    with pytest.raises(GroupFormatError, match=f"format version {FORMAT_VERSION + 1} .* reads"):
        carried_of(*read_ahead(tmp_path))


def test_records_have_where_attachments_stand_and_what_they_are_and_no_values() -> None:
    sample = two_images(1, 2)
    rows = described(sample.placeholders)
    assert [(row["start"], row["length"], row["name"]) for row in rows] == [
        (2, 4, "grid"),
        (2, 4, "pixels"),
        (13, 4, "grid"),
        (13, 4, "pixels"),
    ]
    assert rows[1]["shape"] == [16, 6] and rows[1]["dtype"] == "float32"
    assert rows[1]["digest"] == image(1)[0].digest.hex() != rows[3]["digest"]
    assert re.fullmatch("[0-9a-f]{32}", rows[1]["digest"])


def test_groups_that_are_kept_for_other_programs_hold_no_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to a thousand groups are kept, and images of as many would fill the memory."""
    monkeypatch.setattr("pa_npu.coordinator.served_run.Chat", lambda *_: None)
    nothing_else: dict[str, Any] = {"config": None, "pool": None, "sampling": None}
    served = ServedRun(**nothing_else, tokenizer=None)
    scored = scored_group([two_images(1, 2, 0), two_images(1, 3, 1)])
    group = scored.group(0, 4, 0)
    served.delivered(group, scored)
    (kept,) = served._kept
    assert not kept.group.placeholders and not kept.group.attachments
    assert kept.column("tokens") == group.tokens.tolist()
    rows = json.loads(json.dumps(kept.column("about")))["attachments"]
    assert rows == [described(sample.placeholders) for sample in scored.samples]


def test_a_digest_is_of_name_type_shape_and_bytes() -> None:
    array = np.arange(6, dtype=np.int32)
    digests = {
        Attachment("a", array).digest,
        Attachment("b", array).digest,
        Attachment("a", array.reshape(2, 3)).digest,
        Attachment("a", array.view(np.uint32)).digest,
        Attachment("a", array + 1).digest,
    }
    assert len(digests) == 5
    assert Attachment("a", array.copy()).digest == Attachment("a", array).digest
