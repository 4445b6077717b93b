"""Which lost attempts are a node's fault: the rules, and how a head applies them to reports."""

from pathlib import Path

import pytest

from rollyard.core import Ending, LostAttempt, Outcome, State
from rollyard.core.failure import EngineUnavailable, SandboxStartFailed, TokenizerMismatch
from rollyard.engines.pool.pool import Health
from rollyard.fleet.lost_attempts import DRAINED, MOST_EXCUSED, is_nodes_own
from rollyard.fleet.messages import Ended, Key, Returned
from rollyard.store.codec import to_json
from tests.fleet.test_head import Hand, opened

pytestmark = pytest.mark.slow

FINE = {"is_engine_up": True, "is_served": False, "has_others": True}


@pytest.mark.parametrize(
    ("code", "tokens", "excused", "more", "is_own"),
    [
        ("engine_unavailable", 0, 0, {}, True),
        ("engine_unavailable", 0, 0, {"is_engine_up": False}, False),  # it is down for the head, too
        ("engine_unavailable", 1, 0, {}, False),  # it had sampled tokens
        ("engine_unavailable", 0, MOST_EXCUSED, {}, False),
        ("tokenizer_mismatch", 0, 0, {}, True),
        ("engine_timeout", 0, 0, {}, True),
        ("engine_timeout", 0, 0, {"is_served": True}, False),  # a slow engine, not a node without one
        ("engine_refused", 0, 0, {}, False),  # the request was wrong
        ("sandbox_start_failed", 0, 0, {}, True),
        ("sandbox_start_failed", 0, 0, {"has_others": False}, False),
        ("sandbox_lost", 0, 0, {}, False),
    ],
)
def test_a_node_is_at_fault_only_for_what_it_lacks(
    code: str, tokens: int, excused: int, more: dict[str, bool], is_own: bool
) -> None:
    assert is_nodes_own(code, tokens, excused, **{**FINE, **more}) is is_own


def returned(key: Key, code: str = EngineUnavailable.code, *, tokens: int = 0, is_excused: bool = False) -> Returned:
    return Returned(key, LostAttempt(key.attempt, code, "no engine came up", State.RUN, tokens), is_excused)


def ended(key: Key, error: EngineUnavailable | TokenizerMismatch | SandboxStartFailed) -> Ended:
    return Ended(key, to_json(Ending(Outcome.FAILED, failure=error.failure(State.RUN))), None, 0)


async def test_attempts_lost_by_a_node_without_an_engine_do_not_count_up_to_a_limit(tmp_path: Path) -> None:
    async with opened(tmp_path, max_attempts=2) as (site, hand):
        await site.submit("r1")
        for _ in range(MOST_EXCUSED // 2):
            (key,) = await hand.leased(1)
            assert await hand.send_report(returned(key)) == []
            (key,) = await hand.leased(1)
            assert await hand.send_report(ended(key, TokenizerMismatch("its tokenizer is not there"))) == []
        (key,) = await hand.leased(1)
        assert key.attempt == MOST_EXCUSED + 1
        record = (await site.get("/v1/rollouts/r1")).body
        assert {lost["node"] for lost in record["lost"]} == {"hand"} and len(record["lost"]) == MOST_EXCUSED
        assert await hand.send_report(returned(key)) == []  # this attempt counts
        (key,) = await hand.leased(1)
        assert await hand.send_report(ended(key, EngineUnavailable("no engine of default came up"))) == []
        record = await site.ended("r1")
        assert (record["outcome"], record["failure"]["code"]) == ("failed", "engine_unavailable")
        assert record["failure"]["blame"] == "infra" and record["attempt"] == MOST_EXCUSED + 2


async def test_attempts_given_back_for_lack_of_an_engine_do_not_count_up_to_a_limit(tmp_path: Path) -> None:
    async with opened(tmp_path, max_attempts=1) as (site, hand):
        await site.submit("r1")
        for _ in range(MOST_EXCUSED):
            (key,) = await hand.leased(1)
            assert await hand.send_report(returned(key, is_excused=True)) == []
        (key,) = await hand.leased(1)
        assert await hand.send_report(returned(key, DRAINED, is_excused=True)) == [], "drains are always excused"
        (key,) = await hand.leased(1)
        assert await hand.send_report(returned(key, is_excused=True)) == []
        failure = (await site.ended("r1"))["failure"]
        assert failure["code"] == "engine_unavailable" and "were lost by their nodes" in failure["detail"]


async def test_attempts_with_tokens_or_an_engine_that_is_down_at_the_head_count(tmp_path: Path) -> None:
    async with opened(tmp_path, max_attempts=1, health_s=600) as (site, hand):
        await site.submit("r1", "r2")
        first, second = await hand.leased(2)
        assert await hand.send_report(returned(first, tokens=5)) == []
        (again,) = await hand.leased(1)
        assert again.id == first.id
        site.served.app_state.router.pool("default").members["e1"].set_health(Health.DOWN)
        assert await hand.send_report(ended(second, EngineUnavailable("it is gone"))) == []
        record = await site.ended("r2")
        assert record["failure"]["code"] == "engine_unavailable" and record["attempt"] == 1


async def test_a_lost_rollout_goes_to_another_node_if_one_wants_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (site, hand):
        await site.submit("r1")
        (key,) = await hand.leased(1)
        other = Hand(site.served.app_state.head, "other")
        other.join()
        assert await hand.send_report(ended(key, SandboxStartFailed("no namespaces here")), want=8) == []
        (again,) = await other.leased(1)
        assert again.attempt == 2
        assert (await site.get("/v1/rollouts/r1")).body["lost"][0]["node"] == "hand"


async def test_a_node_that_cannot_use_the_engine_gets_no_rollouts_and_status_shows_why(tmp_path: Path) -> None:
    async with opened(tmp_path) as (site, hand):
        hand.engines = {"e1": "connection refused by http://user:secret@gpu1:8000"}
        assert await hand.send_report(want=8) == []
        await site.submit("r1")
        assert not (await hand.poll_briefly()).leases
        status = (await site.get("/v1/status")).body
        assert "connection refused" in status["unserved_policies"]["default"]
        assert "secret" not in str(status["nodes"]) + str(status["unserved_policies"])
        (node,) = status["nodes"]
        assert node["engines"]["e1"]["is_reachable"] is False and "refused" in node["engines"]["e1"]["error"]
        metrics = (await site.get("/metrics")).body.decode()
        assert 'rollyard_node_engine_reachable{engine="e1",node="hand"} 0.0' in metrics
        assert 'rollyard_policy_unserved{policy="default"} 1.0' in metrics
        hand.engines = {"e1": ""}
        (key,) = await hand.leased(1)
        assert key.attempt == 1
        assert (await site.get("/v1/status")).body["unserved_policies"] == {}
