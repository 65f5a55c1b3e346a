"""The server's side of keepers: masked replies are added, and keepers open their sum once.

The order is what the promise rests on. Which keepers a round has is fixed before nodes are asked; the list of nodes that answered
is in the ledger before a keeper is; and from then on the round is released or spent. The server never holds anything but masked
integers and noised sums.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from scipy.stats import chi2

from fedcgd.accounting.guarantee import rounded_up
from fedcgd.accounting.shares import guarantees_by_collusion
from fedcgd.keepers import EVALUATION, Agreement, Keepers, Masked, Opening, Refusal, add, agree, lifted, sums_of
from fedcgd.keepers.agreement import check_plan, longest_row
from fedcgd.keepers.keeper import list_hash
from fedcgd.keepers.masks import Residues
from fedcgd.ledger import Ledger
from fedcgd.ledger.store import KEEPERS
from fedcgd.ledger.verification import with_evaluations_by_collusion
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.quantisation import Integers
from fedcgd.plan import Plan
from fedcgd.release import ReleaseProtocol
from fedcgd.support.numbers import plural
from fedcgd_flower.flower_private import log, log_warning
from fedcgd_flower.keepers.messages import Masking, read_masked_reply
from fedcgd_flower.keepers.transport import Transport, transport_of
from fedcgd_flower.noise_provider import NoiseParties, NoiseUnavailableError, Replies, Results, ServerNoise, Sums

_MOST_SPENT = (
    3  # rounds in a row: a node or keeper that spoils sums does not mend itself, and each costs its users a turn
)


Members = list[tuple[Masked, int]]
"""What the nodes on the list sent, and which nodes they are."""


class Openings(ServerNoise):
    """The openings of a run's sums of one kind: which keepers a round has, and their answers.

    Args:
        keepers: of the run.
        transport: how they are reached; the same for both kinds.
        ledger: that of this kind.
        agreed: the coordinates of a model → what all parties agree on for this kind.
        sums: of this kind.
        patience: seconds to wait for keepers.
    """

    def __init__(
        self,
        keepers: Keepers,
        transport: Transport,
        ledger: Ledger,
        agreed: Callable[[int], Agreement],
        sums: Sums,
        patience: float,
    ) -> None:
        self._keepers = keepers
        self._transport = transport
        self._ledger = ledger
        self._agreed = lru_cache(maxsize=1)(agreed)
        self._cohort_size = sums.cohort_size
        self._patience = patience
        self.least_nodes = keepers.nodes
        self._check_first = True
        self._check_always = False

    @property
    def gives_up(self) -> str:  # type: ignore[override]
        """Why no further round is tried; "" while there is no reason."""
        last = [opened.state for opened in self._ledger.openings()[-_MOST_SPENT:]]
        reason = (
            f"{_MOST_SPENT} rounds in a row are consumed without a release, and each costs its users a participation"
        )
        return reason if last == ["spent"] * _MOST_SPENT else ""

    advice = (
        "find out why: the keepers' logs say what they refused. If the sums are too long, a node runs other code than the others "
        "or cheats: go on without some of them, until rounds are released"
    )

    def of_evaluations(self, sums: Sums, ledger: Ledger) -> "Openings":
        """The openings of the run's evaluations, whose ledger this is."""

        def agreed(parameters: int) -> Agreement:
            return self._agreed(parameters).of(EVALUATION)

        return Openings(self._keepers, self._transport, ledger, agreed, sums, self._patience)

    def close(self) -> None:
        """Close what the transport holds open."""
        self._transport.close()

    def terms(self, grid: Grid, parameters: int) -> Masking | str:
        """How the nodes of the next round mask, with the keepers that are there; or the reason if too few are.

        `parameters` are those of the model, for evaluations too: both kinds are one agreement.
        """
        agreed = self._agreed(parameters)
        present = self._transport.present(grid, self._patience)
        needed = len(self._keepers.cards) - self._keepers.away
        if len(present) < needed:
            missing = ", ".join(sorted(set(self._keepers.names) - set(present)))
            return f"{len(present)} of {needed} keepers were reachable; missing: {missing}"
        return Masking(agreed, present)

    def sum_of(self, replies: Replies, terms: Masking, size: int) -> tuple[Members, Results]:
        """The masked replies, of which nobody can read a sum yet; for each the users that were asked there, or why it is dropped.

        How many of a node's users took part, nobody knows but the node.
        """
        members: Members = []
        results: Results = []
        tickets: set[bytes] = set()
        for reply, task in replies:
            read = read_masked_reply(reply, task, terms)
            if not isinstance(read, Masked) or read.ticket in tickets:
                results.append("not asked for" if isinstance(read, Masked) else read)
                continue
            tickets.add(read.ticket)
            members.append((read, task.node))
            results.append(len(task.users))
        return members, results

    def add_noise(
        self, total: Members, releases: ReleaseProtocol, attempt: int, terms: Masking, grid: Grid
    ) -> Integers:
        """Σ updates + Σ shares of the noise, in steps, int64, of the round that comes next on the record of `releases`.

        From the moment in which keepers are asked to open it the round is released or consumed.

        Raises:
            NoiseUnavailableError: as `_readable`; if too few nodes are left; and, when the round is consumed, if a keeper refuses
                or is gone, or the sum is longer than updates and noise can be.
        """
        members = self._readable(grid, terms, releases.count, attempt, total)
        if len(members) < self._keepers.nodes:
            raise NoiseUnavailableError(
                f"{plural(len(members), 'node has', 'nodes have')} answered, and the keepers' file says that a sum is of "
                f"at least {self._keepers.nodes}: connect others, or agree on another number with all parties"
            )
        agreement = terms.agreement
        requests = self._requests(terms, releases.count, attempt, members)
        listed = list_hash(agreement, requests[terms.present[0]])
        releases.leave_noise_to_others(self._ledger.record_opening(releases.count, attempt, listed, terms.present))
        answers = self._transport.ask(grid, agreement, requests, check=False, patience=self._patience)
        residues: Residues = np.zeros(agreement.size, f"u{agreement.bits // 8}")
        for member, _ in members:
            add(residues, member.residues)
        for name, answer in answers.items():
            if answer is None or isinstance(answer, Refusal):
                self._check_always = self._check_first = True
                raise NoiseUnavailableError(f"keeper {name}: {answer.reason if answer else 'no answer'}")
            add(residues, answer)
        self._check_first = self._check_always
        noised = lifted(residues)
        self._check_length(noised, terms)
        return noised

    def _readable(self, grid: Grid, masking: Masking, round: int, attempt: int, members: Members) -> Members:
        """`members` without the nodes whose seeds a keeper could not open, where that is to be asked first.

        It is in the first round of a process, when parties may still disagree, and in all after a refusal: else one node
        could spend every round.

        Raises:
            NoiseUnavailableError: if a keeper is gone or refuses; nothing is spent.
        """
        gone = set(masking.present) - set(self._transport.present(grid, 0.0))
        if gone:
            raise NoiseUnavailableError(f"keepers {', '.join(sorted(gone))} are gone")
        if not self._check_first:
            return members
        requests = self._requests(masking, round, attempt, members)
        answers = self._transport.ask(grid, masking.agreement, requests, check=True, patience=self._patience)
        bad: set[int] = set()
        for name, answer in answers.items():
            if not isinstance(answer, Refusal) or answer.reason:
                reason = answer.reason if isinstance(answer, Refusal) else "no answer"
                raise NoiseUnavailableError(f"keeper {name}: {reason}")
            bad |= {i for i in answer.unreadable if 0 <= i < len(members)}
        if bad:
            self._check_always = True
            named = {node.node_id: node.name for node in grid.get_nodes()}
            ids = [members[i][1] for i in sorted(bad)]
            who = ", ".join(named.get(node_id) or f"node {node_id}" for node_id in ids)
            log_warning(
                f"{len(bad)} of {len(members)} nodes cannot be opened, because they see another keepers.toml, or cheat; "
                f"they are left out: {who}"
            )
        return [member for i, member in enumerate(members) if i not in bad]

    def _check_length(self, noised: Integers, masking: Masking) -> None:
        """Raise NoiseUnavailableError if the sum cannot be one of clipped updates and noise: somebody's masks do not fit.

        It is a function of the noised sum, and so costs no privacy.
        """
        agreement = masking.agreement
        rounds = agreement.plan.participation.rounds
        row = longest_row(agreement.plan.mechanism, rounds)
        stddev = agreement.share_stddev * math.sqrt(len(masking.present)) * row
        # An honest sum is called too long with chance 10⁻⁹.
        most = self._cohort_size * agreement.plan.clip_norm
        most += stddev * math.sqrt(float(chi2.isf(1e-9, agreement.size)))
        length = float(np.linalg.norm(noised.astype(np.float64))) * agreement.step
        if length > most:
            raise NoiseUnavailableError(
                f"the noised sum has norm {length:.3g}, and {self._cohort_size} clipped updates with their noise have at most "
                f"{most:.3g}: a node or a keeper sent something else"
            )

    def _requests(self, masking: Masking, round: int, attempt: int, members: Members) -> dict[str, Opening]:
        after: dict[str, int] = {}
        for opened in self._ledger.openings():
            if opened.state == "released" and opened.round < round:
                after |= dict.fromkeys(opened.keepers, opened.round)
        return {
            name: Opening(
                round=round,
                attempt=attempt,
                present=masking.present,
                tickets=tuple(member.ticket for member, _ in members),
                sealed=tuple(member.sealed[name] for member, _ in members),
                after=after.get(name),
            )
            for name in masking.present
        }


