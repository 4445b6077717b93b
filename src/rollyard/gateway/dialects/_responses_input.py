"""Reads the `input` of a Responses request as messages.

In this API a turn of the assistant consists of several items: reasoning, text, calls. They are combined to one
message, since the turn was sampled as one. Items belong together if their ids contain the same reply id (see `item_id`;
clients send the ids back), even if a client has put outputs between the calls of one turn. Without ids, consecutive
items belong together, until reasoning follows text or a call, or text follows text.

Invariant: no content is dropped. An item or part that a message cannot represent raises a Problem that names it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence

from rollyard.core import Json, Message
from rollyard.gateway.base import Problem, shown
from rollyard.gateway.dialects._responses_calls import Toolbox, read_call

_SEALED = "rollyard.1."
_ITEM_ID = re.compile(r"[a-z]+_([0-9A-Za-z]+)_\d+")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def item_id(reply_id: str, index: int) -> str:
    """Returns the end of every output item's id. It identifies the item's reply when a client sends it back."""
    return f"{reply_id}_{index}"


def seal(reasoning: str) -> str:
    """Encodes reasoning for `encrypted_content`, the only field of it that some clients keep. It is not encrypted."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str | None:
    """Decodes what `seal` encoded. Returns None for anything else."""
    if not sealed.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(sealed[len(_SEALED) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


class Transcript:
    """Builds messages from items."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._messages: list[dict[str, Json]] = []
        self._turn: dict[str, Json] | None = None  # the assistant's message that items may still be added to
        self._grown: dict[str, list[str]] = {}  # the pieces of its fields, until they are joined
        self._reply = ""  # its reply id, if its items have one
        self._is_last = False  # whether it is the last message; if not, only tool outputs follow
        self._readers: Mapping[str, Callable[[Mapping[str, Json], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "custom_tool_call": self._call,
            "local_shell_call": self._call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "local_shell_call_output": self._output,
            "additional_tools": self._tools,
            "item_reference": self._reference,
        }

    @property
    def messages(self) -> tuple[Message, ...]:
        self._join()
        return tuple(self._messages)

    def add_message(self, role: str, content: Json) -> None:
        """Adds a message that is not the assistant's."""
        self._join()
        self._messages.append({"role": role, "content": content})
        self._turn = None

    def read(self, items: Json) -> None:
        if isinstance(items, str):
            self.add_message("user", items)
            return
        if not isinstance(items, Sequence):
            raise Problem("invalid", "input must be a string or a list of items", param="input")
        for index, item in enumerate(items):
            where = f"input[{index}]"
            if not isinstance(item, Mapping):
                raise Problem("invalid", f"{where} must be an object", param=where)
            kind = item.get("type") or ("message" if "role" in item else None)
            read = self._readers.get(kind) if isinstance(kind, str) else None
            if read is None:
                raise Problem("invalid", f"{where}: items of type {shown(kind)} are not supported here", param=where)
            read(item, where)

    # --- readers of each item type ---

    def _message(self, item: Mapping[str, Json], where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise Problem(
                "invalid", f"{where}.role {shown(role)} is not user, assistant, system or developer", param=where
            )
        content = _content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self.add_message(str(role), content)
            return
        if not isinstance(content, str):
            raise Problem("invalid", f"{where}.content: an assistant's message is text", param=f"{where}.content")
        turn = self._assistant(item, is_new=lambda turn: bool(turn["content"]) and "tool_calls" not in turn)
        self._grow(turn, "content", content)

    def _reasoning(self, item: Mapping[str, Json], where: str) -> None:
        turn = self._assistant(item, is_new=lambda turn: bool(turn["content"]) or "tool_calls" in turn)
        text = _thought(item, where)
        if text:
            self._grow(turn, "reasoning_content", text)

    def _call(self, item: Mapping[str, Json], where: str) -> None:
        turn = self._assistant(item, is_new=lambda _: False)
        calls = turn.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(read_call(item, where))

    def _output(self, item: Mapping[str, Json], where: str) -> None:
        call_id = item.get("call_id") or item.get("id")  # local_shell_call_output has only the latter
        if not isinstance(call_id, str):
            raise Problem("invalid", f"{where}.call_id must be a string", param=f"{where}.call_id")
        content = _content(item.get("output"), f"{where}.output")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        self._is_last = False

    def _tools(self, item: Mapping[str, Json], where: str) -> None:
        self._toolbox.read(item.get("tools"), f"{where}.tools")

    def _reference(self, item: Mapping[str, Json], where: str) -> None:
        raise Problem(
            "invalid",
            f"{where}: items are not stored, so they cannot be referred to; send the item itself (store=false)",
            param=where,
        )

    def _grow(self, turn: dict[str, Json], field: str, text: str) -> None:
        """Adds text to a field. The field is non-empty from now on and complete after `_join`: thousands of pieces are
        joined once."""
        turn[field] = turn.get(field) or text
        self._grown.setdefault(field, []).append(text)

    def _join(self) -> None:
        for field, pieces in self._grown.items():
            assert self._turn is not None
            self._turn[field] = "".join(pieces)
        self._grown = {}

    def _assistant(self, item: Mapping[str, Json], *, is_new: Callable[[Mapping[str, Json]], bool]) -> dict[str, Json]:
        """Returns the message that an item belongs to. `is_new` decides if the ids do not."""
        id_ = item.get("id")
        match = _ITEM_ID.fullmatch(id_) if isinstance(id_, str) else None
        reply, turn = match.group(1) if match else "", self._turn
        if turn is not None and reply and reply == self._reply:
            return turn
        if turn is not None and self._is_last and not (reply and self._reply) and not is_new(turn):
            self._reply = self._reply or reply
            return turn
        self._join()
        new: dict[str, Json] = {"role": "assistant", "content": ""}
        self._messages.append(new)
        self._turn, self._reply, self._is_last = new, reply, True
        return new


def _content(content: Json, where: str) -> Json:
    """Returns a string if all parts are text, else a list of parts in chat format."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise Problem("invalid", f"{where} must be a string or a list of parts", param=where)
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if all(isinstance(part, str) for part in parts):
        return "".join(str(part) for part in parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: Json, where: str) -> Json:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and isinstance(kind, str):
        text = part.get(_TEXTS.get(kind, ""))
        if isinstance(text, str):
            return text
        url = part.get("image_url")
        if kind == "input_image" and isinstance(url, str):
            detail = part.get("detail")
            return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail else {})}
    raise Problem("invalid", f"{where}: a part of type {shown(kind)} in this form is not supported", param=where)


def _thought(item: Mapping[str, Json], where: str) -> str:
    """Returns the text of a reasoning item: from `seal`, else its content, else its summary."""
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and (text := unseal(sealed)) is not None:
        return text
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, Sequence) and not isinstance(parts, str) and parts:
            texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
            if not all(isinstance(text, str) for text in texts):
                raise Problem("invalid", f"{where}.{name} must be parts with a text", param=f"{where}.{name}")
            return "\n\n".join(str(text) for text in texts)
    if sealed:
        raise Problem("invalid", f"{where}.encrypted_content is of another server and cannot be read", param=where)
    return ""
