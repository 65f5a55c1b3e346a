"""Who is asked in a round: waits until enough users are there who may take part, or says why there are not."""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from logging import INFO, WARNING

from flwr.serverapp import Grid
from flwr.supercore import log

from fedcgd.keys import NoiseKey
from fedcgd.ledger import JointBudget, Ledger
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import cohort
from fedcgd_flower.enough_users import can_replace, too_few, users_needed
from fedcgd_flower.places import Nodes, nodes_of_all, spread
from fedcgd_flower.roster import Roster

_POLL = 1.0  # seconds between looks at who is there
_TOLD_EVERY = 30.0  # seconds between lines about what is waited for
_PATIENCE_WITH_USERS = 2  # tries of a round: replacing a user at once would cost another one's turn


class CohortChoice:
    """Draws the cohorts of `cohort_size` users of a run from those who are there, and remembers who is silent in a round."""

    def __init__(
        self,
        participation: Participation,
        cohort_size: int,
        *,
        expected_users: int,
        patience: float,
        budget: JointBudget | None,
    ) -> None:
        self.refused: frozenset[str] = frozenset()
        """Users whose earlier runs leave too little of `budget`."""
        self.over_budget = 0
        """How many of them were there at the last look."""
        self._participation = participation
        self._cohort_size = cohort_size
        self._expected_users = expected_users
        self._patience = patience
        self._budget = budget
        self._told_budget = False
        self._silent: Counter[str] = Counter()
        self._lost: set[int] = set()
        self._there: set[int] = set()
        self._silent_in = 0

    def note_silence(self, round: int, users: Collection[str], lost: int | None = None) -> None:
        """Some of `users`, which were asked at one node, did not answer in a try of `round`; `lost` is the node if none did."""
        self._forget_before(round)
        self._silent.update(users)
        if lost is not None:
            self._lost.add(lost)

    def wait_for(self, round: int, grid: Grid, roster: Roster, ledger: Ledger, key: NoiseKey) -> dict[str, int] | str:
        """Users of the round and the node of each, or the reason if too few are there within `patience` seconds.

        Raises ValueError if fewer users than expected are there before the first round.
        """
        began = time.monotonic()
        deadline, told = began + self._patience, began
        self._forget_before(round)
        participation, choices_key = self._participation, key.choices_of(ledger.stream_id)
        sampled = participation.sampling != "none"  # then who takes part is drawn, and stays as it was drawn
        while True:
            nodes = self._within_budget(roster.refresh(grid))
            history = ledger.history(list(nodes))
            enough = round > 0 or len(nodes) >= self._expected_users
            # Whoever was asked twice in this very round, in vain, is replaced if others can be spared.
            silent = {user for user, times in self._silent.items() if times >= _PATIENCE_WITH_USERS}
            choices = [nodes.keys()] if sampled else [nodes.keys() - silent, nodes.keys()]
            for available in choices if enough else []:
                users = cohort(participation, round, available, history, cohort_size=self._cohort_size, key=choices_key)
                if users is not None and (
                    len(available) == len(nodes) or can_replace(participation, round, users, nodes, history)
                ):
                    return spread(users, nodes, avoid=self._doubtful(nodes))
            if (now := time.monotonic()) >= deadline:
                break
            if now >= told:  # at once, and then from time to time
                log(INFO, "fedcgd: %s; waiting for up to %.0f s", self._waiting(round, len(nodes)), deadline - now)
                told = now + _TOLD_EVERY
            time.sleep(min(_POLL, self._patience))
        if not enough:
            raise ValueError(self._too_few_to_begin(len(nodes), self._missing(roster)))
        return too_few(participation, round, self._cohort_size, nodes, history, self._missing(roster))

    def _forget_before(self, round: int) -> None:
        if round != self._silent_in:
            self._silent, self._lost, self._there, self._silent_in = Counter(), set(), set(), round

    def _doubtful(self, nodes: Mapping[str, Nodes]) -> set[int]:
        """Nodes that were lost in an earlier try of the round, and those that came since: one may be a lost one's other id."""
        there = nodes_of_all(nodes)
        if not self._lost:
            self._there = there
        return self._lost | (there - self._there)

    def _waiting(self, round: int, users: int) -> str:
        if not round and users < self._expected_users:
            return (
                f"{users} users are there, and {self._expected_users} are expected before the first round: with "
                f"{self._cohort_size} a round, and a user's rounds at least {self._participation.min_separation} apart"
            )
        return f"{users} users are there, and round {round + 1} needs {self._cohort_size} who may take part"

    def _too_few_to_begin(self, users: int, missing: str) -> str:
        participation = self._participation
        return (
            f"{users} users are there after {self._patience:.0f} s, and {self._expected_users} are expected"
            f"{missing and '; '}{missing}. "
            f"With {self._cohort_size} users a round, each at most {participation.participations} times and "
            f"{participation.min_separation} rounds apart, the {participation.rounds} rounds need "
            f"{users_needed(participation, self._cohort_size)} users: lower cohort_size or the plan's min_separation, or say "
            "expected_users to begin with fewer, if others join later"
        )

    def _missing(self, roster: Roster) -> str:
        """What keeps users that might take part from being counted. Their ids are not told: nodes sent them."""
        slow = f"if they are slow to say it, raise patience above {self._patience:.0f} s"
        refused = sum(roster.refused.values())
        parts = [
            f"{roster.silent} nodes have not said which users they host (see above): {slow}" if roster.silent else "",
            f"{roster.claimed_twice} users are claimed by two nodes and take part at neither"
            if roster.claimed_twice
            else "",
            f"{refused} users were claimed by a node that may not speak for them" if refused else "",
            f"{self.over_budget} more have no budget left after earlier runs" if self.over_budget else "",
        ]
        return "; ".join(part for part in parts if part)

    def _within_budget(self, nodes: Mapping[str, Nodes]) -> Mapping[str, Nodes]:
        """Those of the users that the joint budget admits. That depends on earlier ledgers alone, never on what is drawn."""
        refused = nodes.keys() & self.refused
        self.over_budget = len(refused)
        if refused and self._budget is not None and not self._told_budget:
            self._told_budget = True
            log(
                WARNING,
                "fedcgd: %d users that are there are refused: the earlier runs they were in, and this plan, cost more than the "
                "joint budget of ε = %g at δ = %g. Plan a smaller ε for this run, raise the budget, or find other users",
                len(refused),
                self._budget.epsilon,
                self._budget.delta,
            )
        return {user: where for user, where in nodes.items() if user not in refused} if refused else nodes
