"""Real verl, in its own environment, on rollouts of a real service: its training data is compared with the traces."""

import asyncio
import json
import math
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rollyard.client import AsyncClient, Record, Trace
from rollyard.testing.script import Reply, Turn
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.client.served import call, served, task
from tests.trainers.environment import run_script, trainer_python

pytestmark = [pytest.mark.trainers, pytest.mark.slow, pytest.mark.timeout(300)]

PROBE = Path(__file__).parent / "verl_probe.py"
SIZE = 4
PLAIN, RESCUED, BROKEN, SLOW = "Write done.", "RESCUED: write done.", "BROKEN: write done.", "SLOW: write done."
HELD = "HELD: write done."
TASKS = [task(PLAIN), task(RESCUED), task(BROKEN), task(SLOW, limits={"run_s": 8.0}), task(HELD)]


def script(turn: Turn) -> Reply:
    """Odd rollouts solve the task. Infrastructure fails one of RESCUED, one and a spare of BROKEN; a SLOW one hangs."""
    if not turn.session_id or "<|im_start|>" not in turn.text:
        return Reply("ok")  # the probe
    index = int(turn.session_id.rpartition("-")[2])
    if ("RESCUED" in turn.text and index == 1) or ("BROKEN" in turn.text and index in (1, SIZE)):
        return Reply(fault=500)
    if "HELD" in turn.text and turn.number and turn.call == 1:
        return Reply(call("finish"), stall_after=2)  # until it is aborted; the next call continues it
    if turn.number:
        return Reply(call("finish"), latency_s=3600.0 if "SLOW" in turn.text and index == 2 else None)
    return Reply(call("shell", command="echo hello > done" if index % 2 else "echo nothing"))


