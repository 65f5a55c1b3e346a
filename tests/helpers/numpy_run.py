"""Run as a program: the rounds of a server and two nodes whose model is NumPy, recorded in the ledger at the path given."""

import sys
from pathlib import Path

import numpy as np
from flower_runs import SIZE, make, two_nodes
from flwr.supercore.task_identity import TaskIdentity
from shared import record

from fedcgd import NoiseKey

if __name__ == "__main__":
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    strategy = make(key=NoiseKey.generate(), ledger=Path(sys.argv[1]), trusted_nodes=True)
    assert strategy.start(two_nodes(), record(np.zeros(SIZE))).complete
