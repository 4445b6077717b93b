"""Anthropic's Python SDK, unchanged, against a gateway over HTTP. The traces of every conversation are verified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from rollyard.core import Limits, Sampling
from rollyard.testing.script import Reply, Turn
from tests.gateway.site import LIMITS, Site, gateway

if TYPE_CHECKING:
    from anthropic.types import Message, MessageParam, ToolParam

WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


TURNS = (
    "<think>\nTwo cities.\n</think>\n\nI ask for both.\n"
    + tool_call("weather", city="Zürich")
    + "\n"
    + tool_call("weather", city="Bern", days=[1, 2.5, None, False]),
    tool_call("weather", city=""),
    "<think>\nEnough.\n</think>\n\nSunny, 25 °C.",
)


def by_turn(*turns: str | Reply) -> Callable[[Turn], str | Reply]:
    return lambda turn: turns[min(turn.number, len(turns) - 1)]


def client(site: Site, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=site.url, api_key="unused", **options)


def answers(message: Message) -> MessageParam:
    """Returns the results that a program sends for the calls of a turn."""
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"sunny in {block.input.get('city')}"}
            for block in message.content
            if block.type == "tool_use"
        ],
    }


def check_the_conversation(site: Site, replies: list[Message]) -> None:
    """Checks the SDK's messages of `TURNS`, and one trace that contains all three turns."""
    first, second, third = replies
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, zurich, bern = first.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Two cities."
    assert thinking.signature
    assert text.type == "text"
    assert text.text == "I ask for both."
    assert zurich.type == "tool_use"
    assert bern.type == "tool_use"
    assert (zurich.name, zurich.input) == ("weather", {"city": "Zürich"})
    assert (bern.name, bern.input) == ("weather", {"city": "Bern", "days": [1, 2.5, None, False]})
    assert zurich.id != bern.id
    assert [reply.stop_reason for reply in replies] == ["tool_use", "tool_use", "end_turn"]
    assert [block.type for block in second.content] == ["tool_use"]
    assert third.content[-1].type == "text"
    assert third.content[-1].text == "Sunny, 25 °C."
    usage = third.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > second.usage.output_tokens > 0
    assert usage.cache_read_input_tokens, "the engine has the conversation cached, and the usage contains it"
    [trace] = site.verified().traces
    assert len(trace.spans) == 3
    assert site.forks == {}


async def converse(site: Site, ask: Callable[[list[MessageParam]], Any]) -> None:
    history: list[MessageParam] = [{"role": "user", "content": "How is the weather?"}]
    replies: list[Message] = []
    while not replies or replies[-1].stop_reason == "tool_use":
        reply = await ask(history)
        replies.append(reply)
        history.append({"role": "assistant", "content": reply.content})
        history.append(answers(reply))
    check_the_conversation(site, replies)


async def test_a_conversation_with_tools() -> None:
    async with gateway(by_turn(*TURNS)) as site, client(site) as sdk:

        async def ask(history: list[MessageParam]) -> Message:
            return await sdk.messages.create(
                model="m", max_tokens=1000, messages=history, tools=[WEATHER], system="Be brief."
            )

        await converse(site, ask)


async def test_a_conversation_in_the_sync_sdk() -> None:
    async with gateway(by_turn(*TURNS)) as site:
        with anthropic.Anthropic(base_url=site.url, api_key="unused") as sdk:

            def create(history: list[MessageParam]) -> Message:
                return sdk.messages.create(model="m", max_tokens=1000, messages=history, tools=[WEATHER])

            await converse(site, lambda history: asyncio.to_thread(create, history))


async def test_a_conversation_in_the_sync_stream_helper() -> None:
    async with gateway(by_turn(*TURNS)) as site:
        with anthropic.Anthropic(base_url=site.url, api_key="unused") as sdk:

            def stream(history: list[MessageParam]) -> Message:
                with sdk.messages.stream(
                    model="m", max_tokens=1000, messages=history, tools=[WEATHER]
                ) as message_stream:
                    return message_stream.get_final_message()

            await converse(site, lambda history: asyncio.to_thread(stream, history))


async def test_a_streamed_conversation_with_tools() -> None:
    async with gateway(by_turn(*TURNS), engine_options={"tokens_per_s": 2000.0}) as site, client(site) as sdk:

        async def ask(history: list[MessageParam]) -> Message:
            async with sdk.messages.stream(
                model="m",
                max_tokens=1000,
                messages=history,
                tools=[WEATHER],
                thinking={"type": "enabled", "budget_tokens": 1024},
            ) as stream:
                return await stream.get_final_message()

        await converse(site, ask)
        assert site.session.info()["overruled"] == {"thinking": 3}


async def test_streamed_and_unstreamed_turns_can_be_mixed() -> None:
    async with gateway(by_turn(*TURNS)) as site, client(site) as sdk:
        count = 0

        async def ask(history: list[MessageParam]) -> Message:
            nonlocal count
            count += 1
            if count % 2:
                return await sdk.messages.create(model="m", max_tokens=1000, messages=history, tools=[WEATHER])
            async with sdk.messages.stream(model="m", max_tokens=1000, messages=history, tools=[WEATHER]) as stream:
                return await stream.get_final_message()

        await converse(site, ask)