class Truth:
    """The service's records and traces of verl's rollouts."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.traces: dict[str, Trace] = {}

    async def read(self, client: AsyncClient, ids: set[str]) -> None:
        for id in ids:
            self.records[id] = await client.get(id)
            (self.traces[id],) = await client.traces(id)

    def check(self, row: dict[str, Any]) -> None:
        """Asserts that tokens, mask and logprobs are those of the trace, up to the last sampled token."""
        trace, start = self.traces[row["rollout"]], len(row["prompt"])
        end = start + len(row["response"])
        assert trace.logprobs is not None
        assert row["prompt"] + row["response"] == trace.token_ids[:end].tolist()
        assert row["mask"][: end - start] == trace.mask[start:end].tolist()
        assert row["logprobs"][: end - start] == pytest.approx(trace.logprobs[start:end].tolist())
        assert not trace.mask[:start].any() and not trace.mask[end:].any() and row["mask"][0] == 1
        assert sum(row["mask"]) == trace.mask.sum() > 0 and 0 in row["mask"], "two turns, and a tool between them"
        assert self.records[row["rollout"]].task["data"]["instruction"] == row["task"]
        assert self.records[row["rollout"]].summary is not None
        assert row["turns"] == 2


def signals(scores: list[float]) -> list[float]:
    """Advantages of GRPO, as verl computes them."""
    return [(score - statistics.mean(scores)) / (statistics.stdev(scores) + 1e-6) for score in scores]


def check_loss(part: dict[str, Any]) -> None:
    """Asserts that the loss is over exactly the sampled tokens of the rows with an advantage."""
    assert math.isfinite(part["loss"]) and part["loss"] == pytest.approx(part["plain"], abs=1e-6)
    for row, pulls in zip(part["rows"], part["pulls"], strict=True):
        is_learned = any(row["advantages"])
        expected = [bit if is_learned else 0 for bit in row["mask"]]
        assert pulls[: len(expected)] == expected and not any(pulls[len(expected) :])


async def test_verl_learns_from_exactly_the_sampled_tokens_and_no_lost_rollout(tmp_path: Path):
    python = trainer_python("verl")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(one) + "\n" for one in TASKS))
    truth = Truth()
    async with served(tmp_path, engines=[], max_attempts=1, engine_wait_s=60) as service:
        service.engine.script = script
        arguments = (PROBE, tmp_path, tokenizer_dir(), tasks, service.engine.url)
        with TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # the path of Ray's sockets must be short
            # This setting for other systems keeps Ray on the loopback device.
            ray = {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
            environ = {**service.environ(), **ray, "HOME": short}
            await asyncio.to_thread(run_script, python, *arguments, environ=environ, log=tmp_path / "log")
        recorded = json.loads((tmp_path / "seen.json").read_text())
        async with AsyncClient(service.url, service.token) as client:
            await truth.read(
                client, {row["rollout"] for part in recorded.values() for row in part["rows"] if row["rollout"]}
            )
            modes = {name: (await client.get_run(name))["mode"] for name in ("verl", "verl.val")}
            engines = [engine["id"] for engine in await client.engines()]
            policy = await client.policy("default").status()
    assert modes == {"verl": "train", "verl.val": "eval"}
    assert engines == ["default.verl0"], "verl's own server became the policy's engine"
    assert (policy["state"], policy["version"]) == ("paused", 8), "nothing is left to sample: verl updates the weights"
    check_data_proto(truth, recorded["data_proto"])
    check_queue(truth, recorded["train"])
    check_validation(truth, recorded["validation"])
    for row in recorded["awaited"]["rows"]:
        assert (truth.records[row["rollout"]].run, truth.records[row["rollout"]].reward) == ("verl.val", row["score"])
    check_async(truth, recorded["async"])
    assert recorded["refused"]["status"] == "failure"
    assert "was sampled at temperature 1, but verl computes its logprobs at 0.5" in recorded["refused"]["error"]


def check_data_proto(truth: Truth, part: dict[str, Any]) -> None:
    rows = part["rows"]
    assert [row["task"] for row in rows] == [text for text in (PLAIN, RESCUED, BROKEN, SLOW) for _ in range(SIZE)]
    for start in range(0, len(rows), SIZE):
        group = rows[start : start + SIZE]
        assert len({row["uid"] for row in group}) == 1
        real = [row for row in group if row["rollout"]]
        blanks = [row for row in group if not row["rollout"]]
        assert len(real) == (SIZE if group[0]["task"] in (PLAIN, RESCUED) else SIZE - 1)
        for row in real:
            truth.check(row)
            assert row["score"] == truth.records[row["rollout"]].reward
            assert row["version"] == 0
        for row in blanks:
            assert not row["response"] and not any(row["mask"]) and not any(row["advantages"])
            assert row["score"] == pytest.approx(statistics.mean(row["score"] for row in real))
        for row, signal in zip(group, signals([row["score"] for row in group]), strict=True):
            expected = [signal * bit for bit in row["mask"]]
            assert row["advantages"] == pytest.approx(expected, abs=1e-4)
    check_loss(part)
    scores = [row["score"] for row in rows if row["rollout"]]
    assert part["score_mean"] == pytest.approx(statistics.mean(scores)), "blank rows are in no figure"
    assert part["aborted"] == pytest.approx(2 / len(rows))
    assert part["timing"]["agent_loop/rollyard/blank_rows"] == 2
    assert part["timing"]["agent_loop/rollyard/lost_members"] == 1


def check_queue(truth: Truth, part: dict[str, Any]) -> None:
    assert part["status"] == {PLAIN: "finished", RESCUED: "finished", BROKEN: "failure", SLOW: "finished"}
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in part["rows"]:
        if row["tag"].get("is_padding"):
            assert not any(row["mask"]) and not any(row["advantages"])
        else:
            groups.setdefault(row["task"], []).append(row)
    assert {name: len(rows) for name, rows in groups.items()} == {PLAIN: 4, RESCUED: 4, BROKEN: 3, SLOW: 3}
    assert all(not truth.records[row["rollout"]].id.endswith("-1") for row in groups[RESCUED])
    assert all(truth.records[row["rollout"]].trainable for row in groups[SLOW])
    for rows in groups.values():
        for row, signal in zip(rows, signals([sum(row["scores"]) for row in rows]), strict=True):
            truth.check(row)
            assert row["scores"][-1] == truth.records[row["rollout"]].reward
            assert row["advantages"] == pytest.approx([signal * bit for bit in row["mask"]], abs=1e-4)
            assert (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) == (1, 1)
    check_loss(part)


def check_validation(truth: Truth, part: dict[str, Any]) -> None:
    assert set(part["status"].values()) == {"finished"}
    assert len(part["rows"]) == 4
    for row in part["rows"]:
        record = truth.records[row["rollout"]]
        truth.check(row)
        assert (record.run, record.trainable, sum(row["scores"])) == ("verl.val", False, record.reward)
        assert truth.traces[row["rollout"]].sampling.temperature == 0.0
        assert row["tag"]["min_global_steps"] == 2


def check_async(truth: Truth, part: dict[str, Any]) -> None:
    assert part["state"] == "paused", "verl has sampled its batch, and changes the weights next"
    tasks = [truth.records[row["rollout"]].task["data"]["instruction"] for row in part["second"]]
    assert (len(part["first"]), sorted(tasks)) == (SIZE, [HELD] * SIZE + [PLAIN] * SIZE)
    for row, text in zip(part["second"], tasks, strict=True):
        trace = truth.traces[row["rollout"]]
        span = (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"])
        assert span == ((7, 8) if text == HELD else (8, 8))
        assert span == (trace.versions[trace.mask == 1].min(), trace.versions.max())
