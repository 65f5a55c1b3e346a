"""The inner strategy sees one reply a round, and behaves as its own definition says."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, Strategy
from shared import record

from fedcgd_flower.inner import inner_request, inner_step

START = np.array([1.0, -2.0, 0.5], np.float32)


def run(inner: Strategy, means: list[np.ndarray], *, first: int = 1, start=START) -> np.ndarray:
    """The model after the inner strategy saw model + mean for each mean in turn."""
    model = np.asarray(start, np.float32)
    for offset, mean in enumerate(means):
        inner_request(inner, first + offset, record(model), ConfigRecord())
        model = inner_step(inner, first + offset, record(model + mean))["w"].numpy()
    return model


MEANS = [
    np.array([0.1, 0.2, -0.3], np.float32),
    np.array([-0.4, 0.1, 0.2], np.float32),
    np.array([0.3, 0, 0.1], np.float32),
]


def test_fedadam_is_adam_on_the_mean() -> None:
    expected, m, v = START.astype(np.float64), np.zeros(3), np.zeros(3)
    for t, mean in enumerate(MEANS, start=1):
        m, v = 0.9 * m + 0.1 * mean, 0.99 * v + 0.01 * mean.astype(np.float64) ** 2
        # Flower's own bias correction: powers of round + 1.
        step = 0.1 * np.sqrt(1 - 0.99 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        expected = expected + step * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(run(FedAdam(eta=0.1), MEANS), expected, rtol=1e-5)


def test_no_function_is_asked_to_average_metrics_that_do_not_leave_the_nodes() -> None:
    def worst(replies: list[RecordDict], weight: str) -> MetricRecord:
        return MetricRecord({"worst": max(reply["metrics"]["train_loss"] for reply in replies)})

    inner = FedAvg(train_metrics_aggr_fn=worst)
    np.testing.assert_allclose(run(inner, MEANS), START + sum(MEANS), rtol=1e-6)
    assert inner.train_metrics_aggr_fn is worst


def test_inner_configuration_reaches_the_clients() -> None:
    config = inner_request(FedProx(proximal_mu=0.25), 2, record(START), ConfigRecord({"epochs": 3})).config
    assert config["proximal-mu"] == 0.25
    assert config["epochs"] == 3
    assert config["server-round"] == 2


def test_a_strategy_that_makes_no_model_is_refused() -> None:
    class Nothing(FedAvg):
        def aggregate_train(self, server_round, replies):
            return None, None

    with pytest.raises(ValueError, match="Nothing made"):
        inner_step(Nothing(), 1, record(START))
