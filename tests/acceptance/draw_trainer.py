"""A trainer that may be killed at any time: takes batches, logs them to a journal, raises the version, acknowledges.

Its only state is the journal; a new trainer continues with the same draw id.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from rollyard import AsyncClient

BATCH_SIZE = 4
ACK_EVERY = 5  # after a kill between two acknowledgements, batches are delivered again


async def main(url: str, token: str, journal: Path, on_stale: str, batches: int, tasks: Path) -> None:
    async with AsyncClient(url, token, retry_s=120) as client:
        draw = await client.draw(
            "default",
            [json.loads(line) for line in tasks.read_text().splitlines()],
            id="d",
            group_size=2,
            max_staleness=1,
            on_stale=on_stale,
            spares=4,
        )
        policy = client.policy("default")
        while True:
            batch = await draw.batch(BATCH_SIZE)
            with journal.open("a") as file:
                file.write(json.dumps(_entry(batch)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if batch.number > (await policy.status())["version"]:
                async with policy.update(batch.number, lease_s=2.0):
                    await asyncio.sleep(0.01)
            if batch.number % ACK_EVERY == 0:
                await draw.ack(batch)
            if batch.number >= batches:
                return


def _entry(batch) -> dict[str, object]:  # type: ignore[no-untyped-def]
    return {
        "number": batch.number,
        "version": batch.version,
        "groups": [
            {
                "id": group.id,
                "admitted": group.admitted_version,
                "oldest": group.oldest_version,
                "rewards": [rollout.reward for rollout in group.rollouts],
                "tokens": [[trace.token_ids.tolist() for trace in rollout.traces] for rollout in group.rollouts],
            }
            for group in batch.groups
        ],
    }


if __name__ == "__main__":
    url, token, journal, on_stale, batches, tasks = sys.argv[1:]
    asyncio.run(main(url, token, Path(journal), on_stale, int(batches), Path(tasks)))
