"""Who is asked in a round: waits until enough users are there who may take part, or says why there are not."""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcgd.accounting.guarantee import rounded_up
from fedcgd.ledger import Admission, Ledger
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import cohort, eligible
from fedcgd.participation.draws import draw
from fedcgd.participation.history import History
from fedcgd.support.numbers import plural
from fedcgd_flower.flower_private import log_info, log_warning
from fedcgd_flower.grid import kind_of
from fedcgd_flower.noise_provider import ServerNoise
from fedcgd_flower.users import NodeIds, UserDirectory, balance_users

if TYPE_CHECKING:
    from fedcgd_flower.strategy import RunSettings

FLOWERS_DEFAULT = 2
"""Of min_train_nodes and min_available_nodes: a strategy that has it may not have been told a number."""

_EXPECTED_USERS = "expected_users"  # the argument's name: the number of users to begin with was given


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
        cohort_size, source = _planned_cohort(inner, expected_users)
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
    expected_source = _EXPECTED_USERS
    if expected_users is None:
        expected_users, expected_source = _users_needed(participation, cohort_size), "what the plan cannot do without"
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


def _planned_cohort(inner: Strategy, expected_users: int | None) -> tuple[int, str]:
    """(users of a round, where that number comes from), by what the inner strategy says; ValueError if it does not say.

    `min_train_nodes`, where that was set and `fraction_train` was not, whoever is expected. Else, if the number of users is
    given, as in Flower max(⌊fraction_train · users⌋, min_train_nodes).
    """
    least, fraction = getattr(inner, "min_train_nodes", 0), getattr(inner, "fraction_train", 0.0)
    if fraction == 1.0 and least > FLOWERS_DEFAULT:
        return least, f"min_train_nodes = {least}"
    if least and expected_users is not None:
        source = (
            f"max(⌊fraction_train · expected_users⌋, min_train_nodes) = max(⌊{fraction:g} · {expected_users}⌋, {least})"
        )
        return max(int(fraction * expected_users), least), source
    raise ValueError(
        f"how many users a round? {type(inner).__name__} (fraction_train = {fraction:g}, min_train_nodes = {least}; Flower's "
        "defaults are 1 and 2) does not say it without the number of users: give cohort_size=, or expected_users=, or only "
        "min_train_nodes= to the inner strategy, without fraction_train"
    )


def _users_needed(participation: Participation, cohort_size: int) -> int:
    """The fewest users that all rounds can be done with, a full cohort each; 1 with a sampling, where cohorts vary."""
    return 1 if participation.is_secret else participation.users_for(cohort_size)


@dataclass(frozen=True)
class Waits:
    """How users are waited for, in seconds."""

    poll: float = 1.0  # between looks at who is there
    logged_every: float = 30.0  # between lines about what is waited for
    settled: float = 30.0  # without a change, after which nobody waits where nothing can change
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
        self, nodes: Mapping[str, NodeIds], size: int, least: int, silent: Collection[str] = ()
    ) -> dict[str, int] | None:
        """Each user of the cohort, and the node at which it is asked; None if there is no cohort at `least` nodes.

        Others take the place of those who are `silent`, if they can be spared. With a sampling one who takes part stays
        as it was drawn.
        """
        users, there = self.cohort(nodes.keys(), size), nodes
        if silent and not self.participation.is_secret:
            rest = {user: where for user, where in nodes.items() if user not in silent}
            others = self.cohort(rest.keys(), size)
            if others is not None and self._can_replace(others, nodes.keys()):
                users, there = others, rest
        if users is None:
            return None
        chosen = balance_users(users if least == 1 else self._over_nodes(there, size, least), nodes)
        return None if len(set(chosen.values())) < min(least, len(users)) else chosen

    def _over_nodes(self, nodes: Mapping[str, NodeIds], size: int, least: int) -> list[str]:
        """The cohort of a sampling without a secret, at `least` nodes if that can be, and so that later rounds can be too.

        Of those who took part least, those come first whose node has most of them left. Let R rounds share their users, R
        cohorts of c, of which node i hosts nᵢ. All can be at L ≤ c nodes if and only if Σ min(nᵢ, R) ≥ LR (Gale, Ryser, 1957).
        A user of each of the L largest nodes leaves enough for R − 1 rounds, and so do c − L more of the largest: either they are
        of nodes with R or more left, or all c(R − 1) that are left count.
        """
        alike: dict[tuple[NodeIds, tuple[bool, int]], list[tuple[int, str]]] = {}
        for user in eligible(self.participation, self.round, nodes, self.history):
            rank = self.history.last_rounds.get(user) != self.round, self.history.counts.get(user, 0)
            alike.setdefault((nodes[user], rank), []).append((draw(self.key, "order", user), user))
        ordered = sorted(
            (rank, -left, where, user)
            for (where, rank), some in alike.items()
            for left, (_, user) in enumerate(sorted(some), 1)
        )
        firsts = {where: user for *_, where, user in reversed(ordered)}
        chosen = [user for *_, where, user in ordered if firsts[where] == user][:least]
        return chosen + [user for *_, user in ordered if user not in chosen][: size - len(chosen)]

    def _can_replace(self, chosen: Collection[str], reachable: Collection[str]) -> bool:
        """Whether `chosen` may be asked in place of users who were asked in this round before, and later rounds find theirs.

        Users who were asked have participated, so a replacement costs one more participation. Once users return as fast as they
        leave, that is all; the rounds before must live on those that have not been asked yet.
        """
        participation, round, history, size = self.participation, self.round, self.history, len(chosen)
        waiting = eligible(participation, round, reachable, history)
        fresh, waiting_fresh = (
            sum(history.last_rounds.get(user) != round for user in users) for users in (chosen, waiting)
        )
        left = sum(participation.participations - history.counts.get(user, 0) for user in reachable)
        before_return = max(0, participation.scheme.rounds_without_return(participation, round))
        later = participation.rounds - round - 1
        return waiting_fresh - fresh >= size * before_return and left - fresh >= size * later


