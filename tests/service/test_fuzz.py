"""The whole API under generated requests: see `fuzz.py`. `make soak` sends twenty times as many."""

import asyncio
from pathlib import Path

import pytest
import requests

from tests.service.fuzz import ANSWER_S, send, target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_no_request_breaks_the_service(tmp_path: Path):
    async with target(tmp_path) as at:
        fuzzed = await asyncio.to_thread(send, at, 5000, 1)
        assert requests.get(f"{at.url}/healthz", timeout=ANSWER_S).status_code == 200
    assert not fuzzed.wrong, "\n".join(fuzzed.wrong[:10])
    assert fuzzed.sent >= 4000, fuzzed
    assert {200, 401, 403, 404, 422} <= fuzzed.statuses.keys(), fuzzed.statuses
