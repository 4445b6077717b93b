"""The gateway's session: splicing, retries, limits and endings, over real HTTP."""

import asyncio
import gc
import json
import os
import socket
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from rollyard.core import Json, Sampling
from rollyard.core.failure import ContextLimit, PromptTooLong, RunDeadline, TokenLimit, TurnLimit
from rollyard.engines import RouterSettings
from rollyard.gateway import GatewayApp
from rollyard.gateway.app import CHAT
from rollyard.gateway.base import ChatRequest
from rollyard.gateway.intake import key_of, read
from rollyard.http import HttpServer, ListenerBounds
from rollyard.testing.script import Reply, Rules
from tests.gateway.site import LIMITS, Site, gateway, refuse

pytestmark = pytest.mark.slow

SYSTEM = {"role": "system", "content": "go"}
RETRY = {"x-stainless-retry-count": "1"}


def says(*turns: Reply | str) -> Rules:
    replies = tuple(Reply(turn) if isinstance(turn, str) else turn for turn in turns)
    return Rules(rules=(("go", replies),))


def body(*contents: str, **fields: Any) -> dict[str, Any]:
    """Returns a request with a history: user, assistant, user, …"""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)]
    return {"model": "any", "messages": messages, **fields}


async def ask(http: aiohttp.ClientSession, site: Site, what: Any, headers: Any = None) -> dict[str, Any]:
    async with http.post(f"{site.url}/v1/chat/completions", json=what, headers=headers) as answer:
        return {"status": answer.status, "headers": answer.headers, **await answer.json()}


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


# --- splicing


async def test_a_history_that_is_sent_back_is_one_trace_of_what_was_sampled():
    async with gateway(says("first", "second", "third")) as site, aiohttp.ClientSession() as http:
        history = ["go"]
        for expected in ("first", "second", "third"):
            answer = await ask(http, site, body(*history))
            assert text_of(answer) == expected
            history += [expected, "and then?"]
        (trace,) = site.verified().traces
        assert len(trace.spans) == 3
        assert site.forks == {}
        prompts = [list(call.prompt_ids) for call in site.engine.calls]
        for before, after, span in zip(prompts, prompts[1:], trace.spans, strict=False):
            assert after[: span.end] == list(trace.token_ids[: span.end])
            assert after[: len(before)] == before
        assert [message["role"] for message in site.session.messages] == ["user", "assistant"] * 3


async def test_the_number_of_the_conversation_grows_when_another_one_is_shown():
    async with gateway(says("first", "second", "third", "fourth", "fifth")) as site, aiohttp.ClientSession() as http:
        session = site.session

        async def after(*contents: str, **fields: Any) -> tuple[int, int]:
            assert (await ask(http, site, body(*contents, **fields)))["status"] == 200
            return session.conversation_number, len(session.messages)

        assert session.conversation_number == 0
        assert await after("go") == (0, 2)
        assert await after("go", "first", "and?") == (0, 4)
        other = [SYSTEM, {"role": "user", "content": "go on"}]
        assert await after(messages=other) == (0, 4)  # a shorter one is not shown
        assert await after(*("go", "another past", "and?", "more", "so?")) == (1, 6)
        again = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "first", "refusal": None}]
        again += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "second", "reasoning": None}]
        again += [{"role": "user", "content": [{"type": "text", "text": "next"}]}]
        assert await after(messages=again) == (2, 6)
        assert await after(*("go", "first", "and?", "second", "next", "third", "end")) == (2, 8)


async def test_each_reply_of_the_shown_conversation_has_its_turn():
    async with gateway(says("first", "second", "third", "fourth")) as site, aiohttp.ClientSession() as http:
        session = site.session
        await ask(http, site, body("go"))
        await ask(http, site, body(*("go", "not sampled here", "and?")))
        assert session.message_turns == {3: 1}
        await ask(http, site, {"messages": [SYSTEM, {"role": "user", "content": "go"}]})  # a shorter one
        await ask(http, site, body("go", "first", "and?"))
        assert session.message_turns == {1: 0, 3: 3}
        await ask(http, site, body("go", "first", "and?", "second", "so?"))
        assert session.message_turns == {1: 0, 3: 3, 5: 4}
        assert [span.turn for trace in site.verified().traces for span in trace.spans if span.is_owned] == [
            0,
            3,
            4,
            1,
            2,
        ]


