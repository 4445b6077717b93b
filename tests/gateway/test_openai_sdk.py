"""OpenAI's Python SDK, unchanged, against the gateway: Chat Completions.

The traces of every conversation are verified. A history that is sent back, in any form in which the SDK or its users
write it, extends the one trace that it came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from rollyard.core import Limits
from rollyard.engines import RouterSettings
from rollyard.testing.script import Reply, Turn
from tests.gateway.site import LIMITS, Site, gateway

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessage

pytestmark = pytest.mark.slow

HELLO: Any = {"role": "user", "content": "hello"}
LS: Any = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "lists a folder",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
TWO_CALLS = (
    "<think>\nboth at once\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "ls", "arguments": {"path": "/a", "all": false}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ls", "arguments": {"path": "/b"}}\n</tool_call>'
)


def says(*replies: Reply | str) -> Callable[[Turn], Reply | str]:
    """Returns the engine's replies by the number of earlier assistant turns. A probe has no session and gets "ok"."""
    return lambda turn: replies[min(turn.number, len(replies) - 1)] if turn.session_id else "ok"


@asynccontextmanager
async def client_of(site: Site, **options: Any) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", **options) as client:
        yield client


def one_trace(site: Site, *, turns: int) -> None:
    """Checks that all sampled tokens are in one verified trace."""
    (trace,) = site.verified().traces
    assert (len(trace.spans), trace.is_trainable, trace.fork_reason) == (turns, True, None)
    assert not site.forks


def results_of(calls: Sequence[Any] | None, text: str = "empty") -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, "content": text} for call in calls or ()]


# --- conversations ---


async def test_a_conversation_is_one_trace() -> None:
    async with gateway(says("one", "two", "three")) as site, client_of(site) as client:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}]
        for number, expected in enumerate(("one", "two", "three")):
            messages.append({"role": "user", "content": f"next {number}"})
            reply = await client.chat.completions.create(model="any-name", messages=messages)
            (choice,) = reply.choices
            assert (choice.message.content, choice.finish_reason) == (expected, "stop")
            assert reply.model == "any-name"
            assert reply.id.startswith("chatcmpl-")
            messages.append(choice.message)
            usage = reply.usage
            assert usage is not None
            assert usage.prompt_tokens == len(site.engine.calls[-1].prompt_ids)
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            assert usage.prompt_tokens_details is not None
            assert bool(usage.prompt_tokens_details.cached_tokens) == (number > 0)
        one_trace(site, turns=3)


async def test_the_sync_client_works_too() -> None:
    def converse(url: str) -> list[str | None]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
            first = client.chat.completions.create(model="m", messages=[HELLO])
            messages: list[Any] = [HELLO, first.choices[0].message, {"role": "user", "content": "and?"}]
            second = client.chat.completions.create(model="m", messages=messages, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in second)
            return [first.choices[0].message.content, text]

    async with gateway(says("one", "two")) as site:
        assert await asyncio.to_thread(converse, site.url) == ["one", "two"]
        one_trace(site, turns=2)


async def test_the_paths_work_without_v1() -> None:
    async with gateway(says("one")) as site, openai.AsyncOpenAI(base_url=site.url, api_key="any") as client:
        reply = await client.chat.completions.create(model="m", messages=[HELLO])
        assert reply.choices[0].message.content == "one"


async def test_parallel_calls_and_their_results_stay_in_one_trace() -> None:
    async with gateway(says(TWO_CALLS, "both are empty")) as site, client_of(site) as client:
        messages: list[Any] = [HELLO]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[LS])
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.reasoning_content == "both at once"  # type: ignore[attr-defined]
        calls = choice.message.tool_calls or []
        assert [call.function.arguments for call in calls if call.type == "function"] == [
            '{"path": "/a", "all": false}',
            '{"path": "/b"}',
        ]
        assert len({call.id for call in calls}) == 2
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        assert reply.usage.completion_tokens_details.reasoning_tokens
        messages += [choice.message, *results_of(calls)]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[LS])
        assert reply.choices[0].message.content == "both are empty"
        one_trace(site, turns=2)


async def test_a_turn_that_only_calls_has_no_content() -> None:
    only = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    async with gateway(says(only, "done")) as site, client_of(site) as client:
        messages: list[Any] = [HELLO]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[LS])
        message = reply.choices[0].message
        assert message.content is None
        messages += [message, *results_of(message.tool_calls)]
        await client.chat.completions.create(model="m", messages=messages, tools=[LS])
        one_trace(site, turns=2)


def as_object(message: ChatCompletionMessage) -> Any:
    return message


def as_dump(message: ChatCompletionMessage) -> Any:
    return message.model_dump()


