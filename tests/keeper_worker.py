"""`server_worker` with three nodes that host users and are keepers too, each with its key and record in the folder.

    python tests/keeper_worker.py FOLDER ROUNDS KILLS SEED VICTIMS

`FOLDER/world` also gets a line for each answer that leaves a keeper: which keeper, which round, and what the answer's digest is.
"""

import contextlib
import hashlib
import os
import sys
import threading
import warnings
from multiprocessing.connection import Listener
from pathlib import Path

import server_worker as worker
from fake_grid import is_training
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp.strategy import FedAdam

from fedcgd.keepers import KeeperKey, Keepers
from fedcgd.mechanisms import LambdaCGD
from fedcgd.noise.keys import NoiseKey
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd_flower import CorrelatedNoise, host_users, sequential_training
from fedcgd_flower.keeper_gate import question_of

KEEPERS = 3


def key_file(folder: Path, number: int) -> Path:
    return folder / f"keeper-{number}.key"


def make_keepers(folder: Path) -> Keepers:
    cards = [KeeperKey.from_file(key_file(folder, i), create=True).card(f"k{i}") for i in range(KEEPERS)]
    return Keepers(cards=tuple(cards), colluding=1)


def node_app(keepers: Keepers, number: int) -> ClientApp:
    app = ClientApp()
    users = worker.USERS[number::KEEPERS]
    host_users(app, lambda context: users, sequential_training(worker.local_training), keepers=keepers)
    return app


def serve(folder: Path, number: int, driver: tuple[int, int]) -> None:
    os.close(driver[1])
    threading.Thread(target=lambda: os.read(driver[0], 1) or os._exit(0), daemon=True).start()
    app = node_app(make_keepers(folder), number)
    address = folder / f"node-{number}"
    address.unlink(missing_ok=True)
    identity, config = os.getpid(), {"keeper": str(key_file(folder, number))}
    with Listener(str(address), family="AF_UNIX", backlog=16) as listener:
        while True:
            with listener.accept() as server, contextlib.suppress(EOFError, ConnectionError):
                server.send(identity)
                life = server.recv()
                while True:
                    request = message_from_proto(ProtoMessage.FromString(server.recv_bytes()))
                    if is_training(request):
                        task, model = request.content["fedcgd"], worker.digest(request.content["model"])
                        users = task["users"]
                        worker.tell_the_world(folder, "asked", life, task["round"], task["attempt"], model, *users)
                    asked = request.content.config_records.get("fedcgd-keepers", {})
                    opens = question_of(request) == "open"
                    state = Context(run_id=1, node_id=identity, node_config=config, state=RecordDict(), run_config={})
                    reply = app(request, state)
                    if opens and reply.has_content() and reply.content.array_records:
                        answer = hashlib.sha256(reply.content["update"]["flat"].data).hexdigest()
                        worker.tell_the_world(folder, "opened", number, asked["round"], asked["attempt"], answer)
                    server.send_bytes(message_to_proto(reply).SerializeToString())


def make_strategy(folder: Path, rounds: int) -> CorrelatedNoise:
    plan = Plan(
        mechanism=LambdaCGD(0.9),
        participation=Participation(rounds=rounds, min_separation=worker.SEPARATION),
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    return CorrelatedNoise(
        FedAdam(eta=0.05),
        plan,
        cohort_size=worker.COHORT,
        key=NoiseKey.from_file(folder / "key", create=True),
        ledger=folder / "ledger",
        patience=30.0,
        keepers=make_keepers(folder),
    )


if __name__ == "__main__":
    warnings.simplefilter("error")
    worker.NODES, worker.serve, worker.make_strategy = KEEPERS, serve, make_strategy
    place = Path(sys.argv[1])
    make_keepers(place)
    worker.main(place, *map(int, sys.argv[2:5]), sys.argv[5].split(","))
