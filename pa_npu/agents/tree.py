"""The tree of a session: requests and answers as token sequences that share their beginnings.

    question ──policy──> "<tool_call>..." ──tool's answer──> ──policy──> "42"        a leaf, hence a sample
        └──policy──> "41"                                                            a retry: another leaf
    a sub-agent's question ──policy──> ...                                           a request that continues nothing known

A node is one request: the tokens that it added, and those that the policy wrote. Answers keep the
engine's token ids, log-probs and version; they are never rendered and tokenised again.

Nodes are found by text: a request continues the node whose turns its text begins with, and only the
rest is tokenised. A template that renders earlier turns in another form than they were written (for
example without their reasoning) therefore opens a new branch, and no sample contains tokens that
the policy was not shown.

Equal texts may show other images, so these are compared too.

Every leaf is a sample. A turn that several leaves share is trained once, with the advantage of the
first of them in the order of `leaves`; in the others it is context. The order depends on the tokens
only, not on the times of the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import write
from pa_npu.samples.attachments import Placeholders
from pa_npu.samples.shown_images import attached
from pa_npu.samples.types import Sample, SampleBuilder, SampleTurn, num_common
from pa_npu.vision.images import ShownImage


@dataclass(eq=False)
class TurnNode:
    """One request and its answer. The root is no request: it has number 0 and no answer.

    number: order of arrival, from 1.
    context, context_text: tokens and text that the request added behind its parent.
    written: the policy's answer.
    shown: texts that stand for the answer in later requests: its own text, and the template's
    rendering of the same message if that differs only in form.
    images: that the context shows, with starts counted in it.
    """

    number: int
    parent: TurnNode | None
    context: npt.NDArray[np.int32]
    context_text: str
    written: Generation | None
    shown: tuple[str, ...]
    images: tuple[ShownImage, ...] = ()
    reward: float | None = None
    children: list[TurnNode] = field(default_factory=list)

    @property
    def path(self) -> list[TurnNode]:
        """The nodes from the first request to this one, without the root."""
        nodes: list[TurnNode] = []
        node: TurnNode | None = self
        while node is not None and node.written is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    @property
    def identity(self) -> tuple[bytes, bytes, bytes]:
        """The key by which nodes of one parent are ordered."""
        written = b"" if self.written is None else self.written.tokens.tobytes()
        return self.context.tobytes(), b"".join(self.image_digests), written

    @property
    def image_digests(self) -> list[bytes]:
        return [image.file.digest for image in self.images]

    @cached_property
    def placeholders(self) -> tuple[Placeholders, ...]:
        """The images as attachments of the context. Decodes them, which takes time."""
        return attached(self.images)


class SessionTree:
    """A session's requests, which `add` extends. nodes: by their number, the root first."""

    def __init__(self) -> None:
        self.root = TurnNode(0, None, np.zeros(0, np.int32), "", None, ())
        self.nodes = [self.root]

    def find(self, text: str, images: Sequence[tuple[int, bytes]] = ()) -> tuple[TurnNode, int]:
        """Finds the node that covers most of a request's text from its beginning.

        images: place in the text and digest of each image, in order. Returns the node, and the
        position in the text at which the new part begins.
        """

        def turn_ends(child: TurnNode, start: int) -> list[int]:
            if not text.startswith(child.context_text, start):
                return []
            begin = start + len(child.context_text)
            digests = [digest for place, digest in images if start <= place < begin]
            if digests != child.image_digests:
                return []
            return [begin + len(answer) for answer in child.shown if text.startswith(answer, begin)]

        return self._find_longest(turn_ends)

    def find_tokens(self, tokens: npt.NDArray[np.int32]) -> tuple[TurnNode, int]:
        """Does the same as `find` for a request of token ids, which cannot say which images it
        shows.
        """

        def turn_ends(child: TurnNode, start: int) -> list[int]:
            assert child.written is not None
            if child.images:
                return []
            turn = np.concatenate([child.context, child.written.tokens])
            end = start + len(turn)
            return [end] if np.array_equal(tokens[start:end], turn) else []

        return self._find_longest(turn_ends)

    def _find_longest(
        self, turn_ends: Callable[[TurnNode, int], Sequence[int]]
    ) -> tuple[TurnNode, int]:
        """Finds the node that covers most of a request, and the position where it ends.

        turn_ends: returns the possible ends of a child's turn that begins at the given position.
        """
        best = self.root
        best_end = 0
        stack = [(self.root, 0)]
        while stack:
            node, start = stack.pop()
            if start > best_end:
                best = node
                best_end = start
            for child in reversed(node.children):
                stack += [(child, end) for end in turn_ends(child, start)]
        return best, best_end

    def tokens(self, node: TurnNode) -> npt.NDArray[np.int32]:
        """Returns all tokens from the first request to the end of the node's answer: [tokens]."""
        parts = [np.zeros(0, np.int32)]
        for ancestor in node.path:
            assert ancestor.written is not None
            parts += [ancestor.context, ancestor.written.tokens]
        return np.concatenate(parts, dtype=np.int32)

    def images(self, node: TurnNode) -> list[ShownImage]:
        """Returns the images of all contexts up to the node, with starts counted in `tokens`."""
        images = []
        start = 0
        for ancestor in node.path:
            assert ancestor.written is not None
            images += [image.moved(start) for image in ancestor.images]
            start += len(ancestor.context) + len(ancestor.written.tokens)
        return images

    def add(
        self,
        parent: TurnNode,
        context: npt.NDArray[np.int32],
        context_text: str,
        written: Generation,
        shown: Sequence[str],
        images: Sequence[ShownImage] = (),
    ) -> TurnNode:
        """Adds an answered request behind `parent`. The arguments are TurnNode's."""
        node = TurnNode(
            number=len(self.nodes),
            parent=parent,
            context=context,
            context_text=context_text,
            written=written,
            shown=tuple(dict.fromkeys(shown)),
            images=tuple(images),
        )
        parent.children.append(node)
        self.nodes.append(node)
        return node

    @property
    def num_written(self) -> int:
        """How many tokens the policy has written, in all turns."""
        return sum(len(node.written.tokens) for node in self.nodes if node.written is not None)

    def leaves(self) -> Iterator[TurnNode]:
        """Yields nodes without children, depth first, so that leaves with shared turns are adjacent."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.children:
                stack += sorted(node.children, key=lambda child: child.identity, reverse=True)
            elif node.written is not None:
                yield node

    @property
    def longest_leaf(self) -> TurnNode:
        """The leaf whose last request had the most tokens; the first of several."""
        return max(
            self.leaves(),
            key=lambda leaf: len(self.tokens(leaf.parent or self.root)) + len(leaf.context),
        )

    def samples(
        self, text: str, *, ended: bool, reward: float | None, session: int = 0
    ) -> list[Sample]:
        """Makes one sample per leaf.

        Args:
            text: the session's transcript, which reward functions read.
            ended: the session ended by itself, not at a limit.
            reward: the session's; a leaf gets it plus the rewards of the turns on its path. None
                leaves rewards to the reward functions.
            session: number of the session in the group.
        """
        samples = []
        trained: set[int] = set()
        places: dict[int, int] = {}  # each node's position in the order of leaves
        for leaf in self.leaves():
            path = leaf.path
            sample = SampleBuilder(path[0].context, placeholders=path[0].placeholders)
            turns = []
            for node in path:
                assert node.written is not None
                written = node.written
                is_new = node.number not in trained
                if node is not path[0]:
                    sample.show(node.context, placeholders=node.placeholders)
                if is_new:
                    write(sample, written)
                else:
                    sample.show(written.tokens, written.columns)
                place = places.setdefault(node.number, len(places))
                turns.append(
                    SampleTurn(
                        session, place, node.context_text, len(written.tokens), is_new, node.reward
                    )
                )
            trained.update(node.number for node in path)

            leaf_reward = None
            if reward is not None:
                leaf_reward = reward + sum(node.reward or 0.0 for node in path)
            assert leaf.written is not None
            finished = ended and leaf.written.finished
            samples.append(sample.finish(finished, text, leaf_reward, turns))
        return samples


def num_unique(samples: Sequence[Sample]) -> int:
    """Counts the tokens of all samples, with those of a common beginning counted once."""
    # in this order the longest common beginnings are those of neighbours
    ordered = sorted(samples, key=lambda sample: sample.prefix_keys.astype(np.int64).tobytes())
    num_tokens = sum(len(sample.tokens) for sample in ordered)
    num_shared = sum(map(num_common, ordered, ordered[1:]))
    return num_tokens - num_shared