async def test_a_rewritten_history_forks_with_its_reason():
    async with gateway(says("first", "second")) as site, aiohttp.ClientSession() as http:
        await ask(http, site, body("go"))
        await ask(http, site, body("go", "something else", "and then?"))
        assert len(site.verified().traces) == 2
        assert site.forks == {"history rewritten": 1}


async def test_the_tasks_sampling_applies_and_the_clients_is_counted():
    sampling = Sampling(temperature=0.7, max_tokens=33)
    async with gateway(says("ok"), sampling=sampling) as site, aiohttp.ClientSession() as http:
        await ask(http, site, body("go", temperature=0.0, max_tokens=4096))
        params = site.engine.calls[-1].body["sampling_params"]
        assert (params["temperature"], params["max_tokens"]) == (0.7, 33)
        assert site.session.info()["overruled"] == {"temperature": 1}
        await ask(http, site, body("go", max_tokens=7))
        assert site.engine.calls[-1].body["sampling_params"]["max_tokens"] == 7


# --- retries


async def test_an_identical_request_is_a_new_sample():
    async with gateway(says("one")) as site, aiohttp.ClientSession() as http:
        first = await ask(http, site, body("go"))
        second = await ask(http, site, body("go"))
        assert first["id"] != second["id"]
        traces = site.verified().traces
        assert len(traces) == 2
        assert all(trace.is_trainable for trace in traces)
        seeds = [call.body["sampling_params"]["seed"] for call in site.engine.calls]
        assert len(set(seeds)) == 2


async def test_a_retry_by_the_sdks_count_receives_the_same_completion():
    async with gateway(says("one")) as site, aiohttp.ClientSession() as http:
        first = await ask(http, site, body("go"))
        second = await ask(http, site, body("go"), RETRY)
        assert first["id"] == second["id"]
        assert len(site.verified().traces) == 1
        assert site.session.info()["replayed"] == 1
        assert len(site.engine.calls) == 1


async def test_a_retry_of_a_streamed_reply_receives_all_of_it():
    async with gateway(says("one two three")) as site, aiohttp.ClientSession() as http:
        texts = []
        for headers in (None, RETRY):
            async with http.post(
                f"{site.url}/v1/chat/completions", json=body("go", stream=True), headers=headers
            ) as answer:
                texts.append(_streamed(await answer.read()))
        assert texts == ["one two three", "one two three"]
        assert len(site.verified().traces) == 1


@pytest.mark.parametrize("count", ["", "-1", "x", "0", "000", "²", "9" * 5000])
async def test_a_retry_count_may_be_anything(count: str):
    async with gateway(says("one")) as site, aiohttp.ClientSession() as http:
        await ask(http, site, body("go"))
        answer = await ask(http, site, body("go"), {"x-stainless-retry-count": count})
        assert answer["status"] == 200
        assert site.session.info()["replayed"] == (1 if count.startswith("9") else 0)


async def test_a_retry_joins_a_running_completion():
    async with gateway(says(Reply("one", stall_after=0))) as site, aiohttp.ClientSession() as http:
        first = asyncio.create_task(ask(http, site, body("go")))
        await site.engine.busy()
        second = asyncio.create_task(ask(http, site, body("go"), RETRY))
        while site.session.info()["joined"] != 1:
            await asyncio.sleep(0.001)
        (piece,) = site.engine._work.running.values()
        piece.end("done")
        assert (await second)["id"] == (await first)["id"]
        assert len(site.engine.calls) == 1


async def test_two_identical_requests_at_once_are_two_samples():
    async with gateway(says(Reply("one", latency_s=0.1))) as site, aiohttp.ClientSession() as http:
        first, second = await asyncio.gather(ask(http, site, body("go")), ask(http, site, body("go")))
        assert first["id"] != second["id"]
        assert len(site.verified().traces) == 2


async def test_a_disconnect_stops_the_generation_and_leaves_an_abandoned_trace():
    async with gateway(says(Reply("a b c d e f", stall_after=3))) as site, aiohttp.ClientSession() as http:
        asking = asyncio.create_task(ask(http, site, body("go")))
        await site.engine.busy()
        asking.cancel()
        await site.engine.idle()
        assert site.engine.aborted
        await site.session.close()
        (trace,) = site.verified().traces
        assert (trace.is_trainable, trace.untrainable_reason, trace.sampled_tokens) == (False, "abandoned", 3)
        assert site.session.info()["abandoned"] == 1


