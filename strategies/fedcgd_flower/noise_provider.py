"""Who makes the noise of a run's sums: this server, or keepers, whose folder nothing else names.

Rounds know both by two classes, and nodes by three functions. A node loads no part of a server, and keepers only if it has some.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flwr.app import ConfigRecord, Context, Message
from flwr.serverapp import Grid

from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd_flower.clipping import Steps
from fedcgd_flower.messages import TrainTask, failed_reply, sum_of_replies, train_reply
from fedcgd_flower.problems import RejectionReason

if TYPE_CHECKING:
    from fedcgd.keepers import Keepers
    from fedcgd.ledger import Ledger
    from fedcgd.noise.keys import NoiseKey
    from fedcgd.plan import Plan
    from fedcgd.release import ReleaseProtocol

Replies = Iterable[tuple[Message | None, TrainTask]]
Results = list[int | RejectionReason]
"""Of each reply, how many users are in the sum by it, or why none is."""


class NoiseUnavailableError(Exception):
    """The sum has no noise: the round is tried again, or consumed if other parties had been asked for it."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What is summed and noised in the rounds of one kind: updates, or what users measure of a released model."""

    plan: "Plan"
    """Its clip norm is the bound on one user's vector on the wire."""
    size: Callable[[int], int]
    """Parameters of the model → coordinates of the sum."""
    cohort_size: int


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What nodes are told with a request of the round, and the lattice of their integers."""

    lattice: Lattice
    records: Mapping[str, ConfigRecord] = field(default_factory=dict)


class ServerNoise:
    """The noise of one kind of a run's sums. Here it is this server's, which sees sums; other parties override all of it."""

    least_nodes = 1
    """The fewest nodes whose sum gets noise."""
    gives_up = ""
    """Why no further round is tried; "" while there is no reason."""
    advice = ""
    """What can be done about that."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def terms(self, grid: Grid, parameters: int) -> Any:
        """The `Terms` of the next round, for a model of so many parameters; or the reason, a text, if it cannot be tried."""
        from fedcgd.release import lattice_of

        return Terms(lattice=lattice_of(self._sums.plan, self._sums.size(parameters)))

    def sum_of(self, replies: Replies, terms: Any, size: int) -> tuple[Any, Results]:
        """The sum of so many coordinates, as `add_noise` takes it, and what became of each reply."""
        return sum_of_replies(replies, size)

    def add_noise(self, total: Any, releases: "ReleaseProtocol", attempt: int, terms: Any, grid: Grid) -> Integers:
        """The sum with its noise, in steps of the lattice. Raises NoiseUnavailableError."""
        releases.add_noise(total, attempt, terms.lattice)
        return cast(Integers, total)

    def of_evaluations(self, sums: Sums, ledger: "Ledger") -> "ServerNoise":
        """That of the run's evaluations, which this ledger records."""
        return ServerNoise(sums)

    def close(self) -> None:
        """Close what is open."""


class NoiseParties:
    """Who makes the noise of a run, before it has a ledger: this server, unless other parties override all of it."""

    louder = 1.0
    """The standard deviation of the noise, in units of the plan's."""

    def check(self, training: Sums, evaluation: Sums | None, key: "NoiseKey") -> None:
        """Raise ValueError unless they can make the noise of such a run."""

    def to_description(self) -> dict[str, Any]:
        """What a ledger's configuration says of them."""
        return {}

    def log(self, plan: "Plan", evaluations: "Plan | None") -> None:
        """Log who they are and what that means for ε, where the guarantee does not say it."""

    def provider(
        self, training: Sums, evaluation: Sums | None, ledger: "Ledger", path: Path | None, patience: float
    ) -> ServerNoise:
        """The noise of the run's training, recorded in `ledger` at `path`; other parties are waited for `patience` seconds."""
        return ServerNoise(training)


def noise_parties(keepers: "Keepers | None") -> NoiseParties:
    """Keepers, or this server where there are none. Raises TypeError for anything else."""
    if keepers is None:
        return NoiseParties()
    from fedcgd_flower.keepers import KeeperParties

    return KeeperParties(keepers)


# How a node answers: in the clear, or under masks that only keepers open. Their part is loaded only where there are keepers.

KEEPERS = "fedcgd-keepers"
"""The record that says which agreement and which keepers a round has; on a question to a keeper, also what is asked."""


def question_of(message: Message) -> str | None:
    """What a keeper is asked: "/who", "/check" or "/open"; None if the message is no question to a keeper."""
    return cast(str | None, message.content.config_records.get(KEEPERS, ConfigRecord()).get("question"))


def keeper_reply(message: Message, context: Context, keepers: "Keepers | None") -> Message | None:
    """The reply to a question to a keeper; None if `message` is none."""
    if (question := question_of(message)) is None:
        return None
    from fedcgd_flower.keepers import answer_question

    return answer_question(message, question, context, keepers)


def check_masked(message: Message, keepers: "Keepers | None") -> None:
    """Raise ValueError unless the server and this node both mean the same keepers, or both none.

    A node that was given keepers sends nothing that the server alone could read, whatever it is asked.
    """
    if (keepers is not None) != (KEEPERS in message.content.config_records):
        given, asked = ("none", "masks for them") if keepers is None else ("keepers", "what it could read alone")
        raise ValueError(
            f"this node was given {given}, and the server asks for {asked}: give keepers= both to CorrelatedNoise and to "
            "host_users or ClippedUpdateMod, or to neither"
        )


def sum_reply(
    message: Message,
    context: Context,
    task: TrainTask,
    keepers: "Keepers | None",
    users: Collection[str],
    summed: Callable[[], tuple[Steps, int]],
) -> Message:
    """The reply to a request: the sum that `summed` makes for `users` of the node, and how many of them are in it.

    With `keepers` the sum is masked, and how many are in it stays on the node.
    """
    if keepers is not None:
        from fedcgd_flower.keepers import masked_answer

        return masked_answer(message, context, task, keepers, users, lambda: summed()[0])
    try:
        return train_reply(message, task, *summed())
    except Exception as error:
        return failed_reply(message, error)
