"""Rows of Gym datasets as tasks, what is refused, and the Responses object that a verifier gets."""

from typing import Any

import pytest

from rollyard.core import Json, Message, Task, Trajectory
from rollyard.core.failure import TaskInvalid
from rollyard.envs.gym import GymEnvironment
from rollyard.envs.gym.response import response_of
from rollyard.envs.gym.row import GymData
from rollyard.service.schemas.task import to_task
from rollyard.testing.gym_server import TOOLS, row

from .conftest import task


def data(params: Any = None, **more: Any) -> dict[str, Any]:
    return {"server": "s", "row": {"responses_create_params": params or {"input": "hello"}}, **more}


def read(params: Any = None, **more: Any) -> GymData:
    return GymData.read(task("gym", data(params, **more)))


def test_input_is_a_string_or_items():
    assert read().messages == ({"role": "user", "content": "hello"},)
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "get_counter_value", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    parsed = read({"input": items, "instructions": "count", "tools": TOOLS})
    assert [message["role"] for message in parsed.messages] == ["system", "developer", "user", "assistant", "tool"]
    assert parsed.messages[2] == {"role": "user", "content": "hello"}
    assert [tool.name for tool in parsed.tools] == ["increment_counter", "get_counter_value"]
    assert parsed.tools[0].parameters == TOOLS[0]["parameters"]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": None, "strict": True}


@pytest.mark.parametrize(
    ("wrong", "field", "match"),
    [
        ({"server": ""}, "data.server", "a string was expected"),
        ({"server": "s", "row": []}, "data.row", "an object"),
        ({"server": "s", "row": {}}, "data.row.responses_create_params", "an object with the input was expected"),
        (data({"tools": []}), "data.row.responses_create_params.input", "input is missing"),
        (data({"input": [{"type": "computer_call"}]}), "data.row.responses_create_params.input[0]", "computer_call"),
        (
            data({"input": "x", "tools": [{"type": "web_search"}]}),
            "data.row.responses_create_params.tools[0]",
            "a tool of type function was expected",
        ),
        *(
            (data({"input": "x", "tools": [function(name)]}), "data.row.responses_create_params.tools", "not '")
            for name in ("verify", "seed_session", "aggregate_metrics", "mcp", "../verify", "a/b", "..", "a?b", "ä")
        ),
        (data(orakel=[]), "data.orakel", "unknown field"),
        (data(oracle=[1]), "data.oracle[0]", "an object with a tool"),
        (data(oracle=[{"tool": "nope"}]), "data.oracle[0].tool", "one of the row's tools"),
        (data(oracle=[{"answer": "x"}, {"answer": "y"}]), "data.oracle[0].tool", "a string was expected"),
        (data(oracle=[{"answer": "x", "tool": "y"}]), "data.oracle[0].tool", "unknown field"),
        (
            data({"input": "x", "tools": TOOLS}, oracle=[{"tool": "get_counter_value", "arguments": "{}"}]),
            "data.oracle[0].arguments",
            "an object was expected",
        ),
    ],
)
def test_data_that_can_never_work_is_refused_with_the_field(wrong, field, match):
    with pytest.raises(TaskInvalid, match=match) as caught:
        GymEnvironment({"s": "http://127.0.0.1:9"}).check(task("gym", wrong))
    assert caught.value.data["field"] == field
    assert field in caught.value.detail or field.startswith("data.row.responses_create_params.")


# --- the importer ---------------------------------------------------------------------------------------


def test_a_row_becomes_a_task_with_its_sampling():
    gym_row = row(3, 1, 2)
    gym_row["responses_create_params"] |= {"temperature": 0.7, "top_p": 0.9, "max_output_tokens": 512}
    body = GymEnvironment().from_row({**gym_row, "_rowidx": 4}, {"server": "counter", "oracle": "solution"})
    imported = to_task(body, {})
    assert (imported.environment, imported.data["server"], imported.data["oracle"]) == (
        "gym",
        "counter",
        gym_row["solution"],
    )
    assert imported.data["row"] == {**{name: gym_row[name] for name in gym_row if name != "solution"}, "_rowidx": 4}
    assert (imported.sampling.temperature, imported.sampling.top_p, imported.sampling.max_tokens) == (0.7, 0.9, 512)
    assert "sampling" not in GymEnvironment().from_row(row(), {"server": "counter"})


