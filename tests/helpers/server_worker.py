"""A federated run whose server is started and killed, at random moments, until the run is done.

    python tests/helpers/server_worker.py FOLDER ROUNDS KILLS SEED NOISE

The server is `CorrelatedNoise` with a ledger, a secret key and FedAdam; three nodes in its process host the users. NOISE is
"server", or "nodes" if each node is a keeper too, with its key and record in the folder, which is killed with the server; then
users evaluate every third model as well.
`FOLDER/world` gets a line for each thing that leaves the server: what a node was asked and each model that was published; one for
each model that is on the disk and not released yet; and one for each answer that leaves a keeper. Prints the number of kills.
"""

import hashlib
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from fake_grid import FakeGrid, FakeNode, is_training
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam
from flwr.supercore.task_identity import TaskIdentity
from keeper_runs import opening_asked, refusal_in
from plans import make_plan

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.keepers import KeeperKey, Keepers
from fedcgd.ledger import model_file
from fedcgd_flower import CorrelatedNoise, PrivateEvaluation, host_users, sequential_training
from fedcgd_flower.keepers import KeeperParties
from fedcgd_flower.noise_provider import question_of

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


class WatchedGrid(FakeGrid):
    """Three nodes, and what the world sees of the requests to them and of what keepers answer."""

    def __init__(self, folder: Path, life: int, progress: Progress) -> None:
        keepers = keepers_of(folder)
        nodes = {}
        for number in range(NODES):
            config = {} if keepers is None else {"keeper": str(key_file(folder, number))}
            nodes[number + 1] = FakeNode(
                node_app(number, keepers), config=config, tamper=partial(self._answered, number)
            )
        super().__init__(nodes)
        self._folder, self._life, self._progress = folder, life, progress

    def _answered(self, number: int, request: Message, reply: Message) -> Message:
        self._progress(STEP)
        if question_of(request) == "/open" and not refusal_in(reply):
            opened, answer = opening_asked(request), reply.content["update"]["flat"].data
            what = opened["kind"], opened["round"], opened["attempt"]
            tell_the_world(self._folder, "opened", number, *what, hashlib.sha256(answer).hexdigest())
            self._progress(STEP)
        return reply

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        training = [message for message in messages if is_training(message)]
        if training:
            self._progress(PLANNED)
            time.sleep(0.003)
        for message in training:
            task, model = message.content["fedcgd"], digest(message.content["model"])
            tell_the_world(self._folder, "asked", self._life, task["round"], task["attempt"], model, *task["users"])
            self._progress(STEP)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self._progress(ANSWERED if any(is_training(reply) for reply in replies) else STEP)
        return replies


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
    strategy.start(WatchedGrid(folder, life, progress), initial(), evaluate_fn=publish)
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


def report(told: int, go: int, what: bytes) -> None:
    """Tell the driver how far the server is, which then waits until it may go on: so kills spread alike on any machine."""
    os.write(told, what)
    os.read(go, 1)


def wait_for_a_moment(steps: int, go: int, generator: random.Random) -> None:
    """Some steps of the server, or until a round or two are planned, answered, written or released, and then a moment more."""
    few = generator.randint(1, 2)
    wanted, of = generator.choice(
        [(generator.randint(0, 20), STEP + ANSWERED), (few, PLANNED), (few, ANSWERED), (few, WRITTEN), (few, RELEASED)]
    )
    while wanted and (seen := os.read(steps, 1)):
        wanted -= seen in of
        os.write(go, b".")
    time.sleep(generator.choice([0.0, 0.002, 0.01]) * generator.random())


def main(folder: Path, rounds: int, kills: int, seed: int, noise: str) -> None:
    assert KeeperParties  # imported here, once for all lives
    if noise == "nodes":
        for number in range(NODES):
            KeeperKey.from_file(key_file(folder, number), create=True)
    generator = random.Random(seed)
    for life in count(1):
        (steps, told), (waits, go) = os.pipe(), os.pipe()
        progress = partial(report, told, waits) if life <= kills else lambda _: None
        server = fork(partial(train, folder, rounds, life, progress))
        os.close(told)
        if life <= kills:
            wait_for_a_moment(steps, go, generator)
            os.kill(server, signal.SIGKILL)
        _, status = os.waitpid(server, 0)
        for end in (steps, waits, go):
            os.close(end)
        if not os.WIFSIGNALED(status):
            break
    print(life - 1, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5])
