"""Parameters that are granted, overruled or unknown, with the real SDKs, in all three dialects."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import orjson
import pytest

from rollyard.core import AgentSpec, Sampling, Task
from rollyard.core.failure import TaskInvalid
from rollyard.engines.base import Kind
from rollyard.gateway.app import CHAT, MESSAGES, RESPONSES
from rollyard.gateway.base import ChatRequest, Problem, RequestParameter
from rollyard.gateway.intake import read
from rollyard.gateway.options import options_of
from rollyard.gateway.parameters import MOST_SCHEMA_BYTES, MOST_WARNINGS, GrantedParameters, ParameterRules
from rollyard.gateway.replies import cut_at
from rollyard.testing import scripted_engine
from rollyard.tokens.grammar import hermes_calls
from tests.gateway.site import Site, gateway, refuse
from tests.gateway.test_openai_sdk import LS, TWO_CALLS, says

pytestmark = pytest.mark.slow

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
WARNINGS = "x-rollyard-warnings"


@asynccontextmanager
async def clients(*replies: str, **options: Any) -> AsyncGenerator[tuple[Site, Any, Any], None]:
    async with (
        gateway(says(*replies), **options) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as openai_client,
        anthropic.AsyncAnthropic(base_url=site.url, api_key="any", max_retries=0) as anthropic_client,
    ):
        yield site, openai_client, anthropic_client


def params(site: Site) -> Any:
    return site.engine.requests[-1].body["sampling_params"]


# --- warnings


async def test_warnings_list_overruled_and_unknown_parameters():
    async with clients("hi") as (site, openai_client, anthropic_client):
        chat = await openai_client.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, temperature=0.2, tool_choice="required", extra_body={"frobnicate": 1}
        )
        expected = "temperature: the task's sampling applies"
        for word in (expected, "tool_choice: the task", "frobnicate: unknown here"):
            assert word in chat.headers[WARNINGS]
        assert expected in chat.parse().warnings
        responses = await openai_client.responses.with_raw_response.create(
            model="m", input="hello", top_p=0.3, extra_body={"frobnicate": 1}
        )
        assert "top_p: the task's" in responses.headers[WARNINGS]
        assert any("frobnicate: unknown" in warning for warning in responses.parse().warnings)
        messages = await anthropic_client.messages.with_raw_response.create(
            model="m",
            max_tokens=9,
            messages=HELLO,
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={"frobnicate": 1},
        )
        assert "thinking: the task's" in messages.headers[WARNINGS]
        assert any("frobnicate" in warning for warning in (await messages.parse()).warnings)
        assert site.session.info()["overruled"]["frobnicate"] == 3  # type: ignore[index]


async def test_a_stream_has_the_warnings_in_its_header():
    async with clients("hi") as (_, openai_client, anthropic_client):
        async with openai_client.chat.completions.with_streaming_response.create(
            model="m", messages=HELLO, temperature=0.2, stream=True
        ) as answer:
            assert "temperature" in answer.headers[WARNINGS]
            await answer.read()
        async with anthropic_client.messages.stream(
            model="m", max_tokens=9, messages=HELLO, extra_body={"top_k": 3}
        ) as stream:
            assert "top_k" in stream.response.headers[WARNINGS]
            assert (await stream.get_final_message()).content[0].text == "hi"


async def test_parameters_that_change_nothing_cause_no_warning():
    sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=64)
    async with clients("hi", sampling=sampling) as (_, openai_client, _anthropic_client):
        plain: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "tool_choice": "auto", "n": 1, "user": "me"}
        answer = await openai_client.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, response_format={"type": "text"}, max_tokens=1000, **plain
        )
        assert WARNINGS not in answer.headers
        assert "warnings" not in orjson.loads(answer.content)


async def test_a_strict_session_refuses_and_names_the_field():
    async with clients("hi", options={"strict": True}) as (site, openai_client, anthropic_client):
        with pytest.raises(openai.BadRequestError, match=r"'temperature'.*strict") as refused:
            await openai_client.chat.completions.create(model="m", messages=HELLO, temperature=0.2)
        assert refused.value.param == "temperature" and refused.value.code == "unsupported_parameter"
        with pytest.raises(openai.BadRequestError, match="'frobnicate'"):
            await openai_client.responses.create(model="m", input="hello", extra_body={"frobnicate": 1})
        with pytest.raises(anthropic.BadRequestError, match="'tool_choice'"):
            await anthropic_client.messages.create(
                model="m", max_tokens=9, messages=HELLO, tool_choice={"type": "any"}, tools=[]
            )
        with pytest.raises(openai.BadRequestError, match="'response_format'"):
            await openai_client.chat.completions.create(
                model="m", messages=HELLO, response_format={"type": "json_object"}
            )
        assert site.session.turns == 0
        await openai_client.chat.completions.create(model="m", messages=HELLO, stop="x", seed=1, logprobs=True)
        assert site.session.turns == 1


def test_options_are_checked_at_submit():
    for name in ("strict", "structured_output"):
        with pytest.raises(TaskInvalid, match=f"agent.options.{name}"):
            options_of(Task("session", agent=AgentSpec(options={name: "yes"})))


def test_a_header_accepts_any_name_and_is_bounded():
    wishes = ParameterRules(Sampling(), is_strict=False, has_structured_output=False)
    names = tuple(f"näme\r\n{number}" + "x" * 1000 for number in range(100))
    warnings = wishes.grant(ChatRequest((), unknown=names), Kind.VLLM).warnings
    assert len(warnings) == MOST_WARNINGS + 1 and warnings[-1] == "and 84 more"
    assert all(re.fullmatch(r"[ -~]{1,120}", warning) for warning in warnings)


# --- stop


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("refuses", [False, True])
async def test_a_stop_text_ends_the_completion_and_is_not_sent(is_stream: bool, refuses: bool):
    async with clients("one STOP two", "next") as (site, openai_client, anthropic_client):
        if refuses:
            refuse(site, "stop")
        messages = [*HELLO]
        text, finish = await chatted(openai_client, messages, is_stream, stop=["STOP", "never"])
        assert (text.strip(), finish) == ("one", "stop")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        assert (await chatted(openai_client, messages, is_stream))[0] == "next"
        (trace,) = site.verified().traces
        assert len(trace.spans) == 2 and trace.is_trainable and not site.forks
        answer: Any = {"model": "m", "max_tokens": 99, "messages": HELLO, "stop_sequences": ["STOP"]}
        if is_stream:
            async with anthropic_client.messages.stream(**answer) as stream:
                reply = await stream.get_final_message()
        else:
            reply = await anthropic_client.messages.create(**answer)
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "STOP")
        assert reply.content[0].text.strip() == "one"


async def chatted(client: Any, messages: list[Any], is_stream: bool, **fields: Any) -> tuple[str, str]:
    if not is_stream:
        choice = (await client.chat.completions.create(model="m", messages=messages, **fields)).choices[0]
        return choice.message.content, choice.finish_reason
    text, finish = "", ""
    async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True, **fields):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


async def test_the_engine_gets_the_stop_texts_and_the_tokens_end_there():
    async with clients("one STOP two") as (site, openai_client, _):
        await openai_client.chat.completions.create(model="m", messages=HELLO, stop="STOP")
        assert params(site)["stop"] == ["STOP"]
        (trace,) = site.verified().traces
        text = (await site.renderers.of(site.router.engine("e0"))).decode(trace.token_ids[trace.spans[0].start :])
        assert text.endswith("STOP")


@pytest.mark.parametrize("stop", [["x"] * 17, ["x" * 257], [1], {"a": 1}, 7])
async def test_stop_texts_are_bounded(stop: Any):
    for dialect, name in ((CHAT, "stop"), (MESSAGES, "stop_sequences"), (RESPONSES, "stop")):
        body = {"model": "m", "messages": HELLO, "input": "hello", name: stop}
        with pytest.raises(Problem, match=name):
            read(dialect, orjson.dumps(body))


def test_the_reply_ends_at_the_first_stop_text():
    assert cut_at("a b c", ["c", "b"]) == ("a ", "b")
    assert cut_at("a", ["b"]) == ("a", None)


# --- seed


async def test_a_seed_samples_alike_in_one_rollout_and_differently_in_the_next():
    async with clients("hi") as (site, openai_client, _):
        seeds: list[int] = []
        for seed in (42, 42, 7, None):
            await openai_client.chat.completions.create(
                model="m", messages=HELLO, **({} if seed is None else {"seed": seed})
            )
            seeds.append(params(site)["seed"])
        assert seeds[0] == seeds[1] and len(set(seeds)) == 3
        assert 42 not in seeds and all(0 <= seed < 2**31 for seed in seeds)


# --- logprobs


@pytest.mark.parametrize("is_stream", [False, True])
async def test_logprobs_are_those_of_the_trace(is_stream: bool):
    async with clients("hi there") as (site, openai_client, _):
        arguments: dict[str, Any] = {"model": "m", "messages": HELLO, "logprobs": True}
        logprobs: list[Any] = []
        if is_stream:
            async for chunk in await openai_client.chat.completions.create(**arguments, stream=True):
                logprobs += [it for choice in chunk.choices if choice.logprobs for it in choice.logprobs.content]
        else:
            answer = await openai_client.chat.completions.with_raw_response.create(**arguments)
            assert WARNINGS not in answer.headers
            logprobs = answer.parse().choices[0].logprobs.content
        (trace,) = site.verified().traces
        span = trace.spans[0]
        assert trace.logprobs is not None
        assert [it.logprob for it in logprobs] == pytest.approx(list(trace.logprobs[span.start : span.end]))
        assert "".join(it.token for it in logprobs).startswith("hi there")
        plain = await openai_client.chat.completions.create(model="m", messages=HELLO)
        assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("is_stream", [False, True])
async def test_logprobs_of_a_response(is_stream: bool):
    async with clients("hi there") as (_, openai_client, _anthropic_client):
        arguments: dict[str, Any] = {"model": "m", "input": "hello", "include": ["message.output_text.logprobs"]}
        if is_stream:
            async with openai_client.responses.stream(**arguments) as stream:
                response = await stream.get_final_response()
        else:
            response = await openai_client.responses.create(**arguments)
        assert "".join(it.token for it in response.output[0].content[0].logprobs).startswith("hi there")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_top_logprobs_are_the_engines_and_change_nothing_in_the_trace(api: str, is_stream: bool):
    async with clients("hi there") as (site, openai_client, _):
        logprobs: list[Any] = []
        if api == "chat":
            arguments: dict[str, Any] = {"model": "m", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
            if is_stream:
                async for chunk in await openai_client.chat.completions.create(**arguments, stream=True):
                    logprobs += [it for choice in chunk.choices if choice.logprobs for it in choice.logprobs.content]
            else:
                logprobs = (await openai_client.chat.completions.create(**arguments)).choices[0].logprobs.content
        else:
            arguments = {"model": "m", "input": "hello", "top_logprobs": 3}
            if is_stream:
                async with openai_client.responses.stream(**arguments) as stream:
                    response = await stream.get_final_response()
            else:
                response = await openai_client.responses.create(**arguments)
            logprobs = response.output[0].content[0].logprobs
        assert params(site)["logprobs"] == 3
        assert "".join(it.token for it in logprobs).startswith("hi there")
        for it in logprobs:
            values = [top.logprob for top in it.top_logprobs]
            assert len(values) == 3 and values == sorted(values, reverse=True)
            assert it.top_logprobs[0].token == it.token
        assert site.verified().traces[0].is_trainable


async def test_an_engine_that_refuses_top_logprobs_is_called_without_them():
    async with clients("hi there") as (site, openai_client, _):
        original_check = site.engine._check

        def check(body: Any, prompt: Any) -> None:
            original_check(body, prompt)
            if body["sampling_params"].get("logprobs"):
                raise scripted_engine._Refusal("at most 0 logprobs", 400)

        site.engine._check = check  # type: ignore[method-assign]
        arguments: dict[str, Any] = {"model": "m", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
        reply = await openai_client.chat.completions.create(**arguments)
        assert reply.warnings == ["top_logprobs: this engine refuses it"]
        assert all(it.top_logprobs == [] for it in reply.choices[0].logprobs.content)
        assert site.verified().traces[0].is_trainable


def test_top_logprobs_are_bounded_and_need_logprobs():
    for top in (-1, 21, True, "3", 1.5):
        for dialect in (CHAT, RESPONSES):
            body = {"model": "m", "messages": HELLO, "input": "hello", "logprobs": True, "top_logprobs": top}
            with pytest.raises(Problem, match=r"top_logprobs.*from 0 to 20"):
                read(dialect, orjson.dumps(body))
    with pytest.raises(Problem, match="it needs 'logprobs'"):
        read(CHAT, orjson.dumps({"model": "m", "messages": HELLO, "top_logprobs": 3}))
    request = ChatRequest((), wishes=(RequestParameter("top_logprobs", "top_logprobs", 3),))
    granted = ParameterRules(Sampling(), is_strict=False, has_structured_output=False).grant(request, Kind.PRORL)
    assert granted.warnings == ("top_logprobs: engines of kind prorl give none",) and not granted.top_logprobs


# --- tools


@pytest.mark.parametrize("is_stream", [False, True])
async def test_with_tool_choice_none_a_call_is_returned_as_text(is_stream: bool):
    async with clients(TWO_CALLS, "fine") as (site, openai_client, _):
        text, finish = await chatted(openai_client, HELLO, is_stream, tools=[LS], tool_choice="none")
        assert finish == "stop" and text.startswith("I look.") and text.count('"name": "ls"') == 2
        answered = [*HELLO, {"role": "assistant", "content": text, "reasoning_content": "both at once"}]
        again = [*answered, {"role": "user", "content": "and?"}]
        await chatted(openai_client, again, is_stream, tools=[LS], tool_choice="none")
        (trace,) = site.verified().traces
        assert len(trace.spans) == 2


CHOICES: Any = {
    "chat": lambda openai_client, _, name: openai_client.chat.completions.with_raw_response.create(
        model="m",
        messages=HELLO,
        tools=[LS],
        tool_choice={"type": "function", "function": {"name": name}} if name else "required",
    ),
    "responses": lambda openai_client, _, name: openai_client.responses.with_raw_response.create(
        model="m",
        input="hello",
        tools=[{"type": "function", **LS["function"]}],
        tool_choice={"type": "function", "name": name} if name else "required",
    ),
    "messages": lambda _, anthropic_client, name: anthropic_client.messages.with_raw_response.create(
        model="m",
        max_tokens=99,
        messages=HELLO,
        tools=[{"name": "ls", "input_schema": {"type": "object"}}],
        tool_choice={"type": "tool", "name": name} if name else {"type": "any"},
    ),
}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'


@pytest.mark.parametrize("name", ["ls", ""])
@pytest.mark.parametrize("dialect", CHOICES)
async def test_a_call_is_forced_by_grammar_if_the_task_allows_it(dialect: str, name: str):
    async with clients(CALL, options={"structured_output": True}) as (site, openai_client, anthropic_client):
        answer = await CHOICES[dialect](openai_client, anthropic_client, name)
        assert WARNINGS not in answer.headers
        assert params(site)["structured_outputs"] == {"grammar": hermes_calls(["ls"], is_one=bool(name))}
        (trace,) = site.verified().traces
        assert not trace.is_trainable and "constrained by the client: tool_choice" in str(trace.untrainable_reason)
    async with clients(CALL) as (site, openai_client, anthropic_client):
        answer = await CHOICES[dialect](openai_client, anthropic_client, name)
        assert "tool_choice: the task does not allow it" in answer.headers[WARNINGS]
        assert "structured_outputs" not in params(site) and site.verified().traces[0].is_trainable
    async with clients(CALL, options={"strict": True}) as (_, openai_client, anthropic_client):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="'tool_choice'"):
            await CHOICES[dialect](openai_client, anthropic_client, name)
    async with clients(CALL, options={"structured_output": True}) as (_, openai_client, anthropic_client):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="a tool that is not in 'tools'"):
            await CHOICES[dialect](openai_client, anthropic_client, "rm")


async def test_a_missing_forced_call_causes_a_warning():
    async with clients("no call", options={"structured_output": True}) as (site, openai_client, _):
        answer = await CHOICES["chat"](openai_client, None, "ls")
        assert answer.parse().warnings == ["tool_choice: the model called no tool"]
        refuse(site, "structured_outputs")
        answer = await CHOICES["chat"](openai_client, None, "")
        assert answer.parse().warnings == ["tool_choice: this engine refuses it"]
        assert [trace.is_trainable for trace in site.verified().traces] == [False, True]


def test_a_call_is_not_forced_without_a_grammar():
    def grant(
        *wishes: RequestParameter, tools: Any = (LS,), grammar: Any = hermes_calls, kind: Kind = Kind.SGLANG
    ) -> GrantedParameters:
        rules = ParameterRules(
            Sampling(),
            is_strict=False,
            has_structured_output=True,
            call_grammar=lambda names, is_one: grammar(names, is_one=is_one),
        )
        return rules.grant(ChatRequest((), tools=tools, wishes=wishes), kind)

    any_call, json_object = (
        RequestParameter("calls", "tool_choice", ""),
        RequestParameter("format", "f", {"type": "json_object"}),
    )
    assert grant(any_call).sampling.extra == {"ebnf": hermes_calls(["ls"], is_one=False)}
    assert grant(any_call, tools=()).warnings == ("tool_choice: no tools are offered",)
    assert "no grammar" in grant(any_call, grammar=lambda *_, is_one: None).warnings[0]
    assert "no structured output" in grant(any_call, kind=Kind.PRORL).warnings[0]
    many = [{"type": "function", "function": {"name": f"{n:0100}"}} for n in range(300)]
    assert f"more than {MOST_SCHEMA_BYTES} bytes" in grant(any_call, tools=many).warnings[0]
    odd = {"type": "function", "function": {"name": 'x" | root'}}
    assert "no grammar" in grant(any_call, tools=[LS, odd]).warnings[0]
    with pytest.raises(Problem, match="names a tool that is not in 'tools'"):
        grant(RequestParameter("calls", "tool_choice", "rm"))
    both = grant(json_object, any_call)
    assert both.warnings == ("tool_choice: f constrains the completion already",) and not both.has_to_call


# --- formats


FORMATS: Any = {
    "chat": lambda openai_client, _: openai_client.chat.completions.with_raw_response.create(
        model="m",
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ),
    "responses": lambda openai_client, _: openai_client.responses.with_raw_response.create(
        model="m", input="hello", text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    ),
    "messages": lambda _, anthropic_client: anthropic_client.messages.with_raw_response.create(
        model="m",
        max_tokens=9,
        messages=HELLO,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
}


@pytest.mark.parametrize("dialect", FORMATS)
async def test_a_format_uses_the_engines_structured_output_if_the_task_allows_it(dialect: str):
    async with clients('{"a": 1}', options={"structured_output": True}) as (site, openai_client, anthropic_client):
        answer = await FORMATS[dialect](openai_client, anthropic_client)
        assert WARNINGS not in answer.headers
        assert params(site)["structured_outputs"] == {"json": SCHEMA}
        (trace,) = site.verified().traces
        assert not trace.is_trainable and "constrained by the client" in str(trace.untrainable_reason)
    async with clients('{"a": 1}') as (site, openai_client, anthropic_client):
        answer = await FORMATS[dialect](openai_client, anthropic_client)
        assert "structured_output" in answer.headers[WARNINGS]
        assert "structured_outputs" not in params(site)
        assert site.verified().traces[0].is_trainable


def grant(value: Any, kind: Kind = Kind.VLLM, **extra: Any) -> Any:
    wishes = ParameterRules(Sampling(extra=extra), is_strict=False, has_structured_output=True)
    return wishes.grant(ChatRequest((), wishes=(RequestParameter("format", "response_format", value),)), kind)


def test_the_tasks_constraint_stays_and_a_schema_is_bounded():
    json_object = {"type": "json_object"}
    assert grant(json_object).sampling.extra == {"structured_outputs": {"json_object": True}}
    assert grant(json_object, Kind.SGLANG).sampling.extra == {"json_schema": '{"type": "object"}'}
    assert "no structured output" in grant(json_object, Kind.PRORL).warnings[0]
    fixed = grant(json_object, guided_regex="a+")
    assert fixed.sampling.extra == {"guided_regex": "a+"} and fixed.warnings and not fixed.untrainable
    huge = grant({"type": "json_schema", "schema": {"const": "x" * MOST_SCHEMA_BYTES}})
    assert f"{MOST_SCHEMA_BYTES} bytes" in huge.warnings[0] and not huge.sampling.extra


async def test_a_schema_that_the_engine_refuses_does_not_end_the_rollout():
    async with clients("hi", options={"structured_output": True}) as (site, openai_client, _):
        refuse(site, "structured_outputs")
        answer = await FORMATS["chat"](openai_client, None)
        assert "this engine refuses it" in answer.headers[WARNINGS]
        assert site.session.failure is None and site.verified().traces[0].is_trainable
