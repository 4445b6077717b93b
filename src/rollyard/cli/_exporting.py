"""Writes rollouts of a service to files: pages that need no service, and ATIF."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rollyard.cli._console import CommandError, err, note
from rollyard.cli._ids import full_id
from rollyard.core.failure import Gone, NotFound, RollyardError
from rollyard.core.files import replacing
from rollyard.exports.replies import Recorded, Reply, part_paths, recorded, without_files

if TYPE_CHECKING:
    from rollyard.client import AsyncClient, Record

AHEAD = 8  # rollouts that are read at once
PAGE = 200  # rollouts listed by one call

JsonObject = dict[str, Any]


async def record_rollout(client: AsyncClient, record: Record) -> Recorded:
    """Reads all that the rollout's page shows. What the service does not have is recorded as its reply."""
    raw = await _with_trajectory(client, record)
    paths = part_paths(raw)
    replies = await asyncio.gather(*(_reply(client, path, record.run) for path in paths.values()))
    parts = dict(zip(paths, replies, strict=True))
    if parts["artifacts"].status == 200:
        parts["artifacts"] = Reply(200, without_files(parts["artifacts"].body))
    return recorded(raw, parts)


async def _reply(client: AsyncClient, path: str, run: str) -> Reply:
    from rollyard.client import ServiceUnreachable

    try:
        return Reply(200, await client.get_json(path, run=run))
    except ServiceUnreachable:
        raise
    except RollyardError as error:
        problem = {"code": error.code, "detail": error.detail, "remedy": error.remedy}
        return Reply(error.status, {**problem, "status": error.status})


async def _with_trajectory(client: AsyncClient, record: Record) -> JsonObject:
    path = f"/rollouts/{quote(record.id, safe='')}"
    return await client.get_json(path, include="trajectory", run=record.run)


async def write_rollouts(client: AsyncClient, records: Sequence[Record], path: Path) -> None:
    """Writes one page with these rollouts. Raises `CommandError`."""
    limit = asyncio.Semaphore(AHEAD)

    async def read(record: Record) -> Recorded:
        async with limit:
            return await record_rollout(client, record)

    pages = await asyncio.gather(*(read(record) for record in records))
    await asyncio.to_thread(write_file, path, pages)


async def write_kept_page(client: AsyncClient, records: Sequence[Record], name: str) -> Path:
    """Writes one page to a temporary folder that is kept, and returns its path. Only this user can read it."""
    path = Path(tempfile.mkdtemp(prefix=f"rollyard-{name}-")) / "rollouts.html"
    await write_rollouts(client, records, path)
    return path


def write_file(path: Path, rollouts: Any) -> None:
    """Writes a page. Raises `CommandError` if it cannot be written or is too large."""
    from rollyard.exports.html import TooLarge, write_page

    try:
        write_page(path, rollouts)
    except TooLarge as error:
        raise CommandError(f"{path} was not written: {error}", "export fewer rollouts") from error
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}", "give another file") from error


async def export_rollout(
    client: AsyncClient, id: str, in_run: str | None, wait_s: float, *, html: Path | None, atif: Path | None
) -> JsonObject:
    """Writes one rollout to the given files and returns their names."""
    from rollyard.exports.atif import NoConversation, to_atif
    from rollyard.exports.encoding import json_line

    full, run = await full_id(client, "rollout", id, in_run)
    record = await client.get(full, wait_s=wait_s, run=run)
    if not record.is_ended:
        raise CommandError(f"rollout {full} has not ended: it is in {record.state}", "wait for it with --wait-s 60")
    written: JsonObject = {"id": record.id, "run": record.run}
    if html is not None:
        await write_rollouts(client, [record], html)
        written["html"] = str(html)
    if atif is not None:
        try:
            body = to_atif(await _with_trajectory(client, record))
        except NoConversation as error:
            raise CommandError(str(error), "see its failure: rollyard rollouts show") from error
        try:
            await asyncio.to_thread(atif.write_bytes, json_line(body))
        except OSError as error:
            raise CommandError(f"{atif} cannot be written: {error.strerror}", "give another file") from error
        written["atif"] = str(atif)
    return written


async def export_run(client: AsyncClient, run: str, path: Path) -> JsonObject:
    """Writes all ended rollouts of a run to a file, one ATIF trajectory per line, and returns their number.

    At most `AHEAD` rollouts are in memory. The file appears when it is complete.
    """
    from rollyard.exports.atif import NoConversation, to_atif
    from rollyard.exports.encoding import json_line

    total = ((await client.get_run(run, results=True)).get("results") or {}).get("states", {}).get("ended")
    written = skipped = 0
    try:
        with replacing(path) as file, _progress(total) as advance:
            async for body in _bodies(client, run):
                try:
                    line = None if body is None else await asyncio.to_thread(lambda body=body: json_line(to_atif(body)))
                except NoConversation:
                    line = None
                if line is None:
                    skipped += 1
                else:
                    await asyncio.to_thread(file.write, line)
                    written += 1
                advance()
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}", "give another file") from error
    return {"run": run, "atif": str(path), "written": written, "skipped": skipped}


async def _bodies(client: AsyncClient, run: str) -> AsyncIterator[JsonObject | None]:
    """Yields the ended rollouts of a run with their trajectories, in the order in which they ended; None for those
    whose trajectory is no longer stored."""

    async def read(record: Record) -> JsonObject | None:
        try:
            return await _with_trajectory(client, record)
        except (Gone, NotFound):
            return None

    after: str | None = None
    while True:
        page = await client.list(state="ended", run=run, after=after, limit=PAGE)
        for start in range(0, len(page.rollouts), AHEAD):
            for body in await asyncio.gather(*map(read, page.rollouts[start : start + AHEAD])):
                yield body
        if not page.rollouts or page.next == after:
            return
        after = page.next


class _progress:
    """Counts rollouts on stderr: a bar on a terminal, otherwise a line for each thousand."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._bars: Any = None
        console = err()
        if console.is_terminal:
            from rich.progress import Progress

            self._bars = Progress(console=console, transient=True)
            self._bar = self._bars.add_task("rollouts", total=total)

    def __enter__(self) -> Callable[[], None]:
        if self._bars is not None:
            self._bars.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _advance(self) -> None:
        self._done += 1
        if self._bars is not None:
            self._bars.advance(self._bar)
        elif self._done % 1000 == 0:
            note(f"{self._done:,} of {self._total or '?'} rollouts")
