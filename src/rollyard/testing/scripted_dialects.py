"""The bodies in which engines hand over what they sampled, and the ways in which such a body can be spoilt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard.testing.script import END, Tokenizer
from rollyard.testing.scripted_sampling import Sampled

Body = dict[str, Any]


def generate_body(done: Sampled, known_as: str, model: str, *, is_old: bool) -> Body:
    """vLLM's /inference/v1/generate; the old shape is that of versions up to 0.28."""
    choice: Body = {"index": 0, "finish_reason": done.finish, "token_ids": done.ids}
    if not is_old:
        choice["weight_versions"] = done.spans()
    if done.has_logprobs:
        content = [{**_name(done.ids[i], is_old), "logprob": value} for i, value in enumerate(done.logprobs())]
        if done.top:
            for i, entry in enumerate(content):
                tops = done.tops(i).items()
                entry["top_logprobs"] = [{**_name(token, is_old), "logprob": value} for token, value in tops]
        choice["logprobs"] = {"content": content}
    return {"request_id": known_as, "model": model, "choices": [choice], "usage": done.usage()}


def _name(token: int, is_old: bool) -> Body:
    return {"token": f"token_id:{token}"} if is_old else {"token_id": token}


def completion_body(done: Sampled, known_as: str, model: str, tokenizer: Tokenizer) -> Body:
    """vLLM's /v1/completions."""
    choice: Body = {"index": 0, "text": tokenizer.decode(done.ids), "finish_reason": done.finish}
    if done.params.get("return_token_ids"):
        choice["token_ids"] = done.ids
    if done.has_logprobs:
        logprobs: Body = {"token_logprobs": done.logprobs()}
        if done.top:
            tops = [{f"token_id:{t}": v for t, v in done.tops(i).items()} for i in range(len(done.ids))]
            logprobs["top_logprobs"] = tops
        choice["logprobs"] = logprobs
    return {"id": known_as, "model": model, "choices": [choice], "usage": done.usage()}


def sglang_body(done: Sampled, known_as: str, version: str, tokenizer: Tokenizer) -> Body:
    """SGLang's /generate: one weight version, that of the end."""
    meta: Body = {
        "id": known_as,
        "finish_reason": {"type": done.finish},
        "prompt_tokens": len(done.prompt),
        "completion_tokens": len(done.ids),
        "cached_tokens": done.cached,
        "weight_version": "seven" if done.fault == "bad_version" else version,
    }
    if done.has_logprobs:
        meta["output_token_logprobs"] = [[value, done.ids[i], None] for i, value in enumerate(done.logprobs())]
        if done.top:
            tops = [[[v, t, None] for t, v in done.tops(i).items()] for i in range(len(done.ids))]
            meta["output_top_logprobs"] = tops
    return {"text": tokenizer.decode(done.ids), "output_ids": done.ids, "meta_info": meta}


def chat_body(done: Sampled, model: str, tokenizer: Tokenizer) -> Body:
    text = tokenizer.decode(done.ids).removesuffix(END)
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": done.finish}
    head = {"id": "chat", "object": "chat.completion", "created": 0, "model": model}  # clients insist on all of them
    return {**head, "choices": [choice], "usage": done.usage()}


def spoil(done: Sampled, body: Body) -> Body:
    """The body with the fault in its token ids that was asked for."""
    if done.fault not in ("no_token_ids", "wrong_ids"):
        return body
    holders: list[Body] = body.get("choices", [body])
    for holder in holders:
        for key in ("token_ids", "output_ids"):
            if key in holder:
                holder[key] = ["x" for _ in holder[key]] if done.fault == "wrong_ids" else None
    if done.fault == "no_token_ids" and "meta_info" in body:
        body["meta_info"].pop("output_token_logprobs", None)
    return body


def chat_prompt(messages: list[Mapping[str, Any]], start: str) -> str:
    """ChatML, as the scripted model reads it."""
    turns = [f"{start}{message['role']}\n{message.get('content') or ''}{END}\n" for message in messages]
    return "".join(turns) + f"{start}assistant\n"
