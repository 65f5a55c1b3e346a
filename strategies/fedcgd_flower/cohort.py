"""Who is asked in a round: waits until enough users are there who may take part, or says why there are not."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from flwr.serverapp import Grid

from fedcgd.accounting.guarantee import rounded_up
from fedcgd.ledger import Admission, Ledger
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import cohort, eligible
from fedcgd.participation.history import History
from fedcgd.support.numbers import plural
from fedcgd_flower.flower_private import log_info, log_warning
from fedcgd_flower.grid import kind_of
from fedcgd_flower.noise_provider import ServerNoise
from fedcgd_flower.settings import EXPECTED_USERS, RunSettings, users_needed
from fedcgd_flower.users import NodeIds, UserDirectory, balance_users, nodes_of_all


@dataclass(frozen=True)
class Waits:
    """How users are waited for, in seconds, and for how long one who is silent is."""

    poll: float = 1.0  # between looks at who is there
    logged_every: float = 30.0  # between lines about what is waited for
    settled: float = (
        30.0  # without a change, after which nobody waits where no nodes can take part, and in a simulation
    )
    tries: int = 2  # of a round, before a silent user is replaced: at once, it would cost another one's participation


_WAITS = Waits()


@dataclass(frozen=True)
class Draw:
    """What decides who is drawn in one round."""

    participation: Participation
    round: int
    history: History
    key: bytes

    def cohort(self, users: Collection[str], size: int) -> list[str] | None:
        """The cohort of these users; None if too few may take part."""
        return cohort(self.participation, self.round, users, self.history, cohort_size=size, key=self.key)

    def at_nodes(
        self, users: list[str] | None, nodes: Mapping[str, NodeIds], least: int, avoid: Collection[int] = ()
    ) -> dict[str, int] | None:
        """Each of the cohort `users`, and the node at which it is asked; they are at `least` nodes, if that can be.

        None if there is no cohort.
        """
        return None if users is None else balance_users(self._spread(users, nodes, least), nodes, avoid=avoid)

    def _spread(self, users: list[str], nodes: Mapping[str, NodeIds], least: int) -> list[str]:
        """The cohort `users`, with some of other nodes in place of a few, so that it is at `least` nodes, if that can be."""
        chosen = list(users)
        while len(at := Counter(balance_users(chosen, nodes).values())) < min(least, len(users)):
            others = [user for user, where in nodes.items() if at.keys().isdisjoint(where)]
            more = self.cohort(others, 1)
            if more is None:
                return users
            [crowded] = at.most_common(1)
            chosen.remove(next(user for user in reversed(chosen) if crowded[0] in nodes[user]))
            chosen = sorted(chosen + more)
        return chosen

    def can_replace(self, chosen: Collection[str], reachable: Collection[str]) -> bool:
        """Whether `chosen` may be asked in place of users who were asked in this round before, and later rounds find theirs.

        Whoever was asked has participated, so replacing a user costs a participation more. Once users come back as fast as they
        leave, that is all; the rounds before must live on those that have not been asked yet.
        """
        participation, round, history = self.participation, self.round, self.history
        k, size = participation.participations, len(chosen)
        waiting = eligible(participation, round, reachable, history)
        fresh, waiting_fresh = (
            sum(history.last_rounds.get(user) != round for user in users) for users in (chosen, waiting)
        )
        left = sum(k - history.counts.get(user, 0) for user in reachable)
        before_return = max(0, participation.scheme.rounds_without_return(participation, round))
        later = participation.rounds - round - 1
        return waiting_fresh - fresh >= size * before_return and left - fresh >= size * later


class CohortSelector:
    """Draws a run's cohorts from the users who are there, and remembers who is silent in a round."""

    def __init__(self, settings: RunSettings, admission: Admission | None) -> None:
        self.admission = admission
        """Whose earlier runs leave too little of the joint budget."""
        self.over_budget = 0
        """How many of them were there at the last look."""
        self._participation, self._cohort = settings.plan.participation, settings.cohort
        self._patience, self._budget, self._key = settings.patience, settings.budget, settings.key
        self._has_warned = False
        self._silent: Counter[str] = Counter()
        self._lost: set[int] = set()
        self._there: set[int] = set()
        self._silent_in = 0

    def record_dropouts(self, round: int, users: Collection[str], lost: int | None = None) -> None:
        """Some of `users`, which were asked at one node, did not answer in a try of `round`; `lost` is the node if none did."""
        self._forget_before(round)
        self._silent.update(users)
        if lost is not None:
            self._lost.add(lost)

    def wait_for(
        self, round: int, grid: Grid, directory: UserDirectory, ledger: Ledger, noise: ServerNoise
    ) -> dict[str, int] | str:
        """Users of the round and the node of each, or the reason if too few are there within `patience` seconds.

        Raises ValueError if fewer users than expected are there before the first round, or nodes whose users nobody knows; if it
        is the joint budget that refuses the others, without waiting for what cannot come.
        """
        began = changed = log_at = time.monotonic()
        there: tuple[int, int, int] | None = None
        self._forget_before(round)
        choices_key = self._key.choices_of(ledger.stream_id)
        while True:
            nodes = self._within_budget(directory.refresh(grid))
            draw = Draw(self._participation, round, ledger.history(list(nodes)), choices_key)
            may_begin = round > 0 or self._may_begin(len(nodes), directory, grid)
            chosen = None
            if may_begin:
                drawn = self._drawn(draw, nodes.keys())
                chosen = draw.at_nodes(drawn, nodes, noise.least_nodes, avoid=self._doubtful(nodes))
            if chosen is not None:
                return chosen
            now = time.monotonic()
            before, there = there, (directory.connected, len(directory.unable), len(nodes))
            changed = changed if there == before else now
            deadline = began + self._patience
            if self._is_short_by_budget(round, len(nodes)) and not self._nodes_missing(directory, grid):
                # In a simulation all are there. Elsewhere others may still connect, but hardly after a cohort all refused.
                at_once = kind_of(grid).is_simulation or (not nodes and self.over_budget >= self._cohort.size)
                deadline = now if at_once else min(deadline, changed + _WAITS.settled)
            if _is_final(directory, grid):
                deadline = min(deadline, changed + _WAITS.settled)
            if now >= deadline:
                break
            if now >= log_at:  # at once, and then from time to time
                waiting = self._shortage(round, len(nodes), directory)
                log_info(f"{waiting}; waiting for up to {deadline - now:.0f} s")
                log_at = now + _WAITS.logged_every
            time.sleep(min(_WAITS.poll, self._patience))
        waited = f"after {now - began:.0f} s"
        if directory.is_hopeless:
            raise ValueError(f"no user is there {waited}, and none can be: {_unable(directory)}")
        if not may_begin:
            raise ValueError(f"{waited}: {self._shortage(round, len(nodes), directory)}")
        return cohort_shortfall(draw, self._cohort.size, nodes, self._missing(directory))

    def _may_begin(self, users: int, directory: UserDirectory, grid: Grid) -> bool:
        """Whether the first round need not wait for more users."""
        return users >= self._cohort.expected_users and not self._nodes_missing(directory, grid)

    def _drawn(self, draw: Draw, there: Set[str]) -> list[str] | None:
        """The round's cohort of the users that are there; None if too few may take part.

        Without a sampling whoever was asked often enough in this very round, in vain, is replaced if others can be spared. With
        one who takes part stays as it was drawn.
        """
        silent = {user for user, times in self._silent.items() if times >= _WAITS.tries} & there
        if silent and not self._participation.is_secret:
            others = draw.cohort(there - silent, self._cohort.size)
            if others is not None and draw.can_replace(others, there):
                return others
        return draw.cohort(there, self._cohort.size)

    def _forget_before(self, round: int) -> None:
        if round != self._silent_in:
            self._silent, self._lost, self._there, self._silent_in = Counter(), set(), set(), round

    def _doubtful(self, nodes: Mapping[str, NodeIds]) -> set[int]:
        """Nodes that were lost in an earlier try of the round, and those that came since: one may be a lost one's other id."""
        there = nodes_of_all(nodes)
        if not self._lost:
            self._there = there
        return self._lost | (there - self._there)

    def _nodes_missing(self, directory: UserDirectory, grid: Grid) -> bool:
        """Whether the users of too many nodes are unknown to begin without them, unless the number of users was given.

        In a simulation all nodes are this program's own, and none may be. In deployment two, or half of them: a single node
        cannot keep the others from beginning.
        """
        silent = directory.silent
        if not silent or self._cohort.expected_source == EXPECTED_USERS:
            return False
        return kind_of(grid).is_simulation or silent > 1 or 2 * silent >= directory.connected

    def _shortage(self, round: int, users: int, directory: UserDirectory) -> str:
        """Why a round cannot begin with so many users, and what helps."""
        if self._is_short_by_budget(round, users):
            return self._beyond_budget(users)
        there = f"{plural(users, 'user is', 'users are')} there at {plural(directory.connected, 'node', 'nodes')}"
        if not round and users >= self._cohort.expected_users and directory.silent:
            silent = f"{directory.silent} of {plural(directory.connected, 'node has', 'nodes have')}"
            why = f" {_unable(directory)}." if directory.unable else ""
            return (
                f"{silent} not said which users they host, and everybody there would be left out of the run ({there}).{why} To "
                f"begin without them, say how many users are enough: expected_users={users}"
            )
        if round or users >= self._cohort.expected_users:
            return f"{there}, and round {round + 1} needs {self._cohort.size} who may take part: connect more"
        expected = f"{self._cohort.expected_users} are expected ({self._cohort.expected_source})"
        missing = self._missing(directory)
        return f"{there}, and {expected}{missing and '; '}{missing}. {self._remedy(users, directory)}"

    def _is_short_by_budget(self, round: int, users: int) -> bool:
        """Whether the first round could begin, as far as the number of users goes, if the joint budget refused nobody."""
        return not round and users < self._cohort.expected_users <= users + self.over_budget

    def _beyond_budget(self, users: int) -> str:
        """That the joint budget leaves too few users for the first round, and what helps."""
        budget, admission = self._budget, self.admission
        assert budget is not None
        assert admission is not None
        there = plural(users + self.over_budget, "user that is", "users that are")
        cost = rounded_up(admission.full_cost)
        return (
            f"the joint budget leaves too few users to begin with: {self.over_budget} of the {there} there have no budget left "
            f"after earlier runs, and {self._cohort.expected_users} are expected ({self._cohort.expected_source}). This plan and "
            f"the earlier runs they were in would cost up to ε = {cost} together at δ = {budget.delta:g}, and the budget is ε = "
            f"{budget.epsilon:g}. What helps: a plan with a smaller ε, a joint budget of ε = {cost}, or people who were in no "
            "earlier run. With another plan or budget it is another run: this one has released nothing, so that "
            "its ledger may be deleted first"
        )

    def _remedy(self, users: int, directory: UserDirectory) -> str:
        """What to do where fewer users are there than the first round waits for."""
        participation, size = self._participation, self._cohort.size
        turns = plural(participation.participations, "time", "times")
        connect = "connect more nodes" if directory.connected else "no node is connected to the SuperLink: start them"
        return (
            f"With {plural(size, 'user', 'users')} a round, each at most {turns} and {participation.min_separation} rounds "
            f"apart, the {participation.rounds} rounds need {users_needed(participation, size)} users: {connect}, or lower "
            "cohort_size or the plan's min_separation. To begin with fewer, if others join later, say "
            f"expected_users={max(users, 1)}"
        )

    def _missing(self, directory: UserDirectory) -> str:
        """What keeps users that might take part from being counted. Their ids are not told: nodes sent them."""
        slow = f"if they are slow to say it, raise patience above {self._patience:.0f} s"
        refused = sum(directory.refused.values())
        unsaid = directory.silent - len(directory.unable)
        parts = [
            (unsaid, "node has", "nodes have", f"not said which users they host: {slow}"),
            (
                directory.claimed_twice,
                "user is",
                "users are",
                f"claimed by more than one node and not asked ({directory.claimants})",
            ),
            (refused, "user was", "users were", "claimed by a node that may not speak for them"),
            (self.over_budget, "more has", "more have", "no budget left after earlier runs"),
        ]
        texts = [f"{plural(number, one, many)} {what}" for number, one, many, what in parts if number]
        return "; ".join([_unable(directory)] * bool(directory.unable) + texts)

    def _within_budget(self, nodes: Mapping[str, NodeIds]) -> Mapping[str, NodeIds]:
        """Those of the users that the joint budget admits. That depends on earlier ledgers alone, never on what is drawn."""
        refused = nodes.keys() & (frozenset() if self.admission is None else self.admission.refused)
        self.over_budget = len(refused)
        if refused and self._budget is not None and not self._has_warned:
            self._has_warned = True
            log_warning(
                f"{plural(len(refused), 'user that is there is', 'users that are there are')} refused: the earlier runs they "
                f"were in, and this plan, cost more than the joint budget of ε = {self._budget.epsilon:g} at δ = "
                f"{self._budget.delta:g}. Plan a smaller ε for this run, raise the budget, or find other users"
            )
        return {user: where for user, where in nodes.items() if user not in refused} if refused else nodes