async def test_an_interrupted_completion_continues_on_a_retry():
    turns = iter([Reply("a b c d e f", stall_after=3)])
    script = lambda turn: next(turns, "a b c d e f") if "go" in turn.text else "ok"  # noqa: E731
    async with gateway(script) as site, aiohttp.ClientSession() as http:
        asking = asyncio.create_task(ask(http, site, body("go")))
        await site.engine.busy()
        asking.cancel()
        await site.engine.idle()
        answer = await ask(http, site, body("go"))  # no retry header: no client had received it
        assert text_of(answer) == "a b c d e f"
        (trace,) = site.verified().traces
        assert trace.is_trainable
        assert site.session.info()["resumed"] == 1
        first, second = site.engine.calls
        assert list(second.prompt_ids[: len(first.prompt_ids)]) == list(first.prompt_ids)
        assert len(second.prompt_ids) == len(first.prompt_ids) + 3


async def test_a_retry_of_a_request_whose_parameter_the_engine_refuses_continues():
    turns = iter([Reply("a b c d e f", stall_after=3)])
    script = lambda turn: next(turns, "a b c d e f") if "go" in turn.text else "ok"  # noqa: E731
    async with gateway(script) as site, aiohttp.ClientSession() as http:
        refuse(site, "stop")
        request = body("go", stop=["zz"])
        asking = asyncio.create_task(ask(http, site, request))
        await site.engine.busy()
        asking.cancel()
        await site.engine.idle()
        assert text_of(await ask(http, site, request)) == "a b c d e f"
        assert site.session.info()["resumed"] == 1 and site.session.failure is None
        (trace,) = site.verified().traces
        assert trace.is_trainable and len(trace.spans) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_parameter_that_is_refused_in_the_middle_repeats_and_loses_no_token(is_stream: bool):
    """An engine takes over that does not support what the first one did."""
    turns = iter([Reply("a b c d e f", stall_after=3, fault="cut_midway")])
    script = lambda turn: next(turns, "a b c d e f") if "go" in turn.text else "ok"  # noqa: E731
    async with gateway(script) as site, aiohttp.ClientSession() as http:
        refuse(site, "stop", after_calls=1)
        request = body("go", stop=["zz"], stream=is_stream)
        if is_stream:
            async with http.post(f"{site.url}/v1/chat/completions", json=request) as answer:
                events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: {")]
            deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
        else:
            text = text_of(await ask(http, site, request))
        assert text == "a b c d e f" and site.session.failure is None
        (trace,) = site.verified().traces
        assert len(trace.spans) == 1 and site.engine.tokenizer.decode(trace.token_ids).count("a b c") == 1


async def test_a_constrained_beginning_stays_untrainable_if_a_parameter_is_refused_in_the_middle():
    turns = iter([Reply("a b c d e f", stall_after=3, fault="cut_midway")])
    script = lambda turn: next(turns, "a b c d e f") if "go" in turn.text else "ok"  # noqa: E731
    options: dict[str, Json] = {"structured_output": True}
    async with gateway(script, options=options) as site, aiohttp.ClientSession() as http:
        refuse(site, "stop", after_calls=1)
        request = body("go", stop=["zz"], stream=True, response_format={"type": "json_object"})
        async with http.post(f"{site.url}/v1/chat/completions", json=request) as answer:
            await answer.text()
        sent = [request.body.get("sampling_params", {}) for request in site.engine.requests]
        assert ["stop" in it for it in sent if "structured_outputs" in it] == [True]
        (trace,) = site.verified().traces
        assert len(trace.spans) == 1 and not trace.is_trainable


async def test_a_retry_finds_its_request_among_identical_ones():
    """Two concurrent requests with one body: the first loses its connection, the second is answered."""
    replies = iter([Reply("a b c d", stall_after=2), Reply("e f")])
    script = lambda turn: next(replies, "a b c d") if "go" in turn.text else "ok"  # noqa: E731
    async with gateway(script) as site, aiohttp.ClientSession() as http:
        first = asyncio.create_task(ask(http, site, body("go")))
        await site.engine.busy()
        assert text_of(await ask(http, site, body("go"))) == "e f"
        first.cancel()
        await site.engine.idle()
        assert text_of(await ask(http, site, body("go"))) == "a b c d"
        assert site.session.info()["resumed"] == 1
        await site.session.close()
        assert [trace.is_trainable for trace in site.verified().traces] == [True, True]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_reply_is_not_received_if_the_client_leaves_before_the_last_byte(is_stream: bool):
    """The reply is complete, but its slow client disconnected: it can be retried, and is not recorded as received."""
    async with gateway(says("one two")) as site:
        request = read(CHAT, orjson.dumps(body("go", stream=is_stream)))
        listener = await site.session.open(CHAT, request, b"go")
        assert (await listener.reply()).content == "one two"
        listener.leave()
        again = await site.session.open(CHAT, request, b"go")
        assert again.exchange is listener.exchange
        again.leave()
        assert site.session.turns == 0
        await site.session.close()
        (trace,) = site.verified().traces
        assert (trace.is_trainable, trace.untrainable_reason) == (False, "abandoned")
        again.delivered()  # too late
        assert len(site.verified().traces) == 1


async def test_an_answered_request_releases_its_history():
    class ReferencedMessage(dict[str, Json]):
        """A dict that supports weak references."""

    async with gateway(says("one")) as site:
        message = ReferencedMessage(role="user", content="go")
        watched = weakref.ref(message)
        for messages in ((message,), ({"role": "user", "content": "go"},)):
            listener = await site.session.open(CHAT, ChatRequest(messages), b"%d" % len(site.session.messages))
            await listener.reply()
            listener.delivered()
        del message, messages, listener
        gc.collect()
        assert watched() is None


# --- streams


async def test_a_slow_client_receives_everything_in_order():
    """Data that cannot be written immediately is buffered, and nothing is sent twice."""
    words = " ".join(f"word{number}" for number in range(12_000))
    reply = Reply(words, tokens_per_s=40_000)
    options = {"max_context": 1 << 20}
    sampling = Sampling(max_tokens=1 << 19)
    async with gateway(says(reply), engine_options=options, sampling=sampling, send_buffer=4096) as site:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        host, _, port = site.url.removeprefix("http://").partition(":")
        await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
        payload = json.dumps(body("go", stream=True, stream_options={"include_usage": True})).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(payload), payload))
        await site.engine.busy()
        await site.engine.idle()  # everything is sampled; the client has read nothing
        answer = bytearray()
        while chunk := await reader.read(65536):
            answer += chunk
        writer.close()
        assert _streamed(bytes(answer)) == words
        assert answer.rstrip().endswith(b"data: [DONE]")
        (trace,) = site.verified().traces
        assert trace.is_trainable


