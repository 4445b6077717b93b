"""The bodies of /v1/tokens, and a token as it is shown."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollyard.core.access import Access, Quota, TokenRecord
from rollyard.service.models import Body, Count, Priority, Seconds
from rollyard.service.records import JsonObject

Patterns = Annotated[
    list[Annotated[str, Field(pattern=r"^[A-Za-z0-9*][A-Za-z0-9._:*-]{0,127}$")]], Field(max_length=64)
]


class QuotaBody(Body):
    """What its owner may use at once; each optional."""

    queued: Count | None = Field(default=None, description="Rollouts that wait.")
    live: Count | None = Field(default=None, description="Rollouts that run.")
    sessions: Count | None = Field(default=None, description="Open at once.")
    stored_bytes: Count | None = Field(default=None, description="Of trajectories.")
    requests_per_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    priority: Priority | None = Field(default=None, description="The highest that it may ask for.")

    def to_quota(self) -> Quota:
        return Quota(**vars(self))


class TokenBody(Body):
    """A new token. `runs` and `policies` bind it to names; `*` stands for any text."""

    access: Access = Field(strict=False)
    name: Annotated[str, Field(max_length=256)] = ""
    runs: Patterns = Field(default_factory=list)
    policies: Patterns = Field(default_factory=list)
    expires_s: Seconds | None = Field(default=None, description="Seconds from now; unset: it does not expire.")
    quota: QuotaBody = Field(default_factory=QuotaBody)


class RotateBody(Body):
    expires_s: Seconds | None = Field(default=None, description="Seconds from now; unset: it does not expire.")


def token_object(record: TokenRecord) -> JsonObject:
    return {
        "id": record.id,
        "access": record.access,
        "name": record.name,
        "runs": record.runs,
        "policies": record.policies,
        "created_at": record.created_at,
        "created_by": record.created_by,
        "expires_at": record.expires_at,
        "quota": record.quota,
    }
