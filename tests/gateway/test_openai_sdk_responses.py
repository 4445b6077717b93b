"""OpenAI's Python SDK, unchanged, against the gateway: Responses, sync, async, streams, tools, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from rollyard.core import Limits
from rollyard.engines import RouterSettings
from rollyard.testing.script import Turn
from tests.gateway.site import Site, gateway

LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "Looks at a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    "strict": False,
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LOOKING = '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call>'
FIRST = f"<think>\nWhere is it?\n</think>\n\nLooking.\n{LOOKING}"
SECOND = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin Patch"}}\n</tool_call>'
TURNS = (FIRST, SECOND, "All done.")


def script(turn: Turn) -> str:
    return TURNS[min(turn.number, len(TURNS) - 1)]


def client(site: Site, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", **options)


async def answered(sdk: openai.AsyncOpenAI, history: list[Any], *, streams: bool, **options: Any) -> Any:
    """Sends one request and adds its output to the history as the SDK returns it."""
    request: dict[str, Any] = {"model": "policy", "input": history, "tools": [LOOK, PATCH], "store": False, **options}
    if streams:
        async with sdk.responses.stream(**request) as stream:
            response = await stream.get_final_response()
    else:
        response = await sdk.responses.create(**request)
    history += response.output
    return response


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("seals", [False, True])
async def test_several_turns_with_tools_and_reasoning_are_one_trace(streams: bool, seals: bool):
    options: dict[str, Any] = {"include": ["reasoning.encrypted_content"]} if seals else {}
    async with gateway(script) as site, client(site) as sdk:
        history: list[Any] = [{"role": "developer", "content": "Mend it."}, {"role": "user", "content": "Go."}]
        first = await answered(sdk, history, streams=streams, **options)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output[0].content[0].text == "Where is it?"
        assert (first.output[0].encrypted_content is not None) == seals
        assert first.output_text == "Looking."
        assert json.loads(first.output[2].arguments) == {"path": "a"}
        history.append({"type": "function_call_output", "call_id": first.output[2].call_id, "output": "x = 1"})
        second = await answered(sdk, history, streams=streams, **options)
        assert second.output[-1].type == "custom_tool_call" and second.output[-1].input == "*** Begin Patch"
        history.append({"type": "custom_tool_call_output", "call_id": second.output[-1].call_id, "output": "ok"})
        third = await answered(sdk, history, streams=streams, **options)
        assert third.output_text == "All done." and third.status == "completed"
        assert third.usage.input_tokens_details.cached_tokens > 0 and third.usage.output_tokens > 0
        trajectory = site.verified()
        assert len(trajectory.traces) == 1 and trajectory.turns == 3 and site.forks == {}


async def test_events_have_the_sdks_types():
    async with gateway(script) as site, client(site) as sdk:
        stream = await sdk.responses.create(model="policy", input="Go.", tools=[LOOK], stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Looking."
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Where is it?"
        assert events[0].type == "response.created" and events[-1].type == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_the_sync_client_works_too():
    async with gateway(lambda _: "Hello.") as site:

        def talk() -> tuple[str, str]:
            with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none") as sdk:
                whole = sdk.responses.create(model="policy", input="Hi.", instructions="Be brief.")
                with sdk.responses.stream(model="policy", input="Hi again.") as stream:
                    return whole.output_text, stream.get_final_response().output_text

        assert await asyncio.to_thread(talk) == ("Hello.", "Hello.")
        assert site.verified().turns == 2


async def test_a_reply_that_was_cut_off_is_incomplete():
    async with gateway(lambda _: "one two three four five six") as site, client(site) as sdk:
        response = await sdk.responses.create(model="policy", input="Count.", max_output_tokens=2)
        assert response.status == "incomplete" and response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        stream = await sdk.responses.create(model="policy", input="Count.", max_output_tokens=2, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_sampling_that_the_client_sets_is_counted_and_does_not_apply():
    async with gateway(lambda _: "ok") as site, client(site) as sdk:
        await sdk.responses.create(model="policy", input="x", temperature=0.1, tool_choice="required")
        assert site.session.info()["overruled"] == {"temperature": 1, "tool_choice": 1}
        assert site.engine.requests[-1].body["sampling_params"]["temperature"] != 0.1


async def test_a_bad_request_is_refused_once():
    async with gateway(script) as site, client(site) as sdk:
        with pytest.raises(openai.BadRequestError) as raised:
            await sdk.responses.create(model="policy", input="x", previous_response_id="resp_1")
        assert raised.value.param == "previous_response_id" and "send the whole input" in raised.value.message
        assert site.verified().turns == 0


async def test_a_prompt_that_does_not_fit_has_openais_error_code():
    limits = Limits(run_s=60.0, model_s=20.0, max_turns=50, max_context=40)
    async with gateway(script, limits=limits) as site, client(site) as sdk:
        with pytest.raises(openai.BadRequestError) as raised:
            await sdk.responses.create(model="policy", input="long " * 50)
        assert raised.value.code == "context_length_exceeded"
        stream = await sdk.responses.create(model="policy", input="long " * 50, stream=True)
        *_, last = [event async for event in stream]
        assert last.type == "response.failed" and last.response.error is not None
        assert last.response.error.code == "context_length_exceeded"  # pyright: ignore
        assert site.session.info()["requests"] == 2


async def test_lost_engines_are_a_server_error_that_is_not_retried():
    settings = RouterSettings(engine_wait_s=0.2, backoff_s=0.01)
    async with gateway(script, router_settings=settings) as site, client(site) as sdk:
        await site.engine.stop()
        with pytest.raises(openai.InternalServerError) as raised:
            await sdk.responses.create(model="policy", input="x", stream=True)
        assert raised.value.status_code == 503 and raised.value.type == "server_error"
        assert site.session.info()["requests"] == 1
