"""A grid whose one node is in this process: the strategies and the nodes of the app without Ray and SuperLink.

For experiments of many short runs: a run starts in no time, and a round costs what its training costs. What a node sees and what
it answers are the same messages as in `flwr run`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class AppGrid(Grid):
    """One node that runs a `ClientApp` with `run_config`, as a simulated SuperNode that hosts all users."""

    def __init__(self, app: ClientApp, run_config: Mapping[str, Any]) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Flower's Message asks whose task it is
        self._numbered = 0
        self._app = app
        self._run_config = dict(run_config)
        self._replies: dict[str, Message] = {}

    @property
    def run(self) -> Any:
        raise NotImplementedError("there is no SuperLink that knows this run")

    def set_run(self, run: Any) -> None:
        raise NotImplementedError("there is no SuperLink that knows this run")

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError("make a flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        return [1]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=1)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            self._numbered += 1
            name = f"message-{self._numbered}"
            message.metadata.__dict__["_message_id"] = name
            context = Context(
                run_id=1,
                node_id=1,
                node_config={"partition-id": 0, "num-partitions": 1},
                state=RecordDict(),
                run_config=self._run_config,
            )
            self._replies[name] = self._app(message, context)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(list(messages)))
