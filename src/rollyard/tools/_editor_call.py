"""The editor's schema, and the validation of its arguments.

Names and texts are those of the `str_replace_editor` that models were trained on. A relative path is resolved against
the working directory, and the output mentions it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from rollyard.core import Json
from rollyard.sandbox.base import WORKDIR
from rollyard.tools.base import ToolSpec

T = TypeVar("T")

COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")

SPEC = ToolSpec(
    name="str_replace_editor",
    description=(
        "Custom editing tool for viewing, creating and editing files.\n"
        "* If `path` is a file, `view` displays the result of applying `cat -n`. If `path` is a directory, `view` lists"
        " non-hidden files and directories up to 2 levels deep.\n"
        "* The `create` command cannot be used if the specified `path` already exists as a file.\n"
        "* If a `command` generates a long output, its middle is left out.\n"
        "* The `undo_edit` command will revert the last edit made to the file at `path`.\n\n"
        "Notes for using the `str_replace` command:\n"
        "* The `old_str` parameter should match EXACTLY one or more consecutive lines from the original file. Be"
        " mindful of whitespaces!\n"
        "* If the `old_str` parameter is not unique in the file, the replacement will not be performed. Make sure to"
        " include enough context in `old_str` to make it unique.\n"
        "* The `new_str` parameter should contain the edited lines that should replace the `old_str`."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": list(COMMANDS),
                "description": f"The command to run. Allowed options are: `{'`, `'.join(COMMANDS)}`.",
            },
            "path": {
                "type": "string",
                "description": f"Absolute path to file or directory, e.g. `{WORKDIR}/file.py` or `{WORKDIR}`.",
            },
            "file_text": {
                "type": "string",
                "description": "Required parameter of `create` command, with the content of the file to be created.",
            },
            "old_str": {
                "type": "string",
                "description": "Required parameter of `str_replace` command: the string in `path` to replace.",
            },
            "new_str": {
                "type": "string",
                "description": (
                    "Optional parameter of `str_replace` command containing the new string (if not given, no string"
                    " will be added). Required parameter of `insert` command containing the string to insert."
                ),
            },
            "insert_line": {
                "type": "integer",
                "description": (
                    "Required parameter of `insert` command. The `new_str` will be inserted AFTER the line"
                    " `insert_line` of `path`; 0 is the beginning of the file."
                ),
            },
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": (
                    "Optional parameter of `view` command when `path` points to a file. If none is given, the full file"
                    " is shown. If provided, the file will be shown in the indicated line number range, e.g. [11, 12]"
                    " will show lines 11 and 12. Indexing at 1 to start. Setting `[start_line, -1]` shows all lines"
                    " from `start_line` to the end of the file."
                ),
            },
        },
        "required": ["command", "path"],
        "additionalProperties": False,
    },
)


class Refused(Exception):
    """The error that the model receives instead of a result."""


@dataclass(frozen=True, slots=True)
class EditorCall:
    command: str
    path: str
    note: str  # a note to the model about how the call was interpreted
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | None = None
    view_range: tuple[int, int] | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Json], workdir: str = WORKDIR) -> EditorCall:
        provided = {name: value for name, value in arguments.items() if value is not None}
        if unknown := provided.keys() - cls.__dataclass_fields__.keys() | provided.keys() & {"note"}:
            raise Refused(f"Unknown parameter: {', '.join(sorted(unknown))}.")
        command, path = provided.get("command"), _text(provided, "path")
        if command not in COMMANDS:
            raise Refused(f"Unrecognized command {command!r}. The allowed commands are: {', '.join(COMMANDS)}.")
        if not path:
            raise Refused("Parameter `path` is required.")
        whole = str(PurePosixPath(workdir, path))
        if any(len(part.encode()) > 255 for part in whole.split("/")) or len(whole.encode()) > 4000:
            raise Refused("Parameter `path` is too long.")
        return cls(
            command=str(command),
            path=f"/{whole.lstrip('/')}",
            note="" if path.startswith("/") else f"[`{path}` is no absolute path; it was taken as {whole}]\n",
            file_text=_text(provided, "file_text"),
            old_str=_text(provided, "old_str"),
            new_str=_text(provided, "new_str"),
            insert_line=_whole(provided["insert_line"], "insert_line") if "insert_line" in provided else None,
            view_range=_pair(provided["view_range"]) if "view_range" in provided else None,
        )

    def needs(self, name: str, value: T | None) -> T:
        if value is None:
            raise Refused(f"Parameter `{name}` is required for command: {self.command}.")
        return value


def _text(provided: Mapping[str, Json], name: str) -> str | None:
    value = provided.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or "\0" in value:
        raise Refused(f"Parameter `{name}` must be a string without NUL.")
    try:
        value.encode()
    except UnicodeEncodeError:  # models sometimes write half a surrogate pair, which cannot be encoded
        raise Refused(f"Parameter `{name}` holds half a surrogate pair, which is no character.") from None
    return value


def _whole(value: Json, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise Refused(f"Parameter `{name}` must be an integer.")
    return int(value)


def _pair(value: Json) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise Refused("Invalid `view_range`. It should be a list of two integers.")
    return _whole(value[0], "view_range"), _whole(value[1], "view_range")
