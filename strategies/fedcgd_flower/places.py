"""At which nodes users can be asked, and at which of these each user of a round is.

Where nodes share users, a round waits for the node that has most of them; so they are spread evenly, once it is drawn who they
are. Which node trains a user changes nothing in the sum of the updates, which are integers, if a user's update has the same bits
whoever is trained beside it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heapreplace

from fedcgd_flower.user_messages import Hosted

Nodes = tuple[int, ...]
"""Ids of nodes, in ascending order; one object for all users who are at the same nodes."""


def nodes_of_users(hosted: Mapping[int, Hosted]) -> tuple[dict[str, Nodes], set[str]]:
    """(user → the nodes at which it can be asked; the users that two nodes claim and do not both share), from node → its list.

    Nodes whose list is the same object cost one list's time together.
    """
    nodes: dict[str, Nodes] = {}
    claimed_twice: set[str] = set()
    sharing: dict[int, list[int]] = {}
    for node_id, theirs in sorted(hosted.items()):
        if theirs.shared:
            sharing.setdefault(id(theirs), []).append(node_id)
            continue
        here = (node_id,)
        for user in theirs.users:
            if nodes.setdefault(user, here) is not here:
                claimed_twice.add(user)
    alone = set(nodes) if sharing else set()
    both: dict[tuple[Nodes, Nodes], Nodes] = {}
    for node_ids in sharing.values():
        where = tuple(node_ids)
        for user in hosted[where[0]].users:
            before = nodes.setdefault(user, where)
            if user in alone:
                claimed_twice.add(user)
            elif before is not where:  # in two lists that differ
                nodes[user] = both.setdefault((before, where), tuple(sorted({*before, *where})))
    for user in claimed_twice:
        del nodes[user]
    return nodes, claimed_twice


def nodes_of_all(nodes: Mapping[str, Nodes]) -> set[int]:
    """The nodes at which any user can be asked."""
    return {node_id for where in set(nodes.values()) for node_id in where}


def spread(users: Iterable[str], nodes: Mapping[str, Nodes], *, avoid: Collection[int] = ()) -> dict[str, int]:
    """The node at which each of `users` is asked, one of `nodes[user]`; none of `avoid` where it has another.

    Users with fewest nodes come first, those with one before all, and each goes where fewest are yet, to the node with the
    lowest id among equals. So nodes that share all users have as many of them as each other, or one more.
    """
    chosen: dict[str, int] = {}
    alike: dict[Nodes, list[str]] = {}
    for user in users:
        chosen[user] = nodes[user][0]  # in the order of `users`
        alike.setdefault(nodes[user], []).append(user)
    load: Counter[int] = Counter()
    for where, some in sorted(alike.items(), key=lambda item: len(item[0])):
        heap = [(load[node_id], node_id) for node_id in where if node_id not in avoid]
        heap = heap or [(load[node_id], node_id) for node_id in where]
        heapify(heap)
        for user in some:
            count, chosen[user] = heap[0]
            heapreplace(heap, (count + 1, chosen[user]))
        load.update({node_id: count - load[node_id] for count, node_id in heap})
    return chosen