# --- limits


async def test_the_turn_limit_ends_the_rollout():
    limits = replace(LIMITS, max_turns=1)
    async with gateway(says("one"), limits=limits) as site, aiohttp.ClientSession() as http:
        await ask(http, site, body("go"))
        answer = await ask(http, site, body("go", "one", "more"))
        assert (answer["status"], answer["error"]["code"]) == (400, "turn_limit")
        assert answer["headers"]["x-should-retry"] == "false"
        assert isinstance(await site.session.ended(), TurnLimit)
        assert (await ask(http, site, body("go")))["error"]["code"] == "turn_limit"


async def test_the_token_limit_bounds_a_reply_and_then_ends_the_rollout():
    limits = replace(LIMITS, max_tokens=4)
    async with gateway(says("a b c d e f g h"), limits=limits) as site, aiohttp.ClientSession() as http:
        answer = await ask(http, site, body("go"))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 4
        answer = await ask(http, site, body("go"))
        assert answer["error"]["code"] == "token_limit"
        assert isinstance(site.session.failure, TokenLimit)


async def test_parallel_requests_share_the_token_limit():
    limits = replace(LIMITS, max_tokens=6)
    reply = Reply("a b c d e f g h", latency_s=0.1)
    async with gateway(says(reply), limits=limits) as site, aiohttp.ClientSession() as http:
        answers = await asyncio.gather(*(ask(http, site, body("go", max_tokens=4)) for _ in range(3)))
        assert sorted(answer["status"] for answer in answers) == [200, 200, 400]
        assert site.verified().sampled_tokens == 6


