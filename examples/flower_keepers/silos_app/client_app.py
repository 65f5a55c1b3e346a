"""A silo: it hosts patients, masks what it sends, and is a keeper if its configuration names a key.

    KEEPERS=/srv/keepers.toml flower-supernode … --node-config 'silo=0 silos=3 keeper="/srv/keeper.key" participations="n.db"'

The file that says who the keepers are is the silo's own, and not one that comes with the app. So is its count of participations.
"""

import os

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedcgd.keepers import Keepers
from fedcgd_flower import host_users, sequential_training

PATIENTS = 150
SIZE = 100


def patients(context: Context) -> list[str]:
    """The ids of this silo's patients, the same whenever it comes back."""
    silo, silos = int(context.node_config["silo"]), int(context.node_config["silos"])
    return [f"patient {i}" for i in range(silo, PATIENTS, silos)]


def truth(patient: str) -> NDArray[np.float32]:
    """What a model should say of this patient."""
    return np.random.default_rng(int(patient.split()[1])).normal(1.0, 0.1, SIZE).astype(np.float32)


def train(model: ArrayRecord, patient: str, config: ConfigRecord, context: Context) -> ArrayRecord:
    """Half the way from the model to what is true of this patient."""
    start = model["w"].numpy()
    return ArrayRecord({"w": Array(start + np.float32(0.5) * (truth(patient) - start))})


def evaluate(model: ArrayRecord, patient: str, config: ConfigRecord, context: Context) -> dict[str, float]:
    """How far the model is from that."""
    return {"distance": float(np.linalg.norm(model["w"].numpy() - truth(patient)))}


app = ClientApp()
host_users(
    app,
    patients,
    sequential_training(train),
    evaluate=evaluate,
    keepers=Keepers.from_file(os.environ.get("KEEPERS", "/srv/keepers.toml")),
)