def by_hand(message: ChatCompletionMessage) -> Any:
    """Writes a turn like an agent program: other ids, compact arguments, text in parts, vLLM's name for reasoning."""
    calls = [
        {
            "id": f"toolu_{index}",
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments.replace(": ", ":")},
        }
        for index, call in enumerate(message.tool_calls or ())
        if call.type == "function"
    ]
    reasoning = message.reasoning_content  # type: ignore[attr-defined]
    parts = [{"type": "text", "text": message.content}]
    return {"role": "assistant", "content": parts, "reasoning": reasoning, "tool_calls": calls}


@pytest.mark.parametrize("written", [as_object, as_dump, by_hand])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_turn_sent_back_in_any_form_extends_its_trace(
    written: Callable[[ChatCompletionMessage], Any], is_stream: bool
) -> None:
    async with gateway(says(TWO_CALLS, "done")) as site, client_of(site) as client:
        if is_stream:
            async with client.chat.completions.stream(model="m", messages=[HELLO], tools=[LS]) as stream:
                message: ChatCompletionMessage = (await stream.get_final_completion()).choices[0].message
        else:
            reply = await client.chat.completions.create(model="m", messages=[HELLO], tools=[LS])
            message = reply.choices[0].message
        sent = written(message)
        ids = [call["id"] for call in sent["tool_calls"]] if isinstance(sent, dict) else None
        results = results_of(message.tool_calls)
        for result, call_id in zip(results, ids or (), strict=False):
            result["tool_call_id"] = call_id
        messages: list[Any] = [HELLO, sent, *results]
        await client.chat.completions.create(model="m", messages=messages, tools=[LS])
        one_trace(site, turns=2)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param('<tool_call>\n{"name": "ls", "arguments": "{broken"}\n</tool_call>', id="arguments are not JSON"),
        pytest.param('<tool_call>\n{"name": "ls", "arguments": {"pa', id="not closed"),
        pytest.param("so <tool_call>\n{nonsense}\n</tool_call>", id="no JSON at all"),
        pytest.param('<tool_call>\n{"name": "ls", "arguments": {"n": 1e999}}\n</tool_call>', id="infinity"),
        pytest.param("", id="nothing"),
        pytest.param("<think>\nhm", id="only thinking"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_malformed_output_is_returned_and_stays_in_its_trace(output: str, is_stream: bool) -> None:
    async with gateway(says(output, "sorry")) as site, client_of(site) as client:
        if is_stream:
            async with client.chat.completions.stream(model="m", messages=[HELLO], tools=[LS]) as stream:
                message: ChatCompletionMessage = (await stream.get_final_completion()).choices[0].message
        else:
            reply = await client.chat.completions.create(model="m", messages=[HELLO], tools=[LS])
            message = reply.choices[0].message
        answer = results_of(message.tool_calls, "that was no call") or [{"role": "user", "content": "pardon?"}]
        messages: list[Any] = [HELLO, message, *answer]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[LS])
        assert reply.choices[0].message.content == "sorry"
        one_trace(site, turns=2)


@pytest.mark.parametrize(("history", "traces"), [("as_sent", 2), ("keep", 1)])
async def test_reasoning_that_the_client_drops_is_removed_or_kept_by_option(history: str, traces: int) -> None:
    script = says("<think>\nhm\n</think>\n\none", "two")
    async with gateway(script, options={"reasoning_history": history}) as site, client_of(site) as client:
        reply = await client.chat.completions.create(model="m", messages=[HELLO])
        messages: list[Any] = [HELLO, {"role": "assistant", "content": reply.choices[0].message.content}, HELLO]
        await client.chat.completions.create(model="m", messages=messages)
        assert len(site.verified().traces) == traces


async def test_the_tasks_sampling_applies_and_overruled_parameters_are_counted() -> None:
    async with gateway(says("one")) as site, client_of(site) as client:
        parameters: dict[str, Any] = {"temperature": 0.123, "seed": 7, "stop": ["x"], "tool_choice": "required"}
        await client.chat.completions.create(model="m", messages=[HELLO], user="ann", **parameters)
        assert site.session.info()["overruled"] == {"temperature": 1, "tool_choice": 1}
        params = site.engine.calls[0].body["sampling_params"]
        assert params["temperature"] != 0.123
        assert params["stop"] == ["x"]


async def test_a_reply_at_the_token_limit_has_finish_reason_length() -> None:
    async with gateway(says("one two three four five", "six")) as site, client_of(site) as client:
        reply = await client.chat.completions.create(model="m", messages=[HELLO], max_completion_tokens=3)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 3
        messages: list[Any] = [HELLO, reply.choices[0].message, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="m", messages=messages)
        one_trace(site, turns=2)


# --- streams ---


