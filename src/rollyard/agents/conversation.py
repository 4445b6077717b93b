"""A conversation with the policy: either exact to the token, or text only.

`TokenConversation` renders the prompt itself, sends token ids, and records the sampled tokens unchanged.
`TextConversation` is for engines that return only text; it has no traces, so it is not trained on.

Invariants. The conversation holds everything that was sampled, however its owner ends: tokens of a call that a deadline
interrupted are in the trace like any others. If a prompt cannot be extended exactly, a new trace begins, with the
reason; no sampled token is dropped, and each belongs to one trace. prompt + max_tokens never exceeds the context. A
turn's seed is derived from run, rollout and turn, so another attempt samples alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from rollyard.agents.base import Conversation
from rollyard.core import Deadline, Json, Message, Run, Task, Trace, sampling_seed
from rollyard.core.failure import ContextLimit, EngineRefused, PromptTooLong, RollyardError
from rollyard.engines.base import Engine, Generation, Kind, Session
from rollyard.engines.routing.call_metrics import CallMetrics, max_context_of
from rollyard.observe.call_log import CallLog
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NO_SPAN, Span
from rollyard.tokens import Parsed, Renderer, ToolCall, ToolSchema, TraceBuilder
from rollyard.tokens.calls import assistant_message, named_arguments, read_arguments
from rollyard.tokens.demonstrated import DemonstratedTurn, demonstrated_turn
from rollyard.tokens.splice import NOT_EXTENDED, OTHER_TOOLS
from rollyard.tokens.trace_set import TraceSet


async def converse(
    session: Session,
    renderer_of: Callable[[Engine], Awaitable[Renderer]],
    *,
    task: Task,
    run: Run,
    rollout_id: str,
    clock: Deadline,
    span: Span = NO_SPAN,
    metrics: Metrics | None = None,
    call_log: CallLog | None = None,
) -> Conversation:
    """Returns the kind of conversation that the session's engine supports."""
    if session.engine.spec.kind is Kind.OPENAI:
        return TextConversation(session, task=task, clock=clock, span=span, metrics=metrics, call_log=call_log)
    renderer = await renderer_of(session.engine)
    return TokenConversation(
        session,
        renderer,
        task=task,
        run=run,
        rollout_id=rollout_id,
        clock=clock,
        span=span,
        metrics=metrics,
        call_log=call_log,
    )


