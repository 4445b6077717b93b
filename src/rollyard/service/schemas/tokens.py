"""The request bodies of /v1/tokens and /v1/login, and a token as a JSON object."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollyard.core.access import Access, Quota, TokenRecord
from rollyard.service.schemas.body import Body, Count, Priority, Seconds, Text
from rollyard.service.schemas.records import JsonObject

Patterns = Annotated[
    list[Annotated[str, Field(pattern=r"^[A-Za-z0-9*][A-Za-z0-9._:*-]{0,127}$")]], Field(max_length=64)
]


class QuotaBody(Body):
    """What the owner of a token may use at once; each optional."""

    queued: Count | None = Field(default=None, description="Queued rollouts.")
    live: Count | None = Field(default=None, description="Running rollouts.")
    sessions: Count | None = Field(default=None, description="Open sessions.")
    stored_bytes: Count | None = Field(default=None, description="Stored bytes of trajectories.")
    requests_per_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    priority: Priority | None = Field(default=None, description="The highest allowed priority.")

    def to_quota(self) -> Quota:
        return Quota(**vars(self))


class TokenBody(Body):
    """A new token. `runs` and `policies` bind it to names, in which `*` matches any text."""

    access: Access = Field(strict=False)
    name: Annotated[str, Field(max_length=256)] = ""
    runs: Patterns = Field(default_factory=list)
    policies: Patterns = Field(default_factory=list)
    expires_s: Seconds | None = Field(default=None, description="Seconds from now; unset: it does not expire.")
    quota: QuotaBody = Field(default_factory=QuotaBody)


class RotateBody(Body):
    expires_s: Seconds | None = Field(default=None, description="Seconds from now; unset: it does not expire.")


class LoginBody(Body):
    """Exactly one of the two."""

    code: Text | None = Field(default=None, description="The code of a link, which is used up.")
    token: Text | None = None


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
