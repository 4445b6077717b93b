"""The request bodies of /v1/policies, and a policy as a JSON object."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollyard.core import Json
from rollyard.engines.weights.state import LEASE_S, PolicyStatus
from rollyard.service.schemas.body import Body, Name, Seconds
from rollyard.service.schemas.records import without_password

Version = Annotated[int, Field(ge=0, le=2**31 - 1)]  # the width of a trace's version column
Holder = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
EngineIds = Annotated[list[Name], Field(min_length=1, max_length=10_000)]


class PauseBody(Body):
    """`engines`: pause only these; the others continue. `wait_s`: how long the call waits; if the state is still
    pausing then, send the call again to wait further. `holder`: distinguishes callers that share a token; the pause is
    renewed and ended under the same name. `after`: the version that the caller expects; refused if it has changed."""

    mode: Literal["drain", "abort", "keep"] = "abort"
    lease_s: Seconds = LEASE_S
    engines: EngineIds | None = None
    wait_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] | None = None
    holder: Holder | None = None
    after: Version | None = None


class ResumeBody(Body):
    """`holder` and `after` as in a pause. `take_over`: resume even if another holder has paused the policy."""

    version: Version
    engines: EngineIds | None = None
    holder: Holder | None = None
    after: Version | None = None
    take_over: bool = False


class RenewBody(Body):
    lease_s: Seconds = LEASE_S
    holder: Holder | None = None


class OwnerBody(Body):
    owner: Name | None


def policy_object(status: PolicyStatus, owner: str | None) -> dict[str, Json]:
    return {
        "name": status.name,
        "owner": owner,
        "version": status.version,
        "state": status.state,
        "mode": status.mode,
        "lease_s": status.lease_s,
        "lease_left_s": status.lease_left_s,
        "holder": status.holder,
        "engines": [
            {
                "id": engine.id,
                "version": engine.version,
                "state": engine.health,
                "paused": engine.is_paused,
                "error": without_password(engine.error) if engine.error else None,
            }
            for engine in status.engines
        ],
    }
