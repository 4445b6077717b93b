"""`rollyard access` with a real service."""

from tests.cli.conftest import Cli
from tests.client.served import RunningService


async def test_tokens_are_created_listed_rotated_and_revoked(cli: Cli, service: RunningService):
    assert "no token has been created" in (await cli("access", "list")).err
    created = await cli("access", "create", "trainer", "--name", "alice", "--run", "a-*", "--policy", "actor")
    token = created.out.strip()
    assert (
        created.status == 0
        and token.startswith("ryt_")
        and "shown only once" in created.err
        and token not in created.err
    )
    assert (await cli("runs", "create", "a-run", "--policy", "actor", "--token", token)).status == 0
    refused = await cli("runs", "create", "other", "--token", token)
    assert refused.status == 1 and "bound to the runs a-*" in refused.err
    (listed,) = (await cli("access", "list", "--json")).json
    assert (listed["access"], listed["name"], listed["runs"]) == ("trainer", "alice", ["a-*"])
    listing = (await cli("access", "list")).out
    assert "alice" in listing and "a-*" in listing and token not in listing
    rotated = (await cli("access", "rotate", listed["id"], "--json")).json[0]
    assert (await cli("runs", "list", "--token", token)).status == 1
    assert "a-run" in (await cli("runs", "list", "--token", rotated["token"])).out
    revoked = await cli("access", "revoke", listed["id"])
    assert revoked.status == 0 and "is revoked" in revoked.err
    assert "this token is unknown" in (await cli("runs", "list", "--token", rotated["token"])).err
    assert "there is no token" in (await cli("access", "revoke", listed["id"])).err


async def test_a_quota_is_changed(cli: Cli, service: RunningService):
    await cli("access", "create", "trainer", "--live", "1", "--queued", "5")
    (listed,) = (await cli("access", "list", "--json")).json
    changed = await cli("access", "quota", listed["id"], "--live", "7")
    assert changed.status == 0 and "live 7" in changed.err
    (listed,) = (await cli("access", "list", "--json")).json
    assert (listed["quota"]["live"], listed["quota"]["queued"]) == (7, None)
    assert "no quota" in (await cli("access", "quota", listed["id"])).err
    missing = await cli("access", "quota", "tok_none", "--live", "7")
    assert missing.status == 1 and "there is no token 'tok_none'" in missing.err


async def test_the_audit_log_is_shown(cli: Cli, service: RunningService):
    await cli("access", "create", "reader", "--name", "dash", "--expires-s", "60")
    await cli("engines", "clear")
    entries = (await cli("access", "log", "--json")).json
    assert [one["action"] for one in entries] == ["remove_engine", "create_token"]
    log_output = (await cli("access", "log", "--limit", "1")).out
    assert "remove_engine" in log_output and "create_token" not in log_output
    assert "create_token" in (await cli("access", "log", "--before", entries[0]["seq"])).out


async def test_errors_are_reported(cli: Cli, service: RunningService):
    unknown = await cli("access", "create", "root")
    assert unknown.status == 1 and "access: " in unknown.err
    assert (await cli("access", "create", "reader", "--run", "a b")).status == 1
    reader = (await cli("access", "create", "reader")).out.strip()
    assert "is for admins" in (await cli("access", "list", "--token", reader)).err
