from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Generator

import pytest

from rollyard.observe import bound, configure


@pytest.fixture
def out() -> Generator[io.StringIO, None, None]:
    """The stream of the configured logs, for one test."""
    root = logging.getLogger()
    level, stream = root.level, io.StringIO()
    yield stream
    root.setLevel(level)
    for handler in [h for h in root.handlers if getattr(h, "stream", None) is stream]:
        root.removeHandler(handler)


log = logging.getLogger("rollyard.test")


def test_a_line_is_one_json_object_with_its_fields(out: io.StringIO) -> None:
    configure(stream=out)
    log.info("rollout %s", "ended", extra={"rollout": "a", "seconds": 1.5, "labels": {"x": [1]}})
    log.debug("too low")
    (line,) = out.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "info",
        "logger": "rollyard.test",
        "message": "rollout ended",
        "rollout": "a",
        "seconds": 1.5,
        "labels": {"x": [1]},
    }


def test_an_exception_is_logged_in_one_line(out: io.StringIO) -> None:
    configure(stream=out)
    try:
        raise ValueError("no\nway")
    except ValueError:
        log.exception("it failed")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: no\nway" in json.loads(line)["exception"]


def test_secrets_are_hidden_and_long_values_are_truncated(out: io.StringIO) -> None:
    configure(stream=out)
    extra = {"api_key": "k", "Authorization": "Bearer t", "token": "t", "sampled_tokens": 7, "detail": "x" * 9000}
    log.info("hello", extra=extra)
    entry = json.loads(out.getvalue())
    assert entry["api_key"] == entry["Authorization"] == entry["token"] == "***"
    assert entry["sampled_tokens"] == 7 and len(entry["detail"]) < 2100 and "9000 characters" in entry["detail"]


@pytest.mark.parametrize(
    "value", [object(), {1: {2}}, "\ud800", 2**70, {"x": "\udcff"}], ids=["object", "set", "surrogate", "big", "nested"]
)
def test_values_that_cannot_be_encoded_are_still_logged(value: object, out: io.StringIO) -> None:
    configure(stream=out)
    log.info("hello", extra={"value": value})
    assert json.loads(out.getvalue())["message"].strip("'") == "hello"


def test_the_console_style_is_readable(out: io.StringIO) -> None:
    configure(style="console", stream=out)
    log.warning("slow\nengine", extra={"engine": "e", "detail": "two words", "empty": ""})
    line = out.getvalue()
    assert line.endswith("warning rollyard.test slow\\nengine engine=e detail='two words' empty=''\n")


async def test_bound_fields_apply_to_one_task(out: io.StringIO) -> None:
    configure(stream=out)

    async def work(rollout: str) -> None:
        with bound(rollout=rollout):
            await asyncio.sleep(0)
            with bound(stage="run"):
                log.info("working")
            log.info("done", extra={"rollout": "its own"})

    await asyncio.gather(work("a"), work("b"))
    log.info("outside")
    entries = [json.loads(line) for line in out.getvalue().splitlines()]
    inside = [(line["rollout"], line["stage"]) for line in entries if line["message"] == "working"]
    assert sorted(inside) == [("a", "run"), ("b", "run")]
    assert {line["rollout"] for line in entries if line["message"] == "done"} == {"its own"}
    assert all("stage" not in line for line in entries if line["message"] != "working") and "rollout" not in entries[-1]


def test_configuring_twice_logs_once(out: io.StringIO) -> None:
    configure(stream=io.StringIO())
    configure(stream=out, level="WARNING")
    log.info("no")
    log.warning("yes")
    assert len(out.getvalue().splitlines()) == 1