async def test_text_streams_as_it_is_sampled() -> None:
    """The engine stops in the middle of the reply: what it has sampled arrives nevertheless."""
    words = " ".join(f"word{number}" for number in range(40))

    def script(turn: Turn) -> Reply:
        return Reply(words, stall_after=30) if turn.session_id else Reply("ok")

    async with gateway(script) as site, client(site) as sdk:
        async with sdk.messages.stream(
            model="m", max_tokens=1000, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            received = ""
            async for piece in stream.text_stream:
                received += piece
                if received.startswith("word0 word1"):
                    break
            assert words.startswith(received)
            assert site.engine.running == 1
        await site.engine.idle()
        site.verified()


async def test_the_raw_stream() -> None:
    async with gateway(by_turn("<think>\nhm\n</think>\n\nyes")) as site, client(site) as sdk:
        stream = await sdk.messages.create(
            model="m", max_tokens=100, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        kinds = [event.type async for event in stream]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
        site.verified()


async def test_a_history_sent_in_another_form_is_the_same_history() -> None:
    """As plain dicts, with cache marks, the text as a string, nulls added: only the encoding differs."""
    async with gateway(by_turn(*TURNS)) as site, client(site) as sdk:
        question: MessageParam = {"role": "user", "content": "How is the weather?"}
        first = await sdk.messages.create(model="m", max_tokens=1000, messages=[question], tools=[WEATHER])
        blocks: list[Any] = [{**block.model_dump(), "cache_control": None} for block in first.content]
        results = answers(first)
        results["content"][-1]["cache_control"] = {"type": "ephemeral"}  # pyright: ignore
        marked: MessageParam = {"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]}
        await sdk.messages.create(
            model="other",
            max_tokens=500,
            messages=[marked, {"role": "assistant", "content": blocks}, results],
            tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}}],
        )
        [trace] = site.verified().traces
        assert len(trace.spans) == 2
        assert site.forks == {}


async def test_a_header_line_that_changes_and_a_system_message_in_between_do_not_fork() -> None:
    """As Claude Code sends them: a block of its system prompt, and a message of blocks that becomes a string later."""
    async with gateway(by_turn("one", "two")) as site, client(site) as sdk:
        history: list[Any] = [
            {"role": "user", "content": "hi"},
            {"role": "system", "content": [{"type": "text", "text": "Today is Sunday."}]},
        ]
        for number in range(2):
            header = f"x-anthropic-billing-header: cc_version=2.{number};"
            reply = await sdk.messages.create(
                model="m",
                max_tokens=100,
                system=[{"type": "text", "text": header}, {"type": "text", "text": "You are an agent."}],
                messages=history,
            )
            history[1] = {"role": "system", "content": "Today is Sunday."}
            history += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "go on"}]
        [trace] = site.verified().traces
        assert len(trace.spans) == 2
        assert site.forks == {}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_without_valid_json_is_returned_as_text(streams: bool) -> None:
    broken = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>'
    async with gateway(by_turn(broken, "I see.")) as site, client(site) as sdk:
        history: list[MessageParam] = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            if streams:
                async with sdk.messages.stream(model="m", max_tokens=1000, messages=history, tools=[WEATHER]) as stream:
                    reply = await stream.get_final_message()
            else:
                reply = await sdk.messages.create(model="m", max_tokens=1000, messages=history, tools=[WEATHER])
            assert {block.type for block in reply.content} == {"text"}
            assert reply.stop_reason == "end_turn"
            history += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "go on"}]
        assert isinstance(history[1]["content"], list)
        text = "".join(block.text for block in history[1]["content"])  # pyright: ignore
        assert '"arguments": [1]' in text
        [trace] = site.verified().traces
        assert len(trace.spans) == 2


async def test_a_truncated_turn_has_stop_reason_max_tokens() -> None:
    async with gateway(by_turn("one two three four five six", "seven")) as site, client(site) as sdk:
        history: list[MessageParam] = [{"role": "user", "content": "count"}]
        reply = await sdk.messages.create(model="m", max_tokens=3, messages=history)
        assert reply.stop_reason == "max_tokens"
        assert reply.usage.output_tokens == 3
        assert site.session.finish_reason == "stop", "the client's own bound is no limit of the rollout"
        history += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "go on"}]
        await sdk.messages.create(model="m", max_tokens=100, messages=history)
        [trace] = site.verified().traces
        assert [span.finish_reason for span in trace.spans] == ["length", "stop"]
        assert site.forks == {}


async def test_a_reply_that_the_tasks_own_bound_cuts_off_is_one_that_a_limit_cut_off() -> None:
    async with gateway(by_turn("one two three four"), sampling=Sampling(max_tokens=3)) as site, client(site) as sdk:
        for bound in (3, 100):
            await sdk.messages.create(
                model="m", max_tokens=bound, messages=[{"role": "user", "content": f"hi {bound}"}]
            )
            assert site.session.finish_reason == "length"


