"""Which users can be reached at which node, and whether that node may speak for them.

A user is known by an id that outlives connections: what its node declares (a pool lists its users), or the name under which the
node is registered at the SuperLink. Flower's node id is neither: it changes when a node that is not registered comes back, and
so does that node's key. Only a *registered name* (`flwr supernode register KEY --name NAME`) tells who a node is.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import Literal, cast

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedcgd.participation.user_ids import NoUserIdsError, check_not_one_text, user_ids
from fedcgd.support.numbers import plural
from fedcgd_flower.flower_private import log_error, log_failure, log_warning
from fedcgd_flower.grid import UnreadableReplyError, kind_of, pull, push
from fedcgd_flower.messages import TASK
from fedcgd_flower.problems import PROBLEMS, SECOND_USER, Problem, RejectionReason, rejection_reason, silent_problem

NodeIds = tuple[int, ...]
"""Ids of nodes, in ascending order."""

Identity = Literal["declared", "authenticated"]


@dataclass(frozen=True)
class Waits:
    """How often nodes are asked for their users, in seconds."""

    again: float = 10.0  # after an answer that names nobody: it may have been a node that was starting
    longest_rest: float = 3600.0  # between questions to a node that never answers
    named: int = 3  # nodes that claim the same users


_WAITS = Waits()


def configured_user(context: Context) -> str | None:
    """The user that the node's configuration names: its "user-id", or else its "partition-id"; None if neither is there.

    Args:
        context: the node's.
    """
    named = context.node_config.get("user-id", context.node_config.get("partition-id"))
    return None if named is None or named == "" else str(named)


# What server and node say about it.


def users_query(node_id: int) -> Message:
    """The question which users a node hosts.

    It is a train message, because a mod sees only messages for which the ClientApp has a function, and every node has a train
    function.
    """
    content = RecordDict({TASK: ConfigRecord({"question": "users"})})
    return Message(content, dst_node_id=node_id, message_type=MessageType.TRAIN)


def is_users_query(message: Message) -> bool:
    """Whether `message` is what `users_query` made."""
    return TASK in message.content.config_records and "question" in message.content.config_records[TASK]


@dataclass(frozen=True)
class HostedUsers:
    """The users that a node says it hosts. If they are shared, other nodes may host the same: each is asked at one of them."""

    users: tuple[str, ...]
    shared: bool = False
    single: bool = False
    """The node is one user, as with `clipped_update_mod`: whatever it is called, it cannot become another one."""


def problem_reply(request: Message, problem: Problem) -> Message:
    """The reply to a `users_query` of a node that can name no users."""
    return Message(RecordDict({TASK: ConfigRecord({"problem": problem})}), reply_to=request)


def users_reply(
    request: Message, users: Callable[[], Iterable[str]], *, shared: bool = False, single: bool = False
) -> Message:
    """The reply to a `users_query`: the stable ids that `users()` gives, each once, or why there are none.

    The node's own log says more: what is no id, or where `users` raised, without the error's text, which may quote data.
    """
    try:
        named: object = users()
        if single and named == [None]:
            return problem_reply(request, "no user id")
        check_not_one_text(named)
        ids = user_ids(dict.fromkeys(cast(Iterable[str], named)))
    except NoUserIdsError as error:
        log_error(str(error))
        return problem_reply(request, "no ids")
    except Exception as error:
        log_failure("the function that names this node's users", error)
        return problem_reply(request, "users failed")
    answer = ConfigRecord({"users": list(ids)})
    if shared:
        answer["shared"] = True
    if single:
        answer["single"] = True
    return Message(RecordDict({TASK: answer}), reply_to=request)


def read_users_reply(reply: Message | None) -> HostedUsers | Problem | None:
    """The users that a node says it hosts, or what keeps it from saying so; None if the reply tells neither."""
    if reply is None or reply.has_error() or TASK not in reply.content.config_records:
        return None
    answer = reply.content.config_records[TASK]
    for problem in PROBLEMS:
        if answer.get("problem") == problem:
            return problem
    users = answer.get("users")
    try:
        listed = user_ids(dict.fromkeys(cast(list[str], users)) if isinstance(users, list) else "")
    except NoUserIdsError:
        return None
    shared = answer.get("shared") is True
    users_listed = tuple(sorted(listed)) if shared else listed  # so that the lists of nodes that share are equal
    return HostedUsers(users_listed, shared, answer.get("single") is True)


# The server's side.


@dataclass
class _UsersQuery:
    """What a node was asked, and is asked again after a rest that grows until its answer comes in time."""

    asked: float
    rest: float
    message_id: str | None = None
    """Of the question that it has not answered yet."""
    logged: bool = False
    trouble: str = ""
    """Why the node cannot take part, if it has answered and named nobody."""

    @property
    def again(self) -> float:
        """When the node is asked the next time."""
        return self.asked + self.rest


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

    Args:
        identity: see above.
        bind_users: as `Ledger.bind_users`: those of the users a node names that no other node speaks for, its own from then on.
        hosts: user → the registered name of the only node that may name it.
        registered_only: see above.
        timeout: seconds.

    Attributes:
        refused: how many users of other nodes a node has claimed.
        connected: how many nodes were there at the last look, of those that may speak for users.
        names: the nodes that were there at the last look, and the name of each that is registered.
        claimed_twice: how many users took no part at the last look, because two nodes claim them.
        claimants: which nodes claim them.
    """

    def __init__(
        self,
        identity: Identity,
        bind_users: Callable[..., AbstractSet[str]],
        hosts: Mapping[str, str] | None = None,
        registered_only: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.identity, self.bind_users, self.hosts = identity, bind_users, hosts
        self.registered_only, self.timeout = registered_only, timeout
        self.refused: dict[int, int] = {}
        self.connected = self.claimed_twice = 0
        self.names: Mapping[int, str] = {}
        self.claimants = ""
        self._declared: dict[int, HostedUsers] = {}
        # Lists of nodes that are not registered, as sent → what they may speak for, but for what registered ones have taken.
        self._granted: dict[HostedUsers, HostedUsers] = {}
        self._taken: set[str] = set()
        self._questions: dict[int, _UsersQuery] = {}
        self._waited = False
        self._logged: set[str] = set()

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
        return not any(asked.message_id or not asked.trouble for asked in self._questions.values())

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
            hosted = {
                node_id: theirs if names[node_id] else self._left(theirs)
                for node_id, theirs in self._declared.items()
                if node_id in names
            }
        nodes, claimed_twice = nodes_of_users(hosted)
        self.claimed_twice = len(claimed_twice)
        self.claimants = _claimants(hosted, claimed_twice, names) if claimed_twice else ""
        if claimed_twice:
            self._warn_once(
                plural(len(claimed_twice), "user is", "users are")
                + f" claimed by more than one node and not asked: a user belongs to one node. {self.claimants}"
            )
        return nodes

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
            self._warn_once(f"{words}. They are left out")
        return registered

    def _ask(self, grid: Grid, names: Mapping[int, str]) -> None:
        """Ask the connected nodes that have not said yet which users they host, and take down what has been answered."""
        now = time.monotonic()
        self._questions = {node_id: asked for node_id, asked in self._questions.items() if node_id in names}
        self._read_answers(grid, names)  # before anybody is asked again
        silent = sorted(names.keys() - self._declared.keys())
        due = [node_id for node_id in silent if node_id not in self._questions or now >= self._questions[node_id].again]
        queries = [users_query(node_id) for node_id in due]
        if queries:
            push(grid, queries)
        for node_id, query in zip(due, queries, strict=True):
            question = self._questions.setdefault(node_id, _UsersQuery(now, self.timeout / 2))
            question.asked, question.rest = now, min(2 * question.rest, _WAITS.longest_rest)
            question.message_id = query.metadata.message_id
        wait = 0.02
        while self._read_answers(grid, names) and not self._waited and time.monotonic() < now + self.timeout:
            time.sleep(wait)
            wait = min(1.5 * wait, 1.0)
        self._waited = self._waited or bool(names)
        waiting = [node_id for node_id, asked in self._questions.items() if asked.message_id and not asked.logged]
        late = [node_id for node_id in waiting if time.monotonic() >= self._questions[node_id].asked + self.timeout]
        for node_id in late:
            self._questions[node_id].logged = True
        if late:
            others = f" and {plural(len(late) - 1, 'other', 'others')}" if late[1:] else ""
            within = f"{self.timeout:.0f} s"
            log_warning(
                f"node {late[0]}{others} did not answer within {within}; users of a node take part once it does"
            )

    def _read_answers(self, grid: Grid, names: Mapping[int, str]) -> bool:
        """Take down what has been answered; whether a question is still open."""
        for node_id, question in list(self._questions.items()):
            reply = None
            try:
                if question.message_id is None or (reply := pull(grid, question.message_id)) is None:
                    continue
            except UnreadableReplyError:
                pass
            question.message_id, answer = None, read_users_reply(reply)
            if isinstance(answer, HostedUsers):
                del self._questions[node_id]
                self._record_hosted_users(node_id, names[node_id], answer)
                continue
            if kind_of(grid).is_simulation:  # the machine that lacks something has it no sooner for being asked again
                question.rest = _WAITS.longest_rest
            elif not question.trouble:
                question.rest = min(question.rest, _WAITS.again)
            question.trouble = PROBLEMS[answer] if answer else silent_problem(_rejected(reply))
            if question.trouble and not question.logged:
                question.logged = True
                log_warning(f"node {node_id} cannot take part: {question.trouble}")
        return any(question.message_id for question in self._questions.values())

    def _record_hosted_users(self, node_id: int, name: str, claimed: HostedUsers) -> None:
        granted = self._granted.get(claimed)
        if name or granted is None:
            granted = self._grant(claimed, name)
        self._declared[node_id] = granted
        if len(granted.users) < len(claimed.users):
            self.refused[node_id] = len(claimed.users) - len(granted.users)
            second = claimed.single and name and self.hosts is None
            users = plural(self.refused[node_id], "user", "users")
            which = f"{users} {SECOND_USER if second else 'of another node'}"
            log_warning(f"node {node_id} ({name or 'not registered'}) claims {which}, and they are not asked there")

    def _grant(self, claimed: HostedUsers, name: str) -> HostedUsers:
        """What a node with that registered name, or "", may speak for of what it claims."""
        if self.hosts is None:
            allowed = self.bind_users(claimed.users, name, single=claimed.single and bool(name))
        else:
            allowed = {user for user in claimed.users if name and self.hosts.get(user) == name}
        granted = HostedUsers(_without(claimed.users, set(claimed.users) - allowed), claimed.shared and not name)
        if name:
            self._taken |= allowed
        else:
            self._granted[claimed] = granted
        return granted

    def _left(self, granted: HostedUsers) -> HostedUsers:
        """What of it registered nodes have not taken since: nodes that are not registered keep nobody."""
        return replace(granted, users=_without(granted.users, self._taken)) if self._taken else granted

    def _warn_once(self, words: str) -> None:
        if words not in self._logged:
            self._logged.add(words)
            log_warning(words)


def _rejected(reply: Message | None) -> RejectionReason | None:
    return rejection_reason(reply.error) if reply is not None and reply.has_error() else None


def _claimants(hosted: Mapping[int, HostedUsers], claimed_twice: AbstractSet[str], names: Mapping[int, str]) -> str:
    """Which nodes claim these users, and how many: first those that claim most."""
    counts = Counter({node_id: len(claimed_twice & set(theirs.users)) for node_id, theirs in hosted.items()})
    claims = [
        f"node {node_id} ({names[node_id] or 'not registered'}) names {count} of them"
        for node_id, count in counts.most_common(_WAITS.named)
        if count
    ]
    return "; ".join(claims)


def _without(users: tuple[str, ...], others: AbstractSet[str]) -> tuple[str, ...]:
    return users if others.isdisjoint(users) else tuple(user for user in users if user not in others)


def nodes_of_users(hosted: Mapping[int, HostedUsers]) -> tuple[dict[str, NodeIds], set[str]]:
    """(user → the nodes at which it can be asked; the users that two nodes claim and do not both share), from node → its list.

    Nodes with equal lists cost one list's time together.
    """
    alike: dict[HostedUsers, list[int]] = {}
    for node_id, theirs in sorted(hosted.items()):
        alike.setdefault(theirs, []).append(node_id)
    nodes: dict[str, NodeIds] = {}
    alone: set[str] = set()
    claimed_twice: set[str] = set()
    for theirs, node_ids in sorted(alike.items(), key=lambda lists: lists[0].shared):  # what is not shared comes first
        here = tuple(node_ids)
        for user in theirs.users:
            nodes[user] = tuple(sorted({*nodes[user], *here})) if user in nodes else here
            if len(nodes[user]) > 1 and (not theirs.shared or user in alone):
                claimed_twice.add(user)
        if not theirs.shared:
            alone.update(theirs.users)
    for user in claimed_twice:
        del nodes[user]
    return nodes, claimed_twice


def balance_users(users: Iterable[str], nodes: Mapping[str, NodeIds]) -> dict[str, int]:
    """The node at which each of `users` is asked, one of `nodes[user]`.

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
        heap = [(load[node_id], node_id) for node_id in where]
        heapify(heap)
        for user in some:
            count, chosen[user] = heap[0]
            heapreplace(heap, (count + 1, chosen[user]))
        load.update({node_id: count - load[node_id] for count, node_id in heap})
    return chosen
