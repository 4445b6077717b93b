"""A task that lists hosts, in a whole rollout: what it reaches in each stage, and what its record contains."""

from __future__ import annotations

import asyncio
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Outcome, Task
from rollyard.core.egress import EgressCeiling, EgressOptions, HostRule
from rollyard.core.failure import EgressNotAllowed, RollyardError, TaskInvalid
from rollyard.sandbox.egress import mirror_rule
from tests import worker
from tests.pipeline.site import finish, open_site, says, shell, shell_task
from tests.sandbox.egress.site import Names, Server, served

pytestmark = pytest.mark.slow


def asking(task: Task, *hosts: str, eval_hosts: tuple[str, ...] = ()) -> Task:
    return replace(task, sandbox=replace(task.sandbox, egress=EgressOptions(hosts, eval_hosts)))


def ceiling_texts(ceiling: EgressCeiling) -> tuple[str, ...]:
    return tuple(map(str, ceiling.hosts))


def fetch(port: int) -> str:
    return f"curl -sSf http://allowed.test:{port}/"


async def test_run_reaches_listed_hosts_and_eval_stays_offline(tmp_path: Path):
    async with served() as (server, names, ceiling):
        get = fetch(server.port)
        task = asking(shell_task(checks=[f"! {get}", 'test -z "$http_proxy"']), f"allowed.test:{server.port}")
        script = says(shell(f"{get}; curl -s http://other.test/"), finish())
        async with open_site(tmp_path, script, egress=ceiling, resolve=names) as site:
            rollout = await site.rolled(task)
            assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED
            assert rollout.ending.score is not None and rollout.ending.score.reward == 1.0
            egress: Any = rollout.ending.summary.egress
            assert {(host["host"], host["port"], host["verdict"], host["count"]) for host in egress["hosts"]} == {
                ("allowed.test", server.port, "allowed", 1),
                ("other.test", 80, "host", 1),
            }
            assert server.connections == 1 and names.asked == ["allowed.test"]
            metrics, _ = site.pipeline.metrics.render()
            assert b'rollyard_egress_connections_total{verdict="allowed"} 1.0' in metrics
            assert b'rollyard_egress_bytes_total{direction="received"}' in metrics
            site.nothing_left()


@pytest.mark.parametrize("mode", ["fresh", "same"])
async def test_hosts_can_be_listed_for_eval_alone(mode: str, tmp_path: Path):
    async with served() as (server, names, ceiling):
        get = fetch(server.port)
        task = asking(shell_task(checks=[get], eval=mode), eval_hosts=(f"allowed.test:{server.port}",))
        async with open_site(
            tmp_path, says(shell(f"{get} && touch reached"), finish()), egress=ceiling, resolve=names
        ) as site:
            rollout = await site.rolled(task)
            assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
            assert rollout.ending.score.reward == 1.0 and server.connections == 1


async def test_a_set_up_that_used_egress_is_not_shared_with_an_offline_task(tmp_path: Path):
    async with served() as (server, names, ceiling):
        task = shell_task(checks=["grep welcome got"], setup=[f"{fetch(server.port)} > got"])
        script = says(finish(), finish())
        async with open_site(tmp_path, script, egress=ceiling, resolve=names) as site:
            rollout = await site.rolled(asking(task, f"allowed.test:{server.port}"))
            assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
            assert rollout.ending.score.reward == 1.0
            assert rollout.ending.summary.egress["hosts"], "what the set-up reached is in the record"
            offline = await site.rolled(task)
            assert offline.ending is not None and offline.ending.failure is not None
            assert offline.ending.failure.code == "setup_failed" and server.connections == 1


async def test_a_set_up_whose_host_is_down_is_retried(tmp_path: Path):
    """It is not the task's failure and not remembered for other tasks: the third attempt finds the host."""
    async with served() as (server, names, ceiling):
        up = names.answers["allowed.test"]
        names.answers["allowed.test"] = []
        task = asking(
            shell_task(checks=["grep welcome got"], setup=[f"{fetch(server.port)} > got"]), *ceiling_texts(ceiling)
        )
        async with open_site(tmp_path, says(finish()), egress=ceiling, resolve=names) as site:
            rollout_id = await site.submit(task)
            async with asyncio.timeout(30):
                while not names.asked:
                    await asyncio.sleep(0.01)
            names.answers["allowed.test"] = up
            rollout = await site.ended(rollout_id)
            assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED, rollout.ending
            assert {lost.code for lost in rollout.lost} == {"tool_unreachable"}


async def test_an_eval_whose_host_is_down_is_retried_once_and_then_counts(tmp_path: Path):
    async with served() as (server, names, ceiling):
        names.answers["allowed.test"] = []
        task = asking(shell_task(checks=[fetch(server.port)]), eval_hosts=ceiling_texts(ceiling))
        async with open_site(tmp_path, says(finish()), egress=ceiling, resolve=names) as site:
            rollout = await site.rolled(task)
            assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
            assert rollout.ending.score.reward == 0.0 and names.asked == ["allowed.test"] * 2
            assert any("could not be found or connected to" in note for note in rollout.ending.summary.notes)


