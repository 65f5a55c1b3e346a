"""What keepers cost in accuracy: softmax regression on scikit-learn's digits, by the parts that run, without Flower.

python benchmarks/keepers_accuracy.py [--seeds 5] [--json FILE]

1437 users hold one digit each and take part once every 21 of 210 rounds. One node sums their clipped gradients and masks the sum;
the keepers open it. One keeper of which none may collude releases, bit for bit, what a trusted server does, and so stands for
one. Each arm's rate is the best of seven for two other splits into training and test users; then test accuracy over the seeds,
mean and standard deviation in percent. Beside it, the root of the mean squared error of the prefix sums of noise.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fedcgd import Participation, Plan
from fedcgd.keepers import Keeper, Keepers, Opening, add, agree, lifted, mask
from fedcgd.mechanisms import inverse_matrix
from fedcgd.noise.quantisation import Lattice

ROUNDS, SEPARATION, CLASSES = 210, 21, 10
TEST = 360
RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
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


def gradients(weights: Vector, images: Vector, labels: NDArray[np.int64]) -> Vector:
    """One row for each user: the gradient of its cross-entropy."""
    scores = images @ weights.reshape(images.shape[1], CLASSES)
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    odds[np.arange(len(labels)), labels] -= 1.0
    return (images[:, :, None] * odds[:, None, :]).reshape(len(labels), -1)


def accuracy(arm: Arm, plan: Plan, rate: float, seed: int) -> float:
    """Test accuracy, in percent, of one run."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = np.hstack([pixels / 16.0, np.ones((len(labels), 1))])[order]
    labels = labels[order].astype(np.int64)
    train, test = np.arange(TEST, len(labels)), np.arange(TEST)
    keepers = Keepers.simulation(seed, arm.keepers, colluding=arm.colluding)
    members = [Keeper.simulation(keepers, number) for number in range(arm.keepers)]
    cohort = -(-len(train) // SEPARATION)
    size = images.shape[1] * CLASSES
    agreement = agree(plan, size=size, keepers=keepers, run="", users=cohort)
    lattice, weights = Lattice(agreement.step), np.zeros(size)
    for round in range(ROUNDS):
        users = train[round % SEPARATION :: SEPARATION]
        rows = gradients(weights, images[users], labels[users])
        rows *= np.minimum(1.0, 1.0 / np.linalg.norm(rows, axis=1, keepdims=True))
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
    found = (images[test] @ weights.reshape(-1, CLASSES)).argmax(axis=1)
    for keeper in members:
        keeper.close()
    return 100.0 * float((found == labels[test]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for epsilon in (8.0, 2.0):
        for arm in ARMS:
            plan = arm.plan(epsilon)
            rate = max(RATES, key=lambda rate: sum(accuracy(arm, plan, rate, seed) for seed in FURTHER_SEEDS))
            found = [accuracy(arm, plan, rate, seed) for seed in range(options.seeds)]
            error = arm.error(plan)
            rows.append({"epsilon": epsilon, "arm": arm.name, "rmse": error, "rate": rate, "accuracy": found})
            spread = np.std(found, ddof=1)
            said = f"{error:6.2f}  rate {rate:g}  {np.mean(found):.1f} ± {spread:.1f}"
            print(f"ε = {epsilon:g}  {arm.name:40s}  {said}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
