"""The log of an agent program's requests: differences to earlier ones, and bounds on hostile bodies."""

import json
from typing import Any

from rollyard.core import Json
from rollyard.gateway import request_log
from rollyard.gateway.request_log import MOST_BYTES, RequestLog


def add(log: RequestLog, body: dict[str, Json], dialect: str = "chat") -> dict[str, Any]:
    """Adds a body as the gateway does; returns the entry."""
    log.add(log.read(dialect, body, len(json.dumps(body))), turn=0, start_s=0.0)
    return json.loads(log.encoded())["requests"][-1]


def says(*texts: str) -> list[Json]:
    return [{"role": "user", "content": text} for text in texts]


def test_each_request_is_the_difference_to_the_one_that_it_extends() -> None:
    log = RequestLog()
    add(log, {"messages": says("a")})
    second = add(log, {"messages": says("a", "b", "c")})
    assert (second["extends"], second["kept_messages"], second["new_messages"]) == (0, 1, says("b", "c"))
    edited = add(log, {"messages": says("a", "B", "c")})
    assert (edited["extends"], edited["kept_messages"], edited["new_messages"]) == (1, 1, says("B", "c"))
    other = add(log, {"messages": says("x")})
    assert (other["extends"], other["kept_messages"]) == (None, 0)


def test_requests_of_sub_agents_that_alternate_extend_their_own_conversation() -> None:
    log = RequestLog()
    numbers = {name: [add(log, {"messages": says(name)})["number"]] for name in "abc"}
    for turn in range(3):
        for name in "abc":
            entry = add(log, {"messages": says(name, *map(str, range(turn + 1)))})
            assert (entry["extends"], entry["kept_messages"]) == (numbers[name][-1], turn + 1), (name, turn)
            numbers[name].append(entry["number"])


def test_long_fields_that_stay_are_named_and_short_ones_repeated() -> None:
    log = RequestLog()
    body: dict[str, Json] = {"messages": says("a"), "system": "s" * 1000, "max_tokens": 5, "tools": [{}, {}]}
    first = add(log, body, "messages")
    assert (first["fields"], first["same_fields"], first["tools"]) == ({"system": "s" * 1000, "max_tokens": 5}, [], 2)
    again = add(log, {**body, "messages": says("a", "b")}, "messages")
    assert (again["fields"], again["same_fields"]) == ({"max_tokens": 5}, ["system"])
    changed = add(log, {**body, "messages": says("a", "b", "c"), "system": "t" * 1000}, "messages")
    assert changed["fields"]["system"] == "t" * 1000 and changed["same_fields"] == []


def test_the_input_of_the_responses_api_is_its_conversation() -> None:
    log = RequestLog()
    assert add(log, {"input": "hello", "instructions": "be brief"}, "responses")["new_messages"] == ["hello"]
    assert add(log, {"model": "m"})["new_messages"] == []


def test_a_huge_request_is_cut_and_says_so() -> None:
    log = RequestLog()
    entry = add(log, {"messages": says("x" * 5_000_000, "y")})
    assert entry["is_cut"] and len(entry["new_messages"][0]["content"]) < 20_000
    assert "characters left out" in entry["new_messages"][0]["content"]
    assert json.loads(log.encoded())["is_complete"] is False
    deep: Json = []
    for _ in range(900):
        deep = [deep]
    wide: list[Json] = [{"role": "user", "content": str(number)} for number in range(15_000)]
    for messages in (says("z" * 40_000) * 10, [deep], wide, [{"k" * 10_000: 1} for _ in range(1000)]):
        entry = add(log, {"messages": messages, "fields": {str(n): "\0" * 100 for n in range(10_000)}})
        assert entry["is_cut"] and len(json.dumps(entry)) < 4 * (64 << 10)


def test_the_log_is_bounded_and_drops_the_middle() -> None:
    log = RequestLog()
    for number in range(3000):
        log.add(
            log.read("chat", {"messages": says(f"{number} " + "\x01" * 500)}, 600),
            turn=number,
            start_s=0.0,
            overruled=["n" * 1000] * 1000,
        )
        if number % 500 == 0:
            assert len(log.encoded()) <= MOST_BYTES
    shown = json.loads(log.encoded())
    turns = [entry["turn"] for entry in shown["requests"]]
    assert len(log.encoded()) <= MOST_BYTES and not shown["is_complete"]
    assert turns[0] == 0 and turns[-1] == 2999 and len(turns) + shown["dropped"] == 3000


def test_a_log_holds_few_conversations() -> None:
    log = RequestLog()
    for number in range(50):
        add(log, {"messages": says(f"{number}")})
    assert len(log._lines) <= request_log.LINES  # pyright: ignore[reportPrivateUsage]
    log.add(log.read("chat", {"messages": says("big")}, request_log.LINE_BYTES + 1), turn=0, start_s=0.0)
    assert not log._lines  # pyright: ignore[reportPrivateUsage]
