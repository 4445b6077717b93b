"""Python functions as tools: their schemas, their arguments, and their results."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import re
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from rollyard.agents.arguments import wrong_arguments
from rollyard.core import Json
from rollyard.core.failure import SandboxLost, UnknownTool
from rollyard.sandbox import LocalRuntime, Sandbox, SandboxSpec
from rollyard.tools import ToolContext, ToolKind, ToolResult, function, tool, tool_kind, tool_names
from rollyard.tools._history import UNDO_BYTES, UNDO_EDITS
from rollyard.tools.editor import FILE_BYTES


class Unit(StrEnum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    x: int
    y: int = 0


@tool
def measure(
    length: Annotated[float, Field(description="How long.", gt=0)],
    unit: Unit = Unit.METRE,
    *,
    points: list[Point] | None = None,
    json: bool = False,
) -> str:
    """Measures a thing.

    In units of length.
    """
    return f"{length:g} {unit} {points} {json}"


async def invoke(kind: ToolKind, arguments: Mapping[str, Json], timeout_s: float = 20.0, **context: Any) -> ToolResult:
    opened = await kind.open(ToolContext(None, **context))
    result = await opened.call(arguments, timeout_s=timeout_s)
    await opened.close()
    return result


# --- schemas ------------------------------------------------------------------------------------------


def test_the_schema_is_the_signature() -> None:
    kind: ToolKind = measure
    assert (kind.spec.name, kind.spec.description) == ("measure", "Measures a thing.\n\nIn units of length.")
    assert not kind.needs_sandbox and not kind.needs_python
    schema = json.loads(json.dumps(kind.spec.parameters))
    assert schema["type"] == "object" and schema["additionalProperties"] is False
    assert schema["required"] == ["length"]
    assert list(schema["properties"]) == ["length", "unit", "points", "json"]
    assert schema["properties"]["length"] == {"description": "How long.", "exclusiveMinimum": 0, "type": "number"}
    assert schema["properties"]["json"] == {"default": False, "type": "boolean"}
    assert schema["$defs"]["Unit"]["enum"] == ["m", "ft"]
    assert "must be of type number" in wrong_arguments(schema, {"length": "x"})


def test_a_function_stays_callable_and_may_have_another_name() -> None:
    @tool(name="add-up", description="Adds.")
    def add(a: int, b: int = Field(default=1, description="More.")) -> int:
        return a + b

    assert (add.spec.name, add.spec.description, add(2, b=3)) == ("add-up", "Adds.", 5)
    assert add.spec.parameters["properties"]["b"]["description"] == "More."  # type: ignore[index,call-overload]


def test_no_parameters_are_an_empty_object() -> None:
    @tool
    def now() -> str:
        """The time."""
        return "noon"

    assert now.spec.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_function_that_cannot_be_a_tool_is_refused_at_its_declaration() -> None:
    def no_docstring(a: int) -> int:
        return a

    def many(*a: int) -> None:
        "x"

    def keywords(**a: int) -> None:
        "x"

    def positional(a: int, /) -> None:
        "x"

    def untyped(a) -> None:  # type: ignore[no-untyped-def]
        "x"

    def unknown(a: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
        "x"

    def no_json(a: threading.Thread) -> None:
        "x"

    def maybe(sandbox: Sandbox | None) -> None:
        "x"

    refused: list[tuple[Callable[..., object], str]] = [
        (no_docstring, "no docstring"),
        (many, "by name"),
        (keywords, "by name"),
        (positional, "by name"),
        (untyped, "has no type"),
        (unknown, "Nowhere"),
        (no_json, "no JSON schema"),
        (maybe, "no JSON schema"),
        (lambda: None, "not a valid tool name"),
    ]
    for candidate, word in refused:
        with pytest.raises(TypeError, match=word):
            tool(candidate)


# --- arguments and results ----------------------------------------------------------------------------


async def test_arguments_are_read_and_invalid_ones_reported() -> None:
    assert (await invoke(measure, {"length": 2})).content == "2 m None False"
    arguments: dict[str, Json] = {"length": 1.5, "unit": "ft", "points": [{"x": 1}], "json": True}
    assert (await invoke(measure, arguments)).content == "1.5 ft [Point(x=1, y=0)] True"
    for bad, word in (
        ({}, 'argument "length": Field required'),
        ({"length": -1}, "greater than 0"),
        ({"length": 1, "unit": "mile"}, 'argument "unit"'),
        ({"length": 1, "points": [{"x": "?"}]}, 'argument "points.0.x"'),
        ({"length": 1, "p0": 1}, 'argument "p0": Extra inputs'),
    ):
        result = await invoke(measure, bad)
        assert result.is_error and word in result.content, result.content


@dataclass
class Pair:
    a: int
    b: tuple[str, ...]


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("as is", "as is"),
        ("\ud83d", "?"),
        (None, "null"),
        ({"a": [1, 2.5, True]}, '{"a":[1,2.5,true]}'),
        (Pair(1, ("é",)), '{"a":1,"b":["é"]}'),
        (Point(x=1), '{"x":1,"y":0}'),
        (b"bytes", '"bytes"'),
    ],
)
async def test_results_are_text_or_json(value: object, content: str) -> None:
    @tool
    def give() -> object:
        """Gives."""
        return value

    result = await invoke(give, {})
    assert (result.content, result.is_error) == (content, False)


async def test_a_tool_result_is_returned_unchanged_and_long_output_is_cut() -> None:
    @tool
    async def end(length: int) -> ToolResult:
        """Ends."""
        return ToolResult("é" * length, is_final=True, info={"answer": "7"})

    result = await invoke(end, {"length": 3})
    assert result == ToolResult("ééé", is_final=True, info={"answer": "7"})
    result = await invoke(end, {"length": 3000}, output_bytes=101)
    assert result.is_final and "5900 bytes left out" in result.content and len(result.content.encode()) < 150


async def test_a_result_that_json_cannot_represent_is_reported() -> None:
    @tool
    def lock() -> object:
        """Locks."""
        return threading.Lock()

    result = await invoke(lock, {})
    assert result.is_error and "Unable to serialize" in result.content


def raising(error: BaseException) -> list[ToolKind]:
    @tool
    def sync() -> None:
        """Raises."""
        raise error

    @tool
    async def later() -> None:
        """Raises."""
        raise error

    return [sync, later]


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ValueError("no such thing"), "Error: ValueError: no such thing"),
        (KeyError(), "Error: KeyError"),
        (TimeoutError("of its own"), "Error: TimeoutError: of its own"),
        (SystemExit(3), "SystemExit"),
        (StopIteration(), "StopIteration"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
async def test_an_exception_is_an_observation(error: BaseException, word: str) -> None:
    for kind in raising(error):
        result = await invoke(kind, {})
        assert result.is_error and word in result.content, result.content


async def test_an_interrupt_in_a_thread_does_not_end_the_service() -> None:
    assert "KeyboardInterrupt" in (await invoke(raising(KeyboardInterrupt())[0], {})).content


async def test_a_failure_with_its_own_blame_is_raised() -> None:
    for kind in raising(SandboxLost("gone")):
        with pytest.raises(SandboxLost):
            await invoke(kind, {})


# --- threads and deadlines ----------------------------------------------------------------------------

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who")


async def test_a_sync_function_does_not_block_the_event_loop() -> None:
    reached, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @tool
    def wait() -> str:
        """Waits."""
        loop.call_soon_threadsafe(reached.set)
        assert goes_on.wait(20)
        return f"{WHO.get()} in {threading.current_thread().name}"

    WHO.set("us")
    call = asyncio.ensure_future(invoke(wait, {}))
    await reached.wait()
    goes_on.set()
    assert (await call).content == "us in tool-wait"


async def test_a_deadline_is_enforced_and_left_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "MAX_LEFT", 2)
    goes_on = threading.Event()

    @tool
    def hang(really: bool = True) -> str:
        """Hangs."""
        if really:
            goes_on.wait(60)
        return "on"

    @tool
    async def sleep() -> None:
        """Sleeps."""
        await asyncio.Event().wait()

    try:
        for kind in (sleep, hang, hang):
            result = await invoke(kind, {}, timeout_s=0.05)
            assert result.is_error and "not done within 0.05 s" in result.content
        result = await invoke(hang, {"really": False})
        assert result.is_error and "2 earlier calls never ended" in result.content
    finally:
        threads = [thread for thread in threading.enumerate() if thread.name == "tool-hang"]
        goes_on.set()
    assert len(threads) == 2 and all(thread.daemon for thread in threads)
    for thread in threads:
        thread.join(20)
    assert (await invoke(hang, {"really": False})).content == "on"


async def test_a_cancelled_call_is_cancelled() -> None:
    reached = asyncio.Event()

    @tool
    async def wait() -> None:
        """Waits."""
        reached.set()
        await asyncio.Event().wait()

    call = asyncio.ensure_future(invoke(wait, {}))
    await reached.wait()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()


# --- sandbox and context ------------------------------------------------------------------------------


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncGenerator[Sandbox, None]:
    async with LocalRuntime(root=tmp_path / "root") as runtime:
        yield await runtime.start(SandboxSpec(), lease_s=60.0)


@tool
async def lines(path: str, sandbox: Sandbox, context: ToolContext) -> int:
    """How many lines a file has."""
    assert context.sandbox is sandbox
    return (await sandbox.read(path, limit_bytes=1 << 20)).count(b"\n")


async def test_sandbox_and_context_are_given_and_not_shown(sandbox: Sandbox) -> None:
    assert lines.needs_sandbox and list(lines.spec.parameters["properties"]) == ["path"]  # type: ignore[call-overload]
    await sandbox.write("a", b"1\n2\n")
    opened = await lines.open(ToolContext(sandbox))
    assert (await opened.call({"path": "a"}, timeout_s=20.0)).content == "2"
    assert "FileNotFoundError" in (await opened.call({"path": "b"}, timeout_s=20.0)).content
    assert "Extra inputs" in (await opened.call({"path": "a", "sandbox": "x"}, timeout_s=20.0)).content
    await sandbox.kill()
    with pytest.raises(SandboxLost):
        await opened.call({"path": "a"}, timeout_s=20.0)
    with pytest.raises(RuntimeError, match="needs a sandbox"):
        await lines.open(ToolContext(None))


async def test_the_examples_of_the_documentation_work(sandbox: Sandbox) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "give-tools.md").read_text()
    (code,) = [code for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "@tool" in code]
    names: dict[str, Any] = {}
    exec(compile(code, "give-tools.md", "exec", dont_inherit=True), names)
    assert (await invoke(names["convert"], {"celsius": 100})).content == "212.0"
    assert "greater than or equal to -273.15" in (await invoke(names["convert"], {"celsius": -300})).content
    await sandbox.write("a", b"1\n2\n")
    opened = await names["count_lines"].open(ToolContext(sandbox))
    assert (await opened.call({"path": "a"}, timeout_s=20.0)).content == "a has 2 lines."
    for limit in (f"when {function.MAX_LEFT} calls", f"Undo holds {UNDO_EDITS} edits or {UNDO_BYTES >> 20} MiB"):
        assert limit in " ".join(page.split())
    assert f"at most {FILE_BYTES >> 20} MiB" in " ".join(page.split())
    assert set(re.findall(r"^\| `(\w+)` \| `\w+` \|.*(?:yes|no) \|$", page, re.MULTILINE)) <= set(tool_names())


# --- entry points -------------------------------------------------------------------------------------

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package with a module and entry points on Python's path."""

    def installed(package: str, code: str, points: str) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rollyard.tools]\n{points}\n")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return installed


