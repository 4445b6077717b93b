"""Runs the reference trainer from the command line, with a tiny model: interrupted after each phase, killed, completed.

Engine, service and trainer are real processes of `alone.py`. A training runs as several *lives*. Lives that are
interrupted, or have nothing left to do, are trainings of one process; the killed one ends with all its processes, and
the last one has new processes. The model is random and gets no reward. So these tests check which steps there are, what
a step reports, and whether a new life continues at the checkpoint; `tests/with_torch` tests what is learned.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
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
OVER = "this training is over"
STEPS, SAVE_EVERY, KILLED_AT = 5, 2, 3
AT_ONCE = ("--minutes", "0.0001")  # ends at the first check of the time: after an epoch or a step
SMALL = (
    *("--demonstrations", "8", "--max-epochs", "1", "--passes", "2", "--warm-lr", "0.01", "--test-tasks", "0"),
    *("--validate-tasks", "2", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--want", "1"),
    *("--group-size", "2", "--levels", "1", "--families", "find_content", "--keep", "all", "--max-turns", "4"),
)
CHECKPOINT = {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "state.json"}
NUMBERS = ("grad_norm", "rollouts", "tokens_trained", "tokens_seen", "push_s", "wait_s", "learn_s", "step_s")


@dataclass(frozen=True, slots=True)
class Life:
    """What a life of a training printed, and a copy of its folder at its end."""

    output: Sequence[str]
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def saved_step(self) -> int:
        return json.loads((self.folder / "rl" / "state.json").read_text())["step"]

    def steps(self, phase: str) -> list[int]:
        return [line["step"] for line in self.lines if line["phase"] == phase]

    def step(self, number: int) -> dict[str, Any]:
        (step_line,) = (line for line in self.lines if (line["phase"], line["step"]) == ("rl", number))
        return step_line

    def tests(self, phase: str) -> list[str]:
        return [line["what"] for line in self.lines if line["phase"] == phase]


class TrainingRun:
    """`alone.py` in a folder. All its processes are in one process group, so that all of them can be killed."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder = folder
        self._process = process

    @classmethod
    @contextmanager
    def running(cls, folder: Path, model: Path, *options: str) -> Generator[TrainingRun, None, None]:
        places = ["--model", str(model), "--data", str(folder / "data")]
        places += ["--service-python", sys.executable, "--device", "cpu"]
        small = ["--run-slots", "4", "--init-slots", "2", "--max-running", "8", "--cache-gib", "0.1"]
        command = [str(trainer_python("local")), str(ROOT / "examples" / "yardwork" / "alone.py"), *places, *small]
        with (
            (folder / "log").open("ab") as errors,
            subprocess.Popen(
                [*command, "--", *SMALL, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ(folder),
                start_new_session=True,
            ) as process,
        ):
            running = cls(folder, process)
            try:
                yield running
            finally:
                running.kill()

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def train(self, out: Path, *options: str, killed_at: int | None = None) -> Life:
        """Runs one more training in the process, until it ends, or until all are killed after that step of RL."""
        print(shlex.join(["--out", str(out), *options]), file=self._process.stdin, flush=True)
        until = OVER if killed_at is None else f"rl {killed_at}:"
        output: list[str] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(until):
                if killed_at is not None:
                    self.kill()
                return self._life(output, out)
            output.append(line)
        log = (self._folder / "log").read_text(errors="replace")
        pytest.fail("".join(output)[-2000:] + log[-4000:])

    def finish(self, out: Path) -> Life:
        """Waits for its only training and all its processes to end."""
        output, _ = self._process.communicate()
        assert self._process.returncode == 0, (
            output[-2000:] + (self._folder / "log").read_text(errors="replace")[-4000:]
        )
        return self._life(output.splitlines(), out)

    def _life(self, output: Sequence[str], out: Path) -> Life:
        copy = self._folder / f"{out.name}-{len(list(self._folder.iterdir()))}"
        shutil.copytree(out, copy)
        return Life(output, copy)


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of a run with RL, and of a run with a further warm start, which starts from the first life of the
    other."""

    folder: Path
    warm: Life
    cut: Life
    killed: Life
    last: Life
    more: Life
    already_complete: Life
    again: Life


@pytest.fixture(scope="module")
def lives(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    folder = tmp_path_factory.mktemp("lives")
    out, more_out = folder / "out", folder / "more"
    with TrainingRun.running(folder, tiny_model, "-") as running:
        warm = running.train(out, *AT_ONCE)
        for seconds in ("2", "20"):  # the shorter one, if this machine trains more than one epoch in it
            shutil.rmtree(more_out, ignore_errors=True)
            shutil.copytree(out, more_out, ignore=shutil.ignore_patterns("id"))
            options = ("--more-warm-s", seconds, "--test-tasks", "2")
            more = running.train(more_out, *options)
            if len(more.steps("more_warm")) > 1:
                break
        # A training that is complete needs neither an engine nor a service.
        nowhere = "http://127.0.0.1:9"
        places = ("--engine", nowhere, "--service", nowhere, "--token", "none")
        already_complete = running.train(more_out, *options, *places)
        file = more_out / "metrics.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in more.lines[:-1]))  # without its last test
        again = running.train(more_out, *options)
        cut = running.train(out, *AT_ONCE)
        killed = running.train(out, killed_at=KILLED_AT)
    with TrainingRun.running(folder, tiny_model, "--out", str(out)) as running:
        last = running.finish(out)
    return Lives(folder, warm, cut, killed, last, more, already_complete, again)


async def delivered(folder: Path, out: Path) -> tuple[dict[str, Any], list[list[Any]]]:
    """The draw's status in the service, and the tasks of each of its batches."""
    async with service(folder, {}) as served, AsyncClient(served.url, served.token) as client:
        draw = await client.get_draw((out / "id").read_text() + "-rl")
        batches = [await draw.batch(number=number) for number in range(1, STEPS + 1)]
        return dict(await draw.status()), [[(group.epoch, group.item) for group in batch.groups] for batch in batches]


async def test_an_interrupted_run_continues_at_its_checkpoint(lives: Lives):
    first = lives.warm
    assert "everything is saved" in first.output[-1]
    assert (first.steps("warm"), first.steps("rl")) == ([1], []) and not (first.folder / "rl").exists()
    assert {"loss", "pass_at_1", "low", "high", "busy_s"} <= first.lines[0].keys()
    for name in ("warm", "best"):
        assert {file.name for file in (first.folder / name).iterdir()} == CHECKPOINT

    second = lives.cut
    assert "everything is saved" in second.output[-1]
    assert (second.steps("warm"), second.steps("rl"), second.saved_step) == ([1], [1], 1)
    assert second.lines[0] == first.lines[0], "the warm start is not done again"

    third = lives.killed
    assert third.saved_step % SAVE_EVERY == 0, "unsaved steps are lost"
    assert third.steps("rl") == list(range(1, len(third.steps("rl")) + 1)) and len(third.steps("rl")) >= KILLED_AT

    last = lives.last
    assert (last.steps("warm"), last.steps("rl")) == ([1], list(range(1, STEPS + 1))), "each step once"
    assert last.saved_step == STEPS and {file.name for file in (last.folder / "rl").iterdir()} == CHECKPOINT
    assert next(line for line in last.output if line.startswith("rl ")).startswith(f"rl {third.saved_step + 1}:")
    for step in range(1, third.saved_step + 1):
        assert last.step(step) == third.step(step), "steps before the checkpoint are unchanged"
    undone = third.saved_step + 1
    if undone <= len(third.steps("rl")):
        # All tokens of its group are from weights that the checkpoint includes. So the group is not sampled again but
        # delivered again: in this step, or after a group that was started before it and is complete by now.
        sizes = [(line["tokens_trained"], line["tokens_seen"]) for line in last.lines if line["phase"] == "rl"]
        lost = third.step(undone)
        assert (lost["tokens_trained"], lost["tokens_seen"]) in sizes[undone - 1 :]

    lines = [last.step(step) for step in range(1, STEPS + 1)]
    assert any(line["reward_before"] == 0.0 for line in lines) and any("0" in line["by_lag"] for line in lines)
    for line in lines:
        assert all(isinstance(line[name], int | float) for name in NUMBERS)
        assert line["reward_before"] in (0.0, None), "None: its group was judged before, in another step or life"
        assert line["rollouts"] == 2 and line["staleness"] >= 0
        assert 0 < line["tokens_trained"] < line["tokens_seen"]
        assert line["stages_s"].keys() == {"init_s", "run_s", "eval_s"} and line["stages_s"]["run_s"] > 0
        assert line["figures"]["delivered"] == 1 and line["figures"]["tokens_delivered"] == line["tokens_trained"]
        assert line["by_lag"] and all(int(lag) >= 0 for lag in line["by_lag"])
        assert line["by_lag"].get("0", {"mean": 0.0})["mean"] < 1e-3, "the engine has the trained weights"

    facts, batches = await delivered(lives.folder, last.folder)
    assert (facts["state"], facts["reason"], facts["batch"], facts["version"]) == ("ended", "closed", STEPS, STEPS)
    assert [len(batch) for batch in batches] == [1] * STEPS
    assert len({task for (task,) in batches}) == STEPS, "no task was delivered twice"


def test_further_warm_start_is_tested_at_its_end_and_at_its_best(lives: Lives):
    life = lives.more
    epochs = life.steps("more_warm")
    assert epochs == [2**n for n in range(len(epochs))] and len(epochs) > 1 and not life.steps("rl")
    looks = [line for line in life.lines if line["phase"] == "more_warm"]
    assert looks[0]["busy_s"] < looks[-1]["busy_s"] and looks[-1]["loss"] < looks[0]["loss"]
    tests = ["raw", "warm", "more-warm", "more-warm-best"]
    assert life.tests("test") == tests
    best = life.folder / "more-warm-best"
    assert json.loads((best / "state.json").read_text())["epoch"] == 1, "all have no reward, so the first is kept"
    pushed = (life.folder / "pushed" / "adapter_model.safetensors").read_bytes()
    assert pushed == (best / "adapter_model.safetensors").read_bytes(), "what was tested last"

    assert lives.already_complete.lines == life.lines

    epochs = lives.again.steps("more_warm")
    assert epochs and epochs == [2**n for n in range(len(epochs))], "it starts again"
    assert lives.again.tests("test") == tests
    assert lives.again.tests("test_greedy") == tests[1:]


def test_oversampling_is_refused_unless_sampling_and_learning_alternate(tmp_path: Path):
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
    env = environ(tmp_path) | {"PYTHONPROFILEIMPORTTIME": "1"}
    completed = subprocess.run([*command, "--oversample"], env=env, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 2 and "--oversample needs --max-staleness 0" in completed.stderr
    assert not (tmp_path / "out").exists()
    assert not re.search(r"\| +torch$", completed.stderr, re.MULTILINE), "it takes seconds to import, and is not needed"
