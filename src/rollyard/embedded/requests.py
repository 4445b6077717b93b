"""Validates request bodies strictly: an unsupported sampling parameter is refused, not ignored."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.embedded.batching import Request

MAX_TOPS = 20

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop": ("", []),
    "bad_words": ([],),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "skip_special_tokens": (True, False),  # responses contain ids, not text
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True, False),
    "include_stop_str_in_output": (True, False),
}
"""Parameters of vLLM that this engine does not support: only null and the values that change nothing are accepted."""


class Refused(Exception):
    """A response with a status other than 200."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class Params(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: int | None = 16
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = -1
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class GenerateBody(msgspec.Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str = ""
    cache_salt: str | None = None
    priority: int = 0


class TokenizeBody(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    model: str | None = None


CHAT_FIELDS = frozenset({"model", "messages", "tools", "stream", "user", "metadata", "chat_template_kwargs"})


def read(raw: bytes, shape: type[Any], what: str) -> Any:
    try:
        return msgspec.json.decode(raw or b"{}", type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{what}: {error}") from None


def read_params(raw: Mapping[str, Any]) -> Params:
    known: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in NEUTRAL:
            known[name] = value
        elif value is not None and value not in NEUTRAL[name]:
            raise Refused(f"sampling parameter {name} = {value!r} is not supported by this engine")
    try:
        params = msgspec.convert(known, Params)
    except msgspec.ValidationError as error:
        raise Refused(f"sampling parameters: {error}") from None
    if params.temperature is not None and not 0 <= params.temperature < float("inf"):
        raise Refused(f"temperature {params.temperature} is not 0 or more")
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise Refused(f"top_p {params.top_p} is not in (0, 1]")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_TOPS:
        raise Refused(f"logprobs {params.logprobs} is not in [0, {MAX_TOPS}]")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise Refused(f"max_tokens {params.max_tokens} is not 1 or more")
    return params


def make_request(
    prompt: list[int],
    params: Params,
    *,
    max_context: int,
    vocabulary: int,
    eos_ids: frozenset[int],
    salt: str = "",
    session: str = "",
    priority: int = 0,
) -> Request:
    """Builds a request and checks it against the model's limits."""
    if not prompt:
        raise Refused("the prompt is empty")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise Refused(f"a token id of the prompt is not in the vocabulary of {vocabulary}")
    if len(prompt) >= max_context:
        raise Refused(f"The prompt (length {len(prompt)}) is longer than the maximum model length of {max_context}.")
    room = max_context - len(prompt)
    stops = frozenset(params.stop_token_ids or ())
    return Request(
        prompt=prompt,
        max_tokens=min(params.max_tokens or room, room),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_p=1.0 if params.top_p is None else params.top_p,
        top_k=-1 if params.top_k is None else params.top_k,
        stop_ids=stops if params.ignore_eos else stops | eos_ids,
        top=params.logprobs or 0,
        salt=salt,
        session=session,
        priority=priority,
    )
