"""Exceptions in plugins' code are logged for the plugin's author, and clients cannot fill the log with them."""

from __future__ import annotations

import logging

import pytest

from rollyard.core.failure import EnvironmentBroken, NotFound
from rollyard.service import problems
from rollyard.service.problems import PluginErrors


def broken(detail: str) -> EnvironmentBroken:
    error = EnvironmentBroken(detail)
    error.__cause__ = NameError("absent")
    return error


def test_tracebacks_of_plugins_are_logged_at_a_limited_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = PluginErrors()
    with caplog.at_level(logging.WARNING, "rollyard.service"):
        for number in range(1000):
            errors.log(broken(f"check raised {number}"))
        assert [record.detail for record in caplog.records] == ["check raised 0"]  # type: ignore[attr-defined]
        assert caplog.records[0].exc_info
        monkeypatch.setattr(problems, "PLUGIN_LOG_EVERY_S", 0.0)
        errors.log(broken("another"))
    assert caplog.records[1].not_logged_before == 999  # type: ignore[attr-defined]


def test_errors_of_clients_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    PluginErrors().log(NotFound("there is no rollout 'x'"))
    assert not caplog.records
