"""Who is asked in a round: waits until enough users are there who may take part, or says why there are not."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcgd.accounting.guarantee import rounded_down, rounded_up
from fedcgd.ledger import Admission, JointBudget, Ledger
from fedcgd.noise.keys import NoiseKey
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import cohort, eligible
from fedcgd.participation.history import History
from fedcgd.support.numbers import plural
from fedcgd_flower.flower_private import is_simulation, log_info, log_warning
from fedcgd_flower.inner import FLOWERS_DEFAULT, planned_cohort
from fedcgd_flower.keepers.openings import NodeSuspects
from fedcgd_flower.users import NodeIds, UserDirectory, balance_users, nodes_of_all

EXPECTED_USERS = "expected_users"
"""The argument's name: the number of users to begin with was given."""

_POLL = 1.0  # seconds between looks at who is there
_TOLD_EVERY = 30.0  # seconds between lines about what is waited for
_SETTLED = 30.0  # seconds without a change after which nobody waits where no nodes can take part, and in a simulation
_PATIENCE_WITH_USERS = 2  # tries of a round: replacing a user at once would cost another one's turn


class CohortSelector:
    """Draws a run's cohorts from the users who are there, and remembers who is silent in a round."""

    def __init__(
        self, participation: Participation, cohort: "CohortSettings", patience: float, budget: JointBudget | None
    ) -> None:
        self.admission: Admission | None = None
        """Whose earlier runs leave too little of `budget`."""
        self.over_budget = 0
        """How many of them were there at the last look."""
        self._participation = participation
        self._cohort = cohort
        self._patience = patience
        self._budget = budget
        self._told_budget = False
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
        self,
        round: int,
        grid: Grid,
        directory: UserDirectory,
        ledger: Ledger,
        key: NoiseKey,
        suspects: NodeSuspects | None = None,
    ) -> dict[str, int] | str:
        """Users of the round and the node of each, or the reason if too few are there within `patience` seconds.

        Of nodes that are suspected of spoiling sums half are held back, where enough users are at others.

        Raises ValueError if fewer users than expected are there before the first round, or nodes whose users nobody knows; if it
        is the joint budget that refuses the others, without waiting for what cannot come.
        """
        began = changed = tell_at = time.monotonic()
        there: tuple[int, int, int] | None = None
        self._forget_before(round)
        choices_key = key.choices_of(ledger.stream_id)
        while True:
            nodes = self._within_budget(directory.refresh(grid))
            history = ledger.history(list(nodes))
            may_begin = round > 0 or self._may_begin(len(nodes), directory, grid)
            chosen: dict[str, int] | None = None
            least = 1 if suspects is None else suspects.least
            for allowed in directory.allowed(nodes, suspects) if may_begin else ():
                users = self._drawn(round, allowed, history, choices_key)
                if users is not None:
                    users = spread(self._participation, round, users, allowed, history, least=least, key=choices_key)
                chosen = None if users is None else balance_users(users, allowed, avoid=self._doubtful(nodes))
                if chosen is not None and len(set(chosen.values())) >= least:
                    break
            if chosen is not None:
                return chosen
            now = time.monotonic()
            before, there = there, (directory.connected, len(directory.unable), len(nodes))
            changed = changed if there == before else now
            deadline = began + self._patience
            if self._is_short_by_budget(round, len(nodes)) and not self._nodes_missing(directory, grid):
                # In a simulation all are there. Elsewhere others may still connect, but hardly after a cohort all refused.
                at_once = is_simulation(grid) or (not nodes and self.over_budget >= self._cohort.size)
                deadline = now if at_once else min(deadline, changed + _SETTLED)
            if _is_final(directory, grid):
                deadline = min(deadline, changed + _SETTLED)
            if now >= deadline:
                break
            if now >= tell_at:  # at once, and then from time to time
                waiting = self._waiting(round, len(nodes), directory)
                log_info(f"{waiting}; waiting for up to {deadline - now:.0f} s")
                tell_at = now + _TOLD_EVERY
            time.sleep(min(_POLL, self._patience))
        waited = f"after {now - began:.0f} s"
        if directory.is_hopeless:
            raise ValueError(f"no user is there {waited}, and none can be: {_unable(directory)}")
        if not may_begin:
            raise ValueError(self._cannot_begin(len(nodes), directory, waited))
        return cohort_shortfall(self._participation, round, self._cohort.size, nodes, history, self._missing(directory))

    def _may_begin(self, users: int, directory: UserDirectory, grid: Grid) -> bool:
        """Whether the first round need not wait for more users."""
        return users >= self._cohort.expected_users and not self._nodes_missing(directory, grid)

    def _drawn(self, round: int, nodes: Mapping[str, NodeIds], history: History, key: bytes) -> list[str] | None:
        """The round's cohort of the users that are there; None if too few may take part.

        Without a sampling whoever was asked often enough in this very round, in vain, is replaced if others can be spared. With
        one who takes part stays as it was drawn.
        """

        def draw(available: Set[str]) -> list[str] | None:
            return cohort(self._participation, round, available, history, cohort_size=self._cohort.size, key=key)

        silent = {user for user, times in self._silent.items() if times >= _PATIENCE_WITH_USERS} & nodes.keys()
        if silent and not self._participation.is_secret:
            others = draw(nodes.keys() - silent)
            if others is not None and can_replace(self._participation, round, others, nodes, history):
                return others
        return draw(nodes.keys())

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
        return is_simulation(grid) or silent > 1 or 2 * silent >= directory.connected

    def _cannot_begin(self, users: int, directory: UserDirectory, waited: str) -> str:
        there = plural(users, "user is", "users are") + " there"
        if users >= self._cohort.expected_users:
            why = f" {_unable(directory)}." if directory.unable else ""
            return (
                f"{_silent(directory)} not said which users they host {waited}, and everybody there would be "
                f"left out of the run ({there}).{why} To begin without them, say how many users "
                f"are enough: expected_users={users}"
            )
        if self._is_short_by_budget(0, users):
            return self._beyond_budget(users)
        missing = self._missing(directory)
        return (
            f"{there} {waited}, and {self._cohort.expected_users} are expected ({self._cohort.expected_source})"
            f"{missing and '; '}{missing}. {self._remedy(users, directory)}"
        )

    def _is_short_by_budget(self, round: int, users: int) -> bool:
        """Whether the first round could begin, as far as the number of users goes, if the joint budget refused nobody."""
        return not round and users < self._cohort.expected_users <= users + self.over_budget

    def _beyond_budget(self, users: int) -> str:
        """That the joint budget leaves too few users for the first round, and what helps."""
        budget, admission = self._budget, self.admission
        assert budget is not None
        assert admission is not None
        smaller = "a plan with a smaller ε (fedcgd ledger compose says what the earlier runs cost)"
        if admission.room is not None:
            smaller = f"a plan of at most ε = {rounded_down(admission.room)} for this run"
        helps = "" if admission.room == 0 else f"{smaller}, "
        there = plural(users + self.over_budget, "user that is", "users that are")
        cost = rounded_up(admission.full_cost)
        return (
            f"the joint budget leaves too few users to begin with: {self.over_budget} of the {there} there have no budget left "
            f"after earlier runs, and {self._cohort.expected_users} are expected ({self._cohort.expected_source}). This plan and "
            f"the earlier runs they were in would cost up to ε = {cost} together at δ = {budget.delta:g}, and the budget is ε = "
            f"{budget.epsilon:g}. What helps: {helps}a joint budget of ε = {cost}, or people who were in no earlier run. With "
            "another plan or budget it is another run: this one has released nothing, so that its ledger may be deleted first"
        )

    def _waiting(self, round: int, users: int, directory: UserDirectory) -> str:
        there = plural(users, "user is", "users are") + " there"
        at_nodes = f"at {plural(directory.connected, 'node', 'nodes')}"
        if directory.is_hopeless:
            return (
                f"no user is there {at_nodes}, and none can be until others connect or these are mended, as said above"
            )
        if not round and users >= self._cohort.expected_users and directory.silent:
            return f"{_silent(directory)} not said yet which users they host"
        if self._is_short_by_budget(round, users):
            return self._beyond_budget(users)
        if round or users >= self._cohort.expected_users:
            return (
                f"{there} {at_nodes}, and round {round + 1} needs {self._cohort.size} who may take part: connect more"
            )
        return (
            f"{there} {at_nodes}, and {self._cohort.expected_users} are expected before the first round "
            f"({self._cohort.expected_source}). {self._remedy(users, directory)}"
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
        told = [f"{plural(number, one, many)} {what}" for number, one, many, what in parts if number]
        return "; ".join([_unable(directory)] * bool(directory.unable) + told)

    def _within_budget(self, nodes: Mapping[str, NodeIds]) -> Mapping[str, NodeIds]:
        """Those of the users that the joint budget admits. That depends on earlier ledgers alone, never on what is drawn."""
        refused = nodes.keys() & (frozenset() if self.admission is None else self.admission.refused)
        self.over_budget = len(refused)
        if refused and self._budget is not None and not self._told_budget:
            self._told_budget = True
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
    if is_simulation(grid):
        return directory.has_heard_all
    return directory.is_hopeless and directory.connected > 1


def _unable(directory: UserDirectory) -> str:
    """Which nodes cannot take part, and why."""
    by_reason: dict[str, list[int]] = {}
    for node_id, reason in directory.unable.items():
        by_reason.setdefault(reason, []).append(node_id)
    told = []
    for reason, nodes in by_reason.items():
        others = f" and {plural(len(nodes) - 1, 'other', 'others')}" if nodes[1:] else ""
        told.append(f"node {nodes[0]}{others} cannot take part: {reason}")
    return "; ".join(told)


def _silent(directory: UserDirectory) -> str:
    return f"{directory.silent} of {plural(directory.connected, 'node has', 'nodes have')}"


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """How many users a round is planned with (`size`, which `source` set), must answer, and must be there before the first."""

    size: int
    source: str
    min_answers: int
    expected_users: int
    expected_source: str
    """Who says how many are expected."""


def cohort_settings(
    participation: Participation,
    inner: Strategy,
    *,
    cohort_size: int | None,
    expected_users: int | None,
    min_answers: int | None,
) -> CohortSettings:
    """These numbers; for those that are None what the inner strategy and the participation say. Raises ValueError."""
    source = "cohort_size"
    if cohort_size is None:
        cohort_size, source = planned_cohort(inner, expected_users)
    if not isinstance(cohort_size, int) or cohort_size < 1:
        raise ValueError(
            f"cohort_size must be at least 1 and whole, got {cohort_size!r}: the planned number of users of a round"
        )
    if min_answers is None:
        min_answers = 0 if participation.is_secret else 1
    if not 0 <= min_answers <= (0 if participation.is_secret else cohort_size):
        raise ValueError(
            f"min_answers must be between 0 and cohort_size = {cohort_size}, and 0 with a secret sampling, because who "
            f"was drawn may not decide whether a round is released; got {min_answers}"
        )
    expected_source = EXPECTED_USERS
    if expected_users is None:
        expected_users, expected_source = users_needed(participation, cohort_size), "what the plan cannot do without"
        available = getattr(inner, "min_available_nodes", 0)
        if available > max(expected_users, FLOWERS_DEFAULT):
            expected_users, expected_source = available, f"min_available_nodes = {available}"
    return CohortSettings(
        size=cohort_size,
        source=source,
        min_answers=min_answers,
        expected_users=expected_users,
        expected_source=expected_source,
    )


def users_needed(participation: Participation, cohort_size: int) -> int:
    """The fewest users that all rounds can be done with, a full cohort each; 1 with a sampling, where cohorts vary."""
    if participation.is_secret:
        return 1
    return participation.users_for(cohort_size)


def can_replace(
    participation: Participation, round: int, cohort: Collection[str], reachable: Collection[str], history: History
) -> bool:
    """Whether `cohort` may be asked in place of users who were asked in this round before, and later rounds still find theirs.

    Whoever was asked has had a turn, so replacing a user costs a turn more. Once users come back as fast as they leave, that is
    all; the rounds before must live on those that have not been asked yet.
    """
    k, size = participation.participations, len(cohort)
    fresh = sum(history.last_rounds.get(user) != round for user in cohort)
    waiting = sum(history.last_rounds.get(user) != round for user in eligible(participation, round, reachable, history))
    turns = sum(k - history.counts.get(user, 0) for user in reachable)
    before_return = max(0, participation.scheme.rounds_without_return(participation, round))
    return waiting - fresh >= size * before_return and turns - fresh >= size * (participation.rounds - round - 1)


def spread(
    participation: Participation,
    round: int,
    users: list[str],
    nodes: Mapping[str, NodeIds],
    history: History,
    *,
    least: int,
    key: bytes,
) -> list[str]:
    """The cohort `users`, with some of other nodes in place of a few, so that it is at `least` nodes, if that can be."""
    chosen = list(users)
    while len(at := Counter(balance_users(chosen, nodes).values())) < min(least, len(users)):
        others = [user for user, where in nodes.items() if at.keys().isdisjoint(where)]
        more = cohort(participation, round, others, history, cohort_size=1, key=key)
        if more is None:
            return users
        [crowded] = at.most_common(1)
        chosen.remove(next(user for user in reversed(chosen) if crowded[0] in nodes[user]))
        chosen = sorted(chosen + more)
    return chosen


def cohort_shortfall(
    participation: Participation,
    round: int,
    cohort_size: int,
    nodes: Mapping[str, NodeIds],
    history: History,
    missing: str = "",
) -> str:
    """Why no cohort could be drawn: who is there, who of them may take part, and what keeps the others, `missing` ones too."""
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
