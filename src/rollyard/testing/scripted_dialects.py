"""The response bodies of each kind of engine, whole or streamed, and the faults that can be put into them.

A whole body contains one `Sampled`. An event of a stream contains a part of it, without the fields that a real engine
sends only at the end. vLLM sends the new tokens, and weight versions with the last event; SGLang sends all tokens so
far each time, or only the new ones if it is configured to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rollyard.testing.script import END, Tokenizer
from rollyard.testing.scripted_sampling import Sampled

Body = dict[str, Any]


class ReplyFormat(Protocol):
    def whole(self, sampled: Sampled) -> Body: ...


@runtime_checkable
class StreamFormat(ReplyFormat, Protocol):
    def events(self, sampled: Sampled, start: int, end: int, *, is_last: bool) -> list[Body]:
        """Returns the events for the tokens [start, end)."""
        ...


@dataclass(frozen=True, slots=True)
class GenerateFormat:
    """vLLM's /inference/v1/generate; the old shape is that of versions up to 0.28."""

    known_as: str
    model: str
    has_usage: bool
    is_old: bool

    def whole(self, sampled: Sampled) -> Body:
        choice: Body = {"index": 0, "finish_reason": sampled.finish, "token_ids": sampled.ids}
        if not self.is_old:
            choice["weight_versions"] = sampled.spans()
        if sampled.has_logprobs:
            content = [{**self._name(sampled.ids[i]), "logprob": value} for i, value in enumerate(sampled.logprobs())]
            if sampled.top:
                for i, entry in enumerate(content):
                    tops = sampled.tops(i).items()
                    entry["top_logprobs"] = [{**self._name(token), "logprob": value} for token, value in tops]
            choice["logprobs"] = {"content": content}
        return {"request_id": self.known_as, "model": self.model, "choices": [choice], "usage": sampled.usage()}

    def events(self, sampled: Sampled, start: int, end: int, *, is_last: bool) -> list[Body]:
        body = self.whole(sampled.part(start, end))
        choice = body["choices"][0]
        if not is_last:
            choice["finish_reason"] = None
        if not self.is_old:
            choice["weight_versions"] = sampled.spans() if is_last else None
        return _with_usage(body, sampled, self.has_usage and is_last)

    def _name(self, token: int) -> Body:
        return {"token": f"token_id:{token}"} if self.is_old else {"token_id": token}


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """vLLM's /v1/completions."""

    known_as: str
    model: str
    has_usage: bool
    tokenizer: Tokenizer

    def whole(self, sampled: Sampled) -> Body:
        choice: Body = {"index": 0, "text": self.tokenizer.decode(sampled.ids), "finish_reason": sampled.finish}
        if sampled.params.get("return_token_ids"):
            choice["token_ids"] = sampled.ids
        if sampled.has_logprobs:
            logprobs: Body = {"token_logprobs": sampled.logprobs()}
            if sampled.top:
                tops = [{f"token_id:{t}": v for t, v in sampled.tops(i).items()} for i in range(len(sampled.ids))]
                logprobs["top_logprobs"] = tops
            choice["logprobs"] = logprobs
        return {"id": self.known_as, "model": self.model, "choices": [choice], "usage": sampled.usage()}

    def events(self, sampled: Sampled, start: int, end: int, *, is_last: bool) -> list[Body]:
        body = self.whole(sampled.part(start, end))
        if not is_last:
            body["choices"][0]["finish_reason"] = None
        return _with_usage(body, sampled, self.has_usage and is_last)


@dataclass(frozen=True, slots=True)
class SglangFormat:
    """SGLang's /generate: one weight version, the current one."""

    known_as: str
    version: Callable[[], str]
    tokenizer: Tokenizer
    is_incremental: bool

    def whole(self, sampled: Sampled) -> Body:
        meta: Body = {
            "id": self.known_as,
            "finish_reason": {"type": sampled.finish},
            "prompt_tokens": len(sampled.prompt),
            "completion_tokens": len(sampled.ids),
            "cached_tokens": sampled.cached,
            "weight_version": "seven" if sampled.fault == "bad_version" else self.version(),
        }
        if sampled.has_logprobs:
            meta["output_token_logprobs"] = [
                [value, sampled.ids[i], None] for i, value in enumerate(sampled.logprobs())
            ]
            if sampled.top:
                tops = [[[v, t, None] for t, v in sampled.tops(i).items()] for i in range(len(sampled.ids))]
                meta["output_top_logprobs"] = tops
        return {"text": self.tokenizer.decode(sampled.ids), "output_ids": sampled.ids, "meta_info": meta}

    def events(self, sampled: Sampled, start: int, end: int, *, is_last: bool) -> list[Body]:
        body = self.whole(sampled.part(start if self.is_incremental else 0, end))
        body["meta_info"] |= {"prompt_tokens": len(sampled.prompt), "completion_tokens": end}
        if not is_last:
            body["meta_info"]["finish_reason"] = None
        return [body]


@dataclass(frozen=True, slots=True)
class ProrlFormat:
    """The reference system's /generate: ids and logprobs, whole only."""

    def whole(self, sampled: Sampled) -> Body:
        return {"response_ids": sampled.ids, "logprobs": sampled.logprobs() if sampled.has_logprobs else None}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Chat completions, whole only."""

    model: str
    tokenizer: Tokenizer

    def whole(self, sampled: Sampled) -> Body:
        text = self.tokenizer.decode(sampled.ids).removesuffix(END)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": sampled.finish}
        head = {"id": "chat", "object": "chat.completion", "created": 0, "model": self.model}  # clients require them
        return {**head, "choices": [choice], "usage": sampled.usage()}


def _with_usage(body: Body, sampled: Sampled, has_usage: bool) -> list[Body]:
    """vLLM sends usage in a separate event after the last one, if the client requests it."""
    del body["usage"]
    return [body, {**body, "choices": [], "usage": sampled.usage()}] if has_usage else [body]


def spoil(sampled: Sampled, body: Body) -> Body:
    """Returns the body with the requested fault in its token ids or choices."""
    if sampled.fault == "two_choices" and body.get("choices"):
        body["choices"] = body["choices"] * 2
    if sampled.fault not in ("no_token_ids", "wrong_ids"):
        return body
    holders: list[Body] = body.get("choices", [body])
    for holder in holders:
        for key in ("token_ids", "output_ids", "response_ids"):
            if key in holder:
                holder[key] = ["x" for _ in holder[key]] if sampled.fault == "wrong_ids" else None
    if sampled.fault == "no_token_ids" and "meta_info" in body:
        body["meta_info"].pop("output_token_logprobs", None)
    return body


def chat_prompt(messages: list[Mapping[str, Any]], start: str) -> str:
    """Renders messages as ChatML, for the scripted model."""
    turns = [f"{start}{message['role']}\n{message.get('content') or ''}{END}\n" for message in messages]
    return "".join(turns) + f"{start}assistant\n"
