"""/v1/results: rollouts as a table, with filters and full-text search, for people. Ended ones are in the catalog."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.catalog import Filter, InvalidSearch, Search
from rollyard.catalog.entries import agent_name, row_of
from rollyard.core import Json, Outcome, Rollout, State, check_id, id_of
from rollyard.core.failure import InvalidRequest
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.schemas.records import reply
from rollyard.service.schemas.requests import parse_number
from rollyard.service.security.access import caller_of

router = APIRouter(prefix="/v1", tags=["results"])

Reward = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200)]

ENDED, LIVE = "c", "l"
"""The first letter of a cursor: in the catalog, and among rollouts that have not ended."""

LIVE_STATES = tuple(state for state in State if state is not State.ENDED)

READS = 8
"""Times that live rollouts are read for one page: with filters that few of them pass, it is short."""


class ResultsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    run: str | None = None
    environment: Name | None = None
    agent: Name | None = None
    policy: Name | None = None
    version: int | None = Field(
        default=None, ge=0, le=1 << 53, description="Of weights that sampled one of its tokens."
    )
    outcome: Outcome | None = None
    code: Name | None = Field(default=None, description="Of its failure.")
    state: State | Literal["live"] = Field(default=State.ENDED, description="`live`: all that have not ended.")
    group: str | None = None
    trainable: bool | None = None
    min_reward: Reward | None = None
    max_reward: Reward | None = None
    search: str | None = Field(default=None, description="Words in messages and tool outputs; the last may be a start.")
    after: str | None = Field(default=None, max_length=40, description="The `next` of the previous page.")
    limit: int = Field(default=50, ge=1, le=200)


@router.get("/results")
async def list_results(request: Request, query: Annotated[ResultsQuery, Query()]) -> Response:
    """Returns a page of rollouts as rows of a table, newest first. Ended ones come from the catalog: `behind` is how
    many are not in it yet. `total` counts up to 10,000 rows."""
    app_state = app_state_of(request)
    wanted, search = await _wanted(request, query), _search(query)
    if query.state is not State.ENDED:
        return reply(await _live(app_state, query, wanted, search))
    before = parse_number(query.after, ENDED)
    caller = caller_of(request)
    page = await app_state.catalog.page(wanted, search, before=before, limit=query.limit, caller=caller.name)
    if query.run is not None:
        await app_state.run(caller, query.run)  # NotFound: it was deleted while the query waited for the catalog
    return reply(
        {
            "rows": [row.row for row in page.rows if app_state.is_still_readable(caller, str(row.row["run"]))],
            "next": None if page.next_seq is None else f"{ENDED}:{page.next_seq}",
            "total": page.total,
            "total_is_exact": page.is_total_exact,
            "behind": page.behind,
        }
    )


async def _wanted(request: Request, query: ResultsQuery) -> Filter:
    app_state, caller = app_state_of(request), caller_of(request)
    if query.run is not None:
        runs = ((await app_state.run(caller, query.run)).id,)
    else:
        runs = None if caller.is_admin else tuple(run.id for run in app_state.readable(caller))
    if query.min_reward is not None and query.max_reward is not None and query.min_reward > query.max_reward:
        raise InvalidRequest(f"min_reward: {query.min_reward:g} is more than max_reward, {query.max_reward:g}")
    return Filter(
        runs=runs,
        environment=query.environment,
        agent=query.agent,
        policy=query.policy,
        version=query.version,
        outcome=query.outcome,
        code=query.code,
        group=None if query.group is None else check_id(query.group, "group"),
        is_trainable=query.trainable,
        min_reward=query.min_reward,
        max_reward=query.max_reward,
    )


def _search(query: ResultsQuery) -> Search | None:
    if query.search is None or not query.search.strip():
        return None
    try:
        return Search.of(query.search)
    except InvalidSearch as error:
        raise InvalidRequest(f"search: {error}") from error


async def _live(app_state: AppState, query: ResultsQuery, wanted: Filter, search: Search | None) -> dict[str, Json]:
    """A page of rollouts that have not ended, from the store, by order of submission."""
    if search is not None:
        raise InvalidRequest("search: only ended rollouts can be searched")
    before = parse_number(query.after, LIVE)
    states = LIVE_STATES if query.state == "live" else (State(query.state),)
    rows, is_more = list[Json](), True
    for _ in range(READS):
        page, before = await _read_live(app_state, states, wanted, before, query.limit)
        last = before
        for rollout in page:
            policy = run.policy if (run := app_state.pipeline.run_of(rollout.run)) else ""
            if _passes(rollout, policy, wanted):
                rows.append(row_of(rollout, policy))
                if len(rows) == query.limit:
                    before = last if rollout is page[-1] else rollout.seq
                    break
        is_more = before is not None
        if not is_more or len(rows) == query.limit:
            break
    is_whole = not is_more and query.after is None
    return {
        "rows": rows,
        "next": f"{LIVE}:{before}" if is_more else None,
        "total": len(rows),
        "total_is_exact": is_whole,
        "behind": 0,
    }


async def _read_live(
    app_state: AppState, states: tuple[State, ...], wanted: Filter, before: int | None, limit: int
) -> tuple[list[Rollout], int | None]:
    """The newest rollouts in these states before a place in the order of submission, and the next place."""
    found, has_more = list[Rollout](), False
    for state in states:
        page = await app_state.store.list(
            state=state,
            runs=wanted.runs,
            group_named=wanted.group,
            after=None if before is None else f"sn:{before}",
            limit=limit,
            is_newest_first=True,
        )
        found += page.rollouts
        has_more = has_more or page.next_cursor is not None
    found = sorted({one.id: one for one in found}.values(), key=lambda one: -one.seq)  # one may have moved meanwhile
    if len(found) > limit:
        found, has_more = found[:limit], True
    return found, found[-1].seq if found and has_more else None


def _passes(rollout: Rollout, policy: str, wanted: Filter) -> bool:
    if wanted.outcome is not None or wanted.code is not None or wanted.version is not None:
        return False  # only ended rollouts have these
    if wanted.min_reward is not None or wanted.max_reward is not None or wanted.is_trainable:
        return False
    return (
        wanted.environment in (None, rollout.task.environment)
        and wanted.agent in (None, agent_name(rollout.task))
        and wanted.policy in (None, policy)
        and wanted.group in (None, None if rollout.group is None else id_of(rollout.group))
    )
