"""The example tasks, one of each environment that needs neither an image nor a server: the oracle has all of the
reward, doing nothing has none, on every runtime."""

from pathlib import Path

import pytest

from rollyard.cli._tasks import read_tasks
from tests.envs.stage_resources import RUNTIMES, open_resources, rewards

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "environments.jsonl"


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_oracle_and_noop_of_every_example(runtime: str):
    tasks = read_tasks([str(EXAMPLES)])
    environments = {"shell", "math", "stem", "code", "reasoning_gym", "yardwork"}
    assert {str(line.task["environment"]) for line in tasks} == environments
    async with open_resources(runtime) as resources:
        for line in tasks:
            assert (line.place, *await rewards(resources, line.task)) == (line.place, 1.0, 0.0)
