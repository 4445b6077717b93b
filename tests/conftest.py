"""Shared by all tests. In CI (ROLLYARD_NO_SKIPS=1) a skip is a failure: it would hide a hole."""

import contextlib
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from rollyard.sandbox._cgroup_files import own_folders
from tests import real_vllm

NO_SKIPS = os.environ.get("ROLLYARD_NO_SKIPS") == "1"


def pytest_configure() -> None:
    """A suite that a script starts in the background ignores these, and so would the programs that it interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"skipped, though skips are failures here: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def no_groups_left() -> Generator[None, None, None]:
    """Control groups of services that a test killed: their next start would sweep them, and there is none.

    Removes what holds no process, and only what came since: thousands of them slow every walk of the tree down.
    """
    before = set(_groups())
    yield
    for group in set(_groups()) - before:
        for folder in [*group.glob("*/"), group]:
            with contextlib.suppress(OSError):  # something lives in it
                folder.rmdir()


def _groups() -> list[Path]:
    at = {Path(folder) for folder, _ in own_folders("/proc").values()}
    return [group for folder in at for group in folder.glob("rollyard-*/")]


@pytest.fixture(scope="session")
def vllm_folder() -> Path:
    """Where the real vLLM and its model are."""
    found = real_vllm.installed()
    if found is None:
        pytest.skip("no vLLM here: scripts/install-vllm-cpu sets one up")
    return found


@pytest.fixture(scope="session")
def vllm_url(vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """A real vLLM, started once for all tests."""
    with real_vllm.serving(vllm_folder, tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url
