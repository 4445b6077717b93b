"""From a request's bytes to the tokens that it is sent with: read, bounded, matched with its history, rendered.

What is light is done at once; anything else in a thread (`aside.py`). What is bounded, and why:

- JSON values: a parser makes objects of all of them in one step that holds up every thread;
- messages, parts and tools: each costs some Python;
- bytes, by the context: a parser makes a text of 16 MiB in one step, too;
- text: more characters than the context has room for, at the longest token's length, cannot fit, and neither can a text
  of more tokens. That is found by tokenizing it piece by piece until there are too many, never as a whole.

A refusal names the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

import orjson

from rollyard.core import Json, Message
from rollyard.core.failure import InvalidRequest, TaskInvalid
from rollyard.engines.base import Generation
from rollyard.gateway.aside import Aside, text_size
from rollyard.gateway.base import Ask, Dialect, Problem, TokenLogprob
from rollyard.gateway.bounds import Bounds
from rollyard.gateway.weight import Weight, has_more_values, weight_of
from rollyard.tokens import Renderer
from rollyard.tokens.splice import Book, Turn

MOST_VALUES = 50_000
"""About 10 ms of parsing. 4,096 messages with a call each have 40,000."""
MOST_MESSAGES, MOST_PARTS, MOST_TOOLS = 4096, 16_384, 1024
"""OpenAI's API takes 2,048 messages and 128 tools."""
MOST_MODEL_CHARS = 256
"""It is echoed in every event of a stream."""

MOST_BYTES_PER_TOKEN, SLACK_BYTES = 32, 1 << 20
"""A body of more bytes than that for its context is not read. English has 5 bytes per token, Chinese written as \\uXXXX
has 9; reasoning that a template leaves out counts, too."""
LIKELY_CHARS = 6
"""Per token. A text that is shorter than that for its context is tokenized once, as a whole; English has 4 to 5."""
PIECE_CHARS = 32 << 10
MOST_THOUGHT = 16
"""Times the context: what all earlier turns may have thought, which templates leave out."""
CUT_TOKENS = 8
"""What a cut between two pieces may add at most, generously: a cut splits one word."""


_THINK_CLOSE = "</think>"


