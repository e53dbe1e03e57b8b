"""The tree of a session: an agent's requests and the policy's answers as token sequences that share their beginnings.

    question ──policy──> "<tool_call>..." ──tool's answer──> ──policy──> "42"        a leaf, hence a sample
        └──policy──> "41"                                                            a retry: another leaf
    a sub-agent's question ──policy──> ...                                           a request that continues nothing known

A node is one request: the tokens that it added, and those that the policy wrote. What the policy
wrote stays the engine's ids, log-probs and version; it is never rendered and tokenised again. Nodes
are found by text: a request continues the node whose turns its own text begins with, and only what
follows is tokenised. So a template that renders earlier turns otherwise than they were written
(without their reasoning, for one) opens a new branch, and no sample holds tokens that the policy
was not shown.

Every leaf is a sample. A turn that several leaves share is trained once, by the first of them in
the order of `leaves`, with that sample's advantage; in the others it is context. The order follows
from the tokens, not from the time at which requests came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import write
from pa_npu.samples.types import Sample, SampleBuilder, SampleTurn, num_common


@dataclass(eq=False)
class Node:
    """One request. number: in order of arrival, from 1; the root, which is none, has 0.

    context, context_text: what the request added behind its parent. written: the policy's answer.
    shown: texts that stand for the answer in a later request: its own, and the template's rendering
    of the same message where that differs in form only.
    """

    number: int
    parent: Node | None
    context: npt.NDArray[np.int32]
    context_text: str
    written: Generation | None
    shown: tuple[str, ...]
    reward: float | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def path(self) -> list[Node]:
        """The nodes from the first request to this one, without the root."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.written is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def identity(self) -> tuple[bytes, bytes]:
        """The key by which nodes of one parent are ordered."""
        written = b"" if self.written is None else self.written.tokens.tobytes()
        return self.context.tobytes(), written


class SessionTree:
    """Grows by `add`. nodes: all requests by their number, the root first."""

    def __init__(self) -> None:
        self.root = Node(0, None, np.zeros(0, np.int32), "", None, ())
        self.nodes = [self.root]

    def find(self, text: str) -> tuple[Node, int]:
        """The node whose turns the text begins with, the one that covers most of it, and where what
        is new begins.
        """

        def ends(child: Node, start: int) -> list[int]:
            begin = start + len(child.context_text)
            shown = child.shown if text.startswith(child.context_text, start) else ()
            return [begin + len(answer) for answer in shown if text.startswith(answer, begin)]

        return self._furthest(ends)

    def find_tokens(self, tokens: npt.NDArray[np.int32]) -> tuple[Node, int]:
        """The same for a request of token ids."""

        def ends(child: Node, start: int) -> list[int]:
            assert child.written is not None
            own = np.concatenate([child.context, child.written.tokens])
            return (
                [start + len(own)] if np.array_equal(tokens[start : start + len(own)], own) else []
            )

        return self._furthest(ends)

    def _furthest(self, ends: Callable[[Node, int], Sequence[int]]) -> tuple[Node, int]:
        """The node that a request reaches furthest through, and where. ends: where a child's turn
        ends that begins at a place.
        """
        best, most = self.root, 0
        stack = [(self.root, 0)]
        while stack:
            node, start = stack.pop()
            if start > most:
                best, most = node, start
            for child in reversed(node.children):
                stack += [(child, end) for end in ends(child, start)]
        return best, most

    def tokens(self, node: Node) -> npt.NDArray[np.int32]:
        """All tokens from the first request's to the last that the node's answer has."""
        parts = [
            part
            for one in node.path
            if one.written is not None
            for part in (one.context, one.written.tokens)
        ]
        return np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, np.int32)

    def add(
        self,
        parent: Node,
        context: npt.NDArray[np.int32],
        context_text: str,
        written: Generation,
        shown: Sequence[str],
    ) -> Node:
        node = Node(
            len(self.nodes), parent, context, context_text, written, tuple(dict.fromkeys(shown))
        )
        parent.children.append(node)
        self.nodes.append(node)
        return node

    @property
    def num_written(self) -> int:
        """Tokens that the policy has written, in all turns."""
        return sum(len(node.written.tokens) for node in self.nodes if node.written is not None)

    def leaves(self) -> Iterator[Node]:
        """Nodes that nothing continues, depth first: leaves that share turns follow one another."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.children:
                stack += sorted(node.children, key=lambda child: child.identity, reverse=True)
            elif node.written is not None:
                yield node

    @property
    def most_shown(self) -> Node:
        """The leaf whose last request showed the policy most tokens, the first of several."""
        return max(
            self.leaves(),
            key=lambda leaf: len(self.tokens(leaf.parent or self.root)) + len(leaf.context),
        )

    def samples(
        self, text: str, *, ended: bool, reward: float | None, session: int = 0
    ) -> list[Sample]:
        """One sample per leaf. text: the session's, which reward functions read. ended: by itself,
        not at a limit.
        session: its number in the group.

        reward: the session's; a leaf has that and those of the turns on its path. None leaves it to
        the reward functions.
        """
        samples = []
        trained: set[int] = set()
        places: dict[int, int] = {}  # of nodes in the order of leaves
        for leaf in self.leaves():
            path = leaf.path
            sample, turns = SampleBuilder(path[0].context), []
            for node in path:
                assert node.written is not None
                written, is_new = node.written, node.number not in trained
                if node is not path[0]:
                    sample.show(node.context)
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
            own = None if reward is None else reward + sum(node.reward or 0.0 for node in path)
            last = path[-1].written
            samples.append(
                sample.finish(ended and last is not None and last.finished, text, own, turns)
            )
        return samples


def num_unique(samples: Sequence[Sample]) -> int:
    """Tokens of all samples where those of a common beginning count once."""
    # neighbours have most in common
    ordered = sorted(samples, key=lambda sample: sample.prefix_keys.astype(np.int64).tobytes())
    return sum(len(sample.tokens) for sample in ordered) - sum(
        map(num_common, ordered, ordered[1:])
    )