@pytest.mark.parametrize(
    ("row", "options", "match"),
    [
        (row(), {}, "--set server=NAME"),
        (row(), {"server": "s", "url": "x"}, "unknown option 'url' of its importer; there are oracle, server"),
        ({"question": "?"}, {"server": "s"}, "not a row of a Gym dataset"),
        ({"responses_create_params": {"input": 3}}, {"server": "s"}, "input must be a string or a list"),
        (row(), {"server": "s", "oracle": "steps"}, "the row has no field 'steps'"),
        (
            {"responses_create_params": {"input": "x", "temperature": "hot"}},
            {"server": "s"},
            "responses_create_params.temperature: a number was expected",
        ),
    ],
)
def test_an_invalid_row_is_refused(row, options, match):
    with pytest.raises(TaskInvalid, match=match):
        GymEnvironment().from_row(row, options)


# --- what a verifier gets -------------------------------------------------------------------------------


def response_from(*messages: Message, params: Any = None, ended_by: str = "stop", **info: Any) -> dict[str, Any]:
    params = params or {"input": "hello", "tools": TOOLS}
    gym_data = GymData.read(Task("gym", data(params)))
    return response_of(gym_data, Trajectory("r1", 1, messages=messages, ended_by=ended_by, info=info))


def call(name: str, arguments: str, call_id: str = "c1", **more: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        **more,
    }


USER: Message = {"role": "user", "content": "hello"}


def test_items_are_in_order_and_valid_for_the_api():
    response = response_from(
        USER,
        call("get_counter_value", "{}", content="Let me look.", reasoning_content="hm"),
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    )
    from openai.types import responses as sdk

    kinds = (
        sdk.ResponseReasoningItem,
        sdk.ResponseOutputMessage,
        sdk.ResponseFunctionToolCall,
        sdk.response_input_item.FunctionCallOutput,
        sdk.ResponseOutputMessage,
    )
    items: list[Any] = [kind.model_validate(item) for kind, item in zip(kinds, response["output"], strict=True)]
    assert (items[0].content[0].text, items[1].content[0].text) == ("hm", "Let me look.")
    assert (items[2].name, items[2].arguments, items[2].call_id) == ("get_counter_value", "{}", "c1")
    assert (items[3].call_id, items[3].output, items[4].content[0].text) == ("c1", "3", "It is 3.")
    assert len({item["id"] for item in response["output"] if "id" in item}) == 4
    sampled = [item for item in response["output"] if item["type"] != "function_call_output"]
    whole = sdk.Response.model_validate({**response, "output": sampled})  # Gym's own model also allows tool outputs
    assert (whole.status, whole.model, len(whole.tools)) == ("completed", "policy", 2)


def texts(response: dict[str, Any]) -> list[str]:
    return [item["content"][0]["text"] for item in response["output"] if item.get("role") == "assistant"]


def test_only_messages_after_the_input_are_in_the_output():
    items = [USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    system: Message = {"role": "system", "content": "of the agent's own"}
    response = response_from(system, *items, {"role": "assistant", "content": "well"}, params={"input": items})
    assert texts(response) == ["well"]


def test_an_agent_that_did_nothing_has_an_empty_message():
    assert texts(response_from(USER)) == [""]
    assert texts(response_from()) == [""]


def test_the_answer_passed_to_finish_is_the_last_message_once():
    finished = call("finish", '{"answer": "6"}')
    assert texts(response_from(USER, finished, answer="6")) == ["6"]
    assert texts(response_from(USER, {"role": "assistant", "content": "6"}, answer="6")) == ["6"]


def test_a_call_with_unreadable_arguments_becomes_text():
    error: Message = {"role": "tool", "tool_call_id": "c1", "content": "Error: no JSON"}
    for arguments in ("{nope", "[1]", "[" * 100_000):
        output = response_from(USER, call("increment_counter", arguments), error)["output"]
        assert [item["type"] for item in output] == ["message", "message"]
        assert output[0]["content"][0]["text"] == f"increment_counter: {arguments}"
        assert (output[1]["role"], output[1]["content"]) == ("user", "Error: no JSON")


def test_a_reply_that_was_cut_off_is_incomplete():
    response = response_from(USER, {"role": "assistant", "content": "It i"}, ended_by="token_limit")
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_programs_name_of_a_tool_becomes_the_rows_name():
    named = call("mcp__environment__get_counter_value", "{}")
    assert response_from(USER, named, gateway={})["output"][0]["name"] == "get_counter_value"
    assert (
        response_from(USER, named)["output"][0]["name"] == "mcp__environment__get_counter_value"
    )  # not a program: unchanged
    tools: Json = [{"type": "function", "name": name} for name in ("count", "get__count")]
    exact = response_from(USER, call("get__count", "{}"), params={"input": [USER], "tools": tools}, gateway={})
    assert exact["output"][0]["name"] == "get__count"
