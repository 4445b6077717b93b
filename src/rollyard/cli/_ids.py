"""Resolves the ids that a person types: an id, or the first characters of one that no other id starts with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.cli._console import CommandError
from rollyard.core.failure import MalformedId, NotFound

if TYPE_CHECKING:
    from rollyard.client import AsyncClient

ELLIPSIS = "…"  # at the end of an id that a table has shortened
LISTED = 10

_NAMES = {"eval": "evaluation"}


async def full_id(client: AsyncClient, kind: str, text: str, run: str | None = None) -> tuple[str, str | None]:
    """Returns the id and the run of the item (rollout, group, draw, eval, run) with that id or unique prefix.

    Returns the text itself if nothing matches: the service reports that. Raises `CommandError` with the candidates if
    there are several.
    """
    prefix = text.rstrip(ELLIPSIS)
    try:
        found = await client.find_ids(kind, prefix, run=run)
    except (NotFound, MalformedId):  # the run does not exist, or it cannot be an id
        return text, run
    if not found:
        return text, run
    if len(found) == 1:
        return str(found[0]["id"]), run or str(found[0]["run"])
    name = _NAMES.get(kind, kind)
    if all(item["id"] == prefix for item in found):
        runs = ", ".join(str(item["run"]) for item in found)
        raise CommandError(f"the runs {runs} each have a {name} {prefix}", "select one with --run")
    is_one_run = kind == "run" or len({item["run"] for item in found}) == 1
    names = [str(item["id"]) + ("" if is_one_run else f" (run {item['run']})") for item in found[:LISTED]]
    more = f" and {len(found) - LISTED} or more others" if len(found) > LISTED else ""
    raise CommandError(
        f"several {name}s have an id that starts with {prefix}: {', '.join(names)}{more}", "type more of it"
    )
