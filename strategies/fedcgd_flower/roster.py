"""Which users can be reached at which node.

A user is known by an id that outlives connections: what its node declares (a pool lists its users), or the name or key under
which the SuperLink authenticated the node. Flower's node id is neither: it changes when a node comes back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Literal

from flwr.serverapp import Grid
from flwr.supercore import log

from fedcgd_flower.messages import PROBLEMS, read_users_reply, users_query
from fedcgd_flower.send_and_receive import send_and_receive

Identity = Literal["declared", "authenticated"]


@dataclass
class Roster:
    """The users of the connected nodes. `refresh` asks nodes that were not known before.

    `identity="declared"` trusts each node to list its own users. `"authenticated"` takes a node for one user, named by the
    SuperLink's registration; nodes without one are left out.
    """

    identity: Identity
    timeout: float = 60.0
    _declared: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.identity not in ("declared", "authenticated"):
            raise ValueError(f"identity must be 'declared' or 'authenticated', got {self.identity!r}")

    def refresh(self, grid: Grid) -> Mapping[str, int]:
        """The node of every user that exactly one connected node hosts."""
        hosted = self._authenticated(grid) if self.identity == "authenticated" else self._ask(grid)
        nodes: dict[str, int] = {}
        claimed_twice: set[str] = set()
        for node_id, users in hosted.items():
            for user in users:
                if nodes.setdefault(user, node_id) != node_id:
                    claimed_twice.add(user)
        for user in claimed_twice:
            del nodes[user]
        if claimed_twice:
            log(WARNING, "fedcgd: %d users are claimed by two nodes and will not take part", len(claimed_twice))
        return nodes

    def _authenticated(self, grid: Grid) -> dict[int, tuple[str, ...]]:
        return {
            node.node_id: (node.name or node.public_key.hex(),)
            for node in grid.get_nodes()
            if node.name or node.public_key
        }

    def _ask(self, grid: Grid) -> dict[int, tuple[str, ...]]:
        connected = set(grid.get_node_ids())
        unknown = sorted(connected - self._declared.keys())
        if unknown:
            queries = [users_query(node_id) for node_id in unknown]
            for node_id, reply in zip(unknown, send_and_receive(grid, queries, self.timeout), strict=True):
                users = read_users_reply(reply)
                if users is None:
                    log(
                        WARNING,
                        "fedcgd: node %d does not say which users it hosts; its ClientApp needs clipped_update_mod as the "
                        "first of its mods, or host_users(app, ...)",
                        node_id,
                    )
                elif isinstance(users, str):
                    log(WARNING, "fedcgd: node %d cannot take part: %s", node_id, PROBLEMS[users])
                    self._declared[node_id] = ()
                else:
                    self._declared[node_id] = users
        return {node_id: self._declared[node_id] for node_id in connected & self._declared.keys()}
