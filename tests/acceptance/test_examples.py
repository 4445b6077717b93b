"""The example tasks, one of each environment that needs neither an image nor a server: on every runtime the oracle
scores 1 and doing nothing scores 0."""

from pathlib import Path

import pytest

from rollyard.cli._tasks import read_tasks
from tests.envs.stage_resources import RUNTIMES, open_resources, rewards

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "environments.jsonl"


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_every_example_rewards_the_oracle_and_not_noop(runtime: str):
    tasks = read_tasks([str(EXAMPLES)])
    environments = {"shell", "math", "stem", "code", "reasoning_gym", "yardwork"}
    assert {str(line.task["environment"]) for line in tasks} == environments
    async with open_resources(runtime) as resources:
        for line in tasks:
            assert (line.place, *await rewards(resources, line.task)) == (line.place, 1.0, 0.0)
