"""What `--run-config` may say, checked before any work starts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedcgd.mechanisms.schedule import Schedule, check_schedule, scheduled_workload
from fedcgd.mechanisms.workload import Workload
from fedcgd.noise.keys import NoiseKey
from fedcgd.optimisation.catalogue import MechanismSpec
from fedcgd.participation import Participation, scheme_of
from fedcgd_simulations.local_training import LocalTraining
from fedcgd_simulations.server_optimizer import ServerOptimizer, check_average, check_descent


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The run configuration of the app, with the meaning of each key in docs/simulations.md."""

    task: str
    model: str
    data_dir: str
    users: str
    local_epochs: int
    local_batch: int
    local_learning_rate: float
    proximal: float
    mechanism: str
    sampling: str
    epsilon: float
    delta: float
    clip_norm: float
    cohort: int
    participations: int
    rounds: int
    reply_timeout: float
    learning_rate: float
    test_examples: int
    optimizer: ServerOptimizer
    momentum: float
    schedule: Schedule
    warmup: int
    average: float
    augmentations: int
    seed: int
    key_file: str
    trusted_nodes: bool
    ledger_file: str
    results: str

    @staticmethod
    def read(config: Mapping[str, Any]) -> "Settings":
        """The settings in a Flower run configuration. Raises ValueError if the mechanism is misspelled."""
        renamed = {"ledger_file": "ledger"}
        values = {f.name: config[renamed.get(f.name, f.name.replace("_", "-"))] for f in fields(Settings)}
        for name in (f.name for f in fields(Settings) if f.type is float):
            values[name] = float(values[name])  # TOML reads 4 as an integer
        MechanismSpec.parse(values["mechanism"])
        settings = Settings(**values)
        if settings.test_examples < 0:
            raise ValueError(f"test-examples must be at least 0 (0: all of them), got {settings.test_examples}")
        if not 0 < settings.reply_timeout < math.inf:
            raise ValueError(f"reply-timeout must be a positive number of seconds, got {settings.reply_timeout}")
        check_descent(settings.optimizer, settings.momentum, settings.schedule)
        check_average(settings.average, settings.augmentations)
        local = settings.local  # refuses what makes no sense
        if settings.users != "examples" and not local.epochs:
            raise ValueError(
                f"users = {settings.users!r} have many examples each: say with local-epochs how often a user goes through them"
            )
        if local.epochs and settings.augmentations:
            raise ValueError(
                f"augmentations must be 0 with local epochs, got {settings.augmentations}: they are for one gradient step"
            )
        return settings

    @property
    def local(self) -> LocalTraining:
        """How a user with many examples trains. Raises ValueError for numbers that make no sense."""
        return LocalTraining(
            epochs=self.local_epochs,
            batch=self.local_batch,
            learning_rate=self.local_learning_rate,
            proximal=self.proximal,
        )

    def participation(self, users: int) -> Participation:
        """Cohorts of `cohort` out of `users`, each user at most `participations` times, in as many rounds as that takes.

        b = ⌊users / cohort⌋ rounds pass before all others have had their turn; n = k·b unless `rounds` says less.
        """
        if not 1 <= self.cohort <= users:
            raise ValueError(f"cohort must be between 1 and the {users} users of the task, got {self.cohort}")
        scheme = scheme_of(self.sampling)
        epoch = users / self.cohort if scheme.takes_rate else users // self.cohort
        return Participation.for_cohorts(
            self.sampling,
            self.rounds or math.ceil(self.participations * epoch),
            users=users,
            cohort_size=self.cohort,
            min_separation=MechanismSpec.parse(self.mechanism).bands if scheme.takes_groups else None,
        )

    def workload(self, rounds: int) -> Workload:
        """What the server's optimiser makes of the releases; of optimisers other than sgd, the schedule alone."""
        check_schedule(self.schedule, rounds=rounds, warmup=self.warmup)
        return scheduled_workload(self.schedule, rounds, momentum=self.momentum, warmup=self.warmup)

    def key(self) -> NoiseKey:
        """The secret key in `key-file`, made there if there is none; without one, the seed's, which keeps nothing secret."""
        return NoiseKey.from_file(Path(self.key_file), create=True) if self.key_file else NoiseKey.simulation(self.seed)

    def ledger(self) -> Path | None:
        """Where to record the run, and to go on from."""
        return Path(self.ledger_file) if self.ledger_file else None
