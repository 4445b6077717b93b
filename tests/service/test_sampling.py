"""The sampling parameters of a task are checked at submit."""

from pathlib import Path
from typing import Any

import pytest

from tests.service.site import engine_table, open_site, scripted, task

BAD = task(sampling={"extra": {"prompt": [1, 2, 3]}})
SUBMITS: dict[str, tuple[str, dict[str, Any]]] = {
    "a rollout": ("/v1/rollouts", {"id": "r1", "task": BAD}),
    "a group": ("/v1/groups", {"id": "g1", "task": BAD, "size": 4}),
    "a session": ("/v1/sessions", {"id": "r1", "sampling": BAD["sampling"]}),
    "a draw": ("/v1/draws", {"id": "d1", "run": "default", "group_size": 2, "source": {"tasks": [BAD]}}),
}


@pytest.mark.parametrize("what", SUBMITS)
async def test_extra_that_would_replace_the_prompt_is_refused(tmp_path: Path, what: str) -> None:
    path, body = SUBMITS[what]
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        answer = await site.post(path, body)
        assert (answer.status, answer.code) == (422, "sampling_invalid"), answer.body
        assert "may not have prompt" in answer.body["detail"]
        assert (await site.get("/v1/rollouts/r1")).status == 404