async def test_parallel_requests_that_wait_for_tokens_share_the_turn_limit():
    """One at a time has room for its 8 tokens, and samples 2."""
    limits = replace(LIMITS, max_turns=2, max_tokens=10)
    async with gateway(says(Reply("a", latency_s=0.1)), limits=limits) as site, aiohttp.ClientSession() as http:
        answers = await asyncio.gather(*(ask(http, site, body("go", max_tokens=8)) for _ in range(4)))
        assert sum(answer["status"] == 200 for answer in answers) <= 2
        assert {answer["error"]["code"] for answer in answers if answer["status"] != 200} == {"turn_limit"}
        assert site.session.turns <= 2
        assert isinstance(site.session.failure, TurnLimit)


async def test_parallel_requests_within_the_turn_limit_all_get_their_turn():
    limits = replace(LIMITS, max_turns=3, max_tokens=10)
    async with gateway(says(Reply("a", latency_s=0.1)), limits=limits) as site, aiohttp.ClientSession() as http:
        answers = await asyncio.gather(*(ask(http, site, body("go", max_tokens=8)) for _ in range(3)))
        assert [answer["status"] for answer in answers] == [200] * 3
        assert site.session.turns == 3


async def test_tokens_that_wait_to_be_continued_count_in_the_token_limit():
    """A retry continues 3 tokens and waits for room; another request may not sample beyond what then is left."""
    limits = replace(LIMITS, max_tokens=20)
    replies = {"go": Reply("a b c d e f", stall_after=3), "hold": Reply("a b c d", stall_after=2)}
    script = lambda turn: next((reply for text, reply in replies.items() if text in turn.text), "ok")  # noqa: E731
    async with gateway(script, limits=limits) as site, aiohttp.ClientSession() as http:
        first = asyncio.create_task(ask(http, site, body("go", max_tokens=20)))
        await site.engine.busy()
        first.cancel()
        await site.engine.idle()
        holding = asyncio.create_task(ask(http, site, body("hold", max_tokens=12)))
        await site.engine.busy()
        again = asyncio.create_task(ask(http, site, body("go", max_tokens=20)))
        while site.session.info()["resumed"] != 1:
            await asyncio.sleep(0)
        assert site.session.sampled_tokens == 3
        other = asyncio.create_task(ask(http, site, body("other", max_tokens=6)))
        while site.session.info()["requests"] != 4:
            await asyncio.sleep(0)
        assert len(site.engine.calls) == 2, "20 - 3 - 12 leaves 5 tokens, not 6"
        replies["go"] = Reply("a b c d e f")
        holding.cancel()
        assert [answer["status"] for answer in await asyncio.gather(again, other)] == [200, 200]
        await site.session.close()
        assert site.verified().sampled_tokens <= 20


async def test_tokens_that_wait_to_be_continued_are_kept_when_the_rollout_ends():
    limits = replace(LIMITS, max_tokens=20)
    script = lambda turn: Reply("a b c d e f", stall_after=3) if "go" in turn.text else "ok"  # noqa: E731
    async with gateway(script, limits=limits) as site, aiohttp.ClientSession() as http:
        first = asyncio.create_task(ask(http, site, body("go", max_tokens=20)))
        await site.engine.busy()
        first.cancel()
        await site.engine.idle()
        holding = asyncio.create_task(ask(http, site, body("go", "x", "hold", max_tokens=12)))
        await site.engine.busy()
        again = asyncio.create_task(ask(http, site, body("go", max_tokens=20)))
        while site.session.info()["resumed"] != 1:
            await asyncio.sleep(0)
        await site.session.close()
        assert (await again)["error"]["code"] == (await holding)["error"]["code"] == "ended"
        assert site.verified().sampled_tokens == 6


async def test_a_parallel_request_is_not_truncated_for_unused_tokens():
    """Each may sample 8 of the 10 tokens, and samples 4."""
    limits = replace(LIMITS, max_tokens=10)
    reply = Reply("a b c", latency_s=0.1)
    async with gateway(says(reply), limits=limits) as site, aiohttp.ClientSession() as http:
        answers = await asyncio.gather(*(ask(http, site, body("go", max_tokens=8)) for _ in range(2)))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [4, 4]
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop", "stop"]