GREETER = """
from rollyard.tools import tool

@tool
def greet(name: str) -> str:
    "Greets."
    return f"hello {name}"

number = 3
"""


async def test_a_package_provides_tools(install: Install) -> None:
    name = f"greeter_{os.getpid()}"
    install(name, GREETER, f"greet = {name}:greet")
    assert (await invoke(tool_kind("greet"), {"name": "you"})).content == "hello you"
    assert "greet" in tool_names() and "shell" in tool_names()
    with pytest.raises(UnknownTool, match=r"'hammer'; there are: .*finish, greet, .*shell"):
        tool_kind("hammer")


async def test_a_broken_package_is_named(install: Install) -> None:
    name = f"broken_{os.getpid()}"
    install(name, GREETER, f"a = {name}:nothing\nb = {name}:number\nc = no_such_module:x\nd = {name}:tool")
    for asked, word in (
        ("a", "AttributeError"),
        ("b", "is not a ToolKind"),
        ("c", "ModuleNotFound"),
        ("d", "is not a ToolKind"),
    ):
        with pytest.raises(UnknownTool, match=f"the package {name}.*{word}"):
            tool_kind(asked)
    assert tool_kind("shell")


async def test_a_name_has_one_owner(install: Install) -> None:
    one, two = f"one_{os.getpid()}", f"two_{os.getpid()}"
    install(one, GREETER, f"greet = {one}:greet\nshell = {one}:greet")
    install(two, GREETER, f"greet = {two}:greet")
    with pytest.raises(UnknownTool, match=f"'greet' is claimed by the package ({one}|{two}) and by the package"):
        tool_kind("greet")
    with pytest.raises(UnknownTool, match=f"'shell' is claimed by Rollyard itself and by the package {one}"):
        tool_kind("shell")
    assert tool_kind("finish")
