"""Which node spoils the sums that keepers open. Nobody sees what a node sent: it is found by who was in the rounds that failed.

In a round whose sum is too long at least one node sent something else. In the rounds that follow, half of the suspects are not
asked (other users are, or those whose next turn it is): if the sum is right, those who were asked are cleared; if not, it was one
of them. The node that is left of a failed round when all others are cleared, and that was in two failed rounds, is named and
asked no more.

That is sure of nodes that always cheat. One that cheats now and then can have another one named, as nothing here is a proof.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Self

from fedcgd.support.numbers import plural

_FEW = 3  # consumed rounds in a row without a release, where no half of the suspects can be told from the other


def node_name(node_id: int, name: str) -> str:
    """What a node is called here: its registered name, or its id, which is another one whenever it comes back."""
    return name or f"node {node_id}"


class NodeSuspects:
    """What is known of the nodes of a run, by their names: in which of its failed rounds each was, and who is suspected.

    Args:
        least: the fewest nodes whose sum is opened.

    Attributes:
        left_out: the nodes that are not asked any more.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.left_out: set[str] = set()
        self._failed: Counter[str] = Counter()
        self._unresolved: list[set[str]] = []  # of each failed round, the nodes that are not cleared since
        self._largest = 0  # nodes of a failed round
        self._in_a_row = 0

    @classmethod
    def from_description(cls, said: Mapping[str, Any], least: int) -> Self:
        """What `to_description` said; nothing is known if it is empty."""
        suspects = cls(least)
        suspects.left_out = set(said.get("left_out", ()))
        suspects._failed = Counter(said.get("failed_rounds", {}))
        suspects._unresolved = [set(nodes) for nodes in said.get("suspects", ())]
        return suspects

    def to_description(self) -> dict[str, Any]:
        """All that has to be known when the run goes on, as JSON-able values."""
        suspects = [sorted(nodes) for nodes in self._unresolved]
        return {"left_out": sorted(self.left_out), "failed_rounds": dict(self._failed), "suspects": suspects}

    def spent(self, nodes: Collection[str]) -> set[str]:
        """A round gave nothing: a sum of these nodes that was too long, or, with none, by the fault of a keeper.

        Returns:
            Who is found by it.
        """
        self._in_a_row += 1
        self._failed.update(nodes)
        self._largest = max(self._largest, len(nodes))
        if nodes:
            self._unresolved.append(set(nodes))
        return self._found()

    def released(self, nodes: Collection[str]) -> set[str]:
        """A sum of these nodes was right. The result is who is found by it."""
        self._in_a_row = 0
        self._unresolved = [left for suspects in self._unresolved if (left := suspects - set(nodes))]
        return self._found()

    def _found(self) -> set[str]:
        alone = (suspects for suspects in self._unresolved if len(suspects) == 1)
        found = {name for suspects in alone for name in suspects if self._failed[name] > 1}
        self.left_out |= found
        self._unresolved = [suspects for suspects in self._unresolved if not suspects & found]
        return found

    def to_hold_back(self) -> Iterator[set[str]]:
        """The nodes not to ask in the next round: what tells most first, and last those that are not asked at all any more."""
        suspected = Counter[str]()
        for suspects in self._unresolved:
            suspected.update(dict.fromkeys(suspects, 1 / len(suspects)))
        ranked = sorted(suspected, key=lambda name: (-suspected[name], name))
        count = len(ranked)
        if count > 1:
            # After two failures in a row more than one may cheat, and a small part that is right clears them sooner.
            for part in (3 * count // 4 if self._in_a_row > 1 else 0, (count + 1) // 2, count // 4, 1):
                if part:
                    yield self.left_out | set(ranked[:part])
        yield set(self.left_out)

    @property
    def gives_up(self) -> str:
        """Why no further round is tried; "" while there is something to find out."""
        if self._in_a_row < max(_FEW, 2 + math.ceil(math.log2(max(self._largest, 1)))):
            return ""
        told = ", ".join(f"{name}: {count}" for name, count in self._failed.most_common(10))
        history = f"; failed rounds by node: {told}" if told else ""
        return (
            f"{plural(self._in_a_row, 'round', 'rounds')} in a row {'is' if self._in_a_row == 1 else 'are'} spent without a "
            f"release, and each costs its users a turn{history}"
        )
