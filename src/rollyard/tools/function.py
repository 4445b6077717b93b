"""A Python function as a tool: `@tool` makes a `ToolKind` of it, its schema read from signature and docstring.

    @tool
    async def lines(path: Annotated[str, Field(description="A file.")], sandbox: Sandbox) -> int:
        \"\"\"How many lines a file has.\"\"\"
        return (await sandbox.read(path, limit_bytes=1 << 20)).count(b"\\n")

The function runs here, in the service, not in the sandbox: what it does with a model's arguments is its author's care.

Invariants. What cannot be a tool is a TypeError where it is declared. Bad arguments, exceptions and a passed deadline
are observations; only a failure that has its own blame (`RollyardError`: the sandbox is gone) is raised. A sync
function runs in a thread of its own, which nothing can end: at its deadline it is left behind, and MAX_LEFT of those
close the tool. Not here: state of a rollout, which needs a `ToolKind` of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, cast, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, to_json

from rollyard.core import Json
from rollyard.core.failure import RollyardError
from rollyard.sandbox.base import Sandbox
from rollyard.tools._output import cut
from rollyard.tools.base import ToolContext, ToolResult, ToolSpec

log = logging.getLogger("rollyard.tools")

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")  # what every engine's dialect takes

MAX_LEFT = 32
"""Threads of one function that may outlive their deadlines; each costs memory and holds whatever it waits for."""


class _Untitled(GenerateJsonSchema):
    """Titles made from names tell a model nothing that the names do not."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate(self, schema: CoreSchema, mode: Any = "validation") -> dict[str, Any]:
        found = super().generate(schema, mode)
        found.pop("title", None)
        return found


@dataclass(frozen=True, slots=True)
class _Signature:
    """What the model gives (a pydantic model: field → parameter) and what is given by us (parameter → type)."""

    model: type[BaseModel]
    fields: Mapping[str, str]
    given: Mapping[str, type]

    @classmethod
    def of(cls, function: Callable[..., object], name: str) -> _Signature:
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise TypeError(f"the tool {name}: an annotation cannot be read: {error}") from error
        parameters: dict[str, Any] = {}
        fields: dict[str, str] = {}
        given: dict[str, type] = {}
        for number, parameter in enumerate(inspect.signature(function).parameters.values()):
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"the tool {name}: {parameter} cannot be given by name")
            if parameter.name not in hints:
                raise TypeError(f"the tool {name}: the parameter {parameter.name} has no type")
            hint = hints[parameter.name]
            if hint in (ToolContext, Sandbox):
                given[parameter.name] = hint
                continue
            # Fields have names of their own: a parameter may be called `json`, `copy` or `_x`, which a model's may not.
            default = ... if parameter.default is parameter.empty else parameter.default
            parameters[f"p{number}"] = (Annotated[hint, Field(alias=parameter.name)], default)
            fields[f"p{number}"] = parameter.name
        try:
            model = create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **parameters)
            model.model_json_schema()
        except Exception as error:
            raise TypeError(f"the tool {name}: its parameters have no JSON schema: {error}") from error
        return cls(model, fields, given)

    def read(self, arguments: Mapping[str, Json]) -> dict[str, object]:
        """By parameter; ValidationError."""
        found = self.model.model_validate(dict(arguments))
        return {name: getattr(found, field) for field, name in self.fields.items()}


