"""The release protocol, once: what happens between a round's sum and the noised sum that may leave the process.

1. The round's turn is on record with its users, before they are asked (`ReleaseProtocol.plan_round`).
2. When the sum is there it gets a nonce that is bound to it, and the nonce is on record before there is noise of it
   (`RunNoise.add`).
3. The noise of that nonce is added, and nothing else is ever added to any other sum under it.
4. What follows from the noised sum is on record as released before anybody sees it (`ReleaseProtocol.record`).

Whatever fails in between is abandoned: its nonce is used no more, and the round is tried again with another.

A server's rounds and its private evaluations go through all four steps (`ReleaseProtocol`), with their ledger. Central training
and the audit have no ledger, and go through the second and third (`RunNoise`).
"""

from fedcgd.release.callbacks import CentralRelease, Released, to_mlflow, to_tensorboard, to_wandb
from fedcgd.release.protocol import ReleaseProtocol
from fedcgd.release.run_noise import NoiseMode, NoiseSource, RunNoise, array_noise, lattice_of

__all__ = [
    "CentralRelease",
    "NoiseMode",
    "NoiseSource",
    "ReleaseProtocol",
    "Released",
    "RunNoise",
    "array_noise",
    "lattice_of",
    "to_mlflow",
    "to_tensorboard",
    "to_wandb",
]
