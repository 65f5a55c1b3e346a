"""Which users can be reached at which node, and whether that node may speak for them.

A user is known by an id that outlives connections: what its node declares (a pool lists its users), or the name under which the
node is registered at the SuperLink. Flower's node id is neither: it changes when a node that is not registered comes back, and
so does that node's key. Only a *registered name* (`flwr supernode register KEY --name NAME`) tells who a node is.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from typing import Literal

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedcgd.support.numbers import plural
from fedcgd_flower.flower_private import is_simulation, log_warning
from fedcgd_flower.grid import UnreadableReplyError, pull, push
from fedcgd_flower.keepers.openings import NodeSuspects, node_name
from fedcgd_flower.messages import PROBLEMS, HostedUsers, read_users_reply, users_query
from fedcgd_flower.replies import RejectionReason, rejection_reason

NodeIds = tuple[int, ...]
"""Ids of nodes, in ascending order; one object for all users who are at the same nodes."""

Identity = Literal["declared", "authenticated"]


_SECOND_USER = (
    "of another node, or a second user of a node that is one user (clipped_update_mod): give it the user-id that "
    "it had at first in this run, or register the other user's node under a name of its own"
)

_TROUBLE: dict[RejectionReason | None, str] = {
    "app crashed": "its ClientApp could not be loaded, or its process ended: the app's code or a package may be missing where "
    "the node runs, and its own log says which",
    "node lost": "",  # it will be missing from the list of nodes soon
}

_CROWD = 10  # times as many users as the node with second most: a node that crowds others out
_NAMED = 3  # nodes that claim the same users are named

_AGAIN = 10.0  # seconds after an answer that names nobody: it may have been a node that was starting
_LONGEST_REST = 3600.0  # seconds between questions to a node that never answers


@dataclass
class _UsersQuery:
    """What a node was asked, perhaps several times: an answer to any of them is welcome, however late."""

    asked: float
    rest: float
    message_ids: list[str] = field(default_factory=list)
    told: bool = False
    trouble: str = ""
    """Why the node cannot take part, if it has answered and named nobody."""

    @property
    def again(self) -> float:
        """When the node is asked the next time."""
        return self.asked + self.rest


@dataclass
class UserDirectory:
    """The users of the connected nodes. `refresh` asks nodes that were not known before.

    With `identity="declared"` each node lists its users. A user belongs to the first registered node that names it (`bind_users`
    remembers it), or to the one that `hosts` says (user → name), and other nodes' claims are refused. With "authenticated" each
    node is one user, its registered name. `registered_only` leaves out nodes that are not registered.

    A user that two nodes name takes no part, unless all nodes that name it say that they share it and none of them is registered:
    they are a simulation's, or an operator's own. A registered node shares nothing, whatever it says: the first one that names a
    user speaks for it alone, and takes it from those that share it.

    Only the first `refresh` waits for answers, at most `timeout` seconds. A node that is silent is asked again after a while,
    longer each time, and nobody waits for it.
    """

    identity: Identity
    bind_users: Callable[..., AbstractSet[str]]
    """As `Ledger.bind_users`: those of the users a node names that no other node speaks for. From then on they are its own."""
    hosts: Mapping[str, str] | None = None
    registered_only: bool = False
    timeout: float = 60.0
    message_type: str = MessageType.TRAIN
    """Of the questions: that of the rounds' messages."""
    refused: dict[int, int] = field(default_factory=dict)
    """How many users of other nodes a node has claimed."""
    connected: int = 0
    """How many nodes were there at the last look, of those that may speak for users."""
    names: Mapping[int, str] = field(default_factory=dict)
    """The nodes that were there at the last look, and the name of each that is registered."""
    claimed_twice: int = 0
    """How many users took no part at the last look, because two nodes claim them."""
    claimants: str = ""
    """Which nodes claim them."""
    _declared: dict[int, HostedUsers] = field(default_factory=dict)
    _granted: dict[HostedUsers, HostedUsers] = field(default_factory=dict)
    """Lists of nodes that are not registered, as sent → what they may speak for: one object for all that send the same."""
    _questions: dict[int, _UsersQuery] = field(default_factory=dict)
    _waited: bool = False
    _said: set[str] = field(default_factory=set)

    @property
    def silent(self) -> int:
        """How many connected nodes have not said yet which users they host."""
        return len(self._questions)

    @property
    def unable(self) -> dict[int, str]:
        """The connected nodes that have answered and can name nobody, each with the reason."""
        return {node_id: asked.trouble for node_id, asked in self._questions.items() if asked.trouble}

    @property
    def has_heard_all(self) -> bool:
        """Whether every node that is there has answered whatever it was asked, also when it was asked again."""
        return not any(asked.message_ids or not asked.trouble for asked in self._questions.values())

    @property
    def is_hopeless(self) -> bool:
        """Whether no node has named a user since this process began, and all that are there have answered that they cannot."""
        return not self._declared and 0 < self.connected == len(self.unable) and self.has_heard_all

    def refresh(self, grid: Grid) -> Mapping[str, NodeIds]:
        """The node of every user that exactly one connected node hosts; of a shared one, all that host it."""
        names = {node.node_id: node.name for node in grid.get_nodes()}
        if self.registered_only or self.identity == "authenticated":
            names = self._registered(names)
        self.connected, self.names = len(names), names
        if self.identity == "authenticated":
            hosted = {node_id: HostedUsers((name,)) for node_id, name in names.items()}
        else:
            self._ask(grid, names)
            hosted = {node_id: self._declared[node_id] for node_id in names if node_id in self._declared}
        nodes, claimed_twice = nodes_of_users(hosted)
        self.claimed_twice = len(claimed_twice)
        self.claimants = _claimants(hosted, claimed_twice, names) if claimed_twice else ""
        if claimed_twice:
            self._say_once(
                plural(len(claimed_twice), "user is", "users are")
                + f" claimed by more than one node and not asked: a user belongs to one node. {self.claimants}"
            )
        if not is_simulation(grid):
            self._tell_of_crowds(hosted, names)
        return nodes

    def _tell_of_crowds(self, hosted: Mapping[int, HostedUsers], names: Mapping[int, str]) -> None:
        """Say which node that is not registered names so many users that others hardly have a place in a cohort."""
        counts = sorted(((len(theirs.users), node_id) for node_id, theirs in hosted.items() if not theirs.shared))
        if len(counts) < 2 or names[counts[-1][1]]:
            return
        (second, _), (most, node_id) = counts[-2:]
        if most > _CROWD * max(second, 1):
            everybody = sum(count for count, _ in counts)
            self._say_once(
                f"node {node_id} (not registered) names {most} of {everybody} users: it has nearly every place in a cohort. If "
                "you do not know these people to be there, it invents them: register the nodes, and say who is where (hosts=)"
            )

    def allowed(self, nodes: Mapping[str, NodeIds], suspects: NodeSuspects | None) -> Iterator[Mapping[str, NodeIds]]:
        """Whom to ask of `nodes`, as `refresh` gave them, without those held back: what tells most of suspects first."""
        for held_back in [set[str]()] if suspects is None else suspects.to_hold_back():
            ids = {node_id for node_id, name in self.names.items() if node_name(node_id, name) in held_back}
            found = ((user, tuple(node_id for node_id in where if node_id not in ids)) for user, where in nodes.items())
            yield {user: where for user, where in found if where} if ids else nodes

    def _registered(self, names: Mapping[int, str]) -> dict[int, str]:
        """The nodes that have a name. Raises ValueError if there are nodes and none of them has."""
        registered = {node_id: name for node_id, name in names.items() if name}
        if len(registered) < len(names):
            of_all = f"{len(names) - len(registered)} of {plural(len(names), 'node is', 'nodes are')}"
            words = (
                f"{of_all} not registered by name, and nothing else tells who "
                "a node is when it comes back. Register each, at a SuperLink with --enable-supernode-auth: "
                "flwr supernode register KEY.pub --name NAME"
            )
            if not registered:
                declared = self.identity == "declared"
                why = (
                    ". A secret sampling needs it; or, if every node that can connect is yours, as in a simulation, "
                    "say trusted_nodes=True"
                )
                raise ValueError(words + why * declared)
            self._say_once(f"{words}. They are left out")
        return registered

    def _ask(self, grid: Grid, names: Mapping[int, str]) -> None:
        """Ask the connected nodes that have not said yet which users they host, and take down what has been answered."""
        now = time.monotonic()
        self._questions = {node_id: asked for node_id, asked in self._questions.items() if node_id in names}
        silent = sorted(names.keys() - self._declared.keys())
        due = [node_id for node_id in silent if node_id not in self._questions or now >= self._questions[node_id].again]
        queries = [users_query(node_id, self.message_type) for node_id in due]
        if queries:
            push(grid, queries)
        for node_id, query in zip(due, queries, strict=True):
            question = self._questions.setdefault(node_id, _UsersQuery(now, self.timeout / 2))
            question.asked, question.rest = now, min(2 * question.rest, _LONGEST_REST)
            question.message_ids.append(query.metadata.message_id)
        wait = 0.02
        while self._read_answers(grid, names) and not self._waited and time.monotonic() < now + self.timeout:
            time.sleep(wait)
            wait = min(1.5 * wait, 1.0)
        self._waited = self._waited or bool(names)
        waiting = [node_id for node_id, asked in self._questions.items() if asked.message_ids and not asked.told]
        late = [node_id for node_id in waiting if time.monotonic() >= self._questions[node_id].asked + self.timeout]
        for node_id in late:
            self._questions[node_id].told = True
        if late:
            others = f" and {plural(len(late) - 1, 'other', 'others')}" if late[1:] else ""
            within = f"{self.timeout:.0f} s"
            log_warning(
                f"node {late[0]}{others} did not answer within {within}; users of a node take part once it does"
            )

    def _read_answers(self, grid: Grid, names: Mapping[int, str]) -> bool:
        """Take down what has been answered; whether a question is still open."""
        for node_id, question in list(self._questions.items()):
            for message_id in list(question.message_ids):
                reply = answer = None
                try:
                    reply = pull(grid, message_id)
                    answer = read_users_reply(reply)
                except UnreadableReplyError:
                    pass
                else:
                    if reply is None:
                        continue
                if isinstance(answer, HostedUsers):
                    del self._questions[node_id]
                    self._record_hosted_users(node_id, names, answer)
                    break
                question.message_ids.remove(message_id)
                if is_simulation(grid):  # the machine that lacks something has it no sooner for being asked again
                    question.rest = _LONGEST_REST
                elif not question.trouble:
                    question.rest = min(question.rest, _AGAIN)
                question.trouble = PROBLEMS[answer] if answer else self._trouble(reply)
                if question.trouble and not question.told:
                    question.told = True
                    log_warning(f"node {node_id} cannot take part: {question.trouble}")
        return any(question.message_ids for question in self._questions.values())

    def _trouble(self, reply: Message | None) -> str:
        cause = rejection_reason(reply.error) if reply is not None and reply.has_error() else None
        return _TROUBLE.get(
            cause,
            "it was asked which users it hosts, and answered without fedcgd's code. Its ClientApp needs clipped_update_mod "
            "as the first of its mods: from fedcgd_flower import clipped_update_mod; app = ClientApp(mods=[clipped_update_mod]). "
            f"For many users on a node: host_users(app, …). It also needs a function for {self.message_type!r} messages. If it "
            "has all that, its own log says what failed",
        )

    def _record_hosted_users(self, node_id: int, names: Mapping[int, str], claimed: HostedUsers) -> None:
        name = names[node_id]
        granted = self._granted.get(claimed) if not name else None
        if granted is None:
            granted = self._grant(claimed, name)
        self._declared[node_id] = granted
        if len(granted.users) < len(claimed.users):
            self.refused[node_id] = len(claimed.users) - len(granted.users)
            second = claimed.single and name and self.hosts is None
            users = plural(self.refused[node_id], "user", "users")
            which = f"{users} {_SECOND_USER if second else 'of another node'}"
            log_warning(f"node {node_id} ({name or 'not registered'}) claims {which}, and they are not asked there")

    def _grant(self, claimed: HostedUsers, name: str) -> HostedUsers:
        """What a node with that registered name, or "", may speak for of what it claims."""
        if self.hosts is None:
            allowed = self.bind_users(claimed.users, name, single=claimed.single and bool(name))
        else:
            allowed = {user for user in claimed.users if name and self.hosts.get(user) == name}
        others = set(claimed.users) - allowed
        granted = HostedUsers(_without(claimed.users, others), claimed.shared and not name)
        if not name:
            self._granted[claimed] = granted
        else:  # nodes that are not registered claimed them first, and cannot keep them
            before, self._granted = self._granted, {}
            kept = {}
            for sent, theirs in before.items():
                kept[id(theirs)] = self._granted[sent] = replace(theirs, users=_without(theirs.users, allowed))
            self._declared = {other: kept.get(id(theirs), theirs) for other, theirs in self._declared.items()}
        return granted

    def _say_once(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            log_warning(words)


def _claimants(hosted: Mapping[int, HostedUsers], claimed_twice: AbstractSet[str], names: Mapping[int, str]) -> str:
    """Which nodes claim these users: first those that claim users of most other nodes."""
    at = {node_id: found for node_id, theirs in hosted.items() if (found := claimed_twice & set(theirs.users))}
    by: dict[str, list[int]] = {}
    for node_id, users in at.items():
        for user in users:
            by.setdefault(user, []).append(node_id)
    others = {node_id: len({other for user in users for other in by[user]}) - 1 for node_id, users in at.items()}
    told = [
        f"node {node_id} ({names[node_id] or 'not registered'}) names {len(at[node_id])} of them, which "
        f"{plural(others[node_id], 'other node names', 'other nodes name')} too"
        for node_id in sorted(at, key=lambda node_id: (-others[node_id], -len(at[node_id]), node_id))
    ]
    more = f"; and {plural(len(told) - _NAMED, 'node', 'nodes')} more" if len(told) > _NAMED else ""
    return "; ".join(told[:_NAMED]) + more


def _without(users: tuple[str, ...], others: AbstractSet[str]) -> tuple[str, ...]:
    return users if others.isdisjoint(users) else tuple(user for user in users if user not in others)


def nodes_of_users(hosted: Mapping[int, HostedUsers]) -> tuple[dict[str, NodeIds], set[str]]:
    """(user → the nodes at which it can be asked; the users that two nodes claim and do not both share), from node → its list.

    NodeIds whose list is the same object cost one list's time together.
    """
    nodes: dict[str, NodeIds] = {}
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
    both: dict[tuple[NodeIds, NodeIds], NodeIds] = {}
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


def nodes_of_all(nodes: Mapping[str, NodeIds]) -> set[int]:
    """The nodes at which any user can be asked."""
    return {node_id for where in set(nodes.values()) for node_id in where}


def balance_users(users: Iterable[str], nodes: Mapping[str, NodeIds], *, avoid: Collection[int] = ()) -> dict[str, int]:
    """The node at which each of `users` is asked, one of `nodes[user]`; none of `avoid` where it has another.

    Users with fewest nodes come first, those with one before all, and each goes where fewest are yet, to the node with the
    lowest id among equals. So nodes that share all users have as many of them as each other, or one more.
    """
    chosen: dict[str, int] = {}
    alike: dict[NodeIds, list[str]] = {}
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
