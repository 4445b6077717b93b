"""The sum of the sessions and calls that nodes have on an engine, as they report them.

Gauges are those of a node's last report, until the node is gone. Tokens only rise: a node reports its total, so that a
report that arrives twice counts once. A total lower than before means that the node has restarted its count.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class _NodeUse:
    sessions: int = 0
    in_flight: int = 0
    tokens: int = 0


@dataclass(eq=False, slots=True)
class RemoteLoad:
    """The nodes' load of one engine. The sums are maintained, since the router reads them at every pick."""

    sessions: int = 0
    in_flight: int = 0
    tokens: int = 0
    _by_node: dict[str, _NodeUse] = field(default_factory=dict[str, "_NodeUse"])

    def record(self, node: str, sessions: int, in_flight: int, tokens: int) -> bool:
        """Records a node's report; returns whether the load changed."""
        before = self._by_node.get(node, _NodeUse())
        self._by_node[node] = _NodeUse(sessions, in_flight, tokens)
        self.sessions += sessions - before.sessions
        self.in_flight += in_flight - before.in_flight
        self.tokens += tokens - before.tokens if tokens >= before.tokens else tokens
        return (sessions, in_flight) != (before.sessions, before.in_flight)

    def remove(self, node: str) -> bool:
        """Removes a node that is gone. Its tokens stay counted, and are not counted again if it comes back."""
        before = self._by_node.get(node)
        return before is not None and self.record(node, 0, 0, before.tokens)
