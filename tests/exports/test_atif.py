"""ATIF: what is written is valid, has the exact tokens, and gives the same rollout when it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollyard.core.trace import DEMONSTRATION
from rollyard.exports import atif
from rollyard.exports.atif import NoConversation, to_atif
from rollyard.exports.atif_reading import from_atif
from rollyard.exports.encoding import json_line
from rollyard.exports.records import complete
from tests.exports.atif_schema import Trajectory
from tests.exports.rollouts import call, rollout, span, trace


def changed(record: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {**record, "trajectory": {**record["trajectory"], **parts}}


def demonstration() -> dict[str, Any]:
    given = trace(list(range(10, 30)), span(5, 9, 0), span(15, 20, 1), logprobs=None, reason=DEMONSTRATION)
    return changed(rollout(), traces=[given])


CASES = {
    "two turns": rollout(),
    "hostile text": rollout(text="</script>\u2028\ud800\x00 ‮"),
    "no tokens": changed(rollout(), traces=[], tools=[]),
    "a demonstration": demonstration(),
    "no logprobs": changed(rollout(), traces=[trace(list(range(20)), span(5, 9, 0), span(15, 20, 1), logprobs=None)]),
    "parts": changed(
        rollout(),
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            {"role": "tool", "content": "a result without a call", "tool_call_id": "x"},
        ],
    ),
    "only a tool": changed(rollout(), messages=[{"role": "tool", "content": None}]),
    "a call without an id": changed(
        rollout(), messages=[{"role": "assistant", "content": None, "tool_calls": [call("", "[1]")]}]
    ),
}


@pytest.mark.parametrize("record", CASES.values(), ids=CASES)
def test_what_is_written_is_valid(record: dict[str, Any]):
    written = json.loads(json_line(to_atif(record)))
    Trajectory.model_validate(written)


def test_a_step_of_the_model_has_its_exact_tokens():
    record = rollout()
    written = to_atif(record)
    (tokens,) = record["trajectory"]["traces"]
    assert [step["source"] for step in written["steps"]] == ["system", "user", "agent", "agent"]
    for step, (start, end, turn) in zip(written["steps"][2:], ((5, 9, 0), (15, 20, 1)), strict=True):
        metrics = step["metrics"]
        assert metrics["prompt_token_ids"] == tokens["token_ids"][:start]
        assert metrics["completion_token_ids"] == tokens["token_ids"][start:end]
        assert metrics["logprobs"] == tokens["logprobs"][start:end]
        assert metrics["extra"]["versions"] == [[7, end - start]] and metrics["extra"]["prompt_digest"] == f"p{turn}"
        assert step["llm_call_count"] == 1
    assert written["steps"][3]["timestamp"] == "2026-11-18T15:47:07.500+00:00"
    final = written["final_metrics"]
    assert (final["total_prompt_tokens"], final["total_completion_tokens"], final["extra"]["reward"]) == (20, 9, 0.5)


def test_calls_and_results_are_paired_and_broken_ones_are_kept():
    step = to_atif(rollout(text="hi"))["steps"][2]
    good, broken = step["tool_calls"]
    assert good["arguments"] == {"command": "echo hi"} and broken["arguments"] == {}
    assert broken["extra"] == {"arguments": '{"command": broken'}
    first, orphan = step["observation"]["results"]
    assert (first["source_call_id"], first["content"]) == ("c1", "hi")
    assert "source_call_id" not in orphan and orphan["extra"]["tool_call_id"] == "unknown"


def test_a_fork_gives_each_step_the_call_that_sampled_it():
    """The stored conversation is that of the second trace; the first trace has a turn that it left."""
    first = trace(list(range(20)), span(3, 6, 0), span(8, 12, 1))
    second = trace([0, 1, 2, 3, 4, 5, 50, 51, 52, 53], span(3, 6, 0, is_owned=False), span(7, 10, 2))
    written = to_atif(changed(rollout(), traces=[first, second]))
    Trajectory.model_validate(written)
    agent = [step["metrics"] for step in written["steps"] if step["source"] == "agent"]
    assert [one["completion_token_ids"] for one in agent] == [[3, 4, 5], [51, 52, 53]]
    assert agent[0]["logprobs"] == first["logprobs"][3:6], "of the trace that owns the call: the copy has none"
    assert "notes" not in written


def test_calls_that_match_no_step_are_in_the_traces_only():
    three = trace(list(range(20)), span(3, 6, 0), span(8, 9, 1), span(10, 12, 2))
    written = to_atif(changed(rollout(), traces=[three]))
    assert not any("metrics" in step for step in written["steps"]) and "cannot be matched" in written["notes"]
    assert written["extra"]["rollyard"]["trajectory"]["traces"] == [three]


def test_long_prompts_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(atif, "MAX_PROMPT_IDS", 10)
    written = to_atif(rollout())
    first, second = (step["metrics"] for step in written["steps"] if step["source"] == "agent")
    assert "prompt_token_ids" in first and "prompt_token_ids" not in second and "left out" in written["notes"]
    Trajectory.model_validate(written)


def test_a_rollout_without_messages_has_no_trajectory():
    for record in (changed(rollout(), messages=[]), {**rollout(), "trajectory": None}):
        with pytest.raises(NoConversation, match="one has no messages"):
            to_atif(record)


def test_reading_gives_the_same_rollout():
    record = rollout()
    (read,) = from_atif(json.loads(json_line(to_atif(record))))
    assert {**complete(read), "trajectory": None} == {**record, "trajectory": None}
    before, after = record["trajectory"], read["trajectory"]
    assert after["traces"] == before["traces"] and after["info"] == before["info"]
    assert [message["role"] for message in after["messages"]] == [message["role"] for message in before["messages"]]
    assert after["messages"][2] == before["messages"][2], "reasoning and calls, also the broken one"


def test_traces_are_rebuilt_from_the_steps_of_others():
    record = rollout()
    written = to_atif(record)
    del written["extra"]
    steps = [step for step in written["steps"] if step["source"] == "agent"]
    steps[1]["metrics"]["prompt_token_ids"][0] += 1
    for number, expected in ((2, 2), (1, 1)):
        read = complete(next(from_atif(written)))
        assert len(read["trajectory"]["traces"]) == expected
        if number == 2:
            assert "does not continue" in read["trajectory"]["traces"][1]["fork_reason"]
            steps[1]["metrics"]["prompt_token_ids"][0] -= 1
    (rebuilt,), (tokens,) = read["trajectory"]["traces"], record["trajectory"]["traces"]
    for column in ("token_ids", "mask", "logprobs"):
        assert rebuilt[column] == tokens[column]
    assert read["reward"] == 0.5 and read["summary"]["sampled_tokens"] == 9


def test_subagents_are_read_too():
    written = to_atif(rollout())
    written["subagent_trajectories"] = [to_atif(rollout("helper"))]
    assert [record["id"] for record in from_atif(written)] == ["one", "helper"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"agent": None}, "agent: expected an object"),
        ({"steps": {}}, "steps: expected a list"),
        ({"steps": [{"source": "robot", "message": ""}]}, r"steps\[0\].source: expected system, user or agent"),
        (
            {"steps": [{"source": "agent", "metrics": {"completion_token_ids": ["x"]}}]},
            "completion_token_ids: expected a list of integers",
        ),
        (
            {
                "steps": [
                    {
                        "source": "agent",
                        "metrics": {"prompt_token_ids": [], "completion_token_ids": [1], "logprobs": []},
                    }
                ]
            },
            "one number for each completion token",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(change: dict[str, Any], says: str):
    written = {**to_atif(rollout()), "extra": None, **change}
    with pytest.raises(ValueError, match=says):
        list(from_atif(written))
