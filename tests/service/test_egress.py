"""A service whose tasks may reach hosts: its settings, and the responses to submits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.core.egress import EgressOptions, HostRule
from rollyard.core.task import Task
from rollyard.service.node_settings import for_nodes, node_settings
from rollyard.service.schemas.task import to_task
from rollyard.service.settings import Settings, SettingsError, load_settings
from rollyard.store.codec import from_json, to_json
from tests.service.site import open_site, task

EGRESS: dict[str, Any] = {"hosts": ["packages.example", "*.files.example:8443"], "eval_hosts": ["packages.example"]}


def asking(**fields: Any) -> dict[str, Any]:
    return {"task": task(sandbox={"egress": {**EGRESS, **fields}, "runtime": "bubblewrap"})}


async def test_egress_without_allowed_hosts_is_refused_with_a_remedy(tmp_path: Path) -> None:
    async with open_site(tmp_path, runtimes=("local", "bubblewrap")) as site:
        refused = await site.post("/v1/rollouts", asking())
        assert (refused.status, refused.code) == (403, "egress_not_allowed")
        assert "egress_hosts" in refused.body["detail"] and "egress_hosts" in refused.body["remedy"]


async def test_a_submit_beyond_the_egress_ceiling_is_refused(tmp_path: Path) -> None:
    hosts = ("packages.example", "*.example:8443")
    async with open_site(tmp_path, runtimes=("local", "bubblewrap"), egress_hosts=hosts) as site:
        assert (await site.post("/v1/rollouts", asking())).status == 202
        over = await site.post("/v1/rollouts", asking(hosts=["elsewhere.example"]))
        assert over.code == "egress_not_allowed" and "elsewhere.example" in over.body["detail"]
        assert (await site.post("/v1/rollouts", asking(methods=["POST"]))).code == "egress_not_allowed"
        for wrong in ({"methods": ["TRACE"]}, {"hosts": ["x"] * 65}, {"hosts": [""]}, {"host": ["x"]}, {"methods": []}):
            assert (await site.post("/v1/rollouts", asking(**wrong))).status == 422, wrong
        nonsense = await site.post("/v1/rollouts", asking(hosts=["http://packages.example/"]))
        assert nonsense.status == 422 and "sandbox.egress.hosts" in nonsense.body["detail"]
        local = {"task": task(sandbox={"egress": EGRESS, "runtime": "local"})}
        unheld = await site.post("/v1/rollouts", local)
        assert unheld.status == 422 and "cannot restrict a task to a list of hosts" in unheld.body["detail"]
        defaults = {"sandbox": {"egress": {"hosts": ["elsewhere.example"]}, "runtime": "bubblewrap"}}
        assert (await site.post("/v1/runs", {"id": "r", "defaults": defaults})).status == 201
        assert (await site.post("/v1/rollouts", {"run": "r", "task": task()})).code == "egress_not_allowed"


def test_a_stored_task_keeps_its_egress_options() -> None:
    stored = to_task({"environment": "shell", "sandbox": {"egress": EGRESS}}, {})
    assert stored.sandbox.egress == EgressOptions(tuple(EGRESS["hosts"]), ("packages.example",), ("GET", "HEAD"))
    assert from_json(to_json(stored), Task) == stored
    offline = replace(stored, sandbox=replace(stored.sandbox, egress=None))
    assert from_json(to_json(offline), Task) == offline


def test_the_egress_ceiling_follows_from_settings_and_is_the_same_on_nodes() -> None:
    environ = {
        "HOME": "/nowhere",
        "ROLLYARD_EGRESS_HOSTS": "a.example, *.b.example:8443",
        "ROLLYARD_EGRESS_PRIVATE": '["mirror.internal:8081"]',
        "ROLLYARD_EGRESS_MIRRORS": '{"pip": "http://mirror.internal:8081/simple", "apt": "https://deb.internal/debian"}',
        "ROLLYARD_EGRESS_BYTES": "1000",
    }
    settings = load_settings({}, environ, None).settings
    ceiling = settings.egress
    assert ceiling.hosts == (HostRule("a.example"), HostRule("*.b.example", (8443,)))
    assert ceiling.private == (HostRule("mirror.internal", (8081,)),)
    assert ceiling.mirror_hosts == (HostRule("mirror.internal", (8081,)), HostRule("deb.internal", (443,)))
    assert (ceiling.most_bytes, ceiling.connections, ceiling.methods) == (1000, 32, ("GET", "HEAD"))
    assert node_settings(for_nodes(settings), Path("/nowhere"), {}).egress == ceiling
    assert Settings().egress.hosts == ()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("EGRESS_HOSTS", "http://a.example", "egress_hosts"),
        ("EGRESS_HOSTS", "127.1", "egress_hosts"),
        ("EGRESS_PRIVATE", "mirror.internal", "HOST:PORT"),
        ("EGRESS_PRIVATE", "*.internal:80", "HOST:PORT"),
        ("EGRESS_MIRRORS", '{"gem": "http://a.example"}', "egress_mirrors"),
        ("EGRESS_MIRRORS", '{"pip": "http://me:secret@a.example"}', "visible to every task"),
        ("EGRESS_METHODS", "CONNECT", "egress_methods"),
        ("EGRESS_CONNECTIONS", "0", "egress_connections"),
    ],
)
def test_invalid_egress_settings_are_refused(name: str, value: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        load_settings({}, {"HOME": "/nowhere", f"ROLLYARD_{name}": value}, None)
