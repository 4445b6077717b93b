"""`editor`: views files and changes them by exact text, as models were trained to (`str_replace_editor`).

Commands: view, create, str_replace, insert, undo_edit. A change is written to the existing file by `cat` in the
sandbox, so its mode, owner and links are preserved, and no path leads out of the sandbox. The history is held in the
service, bounded.

Invariants. An error is an observation; the file is then unchanged, or the observation reports that it is not. Only the
end of the sandbox raises. A text is replaced only if it occurs exactly once. Files larger than FILE_BYTES, binary files
and files that are not UTF-8 are refused.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.core import Json
from rollyard.sandbox.base import Sandbox
from rollyard.tools._editor_call import SPEC, EditorCall, Refused
from rollyard.tools._history import History, mark
from rollyard.tools._output import cut
from rollyard.tools._text import MOST_MATCHES, NotText, TextFile
from rollyard.tools.base import ToolContext, ToolResult, ToolSpec

FILE_BYTES = 1 << 20
"""The largest file that is shown or changed. Text that people write is smaller; use the shell for larger files."""

QUICK_CHARS = 64 << 10
"""Longer text is numbered in a thread: a megabyte of empty lines would block the event loop for 0.6 s."""

SHOWN_CHARS = 1000
"""The length of a text that did not match, in the error message."""

_LIST = """
[ -r . ] || { echo 'Permission denied' >&2; exit 1; }
top=${1%/}
printf '%s\\n' "$1"
for a in *; do
  [ -e "$a" ] || [ -L "$a" ] || continue
  if [ ! -d "$a" ] || [ -L "$a" ]; then printf '%s\\n' "$top/$a"; continue; fi
  printf '%s\\n' "$top/$a/"
  for b in "$a"/*; do
    [ -e "$b" ] || [ -L "$b" ] || continue
    if [ -d "$b" ] && [ ! -L "$b" ]; then b=$b/; fi
    printf '%s\\n' "$top/$b"
  done
done
"""
"""Lists two levels without hidden files, by shell patterns: an image may have no `find`."""

_INTO = 'cat > "./$1"'


class EditorTool:
    """The editor of one rollout."""

    def __init__(self, sandbox: Sandbox, output_bytes: int) -> None:
        self._sandbox = sandbox
        self._output_bytes = output_bytes
        self._history = History()
        self._turn = asyncio.Lock()  # an edit reads and then writes

    @property
    def spec(self) -> ToolSpec:
        return SPEC

    async def close(self) -> None:
        pass

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        note, is_error = "", False
        try:
            call = EditorCall.of(arguments, self._sandbox.spec.workdir)
            note = call.note
            async with asyncio.timeout(timeout_s), self._turn:
                content = await getattr(self, f"_{call.command}")(call, timeout_s)
        except Refused as refused:
            content, is_error = str(refused), True
        except TimeoutError:
            content, is_error = f"It was not done within {timeout_s:g} s; an edit may be half done.", True
        return ToolResult(cut(note + content, self._output_bytes), is_error=is_error)

    # --- the commands ---

    async def _view(self, call: EditorCall, timeout_s: float) -> str:
        try:
            file = await self._read(call.path)
        except IsADirectoryError:
            if call.view_range is not None:
                raise Refused("The `view_range` parameter is not allowed when `path` is a directory.") from None
            return await self._list(call.path, timeout_s)
        first, last, note = 1, len(file.lines()), ""
        if call.view_range is not None:
            first, last, note = _range(call.view_range, last)
        return f"Here's the result of running `cat -n` on {call.path}:\n{await numbered(file, first, last)}\n{note}"

    async def _list(self, path: str, timeout_s: float) -> str:
        result = await self._sandbox.exec(
            ["sh", "-c", _LIST, "sh", path], cwd=path, timeout_s=timeout_s, output_bytes=2 * self._output_bytes
        )
        if result.status != 0:
            raise Refused(f"The directory {path} cannot be listed: {_stderr_text(result.stderr)}")
        listed = result.stdout.decode("utf-8", "replace")
        if result.dropped_bytes:
            listed += f"\n[… {result.dropped_bytes} bytes left out]\n"
        return f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n{listed}"

    async def _create(self, call: EditorCall, timeout_s: float) -> str:
        text = call.needs("file_text", call.file_text)
        try:
            await self._sandbox.read(call.path, limit_bytes=FILE_BYTES)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            raise _folder(call.path) from None
        except (OSError, ValueError) as error:  # too large, a socket, or below something that is not a folder
            raise Refused(f"{call.path} cannot be created: {_reason(error)}") from None
        else:
            raise Refused(
                f"File already exists at: {call.path}. Cannot overwrite files using command `create`;"
                " use `str_replace`."
            )
        data = text.encode("utf-8")
        _check_size(call.path, data)
        try:
            await self._sandbox.write(call.path, data)
        except (OSError, ValueError) as error:
            raise Refused(f"{call.path} cannot be created: {_reason(error)}") from None
        return f"File created successfully at: {call.path}"

    async def _str_replace(self, call: EditorCall, timeout_s: float) -> str:
        file = await self._file(call.path)
        old, new = (
            file.with_file_newlines(call.needs("old_str", call.old_str)),
            file.with_file_newlines(call.new_str or ""),
        )
        if not old:
            raise Refused("No replacement was performed: `old_str` is empty. Use `insert` to add text.")
        if old == new:
            raise Refused("No replacement was performed: `old_str` and `new_str` are the same.")
        places = file.places(old)
        shown = old if len(old) <= SHOWN_CHARS else f"{old[:SHOWN_CHARS]}…"
        if not places:
            hint = " Its line endings are mixed: give a single line." if file.has_mixed_endings and "\n" in old else ""
            raise Refused(
                f"No replacement was performed, old_str `{shown}` did not appear verbatim in {call.path}.{hint}"
            )
        if len(places) > 1:
            lines = ", ".join(str(line) for line in sorted({file.line_of(at) for at in places}))
            more = " and perhaps more" if len(places) == MOST_MATCHES else ""
            raise Refused(
                f"No replacement was performed. Multiple occurrences of old_str `{shown}` in lines {lines}{more}."
                " Please ensure it is unique."
            )
        line = file.line_of(places[0])
        return await self._edit(call.path, file, file.replaced(places[0], old, new), line, new, timeout_s)

    async def _insert(self, call: EditorCall, timeout_s: float) -> str:
        file = await self._file(call.path)
        new = file.with_file_newlines(call.needs("new_str", call.new_str))
        after, last = call.needs("insert_line", call.insert_line), len(file.lines())
        if not 0 <= after <= last:
            raise Refused(
                f"Invalid `insert_line` parameter: {after}. It should be within the range of lines of the file:"
                f" [0, {last}]."
            )
        return await self._edit(call.path, file, file.inserted(after, new), after + 1, new, timeout_s)

    async def _undo_edit(self, call: EditorCall, timeout_s: float) -> str:
        file = await self._file(call.path)
        edit = self._history.last(call.path)
        if edit is None:
            raise Refused(f"No edit history found for {call.path}.")
        note = "" if edit.after == mark(file.data) else " What something else had changed in it since is undone too."
        await self._write(call.path, edit.before, file.data, timeout_s)
        self._history.drop(edit)
        shown = await numbered(TextFile.of(edit.before))
        return (
            f"Last edit to {call.path} undone successfully.{note} Here's the result of running `cat -n` on"
            f" {call.path}:\n{shown}\n"
        )

    # --- files ---

    async def _read(self, path: str) -> TextFile:
        """Reads a file. Raises IsADirectoryError for the caller to handle, and Refused for any other error."""
        try:
            return TextFile.of(await self._sandbox.read(path, limit_bytes=FILE_BYTES))
        except FileNotFoundError:
            raise Refused(f"The path {path} does not exist. Please provide a valid path.") from None
        except IsADirectoryError:
            raise
        except NotText as error:
            raise Refused(f"{path} is {error}: it can be neither viewed nor edited here.") from None
        except (OSError, ValueError) as error:
            raise Refused(f"{path} cannot be read: {_reason(error)}") from None

    async def _file(self, path: str) -> TextFile:
        try:
            return await self._read(path)
        except IsADirectoryError:
            raise _folder(path) from None

    async def _edit(self, path: str, file: TextFile, edited: TextFile, line: int, new: str, timeout_s: float) -> str:
        before, after = file.data, edited.data
        _check_size(path, after)
        note = await self._write(path, after, before, timeout_s)
        self._history.add(path, before, after)
        return (
            f"The file {path} has been edited.{note} Here's the result of running `cat -n` on a snippet of {path}:\n"
            f"{await numbered(edited, *edited.around(line, new))}\n"
            "Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc)."
            " Edit the file again if necessary."
        )

    async def _write(self, path: str, data: bytes, before: bytes, timeout_s: float) -> str:
        """Writes to the existing file: `Sandbox.write` would replace it by a new one, with another mode, and break
        links."""
        folder, name = posixpath.split(path)
        result = await self._sandbox.exec(["sh", "-c", _INTO, "sh", name], cwd=folder, stdin=data, timeout_s=timeout_s)
        if result.status == 0:
            return ""
        if result.status == 127:  # neither sh nor cat: the file gets the default mode
            try:
                await self._sandbox.write(path, data)
            except (OSError, ValueError) as error:
                raise Refused(f"{path} cannot be written: {_reason(error)}") from None
            return " This image has no `sh` or no `cat`: its mode is 644 now."
        state = await self._put_back(path, before, timeout_s)
        raise Refused(f"{path} cannot be written: {_stderr_text(result.stderr)}. {state}")

    async def _put_back(self, path: str, before: bytes, timeout_s: float) -> str:
        """Restores the file after a failed write: a full disk may have truncated the old text and taken part of the new
        one."""
        folder, name = posixpath.split(path)
        try:
            if await self._sandbox.read(path, limit_bytes=FILE_BYTES) != before:
                await self._sandbox.exec(["sh", "-c", _INTO, "sh", name], cwd=folder, stdin=before, timeout_s=timeout_s)
            is_whole = await self._sandbox.read(path, limit_bytes=FILE_BYTES) == before
        except (OSError, ValueError):
            is_whole = False
        return "The file is as it was." if is_whole else "The file may be cut short now."


async def numbered(file: TextFile, first: int = 1, last: int | None = None) -> str:
    if len(file.text) <= QUICK_CHARS:
        return file.numbered(first, last)
    return await asyncio.to_thread(file.numbered, first, last)


def _range(view_range: tuple[int, int], lines: int) -> tuple[int, int, str]:
    first, last = view_range
    if not 1 <= first <= lines:
        raise Refused(
            f"Invalid `view_range`: [{first}, {last}]. Its first element `{first}` should be within the range of lines"
            f" of the file: [1, {lines}]."
        )
    if last == -1:
        return first, lines, ""
    if last < first:
        raise Refused(
            f"Invalid `view_range`: [{first}, {last}]. Its second element `{last}` should not be smaller than its"
            " first."
        )
    if last > lines:
        return first, lines, f"[The file has only {lines} lines.]\n"
    return first, last, ""


def _check_size(path: str, data: bytes) -> None:
    if len(data) > FILE_BYTES:
        raise Refused(f"{path} would have {len(data)} bytes; this tool takes at most {FILE_BYTES}.")


def _folder(path: str) -> Refused:
    return Refused(f"The path {path} is a directory and only the `view` command can be used on directories.")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _stderr_text(stderr: bytes) -> str:
    return stderr.decode("utf-8", "replace").strip()[-500:] or "no reason was given"


@dataclass(frozen=True, slots=True)
class EditorKind:
    """Opens editors; see `rollyard.tools.base.ToolKind`."""

    spec: ToolSpec = SPEC
    needs_sandbox: bool = True
    needs_python: bool = False

    async def open(self, context: ToolContext) -> EditorTool:
        if context.sandbox is None:
            raise RuntimeError("the editor needs a sandbox")
        return EditorTool(context.sandbox, context.output_bytes)


EDITOR = EditorKind()
