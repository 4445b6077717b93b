"""Finds the recorded conversation that a request extends, and the exact tokens to send.

A client that keeps its own history (an agent program behind the gateway) sends all of it with every request. Rendering
it again would give the model other tokens than it had sampled. So a `ConversationBook` records every completion of a
rollout under the messages that led to it, as the client will send them back. A request whose messages start with such a
history gets the recorded ids (prompt and sampled tokens), followed by the tokens of its new messages.

Histories are compared without differences of encoding: ids of calls, null fields, the formatting of arguments, text in
parts, arguments at their declared default, a line of the system prompt that is different in every request
(histories.py). Content is never ignored. With `reasoning: keep` the model keeps its reasoning in the prompt, whether or
not the client sends it back; with `as_sent` reasoning that the client removed makes it another history.

Invariants. No sampled token is dropped, and each sampled span has one owner: the trace that it was sampled for. A
request that cannot extend a trace exactly (another request has extended it, its history was rewritten, the renderer
cannot verify the prefix) starts a new trace, with the reason; spans that both contain are marked as copies. A
`PreparedTurn` changes nothing until its completion is kept: a request that fails is not recorded.

Cost. A request's history is digested once, in one pass; each known history is found by its digest. For 60 messages of
2 kB (24,000 tokens) that is about 0.4 ms, and the one copy of the ids, the prompt that is sent, about 0.5 ms.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollyard.core import Message, Sampling, Trace
from rollyard.core.trace import LogprobsKind
from rollyard.tokens.base import Parsed, Renderer, ToolSchema
from rollyard.tokens.histories import Histories, History, Toolset
from rollyard.tokens.trace import TraceBuilder
from rollyard.tokens.trace_set import TraceSet

Reasoning = Literal["keep", "as_sent"]

NEW = "new conversation"  # it shares no message with a recorded one
REWRITTEN = "history rewritten"  # it shares the beginning of a recorded one, and then differs
STRIPPED = "reasoning removed"  # it equals a recorded one, except for reasoning that the client left out
BRANCHED = "branched"  # it extends a history that another request has extended, or repeats a request
OTHER_TOOLS = "other tools"  # the same history with other tools
NOT_EXTENDED = "not extended"  # the renderer cannot verify that the new prompt starts with the old tokens
ABANDONED = "abandoned"  # no client received the completion, so nothing can extend it


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A completion that a request may extend: `ids[:sampled_at]` was sent, `ids[sampled_at:end]` was sampled."""

    builder: TraceBuilder
    sampled_at: int
    end: int


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A request ready to be sent: its prompt, and the completion that it extends. Made by `ConversationBook.begin`."""

    prompt: list[int]
    packed: array[int] = field(repr=False)  # the same, as it is recorded; packing 200,000 tokens takes 30 ms
    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    base: _Leaf | None = field(repr=False)  # the completion that it extends exactly
    reason: str | None  # why it extends nothing; None for the first request, and if it extends one
    history: History = field(repr=False)
    toolset: Toolset = field(repr=False)

    @property
    def is_extension(self) -> bool:
        return self.base is not None


@dataclass(frozen=True, slots=True)
class SplicePoint:
    """The position of a request among the conversations, found by `ConversationBook.find`."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    leaf: _Leaf | None = field(repr=False)  # the completion that it extends
    answered: int  # the number of messages up to the last assistant turn
    history: History = field(repr=False)
    toolset: Toolset = field(repr=False)

    @property
    def new(self) -> Sequence[Message]:
        """The messages to render, if the recorded tokens can be used for the others."""
        return self.messages[self.answered :] if self.leaf is not None else self.messages


