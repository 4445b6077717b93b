"""One completion, and the connections (listeners) that wait for it.

A completion belongs to the session, not to the connection that requested it: a client that disconnects and retries
listens to the same one. Events are kept until the reply has been delivered, so a late listener receives all of them.

Invariants. A listener receives every event once, in order, followed by the reply or the problem. The listener that has
written the last byte calls `delivered`; only the first such call reaches the session. An exchange that has no listeners
and was not delivered is forsaken: its generation is stopped. A delivered exchange holds only its reply.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from rollyard.engines.base import Engine, Generation
from rollyard.gateway.base import Dialect, Event, Problem, Reasoning, Reply, Text
from rollyard.gateway.parameters import GrantedParameters
from rollyard.gateway.replies import ReplyOptions
from rollyard.gateway.request_log import SentRequest
from rollyard.observe.call_log import Call
from rollyard.tokens.base import Parsed
from rollyard.tokens.splice import PreparedTurn


class Exchange:
    """One completion. The session creates it, fills it and ends it."""

    def __init__(
        self,
        key: bytes,
        dialect: Dialect,
        turn: PreparedTurn,
        granted: GrantedParameters,
        *,
        reply_id: str,
        is_stream: bool,
        received: Callable[[Exchange], None],
    ) -> None:
        self.key = key
        self.dialect = dialect
        self.granted = granted
        self.is_stream = is_stream
        self.received = received  # called once, when the first listener has received everything
        self.turn: PreparedTurn | None = turn  # dropped once recorded: it holds the whole prompt
        self.prompt_tokens = len(turn.prompt)
        self.id = reply_id
        self.created = int(time.time())
        self.events: list[Event] = []
        self.reply: Reply | None = None
        self.problem: Problem | None = None
        self.parsed: Parsed | None = None  # the same as `reply`, in the form in which the client will send it back
        self.sampled: Generation | None = None  # complete or partial, not recorded yet
        self.engine: Engine | None = None  # the engine that sampled it
        self.is_bound_by_client = False  # its longest reply is the client's own `max_tokens`
        self.is_late = False  # the deadline passed before a client could receive it
        self.is_delivered = False
        self.stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.call: Call | None = None  # in the log of calls
        self.sent: SentRequest | None = None  # in the log of requests
        self.listeners: set[Listener] = set()

    @property
    def reply_options(self) -> ReplyOptions:
        return ReplyOptions(self.dialect.takes_raw_arguments, self.granted.returns_calls, self.granted.stop)

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def has_no_reader(self) -> bool:
        return not self.listeners and not self.is_delivered

    @property
    def has_something(self) -> bool:
        """Whether a retry can use this exchange."""
        return self.is_running or self.reply is not None or (self.sampled is not None and bool(self.sampled.token_ids))

    def listen(self) -> Listener:
        return Listener(self)

    def add(self, events: Sequence[Event]) -> None:
        if events:
            self.events += events
            self.wake()

    def wake(self) -> None:
        for listener in list(self.listeners):
            listener.notify()

    def recorded(self) -> None:
        """Drops what is not needed once the turn is in the book."""
        self.turn = self.sampled = self.parsed = self.engine = None

    def replayed(self) -> list[Event]:
        """Returns the events of a delivered turn, made from its reply."""
        assert self.reply is not None
        reply = self.reply
        lead: list[Event] = [Reasoning(reply.reasoning)] if reply.reasoning else []
        if reply.content:
            lead.append(Text(reply.content))
        return [*lead, *reply.calls]


Relay = Callable[[Sequence[Event], Reply | None], bool]
"""Sends events immediately, and with a `Reply` the end. Returns False if it holds them for a task to send."""


class Listener:
    """One connection that waits for an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.news = asyncio.Event()
        self.relay: Relay | None = None
        self._is_relay_blocked = False  # its relay could not send everything
        self._at = 0
        exchange.listeners.add(self)
        if exchange.is_delivered and exchange.is_stream and not exchange.events:
            exchange.events = exchange.replayed()

    def notify(self) -> None:
        """Called when there is something new. The waiting task is not woken for what the relay sends."""
        relay, exchange = self.relay, self.exchange
        if relay is not None and exchange.problem is None:
            batch, reply = exchange.events[self._at :], exchange.reply
            if not batch and reply is None:
                return
            self._at += len(batch)
            if relay(batch, reply):
                if reply is not None:
                    self.delivered()
                    self.news.set()
                return
            self.relay, self._is_relay_blocked = None, True
        self.news.set()

    async def reply(self) -> Reply:
        """Waits for the reply and returns it. Raises Problem."""
        exchange = self.exchange
        while exchange.reply is None:
            if exchange.problem is not None:
                raise exchange.problem
            self.news.clear()
            await self.news.wait()
        return exchange.reply

    async def next(self, within_s: float) -> list[Event] | None:
        """Returns the events since the last call; an empty list if there were none in time or the relay could not send;
        None after the last event."""
        exchange = self.exchange
        try:
            async with asyncio.timeout(within_s):
                while self._at >= len(exchange.events):
                    if self.is_done:
                        return None
                    if self._is_relay_blocked:
                        self._is_relay_blocked = False
                        return []
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            return []
        batch = exchange.events[self._at :]
        self._at = len(exchange.events)
        return batch

    @property
    def is_done(self) -> bool:
        """Whether the listener has received everything."""
        exchange = self.exchange
        if self not in exchange.listeners:  # its relay has delivered everything
            return True
        is_ended = exchange.reply is not None or exchange.problem is not None
        return is_ended and self._at >= len(exchange.events)

    def delivered(self) -> None:
        """Called when the last byte has been sent."""
        exchange = self.exchange
        exchange.listeners.discard(self)
        if not exchange.is_delivered:
            exchange.is_delivered = True
            exchange.received(exchange)
        if not exchange.listeners:
            exchange.events = []  # a retry's events are made from the reply

    def leave(self) -> None:
        """Called when the connection ends, for any reason. Has no effect after `delivered`."""
        exchange = self.exchange
        exchange.listeners.discard(self)
        if exchange.has_no_reader and exchange.is_running and not exchange.stop.done():
            exchange.stop.set_result(None)
