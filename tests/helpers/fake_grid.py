"""A Grid whose nodes are ClientApps in this process: Flower's logic in milliseconds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

Tamper = Callable[[Message, Message], Message | None]
"""(request, honest reply) → what arrives at the server, None for silence."""


class Killed(BaseException):
    """The end of the server's process. Not an Exception: nothing may catch it on the way out, as nothing catches SIGKILL."""


def honest(request: Message, reply: Message) -> Message:
    return reply


def is_training(message: Message) -> bool:
    """Whether a request (or a reply to one) is about a round, rather than about which users a node hosts."""
    if message.has_content() and "question" in message.content.config_records.get("fedcgd-keepers", {}):
        return False
    task = message.content.config_records.get("fedcgd") if message.has_content() else None
    return message.metadata.message_type == "train" and (task is None or "round" in task)


@dataclass
class FakeNode:
    app: ClientApp
    config: dict[str, str | int | float | bool] = field(default_factory=dict)
    tamper: Tamper = honest
    name: str = ""
    public_key: bytes = b""


class FakeGrid(Grid):
    def __init__(
        self, nodes: dict[int, FakeNode], run_config: dict[str, str | int | float | bool] | None = None
    ) -> None:
        self.nodes = nodes
        self.run_config = run_config or {}
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}

    run = set_run = create_message = None  # type: ignore[assignment]  # which nobody calls

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=i, name=node.name, public_key=node.public_key) for i, node in self.nodes.items()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        assert isinstance(messages, list), "a deployed SuperLink accepts only a list"
        ids = []
        for message in messages:
            message_id = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = message_id
            self.sent.append(message)
            ids.append(message_id)
            node = self.nodes.get(message.metadata.dst_node_id)
            if node is None:
                continue
            context = Context(
                run_id=1,
                node_id=message.metadata.dst_node_id,
                node_config=node.config,
                state=RecordDict(),
                run_config=self.run_config,
            )
            # The node sees a copy, as after a network: what it does to the message does not reach the server.
            copy = Message(
                message.content, dst_node_id=message.metadata.dst_node_id, message_type=message.metadata.message_type
            )
            copy.metadata.__dict__["_message_id"] = message_id
            try:
                reply = node.app(copy, context)
            except Exception as error:
                reply = Message(Error(code=2, reason=str(error)), reply_to=copy)
            arrived = node.tamper(copy, reply)
            if arrived is not None:
                self._replies[message_id] = arrived
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(list(messages)))