class ConversationBook:
    """The conversations of one rollout."""

    def __init__(
        self, renderer: Renderer, *, sampling: Sampling, policy: str, model: str, reasoning: Reasoning = "as_sent"
    ) -> None:
        self._renderer = renderer
        self._traces = TraceSet(sampling=sampling, policy=policy, model=model)
        self._known = Histories(has_reasoning=reasoning == "as_sent")
        self._has_completion = False  # a completion that was not abandoned is recorded
        self._leaves: dict[tuple[bytes, bytes], _Leaf] = {}  # (tools, history with its completion) → the last leaf
        self._asked: set[tuple[bytes, bytes]] = set()  # (tools, history) that a completion was sampled from
        self._prompts: set[bytes] = set()  # the same, without the tools
        self._answers: set[bytes] = set()  # histories with their completion, without the tools
        self._bare_answers: set[bytes] = set()  # the same, without reasoning
        self._histories: set[bytes] = set()  # every prefix of these histories
        self._turns = 0

    @property
    def turns(self) -> int:
        return self._turns

    @property
    def sampled_tokens(self) -> int:
        return self._traces.sampled_tokens

    @property
    def forks(self) -> Mapping[str, int]:
        """The number of traces by the reason for which they were started."""
        return self._traces.forks

    def traces(self) -> tuple[Trace, ...]:
        return self._traces.build()

    # --- a request ---

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> PreparedTurn:
        """Prepares a request. Nothing is recorded yet."""
        place = self.find(messages, tools)
        return self.extended(place) or self.rendered(place)

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> SplicePoint:
        """The position of a request. Cheap; `extended` and `rendered` tokenize, and may run in a thread."""
        toolset = self._known.toolset(tools)
        history = self._known.of(messages, toolset)
        answered = _answered(messages)
        leaf = self._leaves.get((toolset.digest, history.chain[answered])) if answered < len(messages) else None
        return SplicePoint(messages, tools, leaf, answered, history, toolset)

    def extended(self, place: SplicePoint) -> PreparedTurn | None:
        """The recorded tokens followed by those of the new messages; None if that cannot be verified to be exact."""
        leaf = place.leaf
        if leaf is None:
            return None
        sent, sampled = leaf.builder.ids(0, leaf.sampled_at), leaf.builder.ids(leaf.sampled_at, leaf.end)
        prompt = self._renderer.extend(sent, sampled, place.new, place.tools)
        if prompt is None:
            return None
        return _turn(prompt, place, leaf, None)

    def rendered(self, place: SplicePoint) -> PreparedTurn:
        """The whole conversation, rendered: the start of a new trace."""
        reason = NOT_EXTENDED if place.leaf is not None else self._reason(place.history, place.toolset, place.answered)
        prompt = self._renderer.render(place.messages, place.tools)
        return _turn(prompt, place, None, reason)

    def _reason(self, history: History, toolset: Toolset, answered: int) -> str | None:
        """Why the request extends nothing."""
        chain, bare = history.chain, history.bare
        if not self._has_completion:
            return None
        if (toolset.digest, chain[-1]) in self._asked:
            return BRANCHED
        is_asking = answered < len(chain) - 1
        if chain[-1] in self._prompts or (is_asking and chain[answered] in self._answers):
            return OTHER_TOOLS
        if is_asking and bare[answered] in self._bare_answers:
            return STRIPPED
        return REWRITTEN if any(link in self._histories for link in chain[1:]) else NEW

    # --- its completion ---

    def keep(
        self,
        turn: PreparedTurn,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        *,
        finish_reason: str,
        versions: Sequence[tuple[int, int, int]] = (),
        logprobs_kind: LogprobsKind = "unknown",
        engine: str = "",
        request_id: str = "",
        cached_tokens: int | None = None,
        columns: Mapping[str, bytes] | None = None,
        untrainable: str = "",
        is_tokenizer_verified: bool = True,
        is_abandoned: bool = False,
        parsed: Parsed | None = None,
    ) -> Parsed:
        """Records what was sampled from `turn.prompt`, in the trace that it belongs to, and parses it.

        `is_abandoned`: no client received it. It gets a trace of its own, which is not trained on. `parsed`: these ids,
        if the caller has already parsed them, as the client received them and will send them back. If nothing was
        sampled, nothing is recorded.
        """
        if parsed is None:
            parsed = self._renderer.parse(ids, turn.prompt, turn.tools)
        if not ids:
            return parsed
        builder = self._builder(turn, is_abandoned)
        sampled_at = len(builder)
        builder.sampled(
            ids,
            logprobs,
            turn=self._turns,
            finish_reason=finish_reason,
            versions=versions,
            logprobs_kind=logprobs_kind,
            engine=engine,
            request_id=request_id,
            cached_tokens=cached_tokens,
            columns=columns,
            untrainable=untrainable,
            is_tokenizer_verified=is_tokenizer_verified,
        )
        self._turns += 1
        if not is_abandoned:
            self._remember(turn, parsed.message, _Leaf(builder, sampled_at, len(builder)))
        return parsed

    def history(self, turn: PreparedTurn, answer: Message) -> History:
        """The digests of a request's messages and of the answer to it."""
        return self._known.extended(turn.history, answer, turn.toolset)

    def _remember(self, turn: PreparedTurn, answer: Message, leaf: _Leaf) -> None:
        toolset, asked = turn.toolset.digest, turn.history
        whole = self.history(turn, answer)
        self._has_completion = True
        self._leaves[toolset, whole.chain[-1]] = leaf
        self._asked.add((toolset, asked.chain[-1]))
        self._prompts.add(asked.chain[-1])
        self._answers.add(whole.chain[-1])
        self._bare_answers.add(whole.bare[-1])
        self._histories.update(whole.chain[1:])

    def _builder(self, turn: PreparedTurn, is_abandoned: bool) -> TraceBuilder:
        base = turn.base
        if base is not None and len(base.builder) == base.end and not is_abandoned:
            base.builder.context(turn.packed[base.end :])
            return base.builder
        reason = ABANDONED if is_abandoned else BRANCHED if base is not None else turn.reason
        if reason is None:  # it was the first request when it was prepared, and may no longer be
            reason = self._reason(turn.history, turn.toolset, _answered(turn.messages))
        builder = self._traces.start(turn.packed, reason)
        if is_abandoned:
            builder.untrainable(ABANDONED)
        return builder


def _turn(prompt: list[int], place: SplicePoint, leaf: _Leaf | None, reason: str | None) -> PreparedTurn:
    packed = array("i", prompt)
    return PreparedTurn(prompt, packed, place.messages, place.tools, leaf, reason, place.history, place.toolset)


def _answered(messages: Sequence[Message]) -> int:
    """The number of messages up to and including the last assistant turn; those after it are new."""
    return next((at + 1 for at in range(len(messages) - 1, -1, -1) if messages[at].get("role") == "assistant"), 0)
