"""The server: it draws cohorts, adds what arrives, and asks the keepers to open the sum."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.keepers import Keepers, Tls
from fedcgd_flower import CorrelatedNoise, PrivateEvaluation

SIZE = 100

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, or go on where the ledger says."""
    config = context.run_config
    rounds = int(config["rounds"])
    plan = Plan.calibrated(
        "lambda-cgd:0.8", Participation(rounds=rounds, min_separation=3), clip_norm=1.0, epsilon=7.0, delta=1e-5
    )
    measured = Plan.calibrated(  # with the training less than ε = 8, what keepers.toml allows
        "dp-sgd", Participation(rounds=-(-rounds // 3)), clip_norm=1.0, epsilon=1.0, delta=1e-5
    )
    tls = None
    if folder := str(config["certificates"]):  # the keepers are processes of their own (fedcgd keeper serve)
        tls = Tls(
            certificate=f"{folder}/server.crt", private_key=f"{folder}/server.key", trusted=f"{folder}/keepers.crt"
        )
    strategy = CorrelatedNoise(
        FedAvg(min_train_nodes=20),
        plan,
        key=NoiseKey.from_file(str(config["key"]), create=True),  # draws the cohorts; the noise is the keepers'
        keepers=Keepers.from_file(str(config["keepers"]), tls=tls),
        ledger=str(config["ledger"]),
        evaluation=PrivateEvaluation(plan=measured, bounds={"distance": 20.0}, every=3),
    )
    strategy.start(grid, ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))}), timeout=120)