class CohortSelector:
    """Draws a run's cohorts from the users who are there, and remembers who is silent in a round."""

    def __init__(self, settings: "RunSettings", admission: Admission | None) -> None:
        self.admission = admission
        """Whose earlier runs leave too little of the joint budget."""
        self.over_budget = 0
        """How many of them were there at the last look."""
        self._settings, self._cohort = settings, settings.cohort
        self._has_warned = False
        self._silent: Counter[tuple[int, str]] = Counter()
        """(round, user) → in how many tries it was asked at a node that did not answer for all."""

    def record_dropouts(self, round: int, users: Collection[str]) -> None:
        """Some of `users`, which were asked at one node, did not answer in a try of `round`."""
        self._silent.update((round, user) for user in users)

    def wait_for(
        self, round: int, grid: Grid, directory: UserDirectory, ledger: Ledger, noise: ServerNoise
    ) -> dict[str, int] | str:
        """Users of the round and the node of each, or the reason if too few are there within `patience` seconds.

        Raises ValueError if fewer users than expected are there before the first round, or nodes whose users nobody knows.
        """
        began = changed = log_at = time.monotonic()
        there: tuple[int, int, int] | None = None
        choices, patience = self._settings.key.choices_of(ledger.stream_id), self._settings.patience
        silent = {user for (when, user), tries in self._silent.items() if when == round and tries >= _WAITS.tries}
        while True:
            nodes = self._within_budget(directory.refresh(grid))
            draw = Draw(self._settings.plan.participation, round, ledger.history(list(nodes)), choices)
            may_begin = round > 0 or self._may_begin(len(nodes), directory, grid)
            chosen = draw.at_nodes(nodes, self._cohort.size, noise.least_nodes, silent) if may_begin else None
            if chosen is not None:
                return chosen
            now = time.monotonic()
            before, there = there, (directory.connected, len(directory.unable), len(nodes))
            changed = changed if there == before else now
            deadline = began + patience
            if not may_begin and not nodes and self.over_budget >= self._cohort.size:
                deadline = now  # others may still connect, but hardly after a cohort all refused
            if _is_final(directory, grid):
                deadline = min(deadline, changed + _WAITS.settled)
            if now >= deadline:
                break
            if now >= log_at:  # at once, and then from time to time
                waiting = self._shortage(draw, nodes, directory, may_begin, noise.least_nodes)
                log_info(f"{waiting}; waiting for up to {deadline - now:.0f} s")
                log_at = now + _WAITS.logged_every
            time.sleep(min(_WAITS.poll, patience))
        shortage = self._shortage(draw, nodes, directory, may_begin, noise.least_nodes)
        if directory.is_hopeless or not may_begin:
            raise ValueError(f"after {now - began:.0f} s: {shortage}")
        return shortage

    def _may_begin(self, users: int, directory: UserDirectory, grid: Grid) -> bool:
        """Whether the first round need not wait for more users: enough are there, and those of too many nodes are not unknown.

        In a simulation all nodes are this program's own, and none may be unknown. In deployment two, or half of them: a single
        node cannot keep the others from beginning. If the number of users was given, nobody waits for more.
        """
        silent = directory.silent
        if users < self._cohort.expected_users or not silent or self._cohort.expected_source == _EXPECTED_USERS:
            return users >= self._cohort.expected_users
        return not (kind_of(grid).is_simulation or silent > 1 or 2 * silent >= directory.connected)

    def _shortage(
        self, draw: Draw, nodes: Mapping[str, NodeIds], directory: UserDirectory, may_begin: bool, least: int
    ) -> str:
        """Why the round has no cohort: who is there, who of them may take part, what keeps the others, and what helps.

        Users' ids are not told: nodes sent them.
        """
        participation, history, size = draw.participation, draw.history, self._cohort.size
        k = participation.participations
        used_up = sum(history.counts.get(user, 0) >= k and history.last_rounds[user] != draw.round for user in nodes)
        free = len(eligible(participation, draw.round, nodes, history))
        connected = plural(directory.connected, "node", "nodes")
        causes = [
            (len(nodes) - used_up - free, f"of them took part too lately ({participation})"),
            (used_up, f"of them have taken part {plural(k, 'time', 'times')}, which is all they may"),
            (
                self.over_budget,
                f"more, of {len(nodes) + self.over_budget} in all, have no budget left after earlier runs",
            ),
            (directory.claimed_twice, f"more are claimed by several nodes and not asked ({directory.claimants})"),
            (sum(directory.refused.values()), "more were claimed by a node that may not speak for them"),
        ]
        told = [
            f"{plural(len(nodes), 'user is', 'users are')} there at {connected} and {free} may take part, of {size} a round"
        ]
        told += [f"{number} {cause}" for number, cause in causes if number]
        if may_begin and free >= size:
            told.append(
                f"they are at fewer than {least} nodes, and no sum of so few gets noise: connect others, or agree on another "
                "number with all parties"
            )
        if unsaid := directory.silent - len(directory.unable):
            patience = f"{self._settings.patience:.0f} s"
            told.append(
                f"{plural(unsaid, 'node has', 'nodes have')} not said which users they host: if they are slow, raise patience "
                f"above {patience}"
            )
        return "; ".join([*told, *_unable(directory), *([] if may_begin else [self._remedy(len(nodes), directory)])])

    def _remedy(self, users: int, directory: UserDirectory) -> str:
        """What to do where too few users are there to begin with."""
        participation, size = self._settings.plan.participation, self._cohort.size
        if users >= self._cohort.expected_users:
            silent = f"{directory.silent} of {plural(directory.connected, 'node has', 'nodes have')}"
            return (
                f"{silent} not said which users they host, and everybody there would be left out of the run: to begin without "
                f"them, say how many users are enough: expected_users={users}"
            )
        turns = plural(participation.participations, "time", "times")
        connect = "connect more nodes" if directory.connected else "no node is connected to the SuperLink: start them"
        expected = f"{self._cohort.expected_users} are expected ({self._cohort.expected_source})."
        if users + self.over_budget >= self._cohort.expected_users:
            return f"{expected} {self._budget_spent()}"
        return (
            f"{expected} With {plural(size, 'user', 'users')} a round, each at most {turns} and {participation.min_separation} "
            f"rounds apart, the {participation.rounds} rounds need {_users_needed(participation, size)} users: {connect}, or "
            "lower cohort_size or the plan's min_separation. To begin with fewer, if others join later, say "
            f"expected_users={max(users, 1)}"
        )

    def _budget_spent(self) -> str:
        """What earlier runs and this plan cost those who are refused, and what helps."""
        budget, admission = self._settings.budget, self.admission
        assert budget is not None  # noqa: S101
        assert admission is not None  # noqa: S101
        cost = rounded_up(admission.full_cost)
        return (
            f"This plan and the earlier runs that refused users were in would cost up to ε = {cost} together at δ = "
            f"{budget.delta:g}, and the joint budget is ε = {budget.epsilon:g}: plan a smaller ε for this run, take a joint "
            f"budget of ε = {cost}, or find people who were in no earlier run."
        )

    def _within_budget(self, nodes: Mapping[str, NodeIds]) -> Mapping[str, NodeIds]:
        """Those of the users that the joint budget admits. That depends on earlier ledgers alone, never on what is drawn."""
        refused = nodes.keys() & (frozenset() if self.admission is None else self.admission.refused)
        self.over_budget = len(refused)
        if refused and not self._has_warned:
            self._has_warned = True
            there = plural(len(refused), "user that is there is", "users that are there are")
            log_warning(f"{there} refused. {self._budget_spent()}")
        return {user: where for user, where in nodes.items() if user not in refused}


def _is_final(directory: UserDirectory, grid: Grid) -> bool:
    """Whether waiting is in vain if nothing changes soon: all nodes that are there have answered, and no others are to come.

    In deployment a single node that cannot take part says nothing about those that connect after it; of two or more, which
    have the same app, it does.
    """
    if kind_of(grid).is_simulation:
        return directory.has_heard_all
    return directory.is_hopeless and directory.connected > 1


def _unable(directory: UserDirectory) -> list[str]:
    """Which nodes cannot take part, and why."""
    by_reason: dict[str, list[int]] = {}
    for node_id, reason in directory.unable.items():
        by_reason.setdefault(reason, []).append(node_id)
    texts = []
    for reason, nodes in by_reason.items():
        others = f" and {plural(len(nodes) - 1, 'other', 'others')}" if nodes[1:] else ""
        texts.append(f"node {nodes[0]}{others} cannot take part: {reason}")
    return texts