class Intake:
    """One session's: see the module."""

    def __init__(self, book: Book, renderer: Renderer, bounds: Bounds) -> None:
        self._book = book
        self._renderer = renderer
        self._bounds = bounds
        self._aside = Aside()

    async def read(self, dialect: Dialect, raw: bytes | bytearray) -> tuple[Ask, bytes, Weight]:
        """What it says, its key among requests that may be retries, and how much work it is. Raises Problem."""
        weight = weight_of(raw)
        room = self._bounds.room
        if room is not None and weight.bytes > SLACK_BYTES + room * MOST_BYTES_PER_TOKEN:
            raise self._does_not_fit(_DoesNotFit.by_bytes(weight.bytes, room))
        if weight.is_light:
            return read(dialect, raw), key_of(dialect, raw), weight
        ask, key = await self._aside.thread(weight.bytes, lambda it: (read(dialect, it), key_of(dialect, it)), raw)
        return ask, key, weight

    async def begin(self, ask: Ask, weight: Weight) -> Turn:
        """The turn that it begins. Raises Problem."""
        try:
            if not weight.is_light:
                return await self._aside.thread(weight.bytes, self._begun, ask)
            place = self._book.find(ask.messages, ask.tools)
            turn = await self._aside.run(text_size(place.new), self._book.extended, place)
            return turn or await self._aside.run(weight.bytes, self._book.rendered, place)
        except (InvalidRequest, TaskInvalid) as error:  # the renderer has no such part, or no such order of turns
            raise Problem("invalid", error.detail, param="messages") from error
        except _DoesNotFit as error:
            raise self._does_not_fit(error) from None
        except RecursionError:
            raise Problem("invalid", "the request is nested too deeply") from None

    async def logprobs(self, generation: Generation) -> tuple[TokenLogprob, ...] | None:
        """Of each sampled token, with its text; None if the engine gave none."""
        if generation.logprobs is None:
            return None
        return await self._aside.run(8 * len(generation.token_ids), self._logprobs, generation)

    def _logprobs(self, generation: Generation) -> tuple[TokenLogprob, ...]:
        pairs = zip(generation.token_ids, generation.logprobs or (), strict=True)
        return tuple(TokenLogprob(self._renderer.decode([token]), value) for token, value in pairs)

    def _does_not_fit(self, error: _DoesNotFit) -> Problem:
        is_first = not self._book.turns
        return self._bounds.too_long(error.least, error.room, is_first=is_first, detail=str(error))

    def _begun(self, ask: Ask) -> Turn:
        room = self._bounds.room
        if room is not None:
            self._check_text(ask, room)
        return self._book.begin(ask.messages, ask.tools)

    def _check_text(self, ask: Ask, room: int) -> None:
        """_DoesNotFit if it cannot, before anything works on all of it."""
        longest = self._renderer.longest_token_chars
        chars = sum(map(len, _said(ask)))
        least = -(-chars // longest)
        if least <= room and chars > room * LIKELY_CHARS:
            least = max(least, self._counted(_said(ask), room))
        thought = [len(text) for text in _thought(ask.messages)]
        if max(thought, default=0) > room * longest or sum(thought) > MOST_THOUGHT * room * LIKELY_CHARS:
            least = max(least, room + 1)  # no model of this context thought that
        if least > room:
            raise _DoesNotFit(least, room)

    def _counted(self, texts: Iterable[str], room: int) -> int:
        """At least so many tokens; stops above `room`."""
        count = 0
        for text in texts:
            for at in range(0, len(text), PIECE_CHARS):
                count += max(0, len(self._renderer.encode(text[at : at + PIECE_CHARS])) - CUT_TOKENS)
                if count > room:
                    return count
        return count


class _DoesNotFit(Exception):
    """The request has at least so many tokens, and there is room for fewer."""

    def __init__(self, least: int, room: int, detail: str = "") -> None:
        super().__init__(detail or f"the text has at least {least} tokens, the context {room}")
        self.least, self.room = least, room

    @classmethod
    def by_bytes(cls, size: int, room: int) -> _DoesNotFit:
        most = SLACK_BYTES + room * MOST_BYTES_PER_TOKEN
        detail = f"the body has {size} bytes; for a context of {room} tokens at most {most} are read"
        return cls(max(room + 1, size // MOST_BYTES_PER_TOKEN), room, detail)


def read(dialect: Dialect, raw: bytes | bytearray) -> Ask:
    if has_more_values(raw, MOST_VALUES):
        raise Problem("too_large", f"the body has more than {MOST_VALUES} JSON values", code="too_many_values")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Problem("invalid", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Problem("invalid", "the body has to be a JSON object")
    _check_counts(body)
    try:
        return dialect.read(body)
    except RecursionError:
        raise Problem("invalid", "the request is nested too deeply") from None


def key_of(dialect: Dialect, raw: bytes | bytearray) -> bytes:
    """What two requests have in common that may be one and its retry."""
    return blake2b(raw, digest_size=16, person=dialect.name.encode()).digest()


def _check_counts(body: Mapping[str, Json]) -> None:
    """The lists that every dialect has, whatever else is in them."""
    for name in ("messages", "input"):
        items = body.get(name)
        if isinstance(items, list):
            _check_length(name, len(items), MOST_MESSAGES)
            parts = sum(map(_parts, items))
            if parts > MOST_PARTS:
                message = f"Invalid '{name}': they have {parts} parts in all, and {MOST_PARTS} is the maximum."
                raise Problem("invalid", message, code="array_above_max_length", param=name)
    tools = body.get("tools")
    if isinstance(tools, list):
        _check_length("tools", len(tools), MOST_TOOLS)
    model = body.get("model")
    if isinstance(model, str) and len(model) > MOST_MODEL_CHARS:
        message = f"Invalid 'model': a name has at most {MOST_MODEL_CHARS} characters, this one {len(model)}."
        raise Problem("invalid", message, code="string_above_max_length", param="model")


def _check_length(name: str, length: int, most: int) -> None:
    if length > most:
        message = (
            f"Invalid '{name}': array too long. Expected an array with maximum length {most}, "
            f"but got an array with length {length} instead."
        )
        raise Problem("invalid", message, code="array_above_max_length", param=name)


def _parts(item: Json) -> int:
    """Of one message: its content, calls and what else is a list, and the lists of content in those."""
    if not isinstance(item, dict):
        return 0
    count = 0
    for value in item.values():
        if isinstance(value, list):
            count += len(value)
            for part in value:
                inner = part.get("content") if isinstance(part, dict) else None
                count += len(inner) if isinstance(inner, list) else 0
    return count


def _said(ask: Ask) -> Iterator[str]:
    """The texts that are surely rendered: without what a template may leave out."""
    for message in ask.messages:
        for text in _content(message):
            yield text.rpartition(_THINK_CLOSE)[2]
        yield from _strings(message.get("tool_calls"))
    for tool in ask.tools:
        yield from _strings(tool.get("function"))


def _thought(messages: Sequence[Message]) -> Iterator[str]:
    """What a template may leave out: the reasoning of earlier turns."""
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
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list):
            left += item
