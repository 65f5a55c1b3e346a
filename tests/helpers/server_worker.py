"""A federated run over local sockets whose server is started and killed, at random moments, until the run is done.

    python tests/helpers/server_worker.py FOLDER ROUNDS KILLS SEED VICTIMS NOISE

The server is `CorrelatedNoise` with a ledger, a secret key and FedAdam; three node processes host the users. VICTIMS is "server"
or "server,node". NOISE is "server", or "nodes" if each node is a keeper too, with its key and record in the folder; then users
evaluate every third model as well.
`FOLDER/world` gets a line for each thing that leaves the server: what a node was asked (written by the node) and each model that
was published; one for each model that is on the disk and not released yet; and one for each answer that leaves a keeper. Prints
the number of kills of servers and of nodes.
"""

import contextlib
import hashlib
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import numpy as np
from fake_grid import is_training
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam
from flwr.supercore.task_identity import TaskIdentity
from keeper_runs import opening_asked, refusal_in
from plans import make_plan

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.keepers import KeeperKey, Keepers
from fedcgd.ledger import model_file
from fedcgd_flower import CorrelatedNoise, PrivateEvaluation, host_users, sequential_training
from fedcgd_flower.messages import question_of

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # a Message asks which task it is made by

SIZE = 1000
COHORT = 8
NODES = 3
USERS = [f"user-{i}" for i in range(100)]
SEPARATION = 4

STEP, PLANNED, ANSWERED, WRITTEN, RELEASED = b".", b"p", b"a", b"w", b"r"
Progress = Callable[[bytes], object]


def tell_the_world(folder: Path, *words: object) -> None:
    """One line in one system call: a kill leaves all of it or nothing."""
    world = os.open(folder / "world", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(world, (" ".join(map(str, words)) + "\n").encode())
    os.close(world)


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})


def digest(arrays: ArrayRecord) -> str:
    [array] = arrays.values()
    return hashlib.sha256(array.numpy().tobytes()).hexdigest()


def local_training(model: ArrayRecord, user: str, config: object, context: Context) -> ArrayRecord:
    """Half the way to a point that is the user's own."""
    start = model["w"].numpy()
    target = np.random.default_rng(USERS.index(user)).normal(size=SIZE).astype(np.float32)
    return ArrayRecord({"w": Array(start + np.float32(0.5) * (target - start))})


def measuring(model: ArrayRecord, user: str, config: object, context: Context) -> dict[str, float]:
    """How far the model is from the user's own point."""
    target = np.random.default_rng(USERS.index(user)).normal(size=SIZE)
    return {"distance": float(np.linalg.norm(model["w"].numpy() - target))}


def key_file(folder: Path, number: int) -> Path:
    """The key of a node that is a keeper."""
    return folder / f"keeper-{number}.key"


def keepers_of(folder: Path) -> Keepers | None:
    """The nodes as keepers; None if they have no keys."""
    if not key_file(folder, 0).exists():
        return None
    cards = tuple(KeeperKey.from_file(key_file(folder, number)).card(f"k{number}") for number in range(NODES))
    return Keepers(cards=cards, colluding=1)


def node_app(number: int, keepers: Keepers | None = None) -> ClientApp:
    app = ClientApp()
    training = sequential_training(local_training)
    host_users(app, lambda context: USERS[number::NODES], training, evaluate=measuring, keepers=keepers)
    return app


def serve(folder: Path, number: int, driver: tuple[int, int]) -> None:
    """A node: answers one server after another until the driver, at the other end of a pipe, is gone."""
    os.close(driver[1])
    threading.Thread(target=lambda: os.read(driver[0], 1) or os._exit(0), daemon=True).start()
    keepers = keepers_of(folder)
    app = node_app(number, keepers)
    config = {} if keepers is None else {"keeper": str(key_file(folder, number))}
    address = folder / f"node-{number}"
    address.unlink(missing_ok=True)
    identity = os.getpid()  # as in Flower: a node that comes back without a key has another id
    with Listener(str(address), family="AF_UNIX", backlog=16) as listener:
        while True:
            with listener.accept() as server, contextlib.suppress(EOFError, ConnectionError):
                server.send(identity)
                life = server.recv()
                while True:
                    request = message_from_proto(ProtoMessage.FromString(server.recv_bytes()))
                    if is_training(request):
                        task, model = request.content["fedcgd"], digest(request.content["model"])
                        tell_the_world(folder, "asked", life, task["round"], task["attempt"], model, *task["users"])
                    state = Context(run_id=1, node_id=identity, node_config=config, state=RecordDict(), run_config={})
                    reply = app(request, state)
                    if question_of(request) == "/open" and not refusal_in(reply):
                        opened, answer = opening_asked(request), reply.content["update"]["flat"].data
                        answer_digest = hashlib.sha256(answer).hexdigest()
                        what = opened["kind"], opened["round"], opened["attempt"]
                        tell_the_world(folder, "opened", number, *what, answer_digest)
                    server.send_bytes(message_to_proto(reply).SerializeToString())