def _is_final(directory: UserDirectory, grid: Grid) -> bool:
    """Whether waiting is in vain if nothing changes soon: all nodes that are there have answered, and no others are to come.

    In deployment a single node that cannot take part says nothing about those that connect after it; of two or more, which
    have the same app, it does.
    """
    if kind_of(grid).is_simulation:
        return directory.has_heard_all
    return directory.is_hopeless and directory.connected > 1


def _unable(directory: UserDirectory) -> str:
    """Which nodes cannot take part, and why."""
    by_reason: dict[str, list[int]] = {}
    for node_id, reason in directory.unable.items():
        by_reason.setdefault(reason, []).append(node_id)
    texts = []
    for reason, nodes in by_reason.items():
        others = f" and {plural(len(nodes) - 1, 'other', 'others')}" if nodes[1:] else ""
        texts.append(f"node {nodes[0]}{others} cannot take part: {reason}")
    return "; ".join(texts)


def cohort_shortfall(draw: Draw, cohort_size: int, nodes: Mapping[str, NodeIds], missing: str = "") -> str:
    """Why no cohort could be drawn: who is there, who of them may take part, and what keeps the others, `missing` ones too."""
    participation, round, history = draw.participation, draw.round, draw.history
    k = participation.participations
    used_up = sum(history.counts.get(user, 0) >= k and history.last_rounds[user] != round for user in nodes)
    free = len(eligible(participation, round, nodes, history))
    held_back = len(nodes) - used_up - free
    at_nodes = plural(len(nodes_of_all(nodes)), "node", "nodes")
    parts = [
        f"{plural(len(nodes), 'user is', 'users are')} there at {at_nodes} and {free} of "
        f"them may take part, of {cohort_size} for a cohort",
        f"{held_back} took part too lately ({participation})" if held_back else "",
        f"{plural(used_up, 'has', 'have')} taken part {plural(k, 'time', 'times')}, which is all they may"
        if used_up
        else "",
        missing,
    ]
    return "; ".join(part for part in parts if part)
