"""What a run has cost so far, where Opacus has its accountant, and what a checkpoint keeps of the run."""

import warnings
from dataclasses import replace
from typing import Any

from opacus.accountants import IAccountant

from fedcgd.noise import STREAM
from fedcgd.opacus.rounds import Epoch, Rounds
from fedcgd.plan import Plan, plan_differences


class RunAccountant(IAccountant):  # type: ignore[misc]
    """The rounds of a run that are released, in the words of Opacus' accountants.

    Args:
        rounds: of the run.
        epoch: of the run: with the plan and the key it says which examples are in which round.
        fingerprint: the key's, for checkpoints.
        assumed_independent: why the author takes examples for independent, whatever a probe finds; on record.
    """

    def __init__(self, rounds: Rounds, epoch: Epoch, fingerprint: str, assumed_independent: str | None) -> None:
        self.rounds, self.sample_rate, self.fingerprint = rounds, 1 / epoch.steps, fingerprint
        self.assumed_independent = assumed_independent
        self._epoch = {"examples": epoch.examples, "steps": epoch.steps}

    __getstate__ = Rounds.__getstate__

    @property
    def plan(self) -> Plan:
        """What the run is accounted for."""
        return self.rounds.plan

    @property
    def released(self) -> int:
        """How many rounds are released."""
        return self.rounds.releases.count

    @property
    def nonces(self) -> tuple[int, ...]:
        """Of each released round: which of its noises was used."""
        return self.rounds.releases.nonces

    @property
    def run(self) -> str:
        """Names the run among all with its key: no two share noise or batches."""
        return self.rounds.releases.run

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, rounds released), as Opacus' accountants have it; empty before the first release."""
        return [(self.plan.noise_multiplier, self.sample_rate, self.released)] if self.released else []

    def __len__(self) -> int:
        return self.released

    @classmethod
    def mechanism(cls) -> str:
        """A name which no accountant of Opacus has: their checkpoints and these do not mix."""
        return "fedcgd"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Raises RuntimeError: a step that nobody took cannot be counted."""
        raise RuntimeError("the private optimizer counts what it releases, and nothing else does")

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """An upper bound on ε of the rounds so far; adjacency is zero out one example.

        Their number must not depend on what they released: else the ε of the whole plan holds. Under Balls-in-Bins this takes
        seconds, each time. Opacus' `alphas` (orders to search) and errors (how coarse an answer may be) change nothing.
        """
        return replace(self.plan, delta=delta).guarantee(released=self.released).epsilon if self.released else 0.0

    def state_dict(self, destination: Any = None) -> dict[str, Any]:
        """What a checkpoint has to hold so that the noise goes on in the right round; put into `destination` if there is one."""
        state: dict[str, Any] = {} if destination is None else destination
        nonces = self.nonces[: self.rounds.next]
        state["plan"] = self.plan.to_description()
        state["run"], state["noise stream"], state["key"] = self.run, STREAM, self.fingerprint
        state["epoch"] = self._epoch
        state["nonces"] = [f"{nonce:032x}" for nonce in nonces]
        state["history"], state["mechanism"] = self.history, self.mechanism()
        state["assumed independent"] = self.assumed_independent
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; the round under way starts afresh.

        Rounds that were released after it are computed again, and are the same releases if they have the same sums; else training
        goes on after them. No round is released twice.

        Raises:
            ValueError: if it is another plan's, key's or run's, or of other epochs.
        """
        if "plan" not in state:
            raise ValueError("the checkpoint is not of a fedcgd engine: it has no plan, and nobody knows its noise")
        plan, here = state["plan"], self.plan.to_description()
        if plan != here:
            raise ValueError(
                f"the checkpoint is of another plan (in it → here): {', '.join(plan_differences(plan, here))}; make the engine "
                "private by its plan"
            )
        if (epoch := state.get("epoch")) != self._epoch:
            raise ValueError(
                f"the checkpoint is of epochs of {epoch}, and here they are of {self._epoch}: other examples would be in the "
                "rounds that are left, and some in more of them, or nearer together, than the plan says. Take the data set, the "
                "batch_size and the accumulation_steps of the run"
            )
        if state.get("noise stream") != STREAM:
            raise ValueError(
                f"the checkpoint's noise is of the stream {state.get('noise stream')}, and this version makes {STREAM}: later "
                "rounds would not cancel it. End that run with the version that began it"
            )
        if state.get("key") != self.fingerprint:
            raise ValueError(
                f"the checkpoint's noise comes from the key with fingerprint {state.get('key')}, and the engine has another, "
                f"{self.fingerprint}: later rounds would not cancel it. Keep the key: NoiseKey.from_file(path, create=True)"
            )
        run, nonces, releases = str(state["run"]), [int(nonce, 16) for nonce in state["nonces"]], self.rounds.releases
        other = run != self.run
        releases.resume(run, nonces)
        if other and not releases.recorded and len(nonces) < self.plan.participation.rounds:
            warnings.warn(
                f"nothing says whether rounds after the {len(nonces)} of this checkpoint were released by a process that has "
                "ended since: there is no record=. They would be released again, with fresh noise, and ε counts them once, which "
                "is true if nobody has seen a model of theirs. CorrelatedPrivacyEngine(key, record=path) notes each release "
                "durably, and then none is released twice",
                stacklevel=2,
            )
        self.rounds.go_to(len(nonces))
        self.assumed_independent = self.assumed_independent or state.get("assumed independent")
