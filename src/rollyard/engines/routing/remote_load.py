"""What others have of an engine: sessions and calls of nodes, as they told, added up.

Gauges are those that a node told last, until it is gone. Tokens only rise: a node tells how many it has had in all, so
that a report that comes twice counts once, and one that tells fewer than before has begun anew.
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
    """See the module. The sums are kept, since the router asks for them at every pick."""

    sessions: int = 0
    in_flight: int = 0
    tokens: int = 0
    _by_node: dict[str, _NodeUse] = field(default_factory=dict[str, "_NodeUse"])

    def tell(self, node: str, sessions: int, in_flight: int, tokens: int) -> bool:
        """Whether the load is another one now."""
        before = self._by_node.get(node, _NodeUse())
        self._by_node[node] = _NodeUse(sessions, in_flight, tokens)
        self.sessions += sessions - before.sessions
        self.in_flight += in_flight - before.in_flight
        self.tokens += tokens - before.tokens if tokens >= before.tokens else tokens
        return (sessions, in_flight) != (before.sessions, before.in_flight)

    def left(self, node: str) -> bool:
        """The node is gone; its tokens stay counted, and are not counted again if it comes back."""
        before = self._by_node.get(node)
        return before is not None and self.tell(node, 0, 0, before.tokens)