class TokenConversation:
    """A conversation that records exact token ids."""

    def __init__(
        self,
        session: Session,
        renderer: Renderer,
        *,
        task: Task,
        run: Run,
        rollout_id: str,
        clock: Deadline,
        span: Span = NO_SPAN,
        metrics: Metrics | None = None,
        call_log: CallLog | None = None,
    ) -> None:
        self._session = session
        self._renderer = renderer
        self._traces = TraceSet(sampling=task.sampling, policy=run.policy, model=session.engine.info.model)
        self._trace: TraceBuilder | None = None  # the last one
        self._task = task
        self._run = run
        self._rollout_id = rollout_id
        self._clock = clock
        self._watch = CallMetrics(session, span, metrics, call_log)
        self._messages: list[Message] = []
        self._message_turns: dict[int, int] = {}
        self._tools: Sequence[ToolSchema] = ()
        self._sampled_at = 0  # where the last call's tokens begin in the last trace
        self._sampled_tokens = 0
        self._turns = 0
        self._demonstrated_turns = 0
        self._finish_reason = ""

    @property
    def messages(self) -> Sequence[Message]:
        return self._messages

    @property
    def sampled_tokens(self) -> int:
        return self._sampled_tokens

    @property
    def turns(self) -> int:
        return self._turns

    @property
    def message_turns(self) -> Mapping[int, int]:
        return self._message_turns

    @property
    def finish_reason(self) -> str:
        return self._finish_reason

    async def turn(self, new_messages: Sequence[Message], tools: Sequence[ToolSchema], *, max_tokens: int) -> Parsed:
        self._messages += new_messages
        trace = self._extend(new_messages, tools)
        prompt = trace.prompt()
        max_context = max_context_of(self._task.limits, self._session)
        if max_context is not None:
            if len(prompt) + 1 > max_context:
                raise self._too_long(f"the prompt has {len(prompt)} tokens, the context {max_context}")
            max_tokens = min(max_tokens, max_context - len(prompt))
        self._sampled_at = len(prompt)

        try:
            with self._watch.call(self._turns, len(prompt)) as observed:

                def salvage(partial: Generation) -> None:
                    observed.salvaged(len(partial.token_ids))
                    self._keep(partial, trace, prompt)

                generation = await self._session.generate(
                    prompt,
                    sampling=self._task.sampling,
                    max_tokens=max_tokens,
                    seed=sampling_seed(self._run.seed, self._rollout_id, self._turns),
                    stop_token_ids=self._renderer.stop_token_ids,
                    clock=self._clock,
                    model_s=self._task.limits.model_s,
                    salvage=salvage,
                )
                observed.sampled(len(generation.token_ids), generation.cached_tokens, generation.finish_reason)
        except EngineRefused as error:
            if error.data.get("context"):
                raise self._too_long(error.detail) from error
            raise
        parsed = self._keep(generation, trace, prompt)
        if generation.finish_reason == "length" and max_context is not None and len(trace) >= max_context:
            raise ContextLimit(f"the reply was cut off where the context of {max_context} tokens ends")
        return parsed

    def demonstrate(
        self, new_messages: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]
    ) -> DemonstratedTurn:
        """Like `turn`, but with this assistant turn: no engine is called, and nothing counts as sampled."""
        self._messages += new_messages
        trace = self._extend(new_messages, tools)
        prompt = trace.prompt()
        demonstrated = demonstrated_turn(self._renderer, prompt, self._messages, turn, tools)
        max_context, length = (
            max_context_of(self._task.limits, self._session),
            len(prompt) + len(demonstrated.token_ids),
        )
        if max_context is not None and length > max_context:
            raise PromptTooLong(f"with this turn, the demonstration has {length} tokens, the context {max_context}")
        self._sampled_at = len(prompt)
        trace.given(demonstrated.token_ids, turn=self._demonstrated_turns)
        self._demonstrated_turns += 1
        self._messages.append(demonstrated.parsed.message)
        return demonstrated

    def append(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def traces(self) -> tuple[Trace, ...]:
        return self._traces.build()

    def _extend(self, new_messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TraceBuilder:
        """Returns the trace of the next prompt: the last one, extended, or a new one."""
        last, reason = self._trace, None
        if last is not None:
            if tools is self._tools or list(tools) == list(self._tools):
                ids = last.prompt()
                longer = self._renderer.extend(ids[: self._sampled_at], ids[self._sampled_at :], new_messages, tools)
                if longer is not None:
                    last.context(longer[len(ids) :])
                    return last
                reason = NOT_EXTENDED
            else:
                reason = OTHER_TOOLS
        self._tools = tools
        self._trace = self._traces.start(self._renderer.render(self._messages, tools), reason)
        return self._trace

    def _keep(self, generation: Generation, trace: TraceBuilder, prompt: Sequence[int]) -> Parsed:
        engine = self._session.engine
        trace.sampled(
            generation.token_ids,
            generation.logprobs,
            turn=self._turns,
            finish_reason=generation.finish_reason,
            versions=[(span.version, span.start, span.end) for span in generation.versions],
            logprobs_kind=generation.logprobs_kind or engine.info.logprobs_kind,
            engine=generation.engine or engine.spec.id,
            cached_tokens=generation.cached_tokens,
            columns=generation.columns,
            untrainable=generation.untrainable,
            is_tokenizer_verified=generation.is_tokenizer_verified,
        )
        self._message_turns[len(self._messages)] = self._turns
        self._turns += 1
        self._sampled_tokens += len(generation.token_ids)
        self._finish_reason = generation.finish_reason
        parsed = self._renderer.parse(generation.token_ids, prompt, self._tools)
        self._messages.append(parsed.message)
        return parsed

    def _too_long(self, detail: str) -> RollyardError:
        return ContextLimit(detail) if self._turns else PromptTooLong(detail)


class TextConversation:
    """A conversation of messages only, without traces."""

    def __init__(
        self,
        session: Session,
        *,
        task: Task,
        clock: Deadline,
        span: Span = NO_SPAN,
        metrics: Metrics | None = None,
        call_log: CallLog | None = None,
    ) -> None:
        self._session = session
        self._task = task
        self._clock = clock
        self._watch = CallMetrics(session, span, metrics, call_log)
        self._messages: list[Message] = []
        self._message_turns: dict[int, int] = {}
        self._sampled_tokens = 0
        self._turns = 0
        self._finish_reason = ""

    @property
    def messages(self) -> Sequence[Message]:
        return self._messages

    @property
    def sampled_tokens(self) -> int:
        return self._sampled_tokens

    @property
    def turns(self) -> int:
        return self._turns

    @property
    def message_turns(self) -> Mapping[int, int]:
        return self._message_turns

    @property
    def finish_reason(self) -> str:
        return self._finish_reason

    async def turn(self, new_messages: Sequence[Message], tools: Sequence[ToolSchema], *, max_tokens: int) -> Parsed:
        self._messages += new_messages
        try:
            with self._watch.call(self._turns, 0) as observed:
                reply = await self._session.chat(
                    self._messages,
                    sampling=replace(self._task.sampling, max_tokens=max_tokens),
                    tools=tools,
                    clock=self._clock,
                    model_s=self._task.limits.model_s,
                )
                observed.prompt_tokens = reply.prompt_tokens
                observed.sampled(reply.completion_tokens, None, reply.finish_reason)
        except EngineRefused as error:
            if error.data.get("context"):
                raise (ContextLimit if self._turns else PromptTooLong)(error.detail) from error
            raise
        self._message_turns[len(self._messages)] = self._turns
        self._turns += 1
        self._sampled_tokens += reply.completion_tokens
        self._finish_reason = reply.finish_reason
        parsed = _parsed(reply.message, self._turns)
        self._messages.append(parsed.message)
        return parsed

    def append(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def traces(self) -> tuple[Trace, ...]:
        return ()


def _parsed(message: Message, turn: int) -> Parsed:
    """Converts an engine's message to `Parsed`."""
    raw_calls = message.get("tool_calls")
    calls: list[ToolCall] = []
    for index, call in enumerate(raw_calls if isinstance(raw_calls, Sequence) else ()):
        name, arguments = named_arguments(call)
        raw = arguments if isinstance(arguments, str) else ""
        calls.append(read_arguments(name, arguments, raw, _id_of(call) or f"call_{turn}_{index}"))
    content = _text(message.get("content"))
    reasoning = _text(message.get("reasoning_content"))
    return Parsed(content, reasoning, tuple(calls), assistant_message(content, reasoning, calls))


def _id_of(call: Json) -> str:
    return _text(call.get("id")) if isinstance(call, dict) else ""


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""