async def test_a_context_overflow_does_not_end_the_rollout():
    limits = replace(LIMITS, max_context=200)
    async with gateway(says("one"), limits=limits) as site, aiohttp.ClientSession() as http:
        answer = await ask(http, site, body("go " * 300))
        assert (answer["status"], answer["error"]["code"]) == (400, "context_length_exceeded")
        assert isinstance(site.session.overflow, PromptTooLong)
        assert site.session.failure is None
        assert (await ask(http, site, body("go")))["status"] == 200  # the program compacted
        assert site.session.overflow is None
        await ask(http, site, body("go", "one", "more " * 300))
        assert isinstance(site.session.overflow, ContextLimit)


async def test_an_expired_deadline_keeps_the_sampled_tokens():
    limits = replace(LIMITS, run_s=0.3)
    async with gateway(says(Reply("a b c d e", stall_after=2)), limits=limits) as site, aiohttp.ClientSession() as http:
        answer = await ask(http, site, body("go"))
        assert answer["error"]["code"] == "run_deadline"
        assert isinstance(site.session.failure, RunDeadline)
        await site.session.close()
        (trace,) = site.verified().traces
        assert (trace.sampled_tokens, trace.is_trainable) == (2, True)


async def test_a_reply_left_long_before_the_deadline_is_still_abandoned():
    replies = iter([Reply("a b c", stall_after=1), Reply("d e f", stall_after=2)])
    script = lambda turn: next(replies) if "go" in turn.text else "ok"  # noqa: E731
    async with gateway(script) as site, aiohttp.ClientSession() as http:
        asking = asyncio.create_task(ask(http, site, body("go away")))
        await site.engine.busy()
        asking.cancel()
        await site.engine.idle()
        second = asyncio.create_task(ask(http, site, body("go on")))
        await site.engine.busy()
        site.clock.budget_s = site.clock.used_s
        site.clock.rearm()
        assert (await second)["error"]["code"] == "run_deadline"
        await site.session.close()
        traces = sorted((trace.sampled_tokens, trace.untrainable_reason) for trace in site.verified().traces)
        assert traces == [(1, "abandoned"), (2, None)]


async def test_failed_engines_end_the_rollout_with_blame_infra():
    settings = RouterSettings(engine_wait_s=0.2, backoff_s=0.01)
    async with gateway(says("one"), router_settings=settings) as site, aiohttp.ClientSession() as http:
        await site.engine.stop()
        answer = await ask(http, site, body("go"))
        assert answer["status"] == 503
        assert site.session.failure is not None and site.session.failure.blame == "infra"
        assert answer["headers"]["x-should-retry"] == "false"
        await site.engine.start()


async def test_after_close_no_engine_is_called():
    async with gateway(says("one")) as site, aiohttp.ClientSession() as http:
        await site.session.close()
        answer = await ask(http, site, body("go"))
        assert (answer["status"], answer["error"]["code"]) == (503, "ended")
        assert not site.engine.calls


async def test_a_listener_gets_no_partial_reply_when_the_rollout_ends():
    async with gateway(says(Reply("a b c d", stall_after=2))) as site, aiohttp.ClientSession() as http:
        asking = asyncio.create_task(ask(http, site, body("go")))
        await site.engine.busy()
        await site.session.close()
        answer = await asking
        assert (answer["status"], answer["error"]["code"]) == (503, "ended")
        (trace,) = site.verified().traces
        assert (trace.sampled_tokens, trace.untrainable_reason) == (2, "abandoned")


# --- invalid requests


