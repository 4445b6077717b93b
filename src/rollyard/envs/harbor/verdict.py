"""Reads the verifier's files: the reward and the other numbers.

The folder is empty when the verifier starts, so its files were written in EVAL. But tests may run the agent's program,
at the same time and as the same user. So these are not accepted:
- a reward.json, if the tests mention only reward.txt;
- a file or folder that is not writable: the verifier could not have written it;
- a file that reappears after it was removed: a program keeps writing it.

A program that waits for the verifier's write and replaces it once is not detected. To prevent that, tests must not run
the agent's program where it can write the reward; Harbor's own containers have the same limitation.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping

from rollyard.core import Json
from rollyard.envs.harbor.files import Files, mentions
from rollyard.sandbox.base import Sandbox

FOLDER = "/logs/verifier"
REWARD_BYTES = 1 << 20

QUIET_S = 0.2
"""How long a removed file must not reappear: a loop that writes it takes milliseconds."""

_TAKE = 'test -w "$0" && rm -f "$0"'


async def read_verdict(sandbox: Sandbox, tests: Files) -> Mapping[str, float] | None:
    """Returns the numbers, including `reward`. None if the verifier wrote no readable reward."""
    names = ["reward.json", "reward.txt"]
    if mentions(tests, "reward.txt") and not mentions(tests, "reward.json"):
        names.remove("reward.json")
    for name in names:
        path = f"{FOLDER}/{name}"
        try:
            text = await sandbox.read(path, limit_bytes=REWARD_BYTES)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
        await sandbox.exec(["sh", "-c", _TAKE, path], timeout_s=60.0, cwd="/")
        await asyncio.sleep(QUIET_S)
        is_back = (await sandbox.exec(["test", "-e", path], timeout_s=60.0, cwd="/")).status == 0
        return parse_verdict(name, text) if not is_back else None
    return None


def parse_verdict(name: str, text: bytes) -> dict[str, float] | None:
    try:
        parsed: Json = json.loads(text) if name.endswith(".json") else float(text)
    except (ValueError, RecursionError):
        return None
    numbers = parsed if isinstance(parsed, dict) else {"reward": parsed}
    read = {key: number for key, value in numbers.items() if (number := _number(value)) is not None}
    if "reward" in read:
        return read
    if len(read) == 1 and len(numbers) == 1:
        return {"reward": next(iter(read.values()))}
    return None


def _number(value: Json) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
