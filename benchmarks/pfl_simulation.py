"""Users a second of pfl-research, the peer of benchmarks/simulation.py: same model, same sizes, one process. Prints JSON.

python benchmarks/pfl_simulation.py [--cohort 128] [--examples 1] [--rounds 4] [--threads 1]

Needs pfl 0.6 (`pip install "pfl[pytorch]"`), in an environment of its own if its dependencies are not ours; exits with 3 without
it. Federated averaging with its Gaussian mechanism. Its evaluation of every user before and after training is left out.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

NOT_THERE = 3
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulations"))


def measure(cohort: int, examples: int, rounds: int, threads: int) -> dict[str, float]:
    """Medians over the rounds after the first."""
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
    from torch.nn import functional

    from fedcgd_simulations.models.cnn import cnn

    torch.set_num_threads(threads)

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = cnn()

        def loss(self, x: Any, y: Any, **_: Any) -> Any:
            return functional.cross_entropy(self.network(x), y)

        def metrics(self, x: Any, y: Any, **_: Any) -> Any:
            with torch.no_grad():
                return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    times, work = [], []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> Any:
            times.append(time.monotonic())
            work.append(time.process_time())
            return False, Metrics()

    generator = np.random.default_rng(1)
    users = {
        str(user): (
            torch.from_numpy(generator.standard_normal((examples, 3, 32, 32), np.float32)),
            torch.from_numpy(generator.integers(0, 10, examples)),
        )
        for user in range(cohort)
    }
    network = Classifier()
    data = FederatedDataset(lambda user: Dataset(users[user], user_id=user), iter(list(users) * (rounds + 1)).__next__)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, [CentrallyAppliedPrivacyMechanism(GaussianMechanism(1.0, 1.0))]),
        PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=None if examples == 1 else 10),
        NNEvalHyperParams(local_batch_size=None),
        [Clock()],
    )
    seconds = median(np.diff(times))
    processor = median(np.diff(work))
    return {"users/s": cohort / seconds, "processor seconds a user": processor / cohort}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("cohort", 128), ("examples", 1), ("rounds", 4), ("threads", 1)):
        options.add_argument(f"--{name}", type=int, default=value)
    args = options.parse_args()
    if importlib.util.find_spec("pfl") is None:
        sys.exit(NOT_THERE)
    print(json.dumps(measure(**vars(args))))


if __name__ == "__main__":
    main()
