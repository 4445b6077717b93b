"""/v1/runs/{run_id}/series: a run's figures over time or over weight versions, from the catalog."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.catalog.series import Series
from rollyard.core import GroupState
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.schemas.records import JsonObject, reply
from rollyard.service.security.access import caller_of
from rollyard.store.base import GroupCount

router = APIRouter(prefix="/v1", tags=["runs"])


class SeriesQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    by: Literal["time", "version"] = Field(default="time", description="What x is: unix times, or weight versions.")
    points: int = Field(default=60, ge=2, le=500, description="The most points that are returned.")


@router.get("/runs/{run_id}/series")
async def get_series(request: Request, run_id: str, query: Annotated[SeriesQuery, Query()]) -> Response:
    """Returns means and counts of a run's ended rollouts, one for each point of `x`: the start of a span of time, or
    the newest weight version of the rollouts. `staleness`: by how many versions a rollout's oldest token is older than
    the newest that its run had sampled with. `failures` are by code and blame. `group_counts` and `group_tokens` are of
    the groups that have ended, by state: each at the point of its last change, or of its newest weight version."""
    app_state = app_state_of(request)
    caller = caller_of(request)
    run = await app_state.run(caller, run_id)
    found = await app_state.catalog.series(run.id, query.by, query.points, caller=caller.name)
    ended = [one for one in found.groups if one.state is not GroupState.OPEN]
    tokens = await _tokens(app_state, run.id)
    app_state.require_still_readable(caller, run.id)  # this query may have waited for others of the caller
    return reply(
        {
            "by": found.by,
            "x": found.x,
            "count": found.count,
            "reward": found.reward,
            "pass_rate": found.pass_rate,
            "response_tokens": found.response_tokens,
            "turns": found.turns,
            "staleness": found.staleness,
            "share": found.share,
            "failures": found.failures,
            "groups": {state: sum(one.number for one in found.groups if one.state is state) for state in GroupState},
            "group_counts": _columns(found, [(one, one.number) for one in ended]),
            "group_tokens": _columns(found, [(one, one.tokens) for one in ended]),
            "tokens": {"sampled": found.sampled_tokens, **tokens},
            "environments": found.environments,
            "totals": found.totals,
        }
    )


def _columns(series: Series, counts: Sequence[tuple[GroupCount, int]]) -> dict[GroupState, list[int]]:
    """The sums of the numbers by state, at the points of a series. Groups that changed after its last rollout had ended
    are at the last point."""
    columns: dict[GroupState, list[int]] = {}
    for one, number in counts:
        if one.place is None or not series.x:
            continue
        point = max(0, bisect_right(series.x, one.place * series.width) - 1)
        columns.setdefault(one.state, [0] * len(series.x))[point] += number
    return columns


async def _tokens(app_state: AppState, run_id: str) -> JsonObject:
    """Tokens of the groups of the run's draws, by what became of them."""
    tokens = {"delivered": 0, "filtered": 0, "lost": 0}
    for draw in await app_state.store.list_draws([run_id]):
        figures = draw.progress.figures
        tokens["delivered"] += figures.tokens_delivered
        tokens["filtered"] += figures.tokens_filtered
        tokens["lost"] += figures.tokens_lost
    return tokens
