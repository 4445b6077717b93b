"""Converts a request's bytes to the tokens of its prompt: parses, checks bounds, matches its history, renders.

Light requests are handled on the event loop, all others in a thread (`work_threads.py`). A thread helps only if its
steps are short: a C call holds the interpreter until it returns. These are bounded:

- JSON values: a parser creates objects for all of them in one call;
- messages, parts and tools, and the contents of each (`counts.py`): each costs some Python, or is serialized to JSON
  again in one call;
- bytes, by the context;
- characters: long texts are decoded piece by piece (`parser.py`), but joined in one call;
- text that has to be tokenized: it cannot fit if it has more characters than the context has room for at the longest
  token's length, or more tokens than the context. A long text is tokenized piece by piece until there are too many
  tokens, and as a whole only if it fits.

A refusal names the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from rollyard.core import Json, Message
from rollyard.core.failure import ContextLimit, InvalidRequest, TaskInvalid
from rollyard.engines.base import Generation
from rollyard.gateway.base import ChatRequest, Dialect, Problem, TokenLogprob
from rollyard.gateway.body_size import BodySize, has_more_values, weight_of
from rollyard.gateway.bounds import RolloutBounds
from rollyard.gateway.counts import check_counts
from rollyard.gateway.parser import TooMuchStructure, TooMuchText, parse
from rollyard.gateway.request_log import RequestLog, SentRequest
from rollyard.gateway.work_threads import WorkThreads, text_size
from rollyard.tokens import Renderer
from rollyard.tokens.base import ToolSchema
from rollyard.tokens.calls import named_arguments
from rollyard.tokens.splice import ConversationBook, PreparedTurn

MOST_VALUES = 20_000
"""At most 6 ms of parsing. 2,000 messages with a call each have 20,000."""
MOST_BYTES_PER_TOKEN, SLACK_BYTES = 32, 1 << 20
"""A body of more bytes than that for its context is not read. English has 5 bytes per token, Chinese written as \\uXXXX
has 9; reasoning that a template leaves out counts too."""
LIKELY_CHARS = 6
"""Per token; English has 4 to 5."""
SURE_BYTES = 256 << 10
"""A text has at most as many tokens as bytes. Up to this size any text is tokenized as a whole: building the list of
tokens holds the interpreter for 35 ns each, 9 ms. The tokens of a longer text are counted first."""
PIECE_CHARS = 4 << 10
"""Tokenized in one call while counting: 1 to 2 ms. The event loop may have to wait for several calls of two threads."""
MOST_THOUGHT = 16
"""Times the context: the most reasoning that all earlier turns may have. Templates leave it out."""
MOST_NAME_CHARS = 256
"""A longer name of a tool is not repeated for its results: the body has it once and may have thousands of results."""
CUT_TOKENS = 8
"""A generous bound on the tokens that a cut between two pieces adds: a cut splits one word."""


_THINK_CLOSE = "</think>"


class Intake:
    """Reads and prepares the requests of one session."""

    def __init__(
        self, book: ConversationBook, renderer: Renderer, bounds: RolloutBounds, request_log: RequestLog
    ) -> None:
        self._book = book
        self._renderer = renderer
        self._bounds = bounds
        self._request_log = request_log
        self._threads = WorkThreads()

    def check_size(self, size: int, *, is_only_counted: bool = False) -> None:
        """Raises Problem if a body of `size` bytes is too long for the context. Checked while the body arrives: a
        sandbox may have several connections, and each could hold 16 MiB."""
        room = self._bounds.room
        if room is not None and size > SLACK_BYTES + room * MOST_BYTES_PER_TOKEN:
            raise self._does_not_fit(_DoesNotFit.by_bytes(size, room), is_only_counted=is_only_counted)

    async def read(
        self, dialect: Dialect, raw: bytes | bytearray, *, is_only_counted: bool = False
    ) -> tuple[ChatRequest, bytes, BodySize, SentRequest]:
        """Returns the request, the key by which retries are matched, its size, and its entry for the log. Raises
        Problem; if it is only counted, that is no limit which the rollout met."""
        weight = weight_of(raw)
        room = self._bounds.room
        self.check_size(weight.bytes, is_only_counted=is_only_counted)
        if weight.is_light:
            request, sent = self._read(dialect, raw)
            return request, key_of(dialect, raw), weight, sent
        try:
            (request, sent), key = await self._threads.thread(
                weight.bytes, lambda it: (self._read(dialect, it), key_of(dialect, it)), raw
            )
        except TooMuchText as error:
            if room is None:
                raise Problem("too_large", str(error), code="too_much_text") from None
            least = max(room + 1, error.chars // LIKELY_CHARS)
            does_not_fit = _DoesNotFit(least, room, str(error))
            raise self._does_not_fit(does_not_fit, is_only_counted=is_only_counted) from None
        return request, key, weight, sent

    def _read(self, dialect: Dialect, raw: bytes | bytearray) -> tuple[ChatRequest, SentRequest]:
        body = parsed_body(raw)
        return request_of(dialect, body), self._request_log.read(dialect.name, body, len(raw))

    async def begin(self, request: ChatRequest, weight: BodySize, *, is_only_counted: bool = False) -> PreparedTurn:
        """Returns the turn to sample. Raises Problem; if it is only counted, that is no limit which the rollout met."""
        try:
            if not weight.is_light:
                return await self._threads.thread(weight.bytes, self._prepare, request)
            place = self._book.find(request.messages, request.tools)
            turn = await self._threads.run(text_size(place.new), self._book.extended, place)
            return turn or await self._threads.run(weight.bytes, self._book.rendered, place)
        except (InvalidRequest, TaskInvalid) as error:  # the renderer does not support a part or the order of turns
            raise Problem("invalid", error.detail, param="messages") from error
        except _DoesNotFit as error:
            raise self._does_not_fit(error, is_only_counted=is_only_counted) from None
        except RecursionError:
            raise Problem("invalid", "the request is nested too deeply") from None

    async def logprobs(self, generation: Generation) -> tuple[TokenLogprob, ...] | None:
        """Returns the logprob and text of each sampled token; None if the engine returned no logprobs."""
        if generation.logprobs is None:
            return None
        tokens = len(generation.token_ids) + sum(map(len, generation.tops or ()))
        return await self._threads.run(8 * tokens, self._logprobs, generation)

    def _logprobs(self, generation: Generation) -> tuple[TokenLogprob, ...]:
        tops = generation.tops or [()] * len(generation.token_ids)
        rows = zip(generation.token_ids, generation.logprobs or (), tops, strict=True)
        return tuple(
            TokenLogprob(self._decoded(token), value, tuple(TokenLogprob(self._decoded(it), one) for it, one in top))
            for token, value, top in rows
        )

    def _decoded(self, token: int) -> str:
        return self._renderer.decode([token])

    def _does_not_fit(self, error: _DoesNotFit, *, is_only_counted: bool = False) -> Problem:
        if is_only_counted:
            return Problem(
                "context", str(error), code=ContextLimit.code, used_tokens=error.least, max_tokens=error.room
            )
        is_first = not self._book.turns
        return self._bounds.too_long(error.least, error.room, is_first=is_first, detail=str(error))

    def _prepare(self, request: ChatRequest) -> PreparedTurn:
        place = self._book.find(request.messages, request.tools)
        if place.leaf is not None:
            self._check_text(place.new, ())
            turn = self._book.extended(place)
            if turn is not None:
                return turn
        self._check_text(request.messages, request.tools)
        return self._book.rendered(place)

    def _check_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        """Raises _DoesNotFit if the text cannot fit, before any step processes all of it."""
        room = self._bounds.room
        if room is None:
            return
        longest = self._renderer.longest_token_chars
        least = -(-sum(map(len, _rendered_texts(messages, tools))) // longest)
        if least <= room and sum(map(_bytes, _rendered_texts(messages, tools))) > SURE_BYTES:
            least = max(least, self._counted(_rendered_texts(messages, tools), room))
        thought = [len(text) for text in _thought(messages)]
        if max(thought, default=0) > room * longest or sum(thought) > MOST_THOUGHT * room * LIKELY_CHARS:
            least = max(least, room + 1)  # no model with this context can have written that
        if least > room:
            raise _DoesNotFit(least, room)

    def _counted(self, texts: Iterable[str], room: int) -> int:
        """Returns a lower bound on the number of tokens. Stops above `room`."""
        count = 0
        for text in texts:
            for at in range(0, len(text), PIECE_CHARS):
                count += max(0, len(self._renderer.encode(text[at : at + PIECE_CHARS])) - CUT_TOKENS)
                if count > room:
                    return count
        return count


class _DoesNotFit(Exception):
    """The request has at least `least` tokens, more than `room`."""

    def __init__(self, least: int, room: int, detail: str = "") -> None:
        super().__init__(detail or f"the text has at least {least} tokens, the context {room}")
        self.least, self.room = least, room

    @classmethod
    def by_bytes(cls, size: int, room: int) -> _DoesNotFit:
        most = SLACK_BYTES + room * MOST_BYTES_PER_TOKEN
        detail = f"the body has {size} bytes or more; for a context of {room} tokens at most {most} are read"
        return cls(max(room + 1, size // MOST_BYTES_PER_TOKEN), room, detail)


def read(dialect: Dialect, raw: bytes | bytearray) -> ChatRequest:
    return request_of(dialect, parsed_body(raw))


def parsed_body(raw: bytes | bytearray) -> dict[str, Json]:
    """Returns the parsed body within its bounds. Raises Problem."""
    if has_more_values(raw, MOST_VALUES):
        raise Problem("too_large", f"the body has more than {MOST_VALUES} JSON values", code="too_many_values")
    try:
        body = parse(raw)
    except ValueError as error:
        raise Problem("invalid", f"the body is not JSON: {error}") from None
    except TooMuchStructure as error:
        raise Problem("too_large", str(error), code="too_much_structure") from None
    if not isinstance(body, dict):
        raise Problem("invalid", "the body has to be a JSON object")
    check_counts(body)
    return body


def request_of(dialect: Dialect, body: dict[str, Json]) -> ChatRequest:
    try:
        request = dialect.read(body)
    except RecursionError:
        raise Problem("invalid", "the request is nested too deeply") from None
    return replace(request, messages=_with_names(request.messages))


def _with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, in which each result has the name of its tool: some chat templates show it, few clients send it."""
    names, named = dict[str, str](), list[Message]()
    for message in messages:
        calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
        for call in calls if isinstance(calls, Sequence) else ():
            if isinstance(call, Mapping) and isinstance(of := call.get("id"), str):
                names[of] = named_arguments(call)[0]
        is_unnamed = message.get("role") == "tool" and not message.get("name")
        name = names.get(call_id) if is_unnamed and isinstance(call_id, str) else None
        named.append({**message, "name": name} if name and len(name) <= MOST_NAME_CHARS else message)
    return tuple(named)


def key_of(dialect: Dialect, raw: bytes | bytearray) -> bytes:
    """Returns the key that a request and its retry have in common."""
    return blake2b(raw, digest_size=16, person=dialect.name.encode()).digest()


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _rendered_texts(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Iterator[str]:
    """Yields the texts that are always rendered, without what a template may leave out."""
    for message in messages:
        for text in _content(message):
            yield text.rpartition(_THINK_CLOSE)[2]
        yield from _strings(message.get("tool_calls"))
    for tool in tools:
        yield from _strings(tool.get("function"))


def _thought(messages: Sequence[Message]) -> Iterator[str]:
    """Yields what a template may leave out: the reasoning of earlier turns."""
    for message in messages:
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str):
            yield reasoning
        for text in _content(message):
            yield text.rpartition(_THINK_CLOSE)[0]


def _content(message: Message) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else (content,):
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _strings(value: Json) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
