"""`rollyard policies` with a real service: policies are paused and resumed by hand."""

from rollyard.client import AsyncClient
from tests.cli.conftest import Cli
from tests.client.served import RunningService


async def test_policies_are_listed_paused_and_resumed(cli: Cli, service: RunningService):
    (policy,) = (await cli("policies", "list", "--json")).json
    assert (policy["name"], policy["state"], policy["version"]) == ("default", "running", 0)
    paused = await cli("policies", "pause", "default", "--mode", "drain", "--engine", "e0", "--json")
    assert (paused.json[0]["state"], paused.json[0]["mode"]) == ("paused", "drain") and service.engine.control.is_paused
    result = await cli("policies", "list")
    assert "paused" in result.out and "up (paused)" in result.out
    assert "running" in (await cli("policies", "resume", "default", "7")).out and not service.engine.control.is_paused
    assert (await cli("policies", "list", "--json")).json[0]["version"] == 7
    assert (await cli("policies", "resume", "missing", "7")).status == 1
    assert (await cli("policies", "resume", "default", "x")).status == 2
    assert (await cli("engines", "clear")).status == 0
    assert (await cli("policies", "list", "--json")).json[0]["engines"] == [], "its version is kept"


async def test_a_trainers_pause_is_resumed_by_hand_only_with_take_over(cli: Cli, service: RunningService):
    async with AsyncClient(service.url, service.token) as trainer:
        await trainer.policy("default").pause()
        refused = await cli("policies", "resume", "default", "7")
        assert refused.status == 1 and "held by" in refused.err and "--take-over" in refused.err
        assert trainer._holder.id in (await cli("policies", "list", "--json")).json[0]["holder"]
        assert (await cli("policies", "resume", "default", "7", "--take-over")).status == 0
        assert (await trainer.policy("default").status())["version"] == 7


async def test_an_engine_that_does_not_resume_is_reported(cli: Cli, service: RunningService):
    await cli("policies", "pause", "default")
    service.engine.control.fail("resume", 1, 500)
    result = await cli("policies", "resume", "default", "1")
    assert result.status == 1 and "it did not resume" in result.err and "fix the engines" in result.err
    assert "quarantined" in (await cli("policies", "list")).out
    assert (await cli("policies", "resume", "default", "1")).status == 0


async def test_an_empty_list_of_policies_has_a_hint(cli: Cli, service: RunningService):
    await cli("engines", "clear")
    assert "it is created with its first engine" in (await cli("policies", "list")).err