REFUSED: list[tuple[EgressOptions, EgressCeiling, type[RollyardError], str]] = [
    (EgressOptions(("packages.example",)), EgressCeiling(), EgressNotAllowed, "setting egress_hosts"),
    (EgressOptions(("*",)), EgressCeiling((HostRule("packages.example"),)), EgressNotAllowed, "is not among the hosts"),
    (EgressOptions((), ("*.org",)), EgressCeiling((HostRule("*.packages.example"),)), EgressNotAllowed, "eval_hosts"),
    (EgressOptions(("packages.example:22",)), EgressCeiling((HostRule("*"),)), EgressNotAllowed, "packages.example:22"),
    (EgressOptions(("10.0.0.1",)), EgressCeiling((HostRule("*"),)), EgressNotAllowed, "10.0.0.1"),
    (
        EgressOptions(("packages.example",), methods=("POST",)),
        EgressCeiling((HostRule("*"),)),
        EgressNotAllowed,
        "methods",
    ),
    (EgressOptions(("http://packages.example",)), EgressCeiling((HostRule("*"),)), TaskInvalid, "sandbox.egress.hosts"),
]


@pytest.mark.parametrize(("wanted", "ceiling", "error", "text"), REFUSED)
async def test_egress_that_the_operator_does_not_allow_is_refused_at_submit(
    wanted: EgressOptions, ceiling: EgressCeiling, error: type[RollyardError], text: str, tmp_path: Path
):
    async with open_site(tmp_path, says(finish()), egress=ceiling) as site:
        task = shell_task()
        with pytest.raises(error, match=text):
            site.pipeline.resources.check(replace(task, sandbox=replace(task.sandbox, egress=wanted)), site.run)


async def test_an_egress_ceiling_lowered_since_the_submit_is_enforced(tmp_path: Path):
    async with open_site(tmp_path, says(finish())) as site:
        rollout = await site.rolled(asking(shell_task(), "allowed.test"))
        assert rollout.ending is not None and rollout.ending.failure is not None
        assert rollout.ending.failure.code == "task_invalid" and "since the submit" in rollout.ending.failure.detail


class Index(Server):
    """A package index with one package, for pip."""

    def __init__(self, port: int, wheel: bytes) -> None:
        super().__init__(port)
        self._wheel = wheel

    async def respond(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = head.split()[1]
        body = self._wheel if path.endswith(b".whl") else b'<a href="/hi-1-py3-none-any.whl">hi-1-py3-none-any.whl</a>'
        kind = b"application/zip" if path.endswith(b".whl") else b"text/html"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, len(body)) + body)
        await writer.drain()


def make_wheel(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("hi.py", "print('hi from the mirror')\n")
        wheel.writestr("hi-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: hi\nVersion: 1\n")
        tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("hi-1.dist-info/WHEEL", tags)
        record = "".join(f"{name},,\n" for name in (*wheel.namelist(), "hi-1.dist-info/RECORD"))
        wheel.writestr("hi-1.dist-info/RECORD", record)
    return path.read_bytes()


async def test_pip_npm_and_apt_use_the_operators_mirrors(tmp_path: Path):
    """pip installs from one whose address is private; a task that names just the mirror is allowed it."""
    index, names = Index(worker.free_port(), make_wheel(tmp_path / "hi-1-py3-none-any.whl")), Names()
    names.answers["mirror.test"] = [["127.0.0.1"]]
    url = f"http://mirror.test:{index.port}/simple"
    mirrors = {"pip": url, "npm": "http://mirror.test/npm/", "apt": "http://mirror.test/debian"}
    ceiling = EgressCeiling(mirrors=mirrors, mirror_hosts=tuple(map(mirror_rule, mirrors.values())))
    commands = (
        "python3 -m pip install -q --no-cache-dir --target here hi > log 2>&1 && PYTHONPATH=here python3 -m hi > said;"
        " npm config get registry > npm; apt-config dump > apt; cat /.rollyard/apt.list >> apt"
    )
    checks = [
        "grep 'hi from the mirror' said",
        "grep 'http://mirror.test/npm/' npm",
        "grep 'Acquire::http::Proxy \"http://127.0.0.1:8130\"' apt",
        '. /etc/os-release; grep "deb http://mirror.test/debian $VERSION_CODENAME main" apt',
    ]
    task = asking(shell_task(checks=checks, eval="same"), f"mirror.test:{index.port}")
    task = replace(task, limits=replace(task.limits, tool_s=60.0, run_s=90.0))
    async with (
        await asyncio.start_server(index.answer, "127.0.0.1", index.port),
        open_site(tmp_path, says(shell(commands), finish()), egress=ceiling, resolve=names) as site,
    ):
        site.pipeline.resources.check(task, site.run)
        rollout = await site.rolled(task, within_s=100)
        assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
        assert rollout.ending.score.reward == 1.0, rollout.ending.score
