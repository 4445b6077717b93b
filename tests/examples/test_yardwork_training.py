"""The reference trainer as a person starts it, with a tiny model: cut after each phase, killed, and run to its end.

Engine, service and trainer are real processes of `alone.py`, and all of them end with each life of a run. The model is
random and earns no reward. So these tests look at which steps there are, what a step reports, and whether a new life
goes on where the checkpoint is; `tests/with_torch` shows what is learned.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli.rig import service
from rollyard.client import AsyncClient
from tests.embedded.environment import environ
from tests.trainers.environment import ROOT, trainer_python

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = ROOT / "examples" / "yardwork" / "train.py"
LIFE_S = 120.0
STEPS, SAVE_EVERY, KILLED_AT = 5, 2, 3
AT_ONCE = ("--minutes", "0.0001")  # over when it is first looked at: after an epoch, or after a step
SMALL = (
    *("--demonstrations", "8", "--max-epochs", "1", "--passes", "2", "--warm-lr", "0.01", "--test-tasks", "0"),
    *("--validate-tasks", "2", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--want", "1"),
    *("--group-size", "2", "--levels", "1", "--families", "find_content", "--keep", "all", "--max-turns", "4"),
)
CHECKPOINT = {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "state.json"}
NUMBERS = ("grad_norm", "rollouts", "tokens_trained", "tokens_seen", "push_s", "wait_s", "learn_s", "step_s")


@dataclass(frozen=True, slots=True)
class Life:
    """What there was at its end."""

    said: Sequence[str]
    lines: Sequence[dict[str, Any]]
    saved_step: int

    def steps(self, phase: str) -> list[int]:
        return [line["step"] for line in self.lines if line["phase"] == phase]

    def step(self, number: int) -> dict[str, Any]:
        (found,) = (line for line in self.lines if (line["phase"], line["step"]) == ("rl", number))
        return found


@dataclass(frozen=True, slots=True)
class Yard:
    """A folder for one run of training, and the model that it starts from."""

    folder: Path
    model: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def live(self, *options: str, killed_at: int | None = None) -> Life:
        with self._alone(options) as process:
            said: list[str] = []
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if killed_at is not None and line.startswith(f"rl {killed_at}:"):
                    os.killpg(process.pid, signal.SIGKILL)
            status = process.wait(LIFE_S)
            log = (self.folder / "log").read_text(errors="replace")
            assert status == (0 if killed_at is None else -signal.SIGKILL), "".join(said)[-2000:] + log[-4000:]
        state = self.out / "rl" / "state.json"
        return Life(said, self.lines(), json.loads(state.read_text())["step"] if state.exists() else 0)

    def finished(self, *options: str) -> None:
        """Starts the trainer alone: one that has done everything needs neither an engine nor a service."""
        nowhere = "http://127.0.0.1:9"
        places = ["--model", str(self.model), "--out", str(self.out), "--engine", nowhere, "--service", nowhere]
        command = [str(trainer_python("local")), str(TRAIN), *places, "--token", "none", *SMALL, *options]
        done = subprocess.run(command, env=environ(self.folder), capture_output=True, text=True, timeout=LIFE_S)
        assert done.returncode == 0, done.stderr[-4000:]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @contextmanager
    def _alone(self, options: Sequence[str]) -> Generator[subprocess.Popen[str], None, None]:
        """All of it in one process group, so that nothing is left."""
        places = ["--model", str(self.model), "--data", str(self.folder / "data")]
        places += ["--service-python", sys.executable, "--device", "cpu"]
        small = ["--run-slots", "4", "--init-slots", "2", "--max-running", "8", "--cache-gib", "0.1"]
        with (self.folder / "log").open("ab") as errors:
            process = subprocess.Popen(
                [
                    *(str(trainer_python("local")), str(ROOT / "examples" / "yardwork" / "alone.py")),
                    *(*places, *small, "--", "--out", str(self.out), *SMALL, *options),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ(self.folder),
                start_new_session=True,
            )
            try:
                yield process
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


async def delivered(yard: Yard) -> tuple[dict[str, Any], list[list[Any]]]:
    """What the service knows of the draw, and the tasks of each of its batches."""
    async with service(yard.folder, {}) as served, AsyncClient(served.url, served.token) as client:
        draw = await client.get_draw((yard.out / "id").read_text() + "-rl")
        batches = [await draw.batch(number=number) for number in range(1, STEPS + 1)]
        return dict(await draw.status()), [[(group.epoch, group.item) for group in batch.groups] for batch in batches]


async def test_a_run_in_pieces_goes_on_where_it_was_cut(tiny_model: Path, tmp_path: Path):
    yard = Yard(tmp_path, tiny_model)

    first = yard.live(*AT_ONCE)
    assert "everything is saved" in first.said[-1]
    assert (first.steps("warm"), first.steps("rl"), first.saved_step) == ([1], [], 0)
    assert {"loss", "pass_at_1", "low", "high", "busy_s"} <= first.lines[0].keys()
    for name in ("warm", "best"):
        assert {file.name for file in (yard.out / name).iterdir()} == CHECKPOINT

    second = yard.live(*AT_ONCE)
    assert "everything is saved" in second.said[-1]
    assert (second.steps("warm"), second.steps("rl"), second.saved_step) == ([1], [1], 1)
    assert second.lines[0] == first.lines[0], "the warm start is not done again"

    third = yard.live(killed_at=KILLED_AT)
    assert third.saved_step % SAVE_EVERY == 0, "what was not saved was lost"
    assert third.steps("rl") == list(range(1, len(third.steps("rl")) + 1)) and len(third.steps("rl")) >= KILLED_AT

    last = yard.live()
    assert (last.steps("warm"), last.steps("rl")) == ([1], list(range(1, STEPS + 1))), "each step once"
    assert last.saved_step == STEPS and {file.name for file in (yard.out / "rl").iterdir()} == CHECKPOINT
    assert next(line for line in last.said if line.startswith("rl ")).startswith(f"rl {third.saved_step + 1}:")
    for step in range(1, third.saved_step + 1):
        assert last.step(step) == third.step(step), "what the checkpoint knew stays"
    undone = third.saved_step + 1
    if undone <= len(third.steps("rl")):
        # All tokens of its group are of weights that the checkpoint knows. So it is not sampled again, but delivered
        # again: in this step, or behind a group that was begun before it and is complete by now.
        sizes = [(line["tokens_trained"], line["tokens_seen"]) for line in last.lines if line["phase"] == "rl"]
        lost = third.step(undone)
        assert (lost["tokens_trained"], lost["tokens_seen"]) in sizes[undone - 1 :]

    lines = [last.step(step) for step in range(1, STEPS + 1)]
    assert any(line["reward_before"] == 0.0 for line in lines) and any("0" in line["by_lag"] for line in lines)
    for line in lines:
        assert all(isinstance(line[name], int | float) for name in NUMBERS)
        assert line["reward_before"] in (0.0, None), "None: its group had been judged before, in another step or life"
        assert line["rollouts"] == 2 and line["staleness"] >= 0
        assert 0 < line["tokens_trained"] < line["tokens_seen"]
        assert line["stages_s"].keys() == {"init_s", "run_s", "eval_s"} and line["stages_s"]["run_s"] > 0
        assert line["figures"]["delivered"] == 1 and line["figures"]["tokens_delivered"] == line["tokens_trained"]
        assert line["by_lag"] and all(int(lag) >= 0 for lag in line["by_lag"])
        assert line["by_lag"].get("0", {"mean": 0.0})["mean"] < 1e-3, "the engine has the weights that are trained"

    facts, batches = await delivered(yard)
    assert (facts["state"], facts["reason"], facts["batch"], facts["version"]) == ("ended", "closed", STEPS, STEPS)
    assert [len(batch) for batch in batches] == [1] * STEPS
    assert len({task for (task,) in batches}) == STEPS, "no task came twice"


def test_further_warm_start_is_tested_at_its_end_and_at_its_best(tiny_model: Path, tmp_path: Path):
    for seconds in (3.0, 20.0):  # the first in which this machine, as busy as it is, trains more than one epoch
        folder = tmp_path / str(seconds)
        folder.mkdir()
        yard = Yard(folder, tiny_model)
        options = ("--more-warm-s", str(seconds), "--test-tasks", "2")
        life = yard.live(*options)
        epochs = life.steps("more_warm")
        if len(epochs) > 1:
            break
    assert epochs == [2**n for n in range(len(epochs))] and len(epochs) > 1 and not life.steps("rl")
    looks = [line for line in life.lines if line["phase"] == "more_warm"]
    assert looks[0]["busy_s"] < looks[-1]["busy_s"] and looks[-1]["loss"] < looks[0]["loss"]
    tests = ["raw", "warm", "more-warm", "more-warm-best"]
    assert [line["what"] for line in life.lines if line["phase"] == "test"] == tests
    best = yard.out / "more-warm-best"
    assert json.loads((best / "state.json").read_text())["epoch"] == 1, "none earns a reward, so the first stays"
    pushed = (yard.out / "pushed" / "adapter_model.safetensors").read_bytes()
    assert pushed == (best / "adapter_model.safetensors").read_bytes(), "what was tested last"

    yard.finished(*options)
    assert yard.lines() == life.lines, "nothing was left to do"

    file = yard.out / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in life.lines[:-1]))  # cut before its last test
    again = yard.live(*options)
    assert again.steps("more_warm")[:2] == [1, 2], "it begins again"
    assert [line["what"] for line in again.lines if line["phase"] == "test"] == tests
    assert [line["what"] for line in again.lines if line["phase"] == "test_greedy"] == tests[1:]


def test_what_is_for_turns_is_refused_without_them(tmp_path: Path):
    command = [
        str(trainer_python("local")),
        str(TRAIN),
        "--model",
        "x",
        "--engine",
        "y",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run([*command, "--oversample"], env=environ(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--oversample: that is for --max-staleness 0" in done.stderr
    assert not (tmp_path / "out").exists()
