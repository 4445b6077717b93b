"""A Python function as a tool: `@tool` makes it a `ToolKind` whose schema comes from its signature and docstring.

    @tool
    async def lines(path: Annotated[str, Field(description="A file.")], sandbox: Sandbox) -> int:
        \"\"\"How many lines a file has.\"\"\"
        return (await sandbox.read(path, limit_bytes=1 << 20)).count(b"\\n")

The function runs in the service, not in the sandbox: its author has to handle a model's arguments safely.

Invariants. A function that cannot be a tool raises TypeError where it is declared. Invalid arguments, exceptions and a
missed deadline are observations; only a failure with its own blame (`RollyardError`: the sandbox has ended) is raised.
A sync function runs in a thread of its own, which cannot be stopped: at its deadline it is left running, and MAX_LEFT
such threads disable the tool. A tool that needs state per rollout must be a `ToolKind` instead.
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

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")  # what all engines accept

MAX_LEFT = 32
"""The most threads of one function that may outlive their deadlines; each uses memory and other resources."""


class _WithoutTitles(GenerateJsonSchema):
    """Generates schemas without titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate(self, schema: CoreSchema, mode: Any = "validation") -> dict[str, Any]:
        result = super().generate(schema, mode)
        result.pop("title", None)
        return result


@dataclass(frozen=True, slots=True)
class _Signature:
    """The model's arguments (a pydantic model: field → parameter) and those that the service adds (parameter →
    type)."""

    model: type[BaseModel]
    fields: Mapping[str, str]
    injected: Mapping[str, type]

    @classmethod
    def of(cls, function: Callable[..., object], name: str) -> _Signature:
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise TypeError(f"the tool {name}: an annotation cannot be read: {error}") from error
        parameters: dict[str, Any] = {}
        fields: dict[str, str] = {}
        injected: dict[str, type] = {}
        for number, parameter in enumerate(inspect.signature(function).parameters.values()):
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"the tool {name}: {parameter} cannot be given by name")
            if parameter.name not in hints:
                raise TypeError(f"the tool {name}: the parameter {parameter.name} has no type")
            hint = hints[parameter.name]
            if hint in (ToolContext, Sandbox):
                injected[parameter.name] = hint
                continue
            # Fields have generated names: a parameter may be called `json`, `copy` or `_x`, a pydantic field may not.
            default = ... if parameter.default is parameter.empty else parameter.default
            parameters[f"p{number}"] = (Annotated[hint, Field(alias=parameter.name)], default)
            fields[f"p{number}"] = parameter.name
        try:
            model = create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **parameters)
            model.model_json_schema()
        except Exception as error:
            raise TypeError(f"the tool {name}: its parameters have no JSON schema: {error}") from error
        return cls(model, fields, injected)

    def read(self, arguments: Mapping[str, Json]) -> dict[str, object]:
        """Returns the arguments by parameter. Raises ValidationError."""
        validated = self.model.model_validate(dict(arguments))
        return {name: getattr(validated, field) for field, name in self.fields.items()}


class FunctionKind(Generic[P, R]):
    """The `ToolKind` of a function. Calling it calls the function."""

    def __init__(self, function: Callable[P, R], name: str, description: str) -> None:
        self._function = function
        self._signature = _Signature.of(function, name)
        schema = cast("dict[str, Json]", self._signature.model.model_json_schema(schema_generator=_WithoutTitles))
        self.spec = ToolSpec(name, description, {"properties": {}, **schema})
        self.needs_sandbox = bool(self._signature.injected)
        self.needs_python = False
        self._abandoned: set[threading.Thread] = set()
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
        """Returns the function's result. Raises what it raises, and ValidationError."""
        kwargs = self._signature.read(arguments)
        for name, kind in self._signature.injected.items():
            kwargs[name] = context if kind is ToolContext else context.sandbox
        if not inspect.iscoroutinefunction(self._function):
            result = await self._in_thread(kwargs)
        else:
            result = self._function(**kwargs)  # type: ignore[call-arg]
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, kwargs: Mapping[str, object]) -> object:
        """Runs the function in a new thread, not in the loop's executor, which has few threads and is joined at
        exit."""
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        if len(self._abandoned) >= MAX_LEFT:
            raise RuntimeError(f"{len(self._abandoned)} earlier calls never ended")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

        def settle(outcome: tuple[object, BaseException | None]) -> None:
            if not future.done():
                future.set_result(outcome)

        def work() -> None:
            outcome: tuple[object, BaseException | None]
            try:
                outcome = run(self._function, **kwargs), None
            except BaseException as error:  # re-raised in the event loop
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits
                loop.call_soon_threadsafe(settle, outcome)

        run = cast("Callable[..., object]", contextvars.copy_context().run)
        thread = threading.Thread(target=work, name=f"tool-{self.spec.name}", daemon=True)
        thread.start()
        try:
            value, error = await future
        except asyncio.CancelledError:
            self._abandoned.add(thread)
            raise
        if error is None:
            return value
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            raise RuntimeError(repr(error)) from error  # in a coroutine, these would end more than the call
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
                raise  # this task is cancelled, not something that the function waited for
            if isinstance(error, TimeoutError) and guard.expired():
                result = ToolResult(f"Error: it was not done within {timeout_s:g} s", is_error=True)
            else:
                log.info("a tool's function raised", extra={"tool": self.spec.name, "error": type(error).__name__})
                message = f"{type(error).__name__}: {error}".removesuffix(": ")
                result = ToolResult(f"Error: {message}", is_error=True)
        return replace(result, content=cut(result.content, self._context.output_bytes))

    async def close(self) -> None:
        pass


def _result(value: object) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    return ToolResult(value if isinstance(value, str) else to_json(value).decode())


def _wrong(error: ValidationError) -> str:
    problems: list[str] = []
    for one in error.errors(include_url=False, include_context=False, include_input=False)[:10]:
        where = ".".join(map(str, one["loc"]))
        problems.append(f'argument "{where}": {one["msg"]}' if where else one["msg"])
    return "; ".join(problems)


@overload
def tool(function: Callable[P, R], /) -> FunctionKind[P, R]: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[P, R]], FunctionKind[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None, /, *, name: str | None = None, description: str | None = None
) -> FunctionKind[P, R] | Callable[[Callable[P, R]], FunctionKind[P, R]]:
    """Use as `@tool`, or as `@tool(name=…, description=…)` to override the function's name and docstring."""

    def decorate(function: Callable[P, R]) -> FunctionKind[P, R]:
        called = name or getattr(function, "__name__", "")
        if not _NAME.fullmatch(called):
            raise TypeError(f"{called or function!r} is not a valid tool name; give one: @tool(name=…)")
        doc = description or inspect.getdoc(function)
        if not doc:
            raise TypeError(f"the tool {called} has no docstring, which is the description that the model sees")
        return FunctionKind(function, called, doc)

    return decorate if function is None else decorate(function)
