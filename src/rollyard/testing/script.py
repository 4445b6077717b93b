"""The replies of a scripted engine, and the scripts that choose them.

A script is any function of a `Turn`. `Rules` is the declarative one: it decides from the prompt alone (a marker in
its text, and the number of its assistant turns), so its reply is the same after a restart, on another engine, and when
a call is retried:

    {"rules": [{"if": "fix the bug", "turns": ["```bash\\nls\\n```", "done"]}], "default": ["I do not know."]}

A turn beyond the last repeats the last. A turn is a text, or an object with the fields of `Reply`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import orjson

START, END, EOT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

Fault = Literal[
    "cut",  # the connection is closed without a response
    "hang",  # never responds, and ignores aborts; a stream sends `stall_after` tokens before
    "not_json",
    "no_token_ids",
    "two_choices",
    "wrong_ids",  # token ids that are strings
    "fewer_logprobs",
    "no_logprobs",
    "missing_logprob",  # vLLM's −9999.0 for one of them
    "positive_logprob",
    "bad_version",  # a weight version that is not a number
    "unasked_abort",  # as when another client aborts all calls
    "cut_midway",  # a stream is closed after `stall_after` tokens, or half of them; without a stream like "cut"
    "error_midway",  # a stream sends an error there; without a stream status 500
]


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Ids 0 to 255 are bytes, followed by the three special tokens of ChatML. Needs no files."""

    vocab = 259
    _specials: ClassVar[dict[str, int]] = {START: 256, END: 257, EOT: 258}
    _names: ClassVar[dict[int, str]] = {number: name for name, number in _specials.items()}
    _split = re.compile("|".join(re.escape(name) for name in _specials))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._split.finditer(text):
            ids += text[position : match.start()].encode("utf-8", "surrogatepass")
            ids.append(self._specials[match.group()])
            position = match.end()
        ids += text[position:].encode("utf-8", "surrogatepass")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        raw = b"".join(bytes([i]) if i < 256 else self._names.get(i, "\ufffd").encode() for i in ids)
        return raw.decode("utf-8", "replace")


class FolderTokenizer:
    """A tokenizer from the `tokenizer.json` of a model's folder."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        self._loaded = Loaded.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self._loaded.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._loaded.decode(list(ids), skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, and how it is delivered. None: the engine's own setting."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None  # instead of a text
    ends: bool = True  # a text is followed by the stop token
    latency_s: float | None = None  # before the first token
    tokens_per_s: float | None = None  # None: all at once
    stall_after: int | None = None  # stops sampling after this many tokens until it is aborted
    fault: Fault | int | None = None  # an int is an HTTP status


class Turn:
    """The input of a script."""

    def __init__(
        self, prompt_ids: Sequence[int], tokenizer: Tokenizer, marker: array[int], session_id: str, call: int
    ) -> None:
        self.prompt_ids = prompt_ids
        self.session_id = session_id
        self.call = call  # number of the call in this session on this engine, from 0
        self._tokenizer = tokenizer
        self._marker = marker

    @cached_property
    def text(self) -> str:
        return self._tokenizer.decode(self.prompt_ids)

    @cached_property
    def _assistants(self) -> list[int]:
        """The start of each assistant turn of the prompt, after its `<|im_start|>assistant`."""
        ids, marker = array("i", self.prompt_ids), self._marker
        places: list[int] = []
        at = -1
        while True:
            try:
                at = ids.index(marker[0], at + 1)
            except ValueError:
                return places
            if ids[at : at + len(marker)] == marker:
                places.append(at + len(marker))

    @property
    def number(self) -> int:
        """The number of earlier assistant turns, without the one to be sampled, which the prompt starts."""
        return max(0, len(self._assistants) - 1)

    def rest_of(self, ids: list[int], newline: list[int]) -> list[int]:
        """Returns the rest of a reply whose start is already in the prompt's last turn."""
        if not self._assistants:
            return ids
        tail = list(self.prompt_ids[self._assistants[-1] :])
        if tail[: len(newline)] == newline:
            tail = tail[len(newline) :]
        for count in range(min(len(tail), len(ids)), 0, -1):
            if tail[-count:] == ids[:count]:
                return ids[count:]
        return ids


Script = Callable[[Turn], Reply | str | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Rules:
    """The declarative script that the module docstring describes."""

    rules: tuple[tuple[str, tuple[Reply, ...]], ...] = ()
    default: tuple[Reply, ...] = field(default_factory=lambda: (Reply("ok"),))

    @classmethod
    def load(cls, path: Path) -> Rules:
        return cls.read(orjson.loads(path.read_bytes()))

    @classmethod
    def read(cls, script: Mapping[str, Any]) -> Rules:
        unknown = set(script) - {"rules", "default"}
        if unknown:
            raise ValueError(f"a script has the keys rules and default, not {', '.join(sorted(unknown))}")
        rules = tuple((str(rule["if"]), _replies(rule["turns"])) for rule in script.get("rules", ()))
        return cls(rules, _replies(script.get("default", ["ok"])))

    def __call__(self, turn: Turn) -> Reply:
        replies = self.default
        for marker, those in self.rules:
            if marker in turn.text:
                replies = those
                break
        return replies[min(turn.number, len(replies) - 1)]


def _replies(turns: Sequence[Any]) -> tuple[Reply, ...]:
    if not turns or isinstance(turns, str):
        raise ValueError("turns must be a list of at least one turn")
    return tuple(Reply(turn) if isinstance(turn, str) else Reply(**turn) for turn in turns)
