"""Methods of the client for tokens and the audit log. For admins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollyard.client._bodies import part, without_none
from rollyard.client._transport import Transport
from rollyard.client.records import JsonObject, read_object
from rollyard.core import Json

Objects = list[JsonObject]


class AsyncAccess:
    """Mixin of `AsyncClient` for tokens and the audit log."""

    _wire: Transport

    async def create_token(
        self,
        access: str,
        *,
        name: str | None = None,
        runs: Sequence[str] | None = None,
        policies: Sequence[str] | None = None,
        expires_s: float | None = None,
        quota: Mapping[str, Json] | None = None,
    ) -> JsonObject:
        """Creates a token. `token` is returned only here.

        `access` is admin, trainer, submitter, reader or node; `runs` and `policies` bind it to names, in which `*`
        matches any text. `quota` has any of queued, live, sessions, stored_bytes, requests_per_s, priority.
        """
        body = without_none(
            access=access,
            name=name,
            runs=None if runs is None else [*runs],
            policies=None if policies is None else [*policies],
            expires_s=expires_s,
            quota=quota,
        )
        return read_object(await self._wire.json("POST", "/tokens", body=body))

    async def list_tokens(self) -> Objects:
        """The tokens that were created, without their secrets."""
        body = read_object(await self._wire.json("GET", "/tokens"))
        return [read_object(item) for item in body.get("tokens") or ()]

    async def rotate_token(self, id: str, *, expires_s: float | None = None) -> JsonObject:
        """Replaces a token's secret; the old one is refused from now on. What it owns stays its own."""
        body = without_none(expires_s=expires_s)
        return read_object(await self._wire.json("POST", f"/tokens/{part(id)}/rotate", body=body))

    async def change_quota(self, id: str, quota: Mapping[str, Json]) -> JsonObject:
        """Replaces a token's quota; see `create_token`. Quantities that are left out are no longer limited."""
        return read_object(await self._wire.json("PUT", f"/tokens/{part(id)}/quota", body=dict(quota)))

    async def revoke_token(self, id: str) -> None:
        await self._wire.json("DELETE", f"/tokens/{part(id)}")

    async def whoami(self) -> JsonObject:
        """The scope of this client's token, and the runs and policies that it is bound to."""
        return read_object(await self._wire.json("GET", "/login"))

    async def create_login_code(self) -> JsonObject:
        """Creates a `code` that signs a browser in to the dashboard once, as this client: open `URL/#code=CODE` within
        `expires_s`. Only for a service on loopback."""
        return read_object(await self._wire.json("POST", "/login/codes"))

    async def audit(self, *, limit: int = 100, before: int | None = None) -> Objects:
        """Administrative actions, newest first; `before` is the `seq` of the last entry of the previous call."""
        params = {"limit": limit, "before": before}
        body = read_object(await self._wire.json("GET", "/audit", params=params))
        return [read_object(item) for item in body.get("entries") or ()]