async def test_a_stream_comes_token_by_token() -> None:
    """The engine stops in the middle of the reply: what it has sampled arrives nevertheless."""
    async with gateway(says(Reply("one two three four", stall_after=8))) as site, client_of(site) as client:
        stream = await client.chat.completions.create(model="m", messages=[HELLO], stream=True)
        received = ""
        async for chunk in stream:
            received += chunk.choices[0].delta.content or ""
            if received.startswith("one"):
                break
        assert "one two three four".startswith(received)
        assert site.engine.running == 1
        await stream.close()
        await site.engine.idle()


async def test_a_stream_has_the_role_first_and_usage_at_the_end() -> None:
    async with gateway(says(Reply("one two three four", tokens_per_s=200.0))) as site, client_of(site) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[HELLO],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(text or "" for text in texts) == "one two three four"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
        last = chunks[-1]
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.prompt_tokens == len(site.engine.calls[0].prompt_ids)
        one_trace(site, turns=1)


async def test_the_stream_helper_receives_every_kind_of_event() -> None:
    async with gateway(says(TWO_CALLS, "done")) as site, client_of(site) as client:
        async with client.chat.completions.stream(model="m", messages=[HELLO], tools=[LS]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.done"} <= set(kinds)
        message = final.choices[0].message
        assert (message.content, final.choices[0].finish_reason) == ("I look.", "tool_calls")
        assert message.reasoning_content == "both at once"  # type: ignore[attr-defined]
        assert len(message.tool_calls or ()) == 2
        one_trace(site, turns=1)


async def test_a_client_that_leaves_a_stream_stops_the_generation() -> None:
    async with gateway(says(Reply("one two three four", stall_after=3), "fine")) as site, client_of(site) as client:
        stream = await client.chat.completions.create(model="m", messages=[HELLO], stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await site.engine.idle()
        assert len(site.engine.aborted) == 1
        await site.session.close()
        (trace,) = site.verified().traces
        assert (trace.sampled_tokens, trace.untrainable_reason) == (3, "abandoned")


# --- errors ---


async def raised(client: openai.AsyncOpenAI, **parameters: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**{"model": "m", "messages": [HELLO], **parameters})
    return caught.value


async def test_invalid_requests_are_bad_requests_that_name_the_field() -> None:
    async with gateway(says("one")) as site, client_of(site) as client:
        error = await raised(client, messages=[HELLO, {"role": "user", "content": 3}])
        assert isinstance(error, openai.BadRequestError)
        assert (error.code, error.param, error.type) == (
            "invalid_type",
            "messages[1].content",
            "invalid_request_error",
        )
        assert (await raised(client, messages=[])).code == "empty_array"
        assert (await raised(client, n=2)).param == "n"
        assert (await raised(client, n=2, stream=True)).status_code == 400
        assert not site.engine.calls
        assert site.session.turns == 0


async def test_an_image_is_refused_for_a_text_model() -> None:
    async with gateway(says("one")) as site, client_of(site) as client:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        error = await raised(client, messages=[{"role": "user", "content": [image]}])
        assert isinstance(error, openai.BadRequestError)
        assert not site.engine.calls


async def test_an_unknown_endpoint_is_not_found() -> None:
    async with gateway(says("one")) as site, client_of(site) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.embeddings.create(model="m", input="x")
        assert caught.value.type == "not_found_error"


async def test_an_overflow_is_openais_error() -> None:
    limits = Limits(run_s=60.0, model_s=20.0, max_context=64)
    async with gateway(says("one"), limits=limits) as site, client_of(site) as client:
        for is_stream in (False, True):
            long = {"role": "user", "content": "word " * 200}
            error = await raised(client, messages=[long], stream=is_stream)
            assert isinstance(error, openai.BadRequestError)
            assert error.code == "context_length_exceeded"
            assert "This model's maximum context length is 64 tokens." in error.message
        reply = await client.chat.completions.create(model="m", messages=[HELLO])
        assert reply.choices[0].message.content == "one"


async def test_a_used_up_limit_is_reported_once_and_not_retried() -> None:
    limits = Limits(run_s=60.0, model_s=20.0, max_turns=1)
    async with gateway(says("one"), limits=limits) as site, client_of(site, max_retries=3) as client:
        await client.chat.completions.create(model="m", messages=[HELLO])
        error = await raised(client)
        assert (error.status_code, error.code) == (400, "turn_limit")
        assert site.session.info()["requests"] == 2
        one_trace(site, turns=1)


async def test_a_broken_engine_is_an_error_that_is_not_retried() -> None:
    settings = RouterSettings(engine_wait_s=0.1)
    async with gateway(says("one"), router_settings=settings) as site, client_of(site, max_retries=3) as client:
        site.engine.fail_next(20, "not_json")
        error = await raised(client)
        assert isinstance(error, openai.InternalServerError)
        assert error.type == "server_error"
        assert site.session.info()["requests"] == 1
        assert site.session.failure is not None


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error() -> None:
    script = says(Reply("one two three four", stall_after=3))
    settings = RouterSettings(engine_wait_s=0.1)
    async with gateway(script, router_settings=settings) as site, client_of(site) as client:
        stream = await client.chat.completions.create(model="m", messages=[HELLO], stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    await site.engine.stop()
        assert not isinstance(caught.value, openai.APIConnectionError)
        assert caught.value.type == "server_error"


async def test_models_are_listed_and_found() -> None:
    async with gateway(says("one")) as site, client_of(site) as client:
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.object) == (site.session.model, "model")
        assert (await client.models.retrieve("any-name")).id == "any-name"


# --- retries ---


class Losing(httpx2.AsyncHTTPTransport):
    """A network that loses the first response: `lost` handles the request until then."""

    def __init__(self, lost: Callable[[Any, httpx2.Request], Any]) -> None:
        super().__init__()
        self._lost = lost
        self.counts: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.counts.append(request.headers["x-stainless-retry-count"])
        if len(self.counts) > 1:
            return await super().handle_async_request(request)
        await self._lost(super().handle_async_request, request)
        raise httpx2.ReadError("the network lost it", request=request)


@asynccontextmanager
async def losing(site: Site, lost: Callable[[Any, httpx2.Request], Any]) -> AsyncGenerator[Any, None]:
    transport = Losing(lost)
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        client_of(site, http_client=http, max_retries=1) as client,
    ):
        yield client, transport


async def test_a_retry_of_a_finished_request_returns_the_same_completion() -> None:
    async def after_its_end(send: Any, request: httpx2.Request) -> None:
        response = await send(request)
        await response.aread()
        await response.aclose()

    async with gateway(says("one", "two")) as site, losing(site, after_its_end) as (client, transport):
        reply = await client.chat.completions.create(model="m", messages=[HELLO])
        assert transport.counts == ["0", "1"]
        assert len(site.engine.calls) == 1
        assert site.session.info()["replayed"] == 1
        messages = [HELLO, reply.choices[0].message, {"role": "user", "content": "and?"}]
        await client.chat.completions.create(model="m", messages=messages)
        one_trace(site, turns=2)


async def test_a_retry_of_an_interrupted_request_continues_from_the_sampled_tokens() -> None:
    def script(turn: Turn) -> Reply:
        return Reply("one two three four", stall_after=3 if turn.session_id and turn.call == 0 else None)

    async with gateway(script) as site:

        async def in_the_midst(send: Any, request: httpx2.Request) -> None:
            asking = asyncio.ensure_future(send(request))
            await site.engine.busy()
            asking.cancel()
            await asyncio.wait({asking})

        async with losing(site, in_the_midst) as (client, transport):
            reply = await client.chat.completions.create(model="m", messages=[HELLO])
            assert transport.counts == ["0", "1"]
            assert reply.choices[0].message.content == "one two three four"
            first, second = (list(call.prompt_ids) for call in site.engine.calls)
            assert second[: len(first)] == first
            assert len(second) == len(first) + 3
            assert site.session.info()["resumed"] == 1
            one_trace(site, turns=1)


async def test_a_retry_of_a_running_request_receives_the_same_completion() -> None:
    async with gateway(says(Reply("one two three four", latency_s=0.3))) as site, client_of(site) as client:

        async def ask(count: str, is_stream: bool) -> tuple[str, str]:
            header = {"x-stainless-retry-count": count}
            arguments: Any = {"model": "m", "messages": [HELLO], "extra_headers": header}
            if not is_stream:
                reply = await client.chat.completions.create(**arguments)
                return reply.id, reply.choices[0].message.content or ""
            chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **arguments)]
            return chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        for number, is_stream in enumerate((False, True), start=1):
            first = asyncio.ensure_future(ask("0", is_stream))
            await site.engine.busy()
            again = await ask("1", is_stream)
            assert again == await first
            assert again[1] == "one two three four"
            assert len(site.engine.calls) == number
        assert len(site.verified().traces) == 2


async def test_the_same_request_again_is_a_new_sample() -> None:
    async with gateway(says("one")) as site, client_of(site) as client:
        replies = [await client.chat.completions.create(model="m", messages=[HELLO]) for _ in range(2)]
        assert replies[0].id != replies[1].id
        assert len(site.engine.calls) == 2
        assert len(site.verified().traces) == 2


async def test_parallel_conversations_have_traces_of_their_own() -> None:
    async with gateway(says("one", "two"), limits=LIMITS) as site, client_of(site) as client:

        async def converse(number: int) -> None:
            messages: list[Any] = [{"role": "user", "content": f"sub-agent {number}"}]
            for _ in range(2):
                reply = await client.chat.completions.create(model="m", messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]

        await asyncio.gather(*(converse(number) for number in range(8)))
        traces = site.verified().traces
        assert [len(trace.spans) for trace in traces] == [2] * 8
        assert site.forks == {"new conversation": 7}
