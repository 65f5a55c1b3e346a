"""The server: it draws cohorts, adds what arrives, and asks the keepers to open the sum."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.keepers import Keepers, Tls
from fedcgd_flower import CorrelatedNoise

SIZE = 100

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, or go on where the ledger says."""
    config = context.run_config
    plan = Plan.calibrated(
        "lambda-cgd:0.8",
        Participation(rounds=int(config["rounds"]), min_separation=3),
        clip_norm=1.0,
        epsilon=8.0,
        delta=1e-5,
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
    )
    strategy.start(grid, ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))}), timeout=120)