class SocketGrid(Grid):
    """The grid of one server process: a socket to each node that is there."""

    def __init__(self, folder: Path, life: int, progress: Progress) -> None:
        self._folder = folder
        self._life = life
        self._progress = progress
        self._nodes: dict[int, tuple[int, Connection]] = {}
        self._open: dict[str, Message] = {}
        self._arrived: dict[str, Message] = {}
        self._sent = 0

    @property
    def run(self):
        raise NotImplementedError

    def set_run(self, run) -> None:
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        self._progress(STEP)
        missing = set(range(NODES)) - {number for number, _ in self._nodes.values()}
        for number in missing:
            with contextlib.suppress(EOFError, ConnectionError, FileNotFoundError):
                node = Client(str(self._folder / f"node-{number}"), family="AF_UNIX")
                identity = node.recv()
                node.send(self._life)
                self._nodes[identity] = (number, node)
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids, messages = [], list(messages)
        if any(is_training(message) for message in messages):
            self._progress(PLANNED)
            time.sleep(0.003)
        for message in messages:
            self._progress(STEP)
            self._sent += 1
            message_id = f"{self._life}-{self._sent}"
            message.metadata.__dict__["_message_id"] = message_id
            ids.append(message_id)
            self._open[message_id] = message
            with contextlib.suppress(ConnectionError, KeyError):
                self._nodes[message.metadata.dst_node_id][1].send_bytes(message_to_proto(message).SerializeToString())
        self._progress(STEP)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._progress(STEP)
        replies = []
        for ready in wait([node for _, node in self._nodes.values()], timeout=0.01):
            try:
                replies.append(message_from_proto(ProtoMessage.FromString(ready.recv_bytes())))
            except (EOFError, ConnectionError):
                self._nodes = {i: (number, node) for i, (number, node) in self._nodes.items() if node is not ready}
        for reply in replies:
            self._open.pop(reply.metadata.reply_to_message_id)
        for message_id, request in list(self._open.items()):  # the SuperLink too answers for a node that is gone
            if request.metadata.dst_node_id not in self._nodes:
                replies.append(Message(Error(code=5), reply_to=self._open.pop(message_id)))
        if not self._open and any(is_training(reply) for reply in replies):
            self._progress(ANSWERED)
        self._arrived |= {reply.metadata.reply_to_message_id: reply for reply in replies}
        return [self._arrived.pop(message_id) for message_id in message_ids if message_id in self._arrived]


def make_strategy(folder: Path, rounds: int) -> CorrelatedNoise:
    keepers = keepers_of(folder)
    plan = make_plan(LambdaCGD(0.9), Participation(rounds=rounds, min_separation=SEPARATION), noise_multiplier=1.0)
    evaluation = PrivateEvaluation(plan=plan, bounds={"distance": 64.0}, every=3)
    return CorrelatedNoise(
        FedAdam(eta=0.05),
        plan,
        cohort_size=COHORT,
        key=NoiseKey.from_file(folder / "key", create=True),
        ledger=folder / "ledger",
        patience=30.0,
        keepers=keepers,
        evaluation=None if keepers is None else evaluation,
    )


def train(folder: Path, rounds: int, life: int, progress: Progress) -> None:
    """One life of the server: from wherever the ledger says to the last round."""
    logging.disable(logging.WARNING)

    write = model_file.write

    def write_and_tell(ledger: Path, round: int, *parts: Any) -> model_file.Latest:
        written = write(ledger, round, *parts)
        tell_the_world(folder, "written", life, round)
        progress(WRITTEN)
        time.sleep(0.003)  # a moment to be killed in, before the ledger names the file
        return written

    model_file.write = write_and_tell  # type: ignore[assignment]  # in this process, which is a server's one life

    def publish(release: int, arrays: ArrayRecord) -> None:
        progress(RELEASED)
        time.sleep(0.003)  # a moment to be killed in, before the world knows and after it
        tell_the_world(folder, "published", life, release, digest(arrays))
        time.sleep(0.003)
        progress(STEP)

    strategy = make_strategy(folder, rounds)
    progress(STEP)
    strategy.start(SocketGrid(folder, life, progress), initial(), evaluate_fn=publish)
    assert strategy.releases == rounds


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def wait_for_a_moment(steps: int, generator: random.Random) -> None:
    """Some steps of the server, or until a round or two are planned, answered, written or released, and then a moment more.

    By steps and not by the clock, so that the kills spread over all of a round however busy the machine is.
    """
    few = generator.randint(1, 2)
    wanted, of = generator.choice(
        [(generator.randint(0, 20), STEP + ANSWERED), (few, PLANNED), (few, ANSWERED), (few, WRITTEN), (few, RELEASED)]
    )
    while wanted and (seen := os.read(steps, 1)):
        wanted -= seen in of
    time.sleep(generator.choice([0.0, 0.002, 0.01]) * generator.random())


def main(folder: Path, rounds: int, kills: int, seed: int, victims: list[str], noise: str) -> None:
    if noise == "nodes":
        for number in range(NODES):
            KeeperKey.from_file(key_file(folder, number), create=True)
    generator = random.Random(seed)
    killed = Counter()
    driver = os.pipe()
    nodes = [fork(partial(serve, folder, number, driver)) for number in range(NODES)]
    for number in range(NODES):
        while not (folder / f"node-{number}").exists():
            time.sleep(0.01)
    life = 0
    while True:
        life += 1
        steps, told = os.pipe()
        server = fork(partial(train, folder, rounds, life, partial(os.write, told)))
        os.close(told)
        while killed.total() < kills:
            wait_for_a_moment(steps, generator)
            if generator.choice(victims) == "server":
                os.kill(server, signal.SIGKILL)
                break
            number = generator.randrange(NODES)
            os.kill(nodes[number], signal.SIGKILL)
            os.waitpid(nodes[number], 0)
            nodes[number] = fork(partial(serve, folder, number, driver))
            killed["node"] += 1
        _, status = os.waitpid(server, 0)
        os.close(steps)
        if not os.WIFSIGNALED(status):
            break
        killed["server"] += 1
    for node in nodes:
        os.kill(node, signal.SIGKILL)
        os.waitpid(node, 0)
    print(killed["server"], killed["node"], os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.modules["torch"] = None  # type: ignore[assignment]  # no user here needs it, and every new node would load it
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5].split(","), sys.argv[6])
