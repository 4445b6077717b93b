"""Files of trajectories: all formats, and what is wrong is said with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollyard.exports import html, reading
from rollyard.exports.atif import to_atif
from rollyard.exports.encoding import json_line
from rollyard.exports.html import write_page
from rollyard.exports.reading import UnreadableFile, read_rollouts
from rollyard.exports.replies import Recorded, Reply, from_record, recorded
from tests.exports.rollouts import rollout

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}

SAMPLE = {
    "id": 7,
    "epoch": 2,
    "input": "What is it?",
    "target": "42",
    "messages": [
        {"role": "user", "content": "What is it?", "source": "input"},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "I look."}],
            "tool_calls": [{"id": "c", "function": "bash", "arguments": {"cmd": "ls"}, "type": "function"}],
        },
        {"role": "tool", "tool_call_id": "c", "function": "bash", "content": "a b"},
    ],
    "scores": {"match": {"value": "C", "explanation": "it is 42"}},
}


def read(folder: Path, content: bytes | str, name: str = "file.jsonl") -> list[Recorded]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_rollouts(path))


def test_a_file_may_mix_formats(tmp_path: Path):
    lines = [rollout("a"), to_atif(rollout("b")), CHAT, {"rollouts": [rollout("c"), rollout("d")]}, CHAT["messages"]]
    found = read(tmp_path, b"\n".join(map(json_line, lines)))
    assert [one.record["id"] for one in found] == ["a", "b", "rollout", "c", "d", "rollout-2"]
    assert [len(one.record["trajectory"]["messages"]) for one in found] == [6, 6, 2, 6, 6, 2]
    for one in found:
        address = f"/v1/rollouts/{one.record['id']}?include=trajectory&run={one.record['run']}"
        assert one.replies[address].body["id"] == one.record["id"]


def test_a_json_document_may_have_many_lines(tmp_path: Path):
    (one,) = read(tmp_path, json.dumps(rollout(), indent=2))
    assert one.record["trajectory"] == rollout()["trajectory"]
    assert len(read(tmp_path, json.dumps([rollout(), CHAT], indent=1))) == 2


def test_a_log_of_inspect_is_read(tmp_path: Path):
    log = {"version": 2, "eval": {"task": "my task"}, "samples": [SAMPLE]}
    (one,) = read(tmp_path, json.dumps(log), "log.json")
    record = one.record
    assert (record["id"], record["run"], record["reward"]) == ("7-2", "my_task", 1.0)
    assistant, tool = record["trajectory"]["messages"][1:]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert assistant["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"cmd": "ls"}'}
    assert (tool["name"], tool["content"]) == ("bash", "a b")
    assert record["trajectory"]["info"]["evidence"][0]["text"] == "it is 42"
    assert record["task"]["data"]["instruction"] == "What is it?"


def test_texts_of_tokens_in_a_file_are_shown(tmp_path: Path):
    record = rollout()
    record["trajectory"]["traces"][0]["texts"] = ["x"] * 20
    (one,) = read(tmp_path, json_line(record))
    assert one.replies["/v1/rollouts/one/texts?run=grpo"] == Reply(200, {"texts": [["x"] * 20]})
    (without,) = read(tmp_path, json_line(rollout()))
    assert without.replies["/v1/rollouts/one/texts?run=grpo"].status == 404


def test_a_page_is_read_again(tmp_path: Path):
    record = {**rollout("a:b"), "group": "g:1"}
    parts = {"timeline": Reply(200, {"attempts": []}), "texts": Reply(410, {"code": "gone", "detail": "</script>"})}
    pages = [recorded(record, parts), from_record(rollout("two", text="</script><script>alert(1)</script>\u2028"))]
    write_page(tmp_path / "page.html", pages)
    again = list(read_rollouts(tmp_path / "page.html"))
    assert [one.replies for one in again] == [one.replies for one in pages]
    write_page(tmp_path / "again.html", again)
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def bad(**change: Any) -> str:
    return json.dumps({**rollout(), **change})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "line 1, column 1: not JSON"),
        ("{}\n{}", "line 1: neither a rollout nor an ATIF trajectory nor a conversation"),
        ('{"messages": []}\n\n{"messages": [}', "line 3, column 15: not JSON"),
        ('{\n "messages": [\n  nonsense\n]}', "line 3, column 3: not JSON"),
        ("[]", "has no rollouts"),
        ("7", "line 1: expected an object"),
        ("[" * 100_000, "line 1: too deeply nested"),
        ('{"messages": [], "n": ' + "9" * 5000 + "}", "line 1: not JSON: Exceeds the limit"),
        ('{"messages": ["x"]}', r"messages\[0\]: expected an object"),
        ('{"messages": [{"role": 7}]}', r"messages\[0\].role: expected a text"),
        (bad(reward="high"), "Expected `float | null`, got `str` - at `reward`"),
        (bad(trajectory={"traces": [{}]}), r"missing required field `token_ids` - at `trajectory.traces\[0\]`"),
        (bad(trajectory={"messages": [{"content": "x"}]}), "missing required field `role`"),
        (
            bad(trajectory={"traces": [{"token_ids": [1], "mask": [], "versions": [1]}]}),
            r"traces\[0\].mask: 0 values for 1 tokens",
        ),
        (
            bad(
                trajectory={
                    "traces": [{"token_ids": [1], "mask": [1], "versions": [1], "spans": [{"start": 0, "end": 2}]}]
                }
            ),
            r"spans\[0\]: 0 to 2 is not within 1 tokens",
        ),
        ("PK\x03\x04", "is an archive"),
        ("<!doctype html><title>x</title>", "a web page that Rollyard did not write"),
        (
            f'<!doctype html><meta name="generator" content="rollyard 1">{html.OPENING}[]{html.CLOSING}',
            "not what Rollyard writes",
        ),
        (
            f'<!doctype html><meta name="generator" content="rollyard 1">{html.OPENING}{{"a":1}}{html.CLOSING}',
            "not what Rollyard writes",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(content: str, says: str, tmp_path: Path):
    with pytest.raises(UnreadableFile, match=says):
        read(tmp_path, content)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    line = json_line(CHAT)
    monkeypatch.setattr(reading, "MAX_ROLLOUTS", 2)
    assert len(read(tmp_path, 2 * line)) == 2
    with pytest.raises(UnreadableFile, match="more than 2 rollouts"):
        read(tmp_path, 3 * line)
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", len(line) - 2)
    with pytest.raises(UnreadableFile, match="line 1: longer than"):
        read(tmp_path, 2 * line)
    monkeypatch.setattr(reading, "MAX_BYTES", len(line) - 1)
    with pytest.raises(UnreadableFile, match="the most is"):
        read(tmp_path, line)


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    with pytest.raises(UnreadableFile, match="No such file"):
        list(read_rollouts(tmp_path / "none"))
    with pytest.raises(UnreadableFile, match="is a folder"):
        list(read_rollouts(tmp_path))


def test_broken_utf8_and_numbers_that_json_lacks_are_read(tmp_path: Path):
    content = b'{"messages": [{"role": "user", "content": "\xff\\ud800"}], "reward": NaN}'
    (one,) = read(tmp_path, content)
    assert one.record["trajectory"]["messages"][0]["content"] == "\ufffd\ud800" and one.record["reward"] is None
    write_page(tmp_path / "page.html", [one])


def test_ids_of_files_are_made_safe(tmp_path: Path):
    (one,) = read(tmp_path, json_line({**rollout("../<b> id"), "run": "\ud800~"}))
    assert (one.record["id"], one.record["run"]) == ("b_id", "file")
