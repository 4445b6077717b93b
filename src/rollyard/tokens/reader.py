"""Parses a turn incrementally while it is sampled, for a client that receives it as a stream.

`Renderer.parse` of the whole turn is authoritative. A piece is emitted early only if the markers show that it will not
change: text, thinking, and closed calls. Where that is not certain (a call inside thinking that may still be closed, a
`<think>` in the middle of the text), nothing is emitted until it is certain, or until the end.

Invariants. Nothing is emitted twice or withdrawn: the joined deltas are exactly the content and the reasoning that
`finish` returns, and the emitted calls are its calls. For a format whose markers are known, by their ids or
(text_cut.py) by their text, these equal `renderer.parse` of all ids. If the complete turn parses differently from what
was emitted (a stray `</think>`), the emitted part stands, the rest is appended as the model wrote it, and `finish`
returns that: the client will send back what it received.

Work per piece does not grow with the turn, except for one parse at the end of the thinking and of each of the first
calls. Later calls are emitted in batches: a model that repeats itself writes 800 calls in 15,000 tokens, and one parse
for each of them took 8 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rollyard.tokens.base import Markers, Parsed, Renderer, ToolCall, ToolSchema
from rollyard.tokens.calls import assistant_message
from rollyard.tokens.text_cut import Kind, TextCut
from rollyard.tokens.text_stream import CharacterStream, TextStream
from rollyard.tokens.turns import ends_thinking

PROMPT_CALLS = 8
"""This many calls are emitted as soon as they are closed; the others when the turn has grown by a quarter, or ends."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A new piece of text or of reasoning."""

    kind: Kind
    text: str


class _State(Enum):
    THINK = auto()
    DRAFT = auto()  # a call inside thinking: part of it, if the thinking is closed
    ANSWER = auto()  # also the initial state, unless the prompt has opened the thinking
    CALL = auto()  # the first call was opened: only calls are emitted now
    TEXT = auto()  # the markers are text, and `TextCut` decides what is emitted
    WAIT = auto()  # the rest can be emitted only when the turn is complete
    ENDED = auto()  # after the stop token


