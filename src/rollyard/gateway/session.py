"""One rollout's model as its agent program sees it: accepts requests and records every sampled token exactly.

For each request, the `ConversationBook` (`tokens.splice`) finds the recorded conversation that it extends; the engine
receives the recorded tokens followed by the new ones. The task's sampling applies, not the client's. The task's limits
end the rollout as they end the native loop's.

Retries. A request is a retry if its body is, byte for byte, that of a request whose reply no client received
completely, or if the SDK marks it as one (its retry count is above 0). If that completion is still running, the retry
listens to it; if it has finished, the retry receives the same reply; if it was stopped because the client disconnected,
it continues from the sampled tokens. Any other identical request is a new sample. `retry_cache.py` decides which
request is retried.

Invariants. Sampled tokens are never dropped: a reply that was received is in the trace that it extends; one that was
never received is in a trace of its own that is not trained on (`abandoned`). This is decided when the last byte has
been sent: until then a completion waits in `_undelivered`, and only then is it added to the book. When a client
disconnects, its generation is stopped. After `close` the rollout sends no request to an engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rollyard.core import Deadline, Json, Message, Run, Task, Trace
from rollyard.core.eager import start_now
from rollyard.core.failure import (
    RollyardError,
)
from rollyard.engines.base import Generation, Session
from rollyard.engines.routing.call_metrics import CallMetrics
from rollyard.gateway.base import ChatRequest, Dialect, Problem, TokenLogprob
from rollyard.gateway.body_size import LIGHT, BodySize
from rollyard.gateway.bounds import RolloutBounds
from rollyard.gateway.exchange import Exchange, Listener
from rollyard.gateway.intake import Intake
from rollyard.gateway.options import options_of
from rollyard.gateway.parameters import ParameterRules
from rollyard.gateway.replies import ReplyBuilder, convert_turn, reply_of
from rollyard.gateway.request_log import RequestLog, SentRequest
from rollyard.gateway.retry_cache import RetryCache
from rollyard.gateway.sampler import CompletionSampler
from rollyard.observe.call_log import CallLog
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NO_SPAN, Span
from rollyard.tokens import Parsed, Renderer
from rollyard.tokens.splice import ConversationBook, PreparedTurn

log = logging.getLogger("rollyard.gateway")

MOST_OVERRULED = 256
"""The number of parameter names that are counted; a client chooses some of the names."""


class GatewaySession:
    """The gateway's state of one rollout: its requests, completions, traces and limits."""

    def __init__(
        self,
        session: Session,
        renderer: Renderer,
        *,
        task: Task,
        run: Run,
        rollout_id: str,
        clock: Deadline,
        beat: Callable[[], None] = lambda: None,
        span: Span = NO_SPAN,
        metrics: Metrics | None = None,
        call_log: CallLog | None = None,
    ) -> None:
        self._session = session
        self._renderer = renderer
        self._task = task
        self._run = run
        self._rollout_id = rollout_id
        self._clock = clock
        self._beat = beat
        self._call_log = call_log or CallLog()
        self._watch = CallMetrics(session, span, metrics, self._call_log)
        self._sampler = CompletionSampler(session, renderer, task=task, run=run, rollout_id=rollout_id, clock=clock)
        options = options_of(task)
        self._book = ConversationBook(
            renderer,
            sampling=task.sampling,
            policy=run.policy,
            model=session.engine.info.model,
            reasoning=options.reasoning,
        )
        self._wishes = ParameterRules(
            task.sampling,
            is_strict=options.is_strict,
            has_structured_output=options.has_structured_output,
            call_grammar=lambda names, is_one: renderer.call_grammar(names, is_one=is_one),
        )
        self._retry_cache = RetryCache()
        self._running: dict[Exchange, int] = {}  # → the most tokens that it may sample
        self._undelivered: list[Exchange] = []  # sampled, and not received by a client yet
        self._resuming: list[Exchange] = []  # the same, and a retry is about to continue them
        self._admitted = 0  # requests that have a turn and wait for tokens
        self._bounds = RolloutBounds(task.limits, session)
        self.request_log = RequestLog()
        self._intake = Intake(self._book, renderer, self._bounds, self.request_log)
        self._freed = asyncio.Event()  # set when a completion ends
        self._messages: Sequence[Message] = ()
        self._messages_digest = b""
        self._message_turns: Mapping[int, int] = {}
        self._turn_of: dict[bytes, int] = {}  # the digest of a conversation with its reply → the reply's turn
        self.conversation_number = 0  # grows when `messages` are no longer those before and others after them
        self._started_requests = 0
        self._nonce = secrets.token_hex(9)
        self._is_closed = False
        self._finish_reason = ""
        self._counts: Counter[str] = Counter()
        self._overruled: Counter[str] = Counter()
        self.model_s = 0.0

    # --- state

    @property
    def model(self) -> str:
        return self._session.engine.info.model

    @property
    def messages(self) -> Sequence[Message]:
        """The longest conversation, with its last reply."""
        return self._messages

    @property
    def message_turns(self) -> Mapping[int, int]:
        """The turn of each message that was sampled, by the message's number."""
        return self._message_turns

    @property
    def sampled_tokens(self) -> int:
        pending = (*self._undelivered, *self._resuming)
        return self._book.sampled_tokens + sum(len(it.sampled.token_ids) for it in pending if it.sampled is not None)

    @property
    def turns(self) -> int:
        return self._book.turns

    @property
    def finish_reason(self) -> str:
        """Of the last completion; `length` only if a limit of the task or of the model cut it off, not its client's."""
        return self._finish_reason

    @property
    def failure(self) -> RollyardError | None:
        """The reason why the rollout cannot continue; None while it can."""
        return self._bounds.failure

    @property
    def overflow(self) -> RollyardError | None:
        """Set if the conversation did not fit into the context and no turn has been completed since."""
        return self._bounds.overflow

    @property
    def forks(self) -> Mapping[str, int]:
        """The reasons why new traces started, with their counts."""
        return self._book.forks

    def traces(self) -> tuple[Trace, ...]:
        return self._book.traces()

    def info(self) -> dict[str, Json]:
        """Returns the gateway's counters, for the trajectory."""
        return {
            **{name: self._counts[name] for name in ("requests", "joined", "replayed", "resumed", "abandoned")},
            "refused": self._bounds.refused,
            "forks": dict(self._book.forks),
            "overruled": dict(self._overruled),
        }

    def fail(self, error: RollyardError) -> None:
        """Ends the rollout because something else that it needs is lost. The first reason is kept."""
        self._bounds.end(error)

    async def ended(self) -> RollyardError:
        """Waits until the rollout cannot continue: it reached a limit, or the engines failed."""
        return await self._bounds.ended()

    # --- requests

    def check_size(self, size: int, *, is_only_counted: bool = False) -> None:
        """Raises Problem if a body of `size` bytes is too long for the context."""
        self._intake.check_size(size, is_only_counted=is_only_counted)

    async def read(
        self, dialect: Dialect, raw: bytes | bytearray, *, is_only_counted: bool = False
    ) -> tuple[ChatRequest, bytes, BodySize, SentRequest]:
        """Returns the parsed request, its key, its size and its entry for the log: see `Intake.read`."""
        return await self._intake.read(dialect, raw, is_only_counted=is_only_counted)

    async def count(self, request: ChatRequest, weight: BodySize = LIGHT) -> int:
        """Returns the number of tokens in the prompt of the request."""
        return len((await self._intake.begin(request, weight, is_only_counted=True)).prompt)

    async def open(
        self,
        dialect: Dialect,
        request: ChatRequest,
        key: bytes,
        *,
        weight: BodySize = LIGHT,
        retries: int = 0,
        sent: SentRequest | None = None,
    ) -> Listener:
        """Starts a completion, or joins the one that this request is a retry of. Raises Problem."""
        self._check_open()
        self._beat()
        self._counts["requests"] += 1
        earlier = self._retry_cache.earlier(key, is_retry=retries > 0)
        while earlier is not None and earlier.is_running and earlier.stop.done():
            assert earlier.task is not None
            await asyncio.wait({earlier.task})  # its client has just disconnected: wait for what it has sampled
            earlier = self._retry_cache.earlier(key, is_retry=retries > 0)  # another retry may have resumed it
        resumed: Exchange | None = None
        if earlier is not None:
            if earlier.is_running:
                self._counts["joined"] += 1
                return earlier.listen()
            if earlier.reply is not None:
                self._counts["replayed"] += 1
                return earlier.listen()
            if earlier in self._undelivered:
                self._undelivered.remove(earlier)
                self._resuming.append(earlier)
                resumed = earlier
                self._counts["resumed"] += 1
        try:
            return await self._start(dialect, request, key, weight, resumed, sent)
        except BaseException:
            if resumed in self._resuming:
                self._resuming.remove(resumed)
                self._undelivered.append(resumed)
            raise

    async def _start(
        self,
        dialect: Dialect,
        request: ChatRequest,
        key: bytes,
        weight: BodySize,
        resumed: Exchange | None,
        sent: SentRequest | None,
    ) -> Listener:
        turn, resume = None, None
        if resumed is not None:  # continue the prompt of the sampled part: the book may render another one by now
            turn, resume = resumed.turn, resumed.sampled
        turn = turn or await self._intake.begin(request, weight)
        if resumed is not None:
            granted = resumed.granted  # the rest is sampled as its beginning was
        else:
            granted = self._wishes.grant(request, self._session.engine.spec.kind)
        self._overruled.update(granted.refused if len(self._overruled) < MOST_OVERRULED else ())
        max_tokens = await self._budget(request, turn, resume)
        self._check_open()  # the steps above may have waited
        number, self._started_requests = self._started_requests, self._started_requests + 1
        reply_id = f"{self._nonce}{number:06x}"
        exchange = Exchange(
            key, dialect, turn, granted, reply_id=reply_id, is_stream=request.is_stream, received=self._received
        )
        exchange.is_bound_by_client = max_tokens == request.max_tokens != self._task.sampling.max_tokens
        self._retry_cache.add(exchange, instead_of=resumed)
        if resumed is not None:
            self._resuming.remove(resumed)
        if sent is not None:
            turns, now_s = self._turns_started, self._call_log.now_s()
            self.request_log.add(sent, turn=turns, start_s=now_s, overruled=granted.refused)
            exchange.sent = sent
        self._running[exchange] = max_tokens
        listener = exchange.listen()
        exchange.task = start_now(self._run_one(exchange, number, max_tokens, resume))
        return listener

    def _check_open(self) -> None:
        if self._is_closed:
            raise Problem("unavailable", "this rollout has ended", code="ended")
        error = self._bounds.failure
        if error is not None:
            raise Problem("limit", error.detail, code=error.code)

    async def _budget(self, request: ChatRequest, turn: PreparedTurn, resume: Generation | None) -> int:
        """Returns how many tokens it may sample, including those that it resumes from. Raises Problem at a limit. Its
        turn counts while it waits; the caller starts it without waiting."""
        if resume is None:
            self._bounds.turn(self._turns_started)
        requested = min(filter(None, (request.max_tokens, self._task.sampling.max_tokens)))
        requested = self._bounds.fitting(len(turn.prompt), requested, is_first=not self._book.turns)
        has = len(resume.token_ids) if resume is not None else 0
        self._admitted += resume is None
        try:
            while (remaining := self._bounds.tokens_left(self.sampled_tokens)) is not None:
                room = has + remaining - sum(self._running.values())
                if room >= requested or not self._running:
                    return min(requested, room)
                self._freed.clear()
                await self._freed.wait()  # running completions may use less than their budget
        finally:
            self._admitted -= resume is None
        return requested

    @property
    def _turns_started(self) -> int:
        pending = len(self._undelivered) + len(self._resuming) + self._admitted
        return self._book.turns + len(self._running) + pending

    # --- completions

    async def _run_one(self, exchange: Exchange, number: int, max_tokens: int, resume: Generation | None) -> None:
        turn = exchange.turn
        assert turn is not None
        builder: ReplyBuilder | None = None
        if exchange.is_stream:
            builder = ReplyBuilder(self._renderer, turn, exchange.reply_options)
        started_at = time.monotonic()
        try:
            with self._watch.call(number, len(turn.prompt), logged_turn=self._turns_started - 1) as call:
                exchange.call = call.logged
                on_tokens = None if builder is None else self._streaming(exchange, builder)
                generation = await self._sampler.sample(
                    exchange,
                    turn,
                    number,
                    max_tokens=max_tokens,
                    resume=resume,
                    on_tokens=on_tokens,
                    salvage=lambda partial: self._salvage(exchange, partial),  # it is the rollout's last turn
                )
                call.sampled(len(generation.token_ids), generation.cached_tokens, generation.finish_reason)
            logprobs = await self._intake.logprobs(generation) if exchange.granted.has_logprobs else None
            self._sampled(exchange, generation, builder, logprobs)
        except BaseException as error:
            exchange.problem = self._problem(error, exchange)
            exchange.turn = None
            if not isinstance(error, Exception):
                raise
        finally:
            self.model_s += time.monotonic() - started_at
            del self._running[exchange]
            self._freed.set()
            self._beat()
            exchange.wake()

    def _streaming(self, exchange: Exchange, builder: ReplyBuilder) -> Callable[[Sequence[int]], None]:
        def on_tokens(ids: Sequence[int]) -> None:
            self._beat()
            exchange.add(builder.feed(ids))

        return on_tokens

    def _sampled(
        self,
        exchange: Exchange,
        generation: Generation,
        builder: ReplyBuilder | None,
        logprobs: tuple[TokenLogprob, ...] | None,
    ) -> None:
        """Passes a completion to its listeners. It is recorded when one has received it completely, or by `close`."""
        if generation.finish_reason == "abort":  # listeners get no partial reply when the rollout ends
            exchange.problem = Problem("unavailable", "this rollout has ended", code="ended")
        else:
            remaining, parsed = ((), self._read(exchange, generation)) if builder is None else builder.finish()
            exchange.add(remaining)
            exchange.parsed = parsed
            exchange.reply = reply_of(
                parsed,
                generation,
                self._renderer,
                reply_id=exchange.id,
                created=exchange.created,
                prompt_tokens=exchange.prompt_tokens,
                stop=exchange.granted.stop,
                logprobs=logprobs,
                warnings=exchange.granted.warnings_of(parsed.tool_calls),
            )
        exchange.sampled, exchange.engine, exchange.is_late = generation, self._session.engine, self._clock.is_expired
        if generation.token_ids:
            self._undelivered.append(exchange)

    def _received(self, exchange: Exchange) -> None:
        """Records an exchange whose reply a client has received completely."""
        if exchange.sampled is None:
            return  # `close` has recorded it
        if exchange in self._undelivered:
            self._undelivered.remove(exchange)
        try:
            self._keep(exchange, exchange.sampled)
        except Exception as error:
            self._problem(error, exchange)

    def _read(self, exchange: Exchange, generation: Generation) -> Parsed:
        """Returns the turn as a client receives it when it does not stream."""
        turn = exchange.turn
        assert turn is not None
        parsed = self._renderer.parse(generation.token_ids, turn.prompt, turn.tools)
        return convert_turn(parsed, exchange.reply_options)

    def _salvage(self, exchange: Exchange, partial: Generation) -> None:
        if exchange.call is not None:
            exchange.call.tokens = len(partial.token_ids)
        self._keep(exchange, partial)

    def _keep(self, exchange: Exchange, generation: Generation, *, is_abandoned: bool = False) -> None:
        """Adds the turn to the book, as the client received it."""
        turn = exchange.turn
        for logged in (exchange.call, exchange.sent):
            if logged is not None:
                logged.turn = self._book.turns
        assert turn is not None
        number = self._book.turns
        parsed = exchange.parsed or self._read(exchange, generation)
        engine = exchange.engine or self._session.engine
        self._book.keep(
            turn,
            generation.token_ids,
            generation.logprobs,
            finish_reason=generation.finish_reason,
            versions=[(span.version, span.start, span.end) for span in generation.versions],
            logprobs_kind=generation.logprobs_kind or engine.info.logprobs_kind,
            engine=generation.engine or engine.spec.id,
            cached_tokens=generation.cached_tokens,
            columns=generation.columns,
            untrainable=generation.untrainable or exchange.granted.untrainable,
            is_tokenizer_verified=generation.is_tokenizer_verified,
            is_abandoned=is_abandoned,
            parsed=parsed,
        )
        if not is_abandoned:
            is_own_bound = generation.finish_reason == "length" and exchange.is_bound_by_client
            self._finish_reason = "stop" if is_own_bound else generation.finish_reason
            self._show(turn, parsed, number if self._book.turns > number else None)
            self._bounds.completed(len(turn.prompt), generation)
        exchange.recorded()

    def _show(self, turn: PreparedTurn, parsed: Parsed, number: int | None) -> None:
        """Replaces `messages` if this conversation is longer. `number` is the reply's turn, if one was recorded."""
        shown = len(self._messages)
        digests = self._book.history(turn, parsed.message).bare
        if number is not None:
            self._turn_of[digests[-1]] = number
        if len(turn.messages) + 1 < shown:
            return
        if digests[shown] != self._messages_digest:
            self.conversation_number += 1
        self._messages, self._messages_digest = (*turn.messages, parsed.message), digests[-1]
        self._message_turns = {
            at: known for at, d in enumerate(digests[1:]) if (known := self._turn_of.get(d)) is not None
        }

    def _problem(self, error: BaseException, exchange: Exchange) -> Problem:
        is_first = not self._book.turns
        return self._bounds.problem(error, self._clock, self._rollout_id, exchange.prompt_tokens, is_first=is_first)

    # --- closing

    async def close(self) -> None:
        """Stops running completions and records those that no client has received. Traces are complete after this."""
        self._is_closed = True
        for exchange in self._running:
            if not exchange.stop.done():
                exchange.stop.set_result(None)
        tasks = [exchange.task for exchange in self._running if exchange.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        for exchange in (*self._undelivered, *self._resuming):
            assert exchange.sampled is not None
            self._counts["abandoned"] += not exchange.is_late  # a late one is the rollout's last turn
            self._keep(exchange, exchange.sampled, is_abandoned=not exchange.is_late)
        self._undelivered.clear()
        self._resuming.clear()