class KeeperParties(NoiseParties):
    """Keepers make the noise of a run, instead of this server.

    Args:
        keepers: who they are.

    Raises:
        TypeError: for anything else.
    """

    def __init__(self, keepers: Keepers) -> None:
        if not isinstance(keepers, Keepers):
            raise TypeError(f"keepers must be Keepers, for example Keepers.from_file('keepers.toml'); got {keepers!r}")
        self.keepers = keepers
        self.louder = keepers.shares.louder

    def check(self, training: Sums, evaluation: Sums | None, key: NoiseKey) -> None:
        """Raise ValueError unless they can make the noise of such a run."""
        keepers = self.keepers
        check_plan(training.plan)
        if evaluation is not None:
            check_plan(evaluation.plan)
        cohort_size = min(sums.cohort_size for sums in (training, evaluation) if sums is not None)
        if cohort_size < keepers.nodes:
            raise ValueError(
                f"{plural(cohort_size, 'user', 'users')} a round cannot be at {keepers.nodes} nodes, which is the fewest whose "
                "sum the keepers open: take a larger cohort, or agree on another number in their file (nodes = 1 opens single "
                "nodes)"
            )
        if keepers.are_services and keepers.tls is None:
            raise ValueError(
                "these keepers are services, which the server reaches over TLS: Keepers.from_file(…, tls=Tls(certificate=…, "
                "private_key=…, trusted=…))"
            )
        if keepers.simulated != key.simulated:
            raise ValueError(
                "simulated keepers go with a simulation key and real ones with a real key: anybody can guess what a "
                "simulation keeps"
            )

    def to_description(self) -> dict[str, Any]:
        """What a ledger's configuration says of the keepers."""
        keepers = self.keepers
        described = {
            "digest": keepers.digest,
            "colluding": keepers.colluding,
            "away": keepers.away,
            "simulated": keepers.simulated,
            "keepers": {card.name: card.fingerprint for card in keepers.cards},
        }
        return {KEEPERS: described}

    def log(self, plan: Plan, evaluations: Plan | None) -> None:
        """Log who the keepers are and against whom which ε holds, and what they do not protect from."""
        keepers = self.keepers
        names = ", ".join(f"{card.name} ({card.fingerprint})" for card in keepers.cards)
        log(INFO, f"\t├──> fedcgd: the noise comes from {len(keepers.cards)} keepers: {names}")
        for against in guarantees_by_collusion(
            plan.accountant, keepers.shares, noise_multiplier=plan.noise_multiplier, delta=plan.delta
        ):
            planned = " (the plan's)" if against.colluding == keepers.colluding else ""
            log(
                INFO,
                f"\t│\t├── against the server with {against.colluding} of them: ε ≤ {rounded_up(against.epsilon)}{planned}",
            )
        if evaluations is not None:
            both = with_evaluations_by_collusion(plan, evaluations, keepers.shares)
            epsilons = [f"{rounded_up(one)} with {number}" for number, one in enumerate(both)]
            log(INFO, f"\t│\t├── training and evaluations together: ε ≤ {', '.join(epsilons)} of them")
        who = "nodes" if keepers.are_services else "nodes and keepers"
        log(
            INFO,
            f"\t│\t└── this holds against who reads the server, not who changes the app: Flower sends {who} their code",
        )

    def provider(
        self, training: Sums, evaluation: Sums | None, ledger: Ledger, path: Path | None, patience: float
    ) -> Openings:
        """The openings of the run's training."""
        keepers = self.keepers

        def agreed(parameters: int) -> Agreement:
            evaluated = None
            if evaluation is not None:
                size, users = evaluation.size(parameters), evaluation.cohort_size
                evaluated = sums_of(evaluation.plan, size=size, keepers=keepers, users=users)
            return agree(
                training.plan,
                size=training.size(parameters),
                keepers=keepers,
                run=ledger.stream_id,
                users=training.cohort_size,
                evaluation=evaluated,
            )

        transport = transport_of(keepers, path, new=not ledger.openings())
        return Openings(keepers, transport, ledger, agreed, training, patience)
