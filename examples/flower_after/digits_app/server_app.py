"""The server."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app.task import Net, load_test_data, test
from fedcgd import NoiseKey, Participation, Plan
from fedcgd_flower import CorrelatedNoise

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the global model on the server's data."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(model, load_test_data())
    return MetricRecord({"loss": loss, "accuracy": accuracy})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train on all nodes, and save the model."""
    rounds = context.run_config["num-server-rounds"]
    cohort = context.run_config["nodes-per-round"]
    lr = context.run_config["learning-rate"]
    participation = Participation(rounds=rounds, min_separation=2)  # a user rests for a round after each of its own
    plan = Plan.calibrated("lambda-cgd", participation, clip_norm=1.0, epsilon=8.0, delta=1e-3)
    key = NoiseKey.from_file("noise.key", create=True)
    strategy = CorrelatedNoise(FedAvg(min_train_nodes=cohort), plan, key=key, ledger="run.db")
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=rounds,
        evaluate_fn=evaluate,
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
