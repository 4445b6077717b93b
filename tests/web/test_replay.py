"""The times of a shell session's replay, in Chromium."""

from __future__ import annotations

from typing import Any

from playwright.async_api import expect

from rollyard.testing.script import FolderTokenizer, Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import engine_table, open_site, task
from tests.web.conftest import NewVisitor
from tests.web.visitor import Visitor

SESSION = """async ({ messages, turns, timeline, task }) => {
  const { sessionOf, shortened } = await import("/assets/js/rollout/session.js");
  const session = sessionOf(messages, turns, timeline, task);
  const brief = (events) => events.map(({ call, output, from_s, to_s, took_s, isRunning }) =>
    [call.given.command ?? call.name, output && output.content, from_s, to_s, took_s, isRunning]);
  return { events: brief(session.events), short: brief(shortened(session.events, 1)), untimed: session.untimed };
}"""

Event = list[Any]


def said(*calls: tuple[str, str]) -> dict[str, Any]:
    made = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": {"command": command}}}
        for at, (name, command) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def printed(*outputs: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": f"c{at}", "content": text} for at, text in enumerate(outputs)]


def model(turn: int, start_s: float, end_s: float | None) -> dict[str, Any]:
    return {"kind": "model", "turn": turn, "start_s": start_s, "end_s": end_s, "is_error": False}


def tool(turn: int, start_s: float, end_s: float | None, name: str = "shell") -> dict[str, Any]:
    return {"kind": "tool", "turn": turn, "start_s": start_s, "end_s": end_s, "name": name, "is_error": False}


async def session(
    visitor: Visitor,
    messages: list[dict[str, Any]],
    parts: list[dict[str, Any]],
    *,
    turns: list[int | None] | None = None,
    state: str = "ended",
    agent: dict[str, Any] | None = None,
    dropped: int = 0,
) -> dict[str, Any]:
    numbers = iter(range(len(messages)))
    counted = [next(numbers) if message["role"] == "assistant" else None for message in messages]
    timeline = {"state": state, "dropped_calls": dropped, "attempts": [{"attempt": 1, "parts": parts}]}
    page = await visitor.open("/nodes")
    arguments = {
        "messages": messages,
        "turns": turns or counted,
        "timeline": timeline,
        "task": {"agent": agent or {"name": "native"}},
    }
    return await page.evaluate(SESSION, arguments)


async def test_a_call_that_was_refused_does_not_shift_the_times_of_others(visitor: Visitor) -> None:
    messages = [
        said(("nothing", "x"), ("shell", "one")),
        *printed("there is no tool", "1"),
        said(("shell", "two")),  # the renderer's ids begin again in each turn
        *printed("2"),
        said(("shell", "three"), ("finish", "four"), ("shell", "never ran")),
        *printed("3", "done"),
    ]
    parts = [tool(0, 10, 12), tool(1, 20, 25), tool(2, 30, 30.5), tool(2, 30.5, 31, "finish")]
    found = await session(visitor, messages, parts)
    assert [event[:2] for event in found["events"]] == [
        *(["x", "there is no tool"], ["one", "1"], ["two", "2"], ["three", "3"], ["four", "done"]),
    ]
    starts = [event[2] for event in found["events"]]
    assert [start - starts[1] for start in starts[1:]] == [0, 10, 20, 20.5]
    assert [event[4] for event in found["events"]] == [None, 2, 5, 0.5, 0.5]
    assert found["untimed"] == 1


async def test_calls_that_the_log_dropped_are_between_those_that_it_has(visitor: Visitor) -> None:
    messages: list[dict[str, Any]] = []
    for number in range(6):
        messages += [said(("shell", str(number)), ("shell", f"{number}b")), *printed("", "")]
    kept = [model(0, 0, 1), tool(0, 1, 2), tool(0, 2, 3), model(1, 3, 4), tool(1, 4, 5)]
    kept += [tool(4, 90, 91), model(5, 91, 92), tool(5, 92, 93), tool(5, 93, 94)]
    found = await session(visitor, messages, kept, dropped=9)
    events: list[Event] = found["events"]
    at = {event[0]: event[2] + 1 for event in events}
    assert [at[name] for name in ("0", "0b", "1", "4b", "5", "5b")] == [1, 2, 4, 90, 92, 93]
    between = [at[name] for name in ("1b", "2", "2b", "3", "3b", "4")]
    assert between == sorted(between) and between[0] > 5 and between[-1] < 90
    assert found["untimed"] == 6


async def test_calls_of_an_agent_program_take_from_one_model_call_to_the_next_of_their_conversation(
    visitor: Visitor,
) -> None:
    messages = [
        {"role": "user", "content": "go"},
        said(("bash", "one"), ("bash", "two")),
        *printed("1", "2"),
        {"role": "assistant", "content": "I run\n```bash\nthree\nfour\n```\n"},
        {"role": "user", "content": "34"},
        {"role": "assistant", "content": "```bash\nan example\n```"},
    ]
    turns: list[int | None] = [0, 0, 0, 0, 3, 3, 7]
    parts = [model(turn, 10 * turn, 10 * turn + 4) for turn in range(8)]
    found = await session(visitor, messages, parts, turns=turns, agent={"name": "codex"})
    assert [event[:5] for event in found["events"]] == [
        *(["one", "1", 0, 26, 26], ["two", "2", 0, 26, 26], ["three\nfour", "34", 30, 66, 36]),
    ]
    assert [event[2:4] for event in found["short"]] == [[0, 1], [0, 1], [2, 3]]
    assert [event[4] for event in found["short"]] == [26, 26, 36]


async def test_a_call_that_runs_is_not_done(visitor: Visitor) -> None:
    messages = [said(("shell", "one")), *printed("1"), said(("shell", "two"), ("shell", "waits"))]
    parts = [model(0, 0, 1), tool(0, 1, 2), model(1, 2, 3), tool(1, 3, None)]
    found = await session(visitor, messages, parts, state="run")
    assert [[event[0], event[5]] for event in found["events"]] == [["one", False], ["two", True]]


async def test_bash_blocks_are_replayed(tmp_path_factory: Any, new_visitor: NewVisitor) -> None:
    def acts(turn: Turn) -> Reply:
        if "<|im_start|>" not in turn.text:
            return Reply("ok")
        return Reply("I look.\n```bash\necho seen; touch it\n```" if turn.number == 0 else "Done:\n```\nnot bash\n```")

    engine = ScriptedEngine(acts, tokenizer=FolderTokenizer(tokenizer_dir()))
    async with engine, open_site(tmp_path_factory.mktemp("s"), engines=[engine_table(engine)], drain_s=0) as site:
        await site.submit("blocks", task=task(agent={"name": "native", "options": {"format": "bash_block"}}))
        await site.ended("blocks")
        visitor = await new_visitor(site)
        page = await visitor.open("/rollouts/default/blocks?tab=terminal")
        screen = page.get_by_role("region", name="Terminal")
        await page.get_by_role("button", name="To the end").click()
        await expect(screen.locator(".terminal-command")).to_have_count(1)
        await expect(screen).to_contain_text("echo seen; touch it")
        await expect(screen.locator(".long-text").last).to_contain_text("seen")
        await expect(screen).to_contain_text("shell · ")
        await expect(page.get_by_role("tabpanel")).not_to_contain_text("were not stored")
