"""Which recorded conversation a request extends, and the exact tokens that it is sent with.

A client that keeps its own history (an agent program behind the gateway) sends all of it with every request. Rendering
that anew would give the model other tokens than it had sampled. So a `Book` remembers every completion of a rollout
under the messages that led to it, as the client will send them back. A request whose messages begin with such a history
gets those very ids (prompt, then what was sampled) and, behind them, the tokens of what is new.

Histories are compared without what encodings differ in: ids of calls, null fields, the formatting of arguments, text
in parts, a line of the system prompt that is different in every request. Nothing that was said is ever ignored. With
`reasoning: keep` the model goes on seeing what it thought, whether or not the client sends it back; with `as_sent` what
the client removed is gone, and that is another history.

Invariants. Nothing that was sampled is dropped, and each sampled span has one owner: the trace that it was sampled for.
Whoever cannot extend a trace exactly (it went on without them, its history was rewritten, the renderer cannot show the
prefix) begins a new one, with the reason; stretches that both have are marked as copies. A `Turn` changes nothing
until its completion is kept: a request that fails leaves no mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, cast

from rollyard.core import Json, Message, Sampling, Trace
from rollyard.core.trace import LogprobsKind
from rollyard.tokens.base import Parsed, Renderer, ToolSchema
from rollyard.tokens.calls import named_arguments, read_json
from rollyard.tokens.trace import TraceBuilder

Reasoning = Literal["keep", "as_sent"]

NEW = "new conversation"  # it shares no turn with any that is recorded
REWRITTEN = "history rewritten"  # it shares the beginning of one, and then says something else
BRANCHED = "branched"  # it goes on from a turn from which another request has gone on already
OTHER_TOOLS = "other tools"  # the same history, but the model is offered other tools
NOT_EXTENDED = "not extended"  # the renderer cannot show that the new prompt begins with the old tokens
ABANDONED = "abandoned"  # nobody received it, so nothing can follow from it

_CHANGING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""Claude Code's: a line of its system prompt that differs from request to request and tells the model nothing."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A completion that a request may go on from: `ids[:sampled_at]` was sent, `ids[sampled_at:end]` sampled."""

    builder: TraceBuilder
    sampled_at: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request on its way: what is sent, and what it hangs on. See `Book.begin`."""

    prompt: list[int]
    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    base: _Leaf | None  # what it extends exactly
    reason: str | None  # why it extends nothing; None for the first of all, and where it extends

    @property
    def is_extension(self) -> bool:
        return self.base is not None


class Book:
    """The conversations of one rollout."""

    def __init__(
        self, renderer: Renderer, *, sampling: Sampling, policy: str, model: str, reasoning: Reasoning = "as_sent"
    ) -> None:
        self._renderer = renderer
        self._sampling, self._policy, self._model = sampling, policy, model
        self._reasoning: Reasoning = reasoning
        self._builders: list[TraceBuilder] = []
        self._leaves: dict[tuple[bytes, bytes], _Leaf] = {}  # (tools, history with its completion) → the last such
        self._histories: set[bytes] = set()  # every history that any completion was sampled from or led to
        self._turns = 0
        self.forks: dict[str, int] = {}

    @property
    def turns(self) -> int:
        return self._turns

    @property
    def sampled_tokens(self) -> int:
        return sum(builder.sampled_tokens for builder in self._builders)

    def traces(self) -> tuple[Trace, ...]:
        return tuple(builder.build() for builder in self._builders if builder.sampled_tokens)

    # --- a request ---

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Turn:
        """What this request is to be sent with. Nothing is recorded yet."""
        chain = self._chain(messages)
        toolset = _digest(_canonical(tools))
        for length in range(len(messages) - 1, 0, -1):  # the last message is new, whoever said it
            leaf = self._leaves.get((toolset, chain[length]))
            if leaf is None:
                continue
            prompt = self._extended(leaf, messages[length:], tools)
            if prompt is not None:
                return Turn(prompt, messages, tools, leaf, None)
            return Turn(self._renderer.render(messages, tools), messages, tools, None, NOT_EXTENDED)
        return Turn(self._renderer.render(messages, tools), messages, tools, None, self._reason(chain))

    def _extended(self, leaf: _Leaf, new: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int] | None:
        ids = leaf.builder.prompt()
        return self._renderer.extend(ids[: leaf.sampled_at], ids[leaf.sampled_at : leaf.end], new, tools)

    def _reason(self, chain: Sequence[bytes]) -> str | None:
        if not self._builders:
            return None
        known = [length for length in range(1, len(chain)) if chain[length] in self._histories]
        if not known:
            return NEW
        return OTHER_TOOLS if known[-1] >= len(chain) - 2 else REWRITTEN

    # --- its completion ---

    def keep(
        self,
        turn: Turn,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        *,
        finish_reason: str,
        versions: Sequence[tuple[int, int, int]] = (),
        logprobs_kind: LogprobsKind = "unknown",
        engine: str = "",
        cached_tokens: int | None = None,
        columns: Mapping[str, bytes] | None = None,
        is_abandoned: bool = False,
    ) -> Parsed:
        """Records what was sampled from `turn.prompt`, in the trace that it belongs to, and reads it back.

        `is_abandoned`: nobody received it. It keeps a trace of its own, which is not trained on.
        """
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
            cached_tokens=cached_tokens,
            columns=columns,
        )
        self._turns += 1
        parsed = self._renderer.parse(ids, turn.prompt, turn.tools)
        if not is_abandoned and ids:
            history = self._chain([*turn.messages, parsed.message])
            leaf = _Leaf(builder, sampled_at, len(builder))
            self._leaves[_digest(_canonical(turn.tools)), history[-1]] = leaf
            self._histories.update(history[1:])
        return parsed

    def _builder(self, turn: Turn, is_abandoned: bool) -> TraceBuilder:
        base = turn.base
        if base is not None and len(base.builder) == base.end and not is_abandoned:
            base.builder.context(turn.prompt[base.end :])
            return base.builder
        reason = ABANDONED if is_abandoned else BRANCHED if base is not None else turn.reason
        builder = TraceBuilder(sampling=self._sampling, policy=self._policy, model=self._model, fork_reason=reason)
        builder.context(turn.prompt)
        if is_abandoned:
            builder.untrainable(ABANDONED)
        if reason is not None:
            self.forks[reason] = self.forks.get(reason, 0) + 1
            self._mark_copies(builder, turn)
        self._builders.append(builder)
        return builder

    def _mark_copies(self, builder: TraceBuilder, turn: Turn) -> None:
        """Of the recorded trace that begins most like this one: the spans that are here too, token for token."""
        best, shared = None, 0
        for other in self._builders:
            common = other.common_prefix(turn.prompt)
            if common > shared:
                best, shared = other, common
        if best is not None:
            builder.copies([span for span in best.spans if span.end <= shared])

    # --- histories ---

    def _chain(self, messages: Sequence[Message]) -> list[bytes]:
        """The digest of each beginning of the history; the first is that of nothing."""
        chain, running = [b""], blake2b(digest_size=16)
        for message in messages:
            running.update(_canonical(_essence(message, has_reasoning=self._reasoning == "as_sent")))
            chain.append(running.copy().digest())
        return chain


def _essence(message: Message, *, has_reasoning: bool) -> Json:
    """What a message says, in the one way that all encodings of it share."""
    role = message.get("role")
    text = _text(message.get("content"))
    if role in ("system", "developer"):
        role, text = "system", _CHANGING.sub("", text)
    said: list[Json] = [role, text]
    if role == "assistant":
        calls = message.get("tool_calls")
        said.append([_call(call) for call in calls] if isinstance(calls, Sequence) else [])
        if has_reasoning:
            said.append(_text(message.get("reasoning_content")))
    return said


def _text(content: Json) -> str:
    """Text parts are their text; what is not text (an image) is its JSON, so that none equals another."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return _canonical(content).decode()
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "".join(
        part if isinstance(part, str) else _canonical(whole).decode()
        for part, whole in zip(parts, content, strict=True)
    )


def _call(call: Json) -> Json:
    name, arguments = named_arguments(call)
    if isinstance(arguments, str):
        try:
            return [name, read_json(arguments or "{}")]
        except ValueError:
            pass  # it was never JSON: then it is the text that counts
    return [name, arguments]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=_plain).encode()


def _plain(value: object) -> Json:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Json]", value))
    return list(cast("Sequence[Json]", value))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