@pytest.mark.parametrize("words", [40_000, 400_000])  # the second is refused before it is parsed
async def test_counting_a_text_that_does_not_fit_is_no_limit_that_the_rollout_met(words: int) -> None:
    async with gateway(by_turn("yes")) as site, client(site) as sdk:
        with pytest.raises(anthropic.BadRequestError):
            await sdk.messages.count_tokens(model="m", messages=[{"role": "user", "content": "many words " * words}])
        assert site.session.overflow is None and site.session.info()["refused"] == 0


async def test_tokens_are_counted_and_not_sampled() -> None:
    async with gateway(by_turn("yes")) as site, client(site) as sdk:
        question: MessageParam = {"role": "user", "content": "hi"}
        short = await sdk.messages.count_tokens(model="m", messages=[question])
        more = await sdk.messages.count_tokens(model="m", messages=[question], tools=[WEATHER], system="Be brief.")
        assert more.input_tokens > short.input_tokens > 0
        assert site.session.turns == 0
        reply = await sdk.messages.create(model="m", max_tokens=10, messages=[question])
        usage = reply.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == short.input_tokens


async def test_models_are_listed() -> None:
    async with gateway() as site, client(site) as sdk:
        [model] = [model async for model in sdk.models.list()]
        assert model.id == "scripted"


async def test_a_base_url_may_end_in_v1() -> None:
    """Programs differ in the base URL that they expect, so the SDK's own /v1 occurs twice or not at all."""
    async with gateway(by_turn("yes")) as site:
        async with anthropic.AsyncAnthropic(base_url=f"{site.url}/v1", api_key="unused") as sdk:
            with pytest.raises(anthropic.NotFoundError) as caught:
                await sdk.messages.create(model="m", max_tokens=10, messages=[{"role": "user", "content": "hi"}])
        assert caught.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "there is no POST /v1/v1/messages here"},
            "request_id": None,
        }


# --- errors of the SDK


async def test_a_bad_request_raises_the_sdks_bad_request_error() -> None:
    async with gateway() as site, client(site) as sdk:
        document: Any = {"type": "document", "source": {"type": "text", "data": "x", "media_type": "text/plain"}}
        with pytest.raises(anthropic.BadRequestError) as caught:
            await sdk.messages.create(model="m", max_tokens=10, messages=[{"role": "user", "content": [document]}])
        assert caught.value.type == "invalid_request_error"
        assert "messages.0.content.0: a block of type 'document'" in caught.value.message
        assert site.session.info()["requests"] == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_an_overflow_has_the_message_that_clients_parse(streams: bool) -> None:
    limits = Limits(run_s=60.0, model_s=20.0, max_context=300)
    async with gateway(by_turn("yes"), limits=limits) as site, client(site) as sdk:
        long: list[MessageParam] = [{"role": "user", "content": "word " * 2000}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 300 maximum"):
            if streams:
                async with sdk.messages.stream(model="m", max_tokens=10, messages=long) as stream:
                    await stream.get_final_message()
            else:
                await sdk.messages.create(model="m", max_tokens=10, messages=long)
        assert site.session.info()["refused"] == 1, "no SDK retries this"


async def test_a_limit_of_the_rollout_is_not_retried() -> None:
    limits = Limits(run_s=60.0, model_s=20.0, max_turns=1)
    async with gateway(by_turn("yes"), limits=limits) as site, client(site) as sdk:
        question: list[MessageParam] = [{"role": "user", "content": "hi"}]
        await sdk.messages.create(model="m", max_tokens=10, messages=question)
        with pytest.raises(anthropic.BadRequestError, match="turns"):
            await sdk.messages.create(model="m", max_tokens=10, messages=question)
        assert site.session.info()["requests"] == 2
        site.verified()


async def test_a_session_that_has_ended_is_a_server_error() -> None:
    async with gateway(by_turn("yes"), limits=LIMITS) as site, client(site) as sdk:
        await site.session.close()
        with pytest.raises(anthropic.InternalServerError) as caught:
            await sdk.messages.create(model="m", max_tokens=10, messages=[{"role": "user", "content": "hi"}])
        assert (caught.value.status_code, caught.value.type) == (503, "api_error")


async def test_the_tasks_sampling_applies() -> None:
    sampling = Sampling(temperature=0.7, max_tokens=5)
    async with gateway(by_turn("one two three four five six seven"), sampling=sampling) as site, client(site) as sdk:
        reply = await sdk.messages.create(
            model="m",
            max_tokens=1000,
            thinking={"type": "adaptive"},
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"temperature": 0.0},  # this SDK no longer has a parameter for it
        )
        assert reply.usage.output_tokens == 5
        assert site.engine.requests[-1].body["sampling_params"]["temperature"] == 0.7
        assert site.session.info()["overruled"] == {"temperature": 1, "thinking": 1}