@pytest.mark.parametrize(
    ("path", "start", "end"),
    [
        (
            "/v1/messages",
            b'{"model": "m", "messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": '
            b'[{"type": "tool_use", "id": "a", "name": "b", "input": ',
            b"}]}]}",
        ),
        (
            "/v1/responses",
            b'{"input": [{"type": "local_shell_call", "call_id": "a", "action": {"command": ',
            b"}}]}",
        ),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "go"}], "tools": ', b"}"),
    ],
)
@pytest.mark.parametrize("depth", [1000, 5000])
async def test_deep_nesting_is_refused_in_the_dialects_format(path: str, start: bytes, end: bytes, depth: int):
    async with gateway(says("one")) as site, aiohttp.ClientSession() as http:
        raw = start + b'{"a": ' * depth + b"1" + b"}" * depth + end
        async with http.post(f"{site.url}{path}", data=raw) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "go"}]}),
        ("/v1/responses", {"instructions": "go"}),
        ("/v1/messages", {"model": "m", "messages": [{"role": "assistant", "content": "a"}, SYSTEM]}),
    ],
)
async def test_a_renderers_refusal_is_reported_in_the_dialects_format(path: str, request_body: Any):
    """Qwen 3.8's template raises an error if there is no user message."""
    root = Path(os.environ.get("ROLLYARD_TOKENIZERS", "~/.cache/rollyard/tokenizers")).expanduser()
    if not (root / "qwen3" / "tokenizer.json").is_file():
        pytest.skip("no Qwen3 tokenizer here")
    async with (
        gateway(says("one"), tokenizer=root / "qwen3", renderer="qwen3.8") as site,
        aiohttp.ClientSession() as http,
        http.post(f"{site.url}{path}", json=request_body) as answer,
    ):
        reply = await answer.json()
        assert answer.status == 400 and answer.headers["x-should-retry"] == "false"
        assert reply["error"]["message"] and reply["error"]["type"]
        assert site.session.failure is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b'{"messages": 3}', b'{"messages": []}', b"\xff\xfe"])
async def test_garbage_is_refused_and_leaves_no_trace(raw: bytes):
    async with gateway(says("one")) as site, aiohttp.ClientSession() as http:
        async with http.post(f"{site.url}/v1/chat/completions", data=raw) as answer:
            reply = await answer.json()
        assert answer.status == 400
        assert reply["error"]["type"] == "invalid_request_error"
        assert site.session.traces() == ()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/", "/v2/messages"])
async def test_an_unknown_path_is_not_found(path: str):
    async with (
        gateway(says("one")) as site,
        aiohttp.ClientSession() as http,
        http.post(f"{site.url}{path}", json={}) as answer,
    ):
        assert answer.status == 404
        assert "error" in await answer.json()


async def test_a_disconnect_is_detected_if_the_server_does_not_cancel_the_app():
    """The service's port only sends http.disconnect; the doorway cancels. Both must stop the generation."""
    reply = Reply("a b c", stall_after=1)
    async with gateway(says(reply), watches=True) as site, aiohttp.ClientSession() as http:
        asking = asyncio.create_task(ask(http, site, body("go")))
        await site.engine.busy()
        asking.cancel()
        await site.engine.idle()


async def test_an_unread_last_byte_is_not_received_if_the_server_does_not_cancel_the_app():
    """Such a server accepts data for a disconnected client without an error."""
    limits, sampling = replace(LIMITS, max_tokens=100_000), Sampling(max_tokens=100_000)
    rules, roomy = says(Reply("word " * 60_000)), {"max_context": 200_000}
    async with (
        gateway(rules, limits=limits, sampling=sampling, engine_options=roomy) as site,
        port_of(site) as port,
    ):
        raw = orjson.dumps(body("go", stream=True))
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
            await loop.sock_sendall(client, head + raw)
            while not site.session.info()["requests"]:
                await asyncio.sleep(0.01)
            same = await site.session.open(CHAT, read(CHAT, raw), key_of(CHAT, raw), retries=1)
            await same.reply()
            same.leave()
            await loop.sock_recv(client, 1)
            for _ in range(10):  # sends the rest, as far as possible
                await asyncio.sleep(0)
            assert same.exchange.listeners and not same.exchange.is_delivered
        while same.exchange.listeners:
            await asyncio.sleep(0.01)
        assert not same.exchange.is_delivered


@asynccontextmanager
async def port_of(site: Site) -> AsyncGenerator[int, None]:
    """The gateway as the service serves it; its connections buffer little unread data."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = HttpServer(GatewayApp(site.session, watches=True), ListenerBounds(connections=16))
    await server.start(listener, backlog=16)
    try:
        yield listener.getsockname()[1]
    finally:
        await server.drain(5)


def _streamed(raw: bytes) -> str:
    parts: list[str] = []
    for line in raw.decode().splitlines():
        if line.startswith("data: {"):
            chunk: Json = json.loads(line[6:])
            for choice in chunk["choices"]:  # type: ignore[index, call-overload]
                parts.append(choice["delta"].get("content") or "")  # type: ignore[union-attr]
    return "".join(parts)
