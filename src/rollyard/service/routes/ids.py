"""/v1/ids: the full ids of a prefix, for people who type ids."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import check_id, id_of
from rollyard.service.app_state import app_state_of
from rollyard.service.schemas.records import reply
from rollyard.service.security.access import caller_of
from rollyard.store.base import ItemKind

router = APIRouter(prefix="/v1", tags=["ids"])

MOST = 20

_KINDS = {"rollout": ItemKind.ROLLOUT, "group": ItemKind.GROUP, "draw": ItemKind.DRAW, "eval": ItemKind.EVAL}


class IdsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["rollout", "group", "draw", "eval", "run"]
    prefix: str = Field(description="An id, or the first characters of one.")
    run: str | None = Field(default=None, description="Only ids of this run.")


@router.get("/ids")
async def find_ids(request: Request, query: Annotated[IdsQuery, Query()]) -> Response:
    """Returns the items with that id, or else those whose ids start with it: at most 20, each with its run. Other
    routes accept only full ids."""
    app_state, caller = app_state_of(request), caller_of(request)
    prefix = check_id(query.prefix, "prefix")
    if query.run is not None:
        runs = [(await app_state.run(caller, query.run)).id]
    else:
        runs = [run.id for run in app_state.readable(caller)]
    if query.kind == "run":
        names = [name for name in runs if name == prefix] or [name for name in runs if name.startswith(prefix)]
        return reply({"ids": [{"id": name, "run": name} for name in sorted(names)[:MOST]]})
    kind, readable = _KINDS[query.kind], set(runs)
    keys = {key: run for key, run in (await app_state.store.named(kind, prefix)).items() if run in readable}
    keys = keys or await app_state.store.prefixed(kind, prefix, runs, MOST)
    return reply({"ids": [{"id": id_of(key), "run": run} for key, run in sorted(keys.items())]})
