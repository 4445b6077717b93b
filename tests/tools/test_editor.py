"""The editor, in real sandboxes: what it shows, what it changes and what it preserves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from rollyard.core import Json
from rollyard.core.failure import SandboxLost
from rollyard.sandbox import BubblewrapRuntime, LocalRuntime, Sandbox, SandboxSpec
from rollyard.tools import ToolContext, ToolResult, tool_kind
from rollyard.tools._history import UNDO_BYTES, UNDO_EDITS, History
from rollyard.tools._text import TextFile
from rollyard.tools.editor import EDITOR, FILE_BYTES, EditorTool, numbered
from tests.tools.busybox import busybox_image

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("sandbox", [BubblewrapRuntime, LocalRuntime], indirect=True)
A = "/workspace/a.txt"


@pytest.fixture
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Sandbox, None]:
    kind = getattr(request, "param", BubblewrapRuntime)
    async with kind(root=tmp_path / "root") as runtime:
        yield await runtime.start(SandboxSpec(), lease_s=60.0)


@pytest.fixture
async def editor(sandbox: Sandbox) -> EditorTool:
    return await EDITOR.open(ToolContext(sandbox))


async def call(editor: EditorTool, command: str, path: str = A, **more: Json) -> ToolResult:
    return await editor.call({"command": command, "path": path, **more}, timeout_s=20.0)


async def run(editor: EditorTool, command: str, path: str = A, **more: Json) -> str:
    result = await call(editor, command, path, **more)
    assert not result.is_error, result.content
    return result.content


async def refused(editor: EditorTool, command: str, path: str = A, **more: Json) -> str:
    result = await call(editor, command, path, **more)
    assert result.is_error, result.content
    return result.content


async def content(sandbox: Sandbox, path: str = A) -> bytes:
    return await sandbox.read(path, limit_bytes=1 << 22)


# --- commands -----------------------------------------------------------------------------------------


@BOTH
async def test_a_file_is_created_shown_edited_and_restored(sandbox: Sandbox, editor: EditorTool) -> None:
    assert tool_kind("editor") is EDITOR and EDITOR.needs_sandbox and EDITOR.spec.name == "str_replace_editor"
    assert await run(editor, "create", file_text="one\ntwo\nthree\n") == f"File created successfully at: {A}"
    shown = f"Here's the result of running `cat -n` on {A}:\n     1\tone\n     2\ttwo\n     3\tthree\n"
    assert await run(editor, "view") == shown
    output = await run(editor, "str_replace", old_str="two", new_str="2\n2")
    assert "has been edited" in output and "     2\t2\n     3\t2\n     4\tthree\n" in output
    assert "     1\tzero\n     2\tone\n" in await run(editor, "insert", insert_line=0, new_str="zero")
    assert await content(sandbox) == b"zero\none\n2\n2\nthree\n"
    assert "undone successfully" in await run(editor, "undo_edit")
    assert await content(sandbox) == b"one\n2\n2\nthree\n"
    await run(editor, "undo_edit")
    assert await run(editor, "view") == shown
    assert await refused(editor, "undo_edit") == f"No edit history found for {A}."
    await run(editor, "str_replace", old_str="two\n")
    assert await content(sandbox) == b"one\nthree\n"


async def test_a_range_of_lines_is_shown(editor: EditorTool) -> None:
    await run(editor, "create", file_text="".join(f"l{n}\n" for n in range(1, 6)))
    for view_range, lines in (([2, 3], "2 3"), ([4, -1], "4 5"), ([5, 5], "5"), ([4.0, 9], "4 5")):
        shown = (await run(editor, "view", view_range=view_range)).splitlines()[1:]
        assert [line.split()[0] for line in shown if line.startswith("  ")] == lines.split()
    assert "only 5 lines" in await run(editor, "view", view_range=[4, 9])
    for view_range in ([0, 2], [6, 7], [3, 2], [-1, 2], [1], "1", [1, True], [1, 2.5]):
        assert "view_range" in await refused(editor, "view", view_range=view_range)  # type: ignore[arg-type]


@BOTH
async def test_a_folder_is_listed_two_levels_deep_without_hidden_files(sandbox: Sandbox, editor: EditorTool) -> None:
    for name in ("a", "d/b c", "d/e/f", ".git/x", "d/.h", "-n"):
        await sandbox.write(f"/workspace/{name}", b"")
    await sandbox.exec("ln -s / d/out; ln -s d l; ln -s nowhere broken", timeout_s=20.0)
    listed = (await run(editor, "view", "/workspace")).splitlines()[1:]
    names = ["/a", "/d/", "/d/b c", "/d/e/", "/-n", "/d/out", "/l", "/broken"]
    assert sorted(listed) == sorted(["/workspace", *[f"/workspace{name}" for name in names]])
    assert "directory" in await refused(editor, "view", "/workspace", view_range=[1, 2])
    for command, more in (("create", {"file_text": ""}), ("insert", {}), ("str_replace", {}), ("undo_edit", {})):
        assert "is a directory" in await refused(editor, command, "/workspace/d", **more)


async def test_an_empty_folder_the_root_and_an_inaccessible_one(sandbox: Sandbox, editor: EditorTool) -> None:
    await sandbox.exec("mkdir empty shut; chmod 0 shut", timeout_s=20.0)
    assert (await run(editor, "view", "/workspace/empty")).splitlines()[1:] == ["/workspace/empty"]
    assert "/usr/bin/" in (await run(editor, "view", "/")).splitlines()
    assert "Permission denied" in await refused(editor, "view", "/workspace/shut")


@BOTH
async def test_a_relative_path_is_resolved_against_the_working_directory_and_reported(
    sandbox: Sandbox, editor: EditorTool
) -> None:
    output = await run(editor, "create", "src/../-a b.txt", file_text="x")
    assert "was taken as /workspace/src/../-a b.txt]" in output
    assert "does not exist" in (output := await refused(editor, "view", "nowhere")) and "/workspace/nowhere" in output
    await run(editor, "create", "b.txt", file_text="x")
    await run(editor, "str_replace", "/workspace//./b.txt", old_str="x", new_str="y")
    await run(editor, "undo_edit", "b.txt")
    assert await content(sandbox, "/workspace/b.txt") == b"x"


# --- refusals -----------------------------------------------------------------------------------------


async def test_a_text_must_match_exactly_once(sandbox: Sandbox, editor: EditorTool) -> None:
    data = b"a = 1\nb = 2\na = 1\naaa\n"
    await sandbox.write(A, data)
    assert "did not appear verbatim" in await refused(editor, "str_replace", old_str="a  = 1", new_str="")
    assert "in lines 1, 3." in await refused(editor, "str_replace", old_str="a = 1", new_str="a = 2")
    assert "Multiple occurrences" in await refused(editor, "str_replace", old_str="aa", new_str="b")
    assert "is empty" in await refused(editor, "str_replace", old_str="", new_str="b")
    assert "are the same" in await refused(editor, "str_replace", old_str="b", new_str="b")
    assert await content(sandbox) == data
    assert "No edit history" in await refused(editor, "undo_edit")


async def test_invalid_calls_return_the_error(editor: EditorTool) -> None:
    await run(editor, "create", file_text="1\n2")
    for arguments, word in (
        ({}, "command"),
        ({"command": "delete", "path": A}, "Unrecognized command 'delete'"),
        ({"command": "view"}, "`path` is required"),
        ({"command": "view", "path": 3}, "`path` must be a string"),
        ({"command": "view", "path": "/a\0b"}, "NUL"),
        ({"command": "view", "path": "/" + "a" * 300}, "too long"),
        ({"command": "view", "path": "/" + "a/" * 3000}, "too long"),
        ({"command": "view", "path": A, "lines": 3}, "Unknown parameter: lines"),
        ({"command": "view", "path": A, "note": "x"}, "Unknown parameter: note"),
        ({"command": "view", "path": f"{A}/b"}, "Not a directory"),
        ({"command": "create", "path": f"{A}/b", "file_text": ""}, "cannot be created"),
        ({"command": "create", "path": A, "file_text": ""}, "already exists"),
        ({"command": "create", "path": "/usr/x", "file_text": ""}, "Read-only file system"),
        ({"command": "create", "path": "/workspace/b"}, "`file_text` is required for command: create"),
        ({"command": "create", "path": "/workspace/b", "file_text": "\ud83d"}, "surrogate"),
        ({"command": "str_replace", "path": A}, "`old_str` is required"),
        ({"command": "insert", "path": A, "new_str": "x"}, "`insert_line` is required"),
        ({"command": "insert", "path": A, "insert_line": 1}, "`new_str` is required"),
        ({"command": "insert", "path": A, "insert_line": 3, "new_str": "x"}, "[0, 2]"),
        ({"command": "insert", "path": A, "insert_line": "1", "new_str": "x"}, "must be an integer"),
        ({"command": "insert", "path": A, "insert_line": float("inf"), "new_str": "x"}, "must be an integer"),
    ):
        result = await editor.call(arguments, timeout_s=20.0)
        assert result.is_error and word in result.content, (arguments, result.content)
    assert await run(editor, "view", view_range=None, old_str=None)


async def test_files_that_are_not_text_are_refused(sandbox: Sandbox, editor: EditorTool) -> None:
    for data, word in ((b"a\0b", "a binary file"), (b"caf\xe9 au lait", "not UTF-8 text (byte 0xe9 at offset 3)")):
        await sandbox.write(A, data)
        for command, more in (("view", {}), ("str_replace", {"old_str": "a", "new_str": "b"})):
            assert word in await refused(editor, command, **more)
        assert await content(sandbox) == data
    await sandbox.exec("rm a.txt; mkfifo a.txt", timeout_s=20.0)
    assert "not a regular file" in await refused(editor, "view")


async def test_files_have_a_largest_size(sandbox: Sandbox, editor: EditorTool) -> None:
    await sandbox.exec("truncate -s 1T a.txt", timeout_s=20.0)
    assert "bytes, more than" in await refused(editor, "view")
    big = "x" * FILE_BYTES
    assert "at most" in await refused(editor, "create", "/workspace/b", file_text=big + "x")
    await run(editor, "create", "/workspace/b", file_text=big)
    assert "at most" in await refused(editor, "insert", "/workspace/b", insert_line=0, new_str="x")
    assert len(await content(sandbox, "/workspace/b")) == FILE_BYTES


# --- what an edit preserves ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\r\nb\r\nc\r\n", b"a\r\nB\r\nB\r\nc\r\n"),
        (b"a\nb\nc", b"a\nB\nB\nc"),
        (b"\xef\xbb\xbfa\nb\nc\n", b"\xef\xbb\xbfa\nB\nB\nc\n"),
        (b"x\r\ny\ra\nb\nc\x0c\xe2\x80\xa8\n", b"x\r\ny\ra\nB\nB\nc\x0c\xe2\x80\xa8\n"),
        (b"\ta\nb\nc\t\n", b"\ta\nB\nB\nc\t\n"),
    ],
)
async def test_line_endings_tabs_and_a_missing_last_newline_are_preserved(
    sandbox: Sandbox, editor: EditorTool, before: bytes, after: bytes
) -> None:
    await sandbox.write(A, before)
    assert "\r\n" not in await run(editor, "view") or b"x\r\n" in before
    await run(editor, "str_replace", old_str="a\nb\nc", new_str="a\nB\nB\nc")
    assert await content(sandbox) == after
    await run(editor, "undo_edit")
    assert await content(sandbox) == before


async def test_mixed_line_endings_are_reported_if_they_matter(sandbox: Sandbox, editor: EditorTool) -> None:
    await sandbox.write(A, b"a\r\nb\n")
    assert "line endings are mixed" in await refused(editor, "str_replace", old_str="a\nb", new_str="c")
    await run(editor, "str_replace", old_str="a", new_str="A")
    assert await content(sandbox) == b"A\r\nb\n"


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [(b"", 0, b"x\n"), (b"a", 1, b"a\nx"), (b"a\n", 1, b"a\nx\n"), (b"a\r\nb\r\n", 1, b"a\r\nx\r\nb\r\n")],
)
async def test_insertion_at_every_kind_of_end(
    sandbox: Sandbox, editor: EditorTool, before: bytes, line: int, after: bytes
) -> None:
    await sandbox.write(A, before)
    await run(editor, "insert", insert_line=line, new_str="x")
    assert await content(sandbox) == after


@BOTH
async def test_mode_and_links_are_preserved(sandbox: Sandbox, editor: EditorTool) -> None:
    await sandbox.write(A, b"#!/bin/sh\necho old\n", mode=0o750)
    await sandbox.exec("ln -s a.txt link; ln a.txt hard", timeout_s=20.0)
    await run(editor, "str_replace", "/workspace/link", old_str="old", new_str="new")
    ran = await sandbox.exec("test -L link && ./hard && ls -l a.txt", timeout_s=20.0)
    assert ran.stdout.startswith(b"new\n-rwxr-x---")
    await run(editor, "undo_edit", "/workspace/link")
    assert (await sandbox.exec("./a.txt", timeout_s=20.0)).stdout == b"old\n"


async def test_an_unwritable_file_is_unchanged(sandbox: Sandbox, editor: EditorTool) -> None:
    await sandbox.write(A, b"localhost\n", mode=0o444)
    for path, reason in (("/etc/hosts", "Read-only file system"), (A, "Permission denied")):
        before = await content(sandbox, path)
        output = await refused(editor, "insert", path, insert_line=0, new_str="1.2.3.4 elsewhere")
        assert reason in output and "The file is as it was." in output
        assert await content(sandbox, path) == before
        assert "No edit history" in await refused(editor, "undo_edit", path)


async def test_a_full_disk_fails_the_edit_and_preserves_the_file(tmp_path: Path) -> None:
    async with BubblewrapRuntime(root=tmp_path, shm_bytes=256 << 10) as runtime:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
        editor = await EDITOR.open(ToolContext(sandbox))
        data = b"x" * 100_000 + b"\n"
        await sandbox.write("/dev/shm/x", data)
        await sandbox.exec("cat /dev/zero > /dev/shm/rest", timeout_s=20.0)
        output = await refused(editor, "insert", "/dev/shm/x", insert_line=0, new_str="y" * 200_000)
        assert "No space left" in output and "The file is as it was" in output
        assert await content(sandbox, "/dev/shm/x") == data


async def test_the_editor_works_in_an_image_with_only_busybox(tmp_path: Path) -> None:
    image = busybox_image(tmp_path / "image")
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(image=str(image)), lease_s=60.0)
        editor = await EDITOR.open(ToolContext(sandbox))
        await sandbox.write(A, b"a\n", mode=0o755)
        assert A in (await run(editor, "view", "/workspace")).splitlines()
        assert "644" not in await run(editor, "str_replace", old_str="a", new_str="b")
        assert (await sandbox.exec("ls -l a.txt", timeout_s=20.0)).stdout.startswith(b"-rwxr-xr-x")
        await sandbox.exec("rm /bin/sh", timeout_s=20.0)  # from here on, as in an image without a shell
        assert "its mode is 644 now" in await run(editor, "str_replace", old_str="b", new_str="c")
        assert await content(sandbox) == b"c\n"
        assert "cannot be listed" in await refused(editor, "view", "/workspace")


async def test_undo_reports_other_changes_that_it_reverts(sandbox: Sandbox, editor: EditorTool) -> None:
    await run(editor, "create", file_text="a\n")
    for _ in range(2):  # each repetition of an edit is one step
        await run(editor, "str_replace", old_str="a", new_str="b")
        await run(editor, "str_replace", old_str="b", new_str="a")
    await run(editor, "str_replace", old_str="a", new_str="b")
    await sandbox.exec("echo more >> a.txt", timeout_s=20.0)
    assert "something else had changed" in await run(editor, "undo_edit")
    for expected in (b"b\n", b"a\n", b"b\n", b"a\n"):
        assert "something else" not in await run(editor, "undo_edit")
        assert await content(sandbox) == expected
    await refused(editor, "undo_edit")


def test_history_is_bounded_in_number_and_in_bytes() -> None:
    history = History()
    for number in range(UNDO_EDITS + 5):
        history.add(f"/{number}", b"x", b"y")
    assert history.last("/4") is None and history.last("/5") is not None
    history.add("/big", b"x" * UNDO_BYTES, b"")
    assert history.last(f"/{UNDO_EDITS + 4}") is None
    edit = history.last("/big")
    assert edit is not None
    history.drop(edit)
    history.add("/big", b"x" * UNDO_BYTES, b"")
    assert history.last("/big") is not None


@pytest.mark.parametrize("data", [b"", b"\n", b"a", b"a\r\n", b"a\r\n\n", b"a\rb\r\n", b"\r", b"\n\r\n", b"\r\r\n"])
def test_a_text_is_written_as_it_was_read(data: bytes) -> None:
    assert TextFile.of(data).data == data


# --- bounds -------------------------------------------------------------------------------------------


async def test_long_output_is_cut_and_counted(sandbox: Sandbox) -> None:
    editor = await EDITOR.open(ToolContext(sandbox, output_bytes=1000))
    await run(editor, "create", file_text="é" * 30_000)
    assert len((output := await run(editor, "view")).encode()) < 1100 and "bytes left out" in output
    assert "\ufffd" not in output
    output = await run(editor, "insert", insert_line=0, new_str="y" * 50_000)
    assert len(output.encode()) < 1100
    assert len((await refused(editor, "str_replace", old_str="z" * 50_000)).encode()) < 2300
    await sandbox.exec("mkdir d; cd d; seq 5000 | xargs touch", timeout_s=20.0)
    assert len((output := await run(editor, "view", "/workspace/d")).encode()) < 1100 and "bytes left out" in output


async def test_a_call_ends_at_its_timeout(sandbox: Sandbox, editor: EditorTool) -> None:
    await run(editor, "create", file_text="a\n")
    result = await editor.call({"command": "view", "path": A}, timeout_s=0.0)
    assert result.is_error and "not done within 0 s" in result.content
    assert "a\n" in await run(editor, "view")


async def test_concurrent_edits_are_all_kept(sandbox: Sandbox, editor: EditorTool) -> None:
    await run(editor, "create", file_text="")
    await asyncio.gather(*[run(editor, "insert", insert_line=0, new_str=str(n)) for n in range(8)])
    assert sorted((await content(sandbox)).split()) == [b"%d" % n for n in range(8)]


async def test_links_do_not_lead_out_of_the_sandbox(sandbox: Sandbox, editor: EditorTool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    await sandbox.exec(["ln", "-s", str(secret), "a.txt"], timeout_s=20.0)
    assert "does not exist" in await refused(editor, "view")
    await run(editor, "create", file_text="mine")
    assert secret.read_text() == "of the host"


async def test_the_end_of_the_sandbox_is_an_error_with_its_blame(sandbox: Sandbox, editor: EditorTool) -> None:
    await run(editor, "create", file_text="a\n")
    await sandbox.kill()
    for command, more in (("view", {}), ("create", {"file_text": ""}), ("undo_edit", {})):
        with pytest.raises(SandboxLost):
            await call(editor, command, **more)
    await editor.close()


async def test_a_file_of_a_million_lines_does_not_block_the_event_loop():
    file = TextFile.of(b"\n" * FILE_BYTES)
    others = asyncio.create_task(asyncio.sleep(0))
    shown = await numbered(file)
    assert others.done(), "no other task ran"
    assert shown.endswith(f"\n{FILE_BYTES:6}\t") and shown == file.numbered()
