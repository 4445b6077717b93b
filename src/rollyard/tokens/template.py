"""A model's own chat template (Jinja), rendered as its authors' library does.

Used to render models that have no hand-written renderer, and to check those that have one. The template comes with the
model, so it runs in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.nodes
import jinja2.sandbox
from jinja2.ext import Extension
from jinja2.parser import Parser

from rollyard.core import Json, Message
from rollyard.core.failure import InvalidRequest


class TemplateRefused(Exception):
    """The template itself raised an error for these messages."""


class _Generation(Extension):
    """`{% generation %}` marks assistant text for other tools; here it is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class says so)

    def parse(self, parser: Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """One compiled template, or several named ones ("default", "tool_use") as some models ship."""

    def __init__(self, source: Json, special_tokens: Mapping[str, str]) -> None:
        environment: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
        self._named: dict[str, jinja2.Template] = {
            name: environment.from_string(text) for name, text in _sources(source).items()
        }
        self._special_tokens = dict(special_tokens)

    def fill(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Json],
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self._named else "default"
        template = self._named.get(name) or next(iter(self._named.values()))
        return template.render(
            **{
                **self._special_tokens,
                "messages": list(messages),
                "tools": list(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
        )


def _sources(source: Json) -> dict[str, str]:
    if isinstance(source, str) and source:
        return {"default": source}
    named: dict[str, str] = {}
    if isinstance(source, Sequence):
        for entry in source:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                named[str(entry.get("name", "default"))] = cast("str", entry["template"])
    if not named:
        raise InvalidRequest("the tokenizer has no chat template; name a renderer for this engine")
    return named


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> str:
    raise TemplateRefused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
