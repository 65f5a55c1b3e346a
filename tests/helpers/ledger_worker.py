"""A tiny training run on a ledger, and a program that starts it and kills it, at random moments, until it is done.

    python tests/helpers/ledger_worker.py FOLDER KILLS SEED

`FOLDER/world` gets a line for each thing that leaves the process: that is what the adversary sees. Prints the number of kills.
"""

import contextlib
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from plans import make_plan

from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation
from fedcgd.noise import NoiseStream
from fedcgd.participation.cohorts import cohort
from fedcgd.release import lattice_of
from fedcgd.release.run_noise import LatticeNormals, NoiseSource

SIZE = 40
ROUNDS = 150
COHORT = 8
USERS = [f"user-{i}" for i in range(40)]
PLAN = make_plan(
    LambdaCGD(0.9), Participation(rounds=ROUNDS, min_separation=4, max_participations=35), noise_multiplier=3.0
)
CONFIGURATION = {"task": "none"}


def summed(round: int, users: list[str]) -> np.ndarray:
    """What the users of a round send: any function of them and the round."""
    seed = hashlib.sha256(f"{round} {' '.join(users)}".encode()).digest()
    return np.random.default_rng(list(seed)).uniform(-1, 1, SIZE)


def step(model: np.ndarray, momentum: np.ndarray, noised: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    momentum = 0.5 * momentum + noised
    return model + momentum, momentum


def show_the_world(folder: Path, line: str) -> None:
    with (folder / "world").open("a") as file:
        file.write(line + "\n")


def train(folder: Path, progress: Callable[[], object]) -> None:
    key = NoiseKey.from_file(folder / "key", create=True)
    with Ledger.open(folder / "ledger", plan=PLAN, configuration=CONFIGURATION, key=key) as ledger:
        grid = lattice_of(PLAN, SIZE)
        stream = NoiseStream(key.noise_of(ledger.stream_id))
        noise = NoiseSource(PLAN.mechanism, ROUNDS, LatticeNormals(stream, grid))
        run = ledger.resume()
        model = np.frombuffer(run.model).copy() if run.model else np.zeros(SIZE)
        momentum = np.frombuffer(run.state).copy() if run.state else np.zeros(SIZE)
        nonces = list(run.nonces)
        progress()
        for round in range(run.round, ROUNDS):
            users = cohort(
                PLAN.participation,
                round,
                USERS,
                ledger.history(USERS),
                cohort_size=COHORT,
                key=key.choices_of(ledger.stream_id),
            )
            assert users is not None, f"nobody is left for round {round}"
            attempt = ledger.plan_round(round, users)
            show_the_world(folder, f"asked {round} {attempt} {' '.join(users)}")
            progress()
            total = grid.to_steps(summed(round, users))
            nonce = key.nonce_of(ledger.stream_id, total, earlier=nonces, attempt=attempt)
            ledger.record_aggregated(round, attempt, nonce)
            progress()
            nonces.append(nonce)
            noise.add(total, nonces, PLAN.stddev)
            model, momentum = step(model, momentum, grid.from_steps(total))
            ledger.record_released(round, attempt, model.tobytes(), momentum.tobytes())
            show_the_world(folder, f"released {round} {attempt} {model.tobytes().hex()}")
            progress()


def main(folder: Path, kills: int, seed: int) -> None:
    generator = random.Random(seed)
    killed = 0
    while True:
        steps, told = os.pipe()
        child = os.fork()
        if not child:
            train(folder, partial(os.write, told, b"."))
            os._exit(0)
        os.close(told)
        if killed < kills:
            # So many steps, then a moment more: the kills spread over the states however busy the machine is.
            wanted = generator.randint(0, 7)
            while wanted and (seen := len(os.read(steps, wanted))):
                wanted -= seen
            time.sleep(generator.uniform(0.0, 0.003))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(steps)
        if not os.WIFSIGNALED(status):
            break
        killed += 1
    print(killed, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
