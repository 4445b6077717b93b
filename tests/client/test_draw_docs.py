"""Runs the examples of docs/how-to/train-with-draws.md unchanged."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollyard.client import AsyncClient
from tests.client.served import RunningService
from tests.client.test_draws_served import COIN, tasks

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-with-draws.md"


class Crash(Exception):
    pass


class Trainer:
    """Learns nothing, and loses what it has not saved. It dies once, at batch `crash_at`."""

    pad_id = 0

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at
        self.saved = 0
        self.batches: list[dict[str, Any]] = []
        self.pushed = 0

    def load(self) -> int:
        del self.batches[self.saved :]
        return self.saved

    def save(self, steps: int) -> None:
        self.saved = steps

    def learn(self, arrays: dict[str, Any]) -> None:
        self.batches.append(arrays)
        if len(self.batches) == self.crash_at:
            self.crash_at = None
            raise Crash

    def push_weights(self) -> None:
        self.pushed += 1


@pytest.fixture
def page(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the page's blocks define."""
    for name, value in service.environ().items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    return names


async def test_the_loop_runs_and_continues_after_a_crash(page: dict[str, Any], client: AsyncClient):
    trainer = Trainer(crash_at=4)
    with pytest.raises(Crash):
        await page["train"](trainer, tasks(8, COIN), steps=5, want=2, every=2)
    assert trainer.saved == 2
    await page["train"](trainer, tasks(8, COIN), steps=5, want=2, every=2)
    assert [len(arrays["rewards"]) for arrays in trainer.batches] == [8] * 5
    status = await (await client.get_draw("grpo")).status()
    assert (status["batch"], status["acked"], status["version"]) == (5, 4, 5)
    assert status["figures"]["delivered"] == 10
    newest = [arrays["versions"].max() for arrays in trainer.batches]
    assert all(version <= step for step, version in enumerate(newest))
    assert await page["replay"](client, want=2) == [5]


async def test_the_stream_the_loss_and_the_curriculum_run(page: dict[str, Any], client: AsyncClient):
    await client.create_run("grpo")
    draw = await client.draw("grpo", tasks(8, COIN), group_size=4)
    trainer = Trainer()
    figures = await page["follow"](draw, trainer, want=2)
    assert figures["delivered"] == 2 and len(trainer.batches) == 2

    def certain(input_ids: Any, attention_mask: Any) -> Any:
        assert input_ids.shape == attention_mask.shape
        return np.zeros(input_ids.shape, dtype=np.float32)

    batch = await draw.batch(want=2)
    assert page["loss_of"](batch.groups, certain) == 0.0
    assert np.isfinite(page["loss_of"](batch.groups, lambda ids, _: np.full(ids.shape, -1.0)))
    await draw.close()
    rewards = await asyncio.to_thread(page["curriculum"], [tasks(2, "true"), tasks(2, "false")], 2)
    assert rewards == [[1.0, 1.0], [0.0, 0.0]]
