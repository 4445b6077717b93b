"""The small form of an hour of steady load."""

from pathlib import Path

import pytest

from tests.soak.steady import SPARE, Look, grown, in_lots


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_the_resource_use_of_a_service_levels_off(tmp_path: Path):
    looks = await in_lots(tmp_path, looks=6, each=16)
    assert not grown(looks), looks


def test_growing_resources_are_named():
    level = [Look(n, n, 100, 50, 8, 10, 4, 200) for n in range(9)]
    assert not grown(level)
    leak = [Look(n, n, 100, 50 + 40 * n, 8, 10, 4, 200) for n in range(9)]
    assert grown(leak) == {"descriptors": "210 in the middle third, 330 in the last"}
    assert set(SPARE) == {"memory_mib", "descriptors", "threads", "processes", "cgroups", "disk_mib"}