class FunctionKind(Generic[P, R]):
    """See the module. Called directly, it is still the function."""

    def __init__(self, function: Callable[P, R], name: str, description: str) -> None:
        self._function = function
        self._signature = _Signature.of(function, name)
        schema = cast("dict[str, Json]", self._signature.model.model_json_schema(schema_generator=_Untitled))
        self.spec = ToolSpec(name, description, {"properties": {}, **schema})
        self.needs_sandbox = bool(self._signature.given)
        self.needs_python = False
        self._left: set[threading.Thread] = set()
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.spec.name}>"

    async def open(self, context: ToolContext) -> FunctionTool:
        if self.needs_sandbox and context.sandbox is None:
            raise RuntimeError(f"the tool {self.spec.name} needs a sandbox")
        return FunctionTool(self, context)

    async def run(self, arguments: Mapping[str, Json], context: ToolContext) -> object:
        """What the function returns; whatever it raises, and ValidationError."""
        given = self._signature.read(arguments)
        for name, kind in self._signature.given.items():
            given[name] = context if kind is ToolContext else context.sandbox
        if not inspect.iscoroutinefunction(self._function):
            result = await self._in_thread(given)
        else:
            result = self._function(**given)  # type: ignore[call-arg]
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, given: Mapping[str, object]) -> object:
        """Not the loop's own threads: they are few, and the process waits for them when it ends."""
        self._left = {thread for thread in self._left if thread.is_alive()}
        if len(self._left) >= MAX_LEFT:
            raise RuntimeError(f"{len(self._left)} earlier calls never ended")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

        def settle(outcome: tuple[object, BaseException | None]) -> None:
            if not future.done():
                future.set_result(outcome)

        def work() -> None:
            outcome: tuple[object, BaseException | None]
            try:
                outcome = run(self._function, **given), None
            except BaseException as error:  # a thread has nobody else to tell
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, outcome)

        run = cast("Callable[..., object]", contextvars.copy_context().run)
        thread = threading.Thread(target=work, name=f"tool-{self.spec.name}", daemon=True)
        thread.start()
        try:
            value, error = await future
        except asyncio.CancelledError:
            self._left.add(thread)
            raise
        if error is None:
            return value
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            raise RuntimeError(repr(error)) from error  # in here, these would end more than a call
        raise error


class FunctionTool:
    """A function, opened for one rollout."""

    def __init__(self, kind: FunctionKind[..., Any], context: ToolContext) -> None:
        self._kind, self._context = kind, context

    @property
    def spec(self) -> ToolSpec:
        return self._kind.spec

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        guard = asyncio.timeout(timeout_s)
        try:
            async with guard:
                result = _result(await self._kind.run(arguments, self._context))
        except RollyardError:
            raise
        except ValidationError as error:
            result = ToolResult(f"Error: {_wrong(error)}", is_error=True)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # it is we who are cancelled, not something that the function waited for
            if isinstance(error, TimeoutError) and guard.expired():
                result = ToolResult(f"Error: it was not done within {timeout_s:g} s", is_error=True)
            else:
                log.info("a tool's function raised", extra={"tool": self.spec.name, "error": type(error).__name__})
                said = f"{type(error).__name__}: {error}".removesuffix(": ")
                result = ToolResult(f"Error: {said}", is_error=True)
        return replace(result, content=cut(result.content, self._context.output_bytes))

    async def close(self) -> None:
        pass


def _result(value: object) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    return ToolResult(value if isinstance(value, str) else to_json(value).decode())


def _wrong(error: ValidationError) -> str:
    found: list[str] = []
    for one in error.errors(include_url=False, include_context=False, include_input=False)[:10]:
        where = ".".join(map(str, one["loc"]))
        found.append(f'argument "{where}": {one["msg"]}' if where else one["msg"])
    return "; ".join(found)


@overload
def tool(function: Callable[P, R], /) -> FunctionKind[P, R]: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[P, R]], FunctionKind[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None, /, *, name: str | None = None, description: str | None = None
) -> FunctionKind[P, R] | Callable[[Callable[P, R]], FunctionKind[P, R]]:
    """`@tool`, or `@tool(name=…, description=…)` where the model is to be told other words than the code's."""

    def made(function: Callable[P, R]) -> FunctionKind[P, R]:
        called = name or getattr(function, "__name__", "")
        if not _NAME.fullmatch(called):
            raise TypeError(f"{called or function!r} is no name for a tool; give one: @tool(name=…)")
        told = description or inspect.getdoc(function)
        if not told:
            raise TypeError(f"the tool {called} has no docstring: it is what the model is told")
        return FunctionKind(function, called, told)

    return made if function is None else made(function)