class Reader:
    """The incremental parser of one turn."""

    def __init__(self, renderer: Renderer, prompt_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> None:
        self._renderer, self._prompt, self._tools = renderer, prompt_ids, tools
        self._ids: list[int] = []
        self._out: list[Delta | ToolCall] = []
        self._emitted: dict[Kind, list[str]] = {"text": [], "reasoning": []}
        self._calls: list[ToolCall] = []
        self._stops = frozenset(renderer.stop_token_ids)
        self._has_thought = False
        self._last: tuple[int, Parsed] | None = None  # the last parse, with the number of ids parsed
        self._calls_due = 0  # the length of the turn at which calls are parsed again
        self._waits_from: int | None = None
        markers = renderer.markers
        self._markers = markers or Markers()
        self._state = _State.ANSWER
        if markers is None:
            self._wait(0)
        elif markers.is_text:
            self._state = _State.TEXT
        elif ends_thinking(prompt_ids, markers, renderer.stop_token_ids):
            self._state = _State.THINK
        self._cut = TextCut()
        self._channel = (CharacterStream if self._state is _State.TEXT else TextStream)(renderer.decode)

    def feed(self, ids: Sequence[int]) -> list[Delta | ToolCall]:
        """Adds sampled ids and returns what can be emitted now."""
        for token in ids:
            self._ids.append(token)
            if self._state is not _State.ENDED:
                self._read(token)
        if self._state is _State.ANSWER:
            self._emit("text", self._channel.take())
        elif self._state is _State.THINK:
            self._emit("reasoning", self._channel.take())
        elif self._state is _State.TEXT:
            self._read_text(self._channel.take())
        return self._take_output()

    def finish(self) -> tuple[list[Delta | ToolCall], Parsed]:
        """Returns what is left to emit, and the turn as it was emitted."""
        truth = self._parsed()
        content, thought = self._emitted_text("text"), self._emitted_text("reasoning")
        is_consistent = truth.content.startswith(content) and truth.reasoning.startswith(thought)
        if is_consistent:
            self._emit("reasoning", truth.reasoning[len(thought) :])
            self._emit("text", truth.content[len(content) :])
        elif self._waits_from is not None:
            for token in self._unemitted(self._waits_from):
                self._channel.add(token)
            self._emit("text", self._channel.flush())
        elif self._markers.is_text:
            for kind, text in [*self._cut.feed(self._channel.flush()), *self._cut.flush()]:
                self._emit(kind, text)
        if list(truth.tool_calls[: len(self._calls)]) == self._calls:
            self._emit_calls(truth.tool_calls)
        content, thought, calls = self._emitted_text("text"), self._emitted_text("reasoning"), tuple(self._calls)
        if (content, thought, calls) == (truth.content, truth.reasoning, truth.tool_calls):
            return self._take_output(), truth
        return self._take_output(), Parsed(content, thought, calls, assistant_message(content, thought, calls))

    # --- one id ---

    def _read(self, token: int) -> None:
        markers, state = self._markers, self._state
        if token in self._stops:
            self._end()
        elif state in (_State.THINK, _State.DRAFT):
            if token == markers.think_close:
                self._end_thinking()
            elif token != markers.think_open:  # a second opening is ignored
                if token in markers.call_open and state is _State.THINK:
                    self._emit("reasoning", self._channel.take())
                    self._state = _State.DRAFT
                self._channel.add(token)
        elif state is _State.CALL:
            if token in markers.call_close:
                self._read_calls()
        elif state is _State.ANSWER:
            if token in markers.call_open:
                self._emit("text", self._channel.flush())
                self._state = _State.CALL
            elif token in (markers.think_open, markers.think_close) and not self._has_thought:
                self._begin_thinking(token)
            else:
                self._channel.add(token)
        elif state is _State.TEXT:
            self._channel.add(token)

    def _read_text(self, text: str) -> None:
        for kind, piece in self._cut.feed(text):
            self._emit(kind, piece)
        settled = self._cut.settled_calls
        if settled > len(self._calls):
            self._read_calls(settled)

    def _read_calls(self, settled: int | None = None) -> None:
        """Emits the closed calls, unless the next batch is not due yet."""
        length = len(self._ids)
        if length < self._calls_due:
            return
        self._emit_calls(self._parsed().tool_calls[:settled])
        if len(self._calls) >= PROMPT_CALLS:
            self._calls_due = length + length // 4

    def _begin_thinking(self, token: int) -> None:
        self._emit("text", self._channel.take())
        if token == self._markers.think_open and not self._emitted_text("text") and not self._channel.has_more:
            self._channel = TextStream(self._renderer.decode)
            self._state = _State.THINK
        else:  # not at the start of a turn: only the renderer can interpret it
            self._wait(len(self._ids) - 1)

    def _end_thinking(self) -> None:
        self._emit("reasoning", self._channel.flush())
        self._channel = TextStream(self._renderer.decode)
        self._state, self._has_thought = _State.ANSWER, True
        parsed = self._parsed()
        if parsed.content or parsed.reasoning != self._emitted_text("reasoning"):
            self._wait(len(self._ids))

    def _end(self) -> None:
        if self._state is _State.ANSWER:
            self._emit("text", self._channel.flush())
        elif self._state is _State.THINK:
            self._emit("reasoning", self._channel.flush())
        elif self._state is _State.TEXT:
            self._read_text(self._channel.flush())
        self._state = _State.ENDED

    def _wait(self, at: int) -> None:
        self._state, self._waits_from = _State.WAIT, at

    # --- emitting ---

    def _emit(self, kind: Kind, text: str) -> None:
        if not text:
            return
        self._emitted[kind].append(text)
        last = self._out[-1] if self._out else None
        if isinstance(last, Delta) and last.kind == kind:
            self._out[-1] = Delta(kind, last.text + text)
        else:
            self._out.append(Delta(kind, text))

    def _emit_calls(self, calls: Sequence[ToolCall]) -> None:
        new = calls[len(self._calls) :]
        self._calls += new
        self._out += new

    def _emitted_text(self, kind: Kind) -> str:
        self._emitted[kind] = ["".join(self._emitted[kind])]
        return self._emitted[kind][0]

    def _parsed(self) -> Parsed:
        """The turn so far, as the renderer parses it. Stop tokens after the last parse do not change it."""
        if self._last is not None:
            length, parsed = self._last
            if all(token in self._stops for token in self._ids[length:]):
                return parsed
        parsed = self._renderer.parse(self._ids, self._prompt, self._tools)
        self._last = len(self._ids), parsed
        return parsed

    def _unemitted(self, at: int) -> list[int]:
        """The ids from `at` to the first call or the end."""
        ends = self._stops | self._markers.call_open
        remaining = self._ids[at:]
        return remaining[: next((n for n, token in enumerate(remaining) if token in ends), len(remaining))]

    def _take_output(self) -> list[Delta | ToolCall]:
        taken, self._out = self._out, []
        return taken
