"""What keepers cost in accuracy: softmax regression on digits or on tweets' embeddings, by the parts that run, without Flower.

python benchmarks/keepers_accuracy.py digits|tweets|tweets-3000 [--seeds 5] [--output FILE]

Users hold one example each and take part once every 21 of 210 rounds: 1437 with digits, 31,036 with all tweets, and
3000 with a part of them. One node sums their clipped gradients and masks the sum; the keepers open it. One keeper of which none
may collude releases, bit for bit, what a trusted server does, and so stands for one. Each arm's rate is the best of `RATES` for
two other splits into training and test users; then test accuracy over the seeds, mean and standard deviation in percent. Beside
it, the root of the mean squared error of the prefix sums of noise.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fedcgd import Participation, Plan
from fedcgd.keepers import Keeper, Keepers, Opening, add, agree, lifted, mask
from fedcgd.mechanisms import inverse_matrix
from fedcgd.noise.quantisation import Lattice

ROUNDS, SEPARATION = 210, 21
RATES = tuple(2.0**power for power in range(-3, 8))
FURTHER_SEEDS = (101, 102)
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """A mechanism, and keepers of which some may collude."""

    name: str
    mechanism: str
    keepers: int
    colluding: int

    def plan(self, epsilon: float) -> Plan:
        """With δ = 10⁻⁵."""
        participation = Participation(rounds=ROUNDS, min_separation=SEPARATION)
        return Plan.calibrated(self.mechanism, participation, clip_norm=1.0, epsilon=epsilon, delta=1e-5)

    def error(self, plan: Plan) -> float:
        """The root of the mean square of the noise in the sums of the first 1, 2, … 210 rounds, for clip norm 1."""
        sums = np.cumsum(inverse_matrix(plan.mechanism, ROUNDS), axis=0)
        louder = np.sqrt(self.keepers / (self.keepers - self.colluding))
        return float(louder * plan.stddev * np.sqrt(np.square(sums).sum() / ROUNDS))


ARMS = (
    Arm("λ-CGD, a trusted server or K = 1, t = 0", "lambda-cgd:0.9", 1, 0),
    Arm("λ-CGD, K = 3, t = 1", "lambda-cgd:0.9", 3, 1),
    Arm("DP-SGD, a trusted server", "dp-sgd", 1, 0),
)


@dataclass(frozen=True)
class Examples:
    """One for each user, and for each test; the last input is 1."""

    inputs: Vector
    labels: NDArray[np.int64]
    classes: int
    tests: int


def digits() -> Examples:
    """A fifth for test."""
    pixels, labels = load_digits(return_X_y=True)
    return Examples(_with_one(pixels / 16.0), labels.astype(np.int64), 10, 360)


def tweets() -> Examples:
    """A sixth for test. MiniLM's sentence embeddings, which take minutes the first time."""
    from fedcgd_simulations.minilm import minilm_embeddings
    from fedcgd_simulations.tasks.tweets import find_file, read_tweets

    texts, labels = read_tweets(find_file(None))
    embeddings = minilm_embeddings(texts).numpy().astype(np.float64)
    return Examples(_with_one(embeddings), np.array(labels, np.int64), 3, len(texts) // 6)


def some_tweets() -> Examples:
    """3000 for test, 3000 to train."""
    every = tweets()
    chosen = np.random.default_rng(0).permutation(len(every.labels))[:6000]
    return Examples(every.inputs[chosen], every.labels[chosen], 3, 3000)


def _with_one(inputs: Vector) -> Vector:
    return np.hstack([inputs, np.ones((len(inputs), 1))])


TASKS: dict[str, Callable[[], Examples]] = {"digits": digits, "tweets": tweets, "tweets-3000": some_tweets}


def gradients(weights: Vector, images: Vector, labels: NDArray[np.int64]) -> Vector:
    """One row for each user: the gradient of its cross-entropy."""
    scores = images @ weights
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    odds[np.arange(len(labels)), labels] -= 1.0
    return (images[:, :, None] * odds[:, None, :]).reshape(len(labels), -1)


def accuracy(examples: Examples, arm: Arm, plan: Plan, rate: float, seed: int) -> float:
    """Test accuracy, in percent, of one run."""
    order = np.random.default_rng(seed).permutation(len(examples.labels))
    images, labels = examples.inputs[order], examples.labels[order]
    train, test = np.arange(examples.tests, len(labels)), np.arange(examples.tests)
    keepers = Keepers.simulation(seed, arm.keepers, colluding=arm.colluding)
    members = [Keeper.simulation(keepers, number) for number in range(arm.keepers)]
    cohort = -(-len(train) // SEPARATION)
    shape = images.shape[1], examples.classes
    size = shape[0] * shape[1]
    agreement = agree(plan, size=size, keepers=keepers, run="", users=cohort)
    lattice, weights = Lattice(agreement.step), np.zeros(size)
    for round in range(ROUNDS):
        users = train[round % SEPARATION :: SEPARATION]
        rows = gradients(weights.reshape(shape), images[users], labels[users])
        rows /= np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        masked = mask(lattice.to_steps(rows.sum(axis=0)), agreement, round=round, attempt=0, present=keepers.names)
        total = masked.residues
        for keeper in members:
            opening = Opening(
                round=round,
                attempt=0,
                present=keepers.names,
                tickets=(masked.ticket,),
                sealed=(masked.sealed[keeper.card.name],),
                after=round - 1 if round else None,
            )
            add(total, keeper.answer(agreement, opening))
        weights -= rate * lattice.from_steps(lifted(total)) / cohort
    found = (images[test] @ weights.reshape(shape)).argmax(axis=1)
    for keeper in members:
        keeper.close()
    return 100.0 * float((found == labels[test]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a line of JSON for each arm is added to this file")
    options = parser.parse_args()
    examples = TASKS[options.task]()
    for epsilon in (8.0, 2.0):
        for arm in ARMS:
            plan = arm.plan(epsilon)
            totals = [sum(accuracy(examples, arm, plan, rate, seed) for seed in FURTHER_SEEDS) for rate in RATES]
            rate = RATES[int(np.argmax(totals))]
            found = [accuracy(examples, arm, plan, rate, seed) for seed in range(options.seeds)]
            error = arm.error(plan)
            spread = np.std(found, ddof=1)
            said = f"{error:6.2f}  rate {rate:g}  {np.mean(found):.1f} ± {spread:.1f}"
            print(f"ε = {epsilon:g}  {arm.name:40s}  {said}", flush=True)
            if options.output:
                row = {
                    "task": options.task,
                    "epsilon": epsilon,
                    "arm": arm.name,
                    "rmse": error,
                    "rate": rate,
                    "accuracy": found,
                }
                with options.output.open("a") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
