"""The persistent Python, the image's and the portable one, in sandboxes: its state, its failures and its output."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from bench.peer_drivers import CACHE
from rollyard.core.failure import SandboxEndedByPolicy, SandboxLost
from rollyard.sandbox import Bind, BubblewrapRuntime, LocalRuntime, Sandbox, SandboxSpec
from rollyard.sandbox.python import INSIDE, PortablePython, portable_python
from rollyard.tools import _ipython_worker
from rollyard.tools._ipython_process import REPLY_BYTES
from rollyard.tools.base import ToolContext
from rollyard.tools.ipython import IMAGES_OWN, IPYTHON, CellOutcome, Command, NoPython, PythonSession
from rollyard.tools.registry import tool_kind
from tests.tools.busybox import busybox_image

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("session", ["plain", "ipython"], indirect=True)
"""For tests that depend on the interpreter; all others use the image's own Python, which is plain."""

IPYTHON_ONLY = pytest.mark.parametrize("session", ["ipython"], indirect=True)


@pytest.fixture(scope="module")
def python() -> PortablePython:
    return portable_python(CACHE / "python")


@pytest.fixture
async def sandbox(tmp_path: Path, python: PortablePython) -> AsyncGenerator[Sandbox, None]:
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        yield await runtime.start(SandboxSpec(binds=(Bind(python.folder, INSIDE),)), lease_s=60.0)


@pytest.fixture
async def session(
    request: pytest.FixtureRequest, sandbox: Sandbox, python: PortablePython
) -> AsyncGenerator[PythonSession, None]:
    kind = getattr(request, "param", "plain")
    command: Command = IMAGES_OWN if kind == "plain" else (python.argv, python.env)
    async with PythonSession(sandbox, [command], output_bytes=1 << 20) as session:
        yield session


async def output_of(session: PythonSession, code: str) -> str:
    result = await session.run(code, 20.0)
    assert result.outcome is CellOutcome.COMPLETED and not result.is_raised, result
    return result.output


async def raised(session: PythonSession, code: str) -> str:
    result = await session.run(code, 20.0)
    assert result.outcome is CellOutcome.COMPLETED and result.is_raised, result
    return result.output


# --- state and output ---------------------------------------------------------------------------------


@BOTH
async def test_names_persist_and_the_last_value_is_shown(session: PythonSession) -> None:
    assert await output_of(session, "import math\nx = 41\ndef f(y):\n    return x + y") == ""
    assert await output_of(session, "f(1)") == "42\n"
    assert await output_of(session, "print('a')\n'b'") == "a\n'b'\n"
    assert await output_of(session, "None") == await output_of(session, "") == ""
    assert await output_of(session, "import asyncio\nawait asyncio.sleep(0, _)") == "'b'\n"
    assert await output_of(session, "import pickle, __main__\npickle.loads(pickle.dumps(f)) is f") == "True\n"


@BOTH
async def test_long_and_odd_code_arrives_unchanged(session: PythonSession) -> None:
    assert await output_of(session, f"x = '{'é' * 500_000}'\nlen(x)") == "500000\n"
    assert await output_of(session, "'é漢🙂'") == "'é漢🙂'\n"
    assert await output_of(session, "print('\ud83d', '\\ud83d')") == "? \\ud83d\n"
    assert "null" in await raised(session, "x = '\0'")


@BOTH
async def test_all_output_comes_in_order(session: PythonSession) -> None:
    code = """
import os, subprocess, sys, ctypes
print("one", end=" ")
os.system("echo two")
print("three", file=sys.stderr)
subprocess.run("echo four >&2", shell=True)
os.write(1, b"five\\n")
_ = ctypes.CDLL(None).printf(b"six\\n")
"""
    assert await output_of(session, code) == "one two\nthree\nfour\nfive\nsix\n"
    assert await output_of(session, "_ = os.write(1, b'\\xff\\x1b[31mred\\n')") == "\ufffdred\n"


async def test_floods_are_cut_in_the_middle_and_counted(sandbox: Sandbox) -> None:
    async with PythonSession(sandbox, [IMAGES_OWN], output_bytes=1000) as session:
        result = await session.run("print('first'); print('y\\n' * 2_500_000, end=''); print('last')", 30.0)
        assert result.output.startswith("first\ny\n") and result.output.endswith("y\nlast\n")
        assert len(result.output) < 1100 and result.omitted_bytes == 5_000_011 - 1000
        assert await output_of(session, "1") == "1\n"


@BOTH
async def test_an_endless_flood_ends_at_its_timeout(session: PythonSession) -> None:
    result = await session.run("while True: print('y' * 1000)", 3.0)
    assert result.outcome is CellOutcome.TIMEOUT and result.omitted_bytes > 0
    assert not result.is_restarted
    assert await output_of(session, "1") == "1\n"


@BOTH
async def test_pictures_are_shown_as_type_and_size(session: PythonSession) -> None:
    await output_of(
        session, "class A:\n    def _repr_png_(self): return b'x' * 99\n    def __repr__(self): return 'A!'"
    )
    assert await output_of(session, "A()") == "A!\n<image/png, 99 bytes>\n"
    assert await output_of(session, "display(A(), 'b')") == "A!\n<image/png, 99 bytes>\n'b'\n"


def test_a_picture_in_base64_has_its_own_size() -> None:
    assert _ipython_worker.as_text({"image/png": "eHh4eA==\n", "text/html": "<b>"}) == "<b>\n<image/png, 4 bytes>"


# --- errors in a cell ---------------------------------------------------------------------------------


@BOTH
async def test_a_traceback_has_no_colours_and_no_frames_of_the_worker(session: PythonSession) -> None:
    await output_of(session, "x = 5\ndef f():\n    return 1 / 0")
    output = await raised(session, "f()")
    assert "ZeroDivisionError: division by zero" in output and "return 1 / 0" in output
    assert "\x1b" not in output and "ipython_" not in output
    assert "SyntaxError" in await raised(session, "def g(:")
    assert "RecursionError" in await raised(session, "def r(): r()\nr()")
    shown = await session.run("class B:\n    def __repr__(self): raise ValueError('boom')\nB()", 20.0)
    assert "ValueError: boom" in shown.output
    assert await output_of(session, "x") == "5\n"


@BOTH
async def test_exit_does_not_end_the_process(session: PythonSession) -> None:
    await output_of(session, "import sys\nx = 5")
    assert "SystemExit: 3" in await raised(session, "sys.exit(3)")
    await session.run("exit()", 20.0)
    assert await output_of(session, "x") == "5\n"


@BOTH
async def test_input_raises_eof_error(session: PythonSession) -> None:
    assert "EOFError: nobody can type" in await raised(session, "input('name? ')")
    assert await output_of(session, "import sys\nsys.stdin.read()") == "''\n"


@IPYTHON_ONLY
async def test_magics_work_with_ipython(session: PythonSession) -> None:
    assert await output_of(session, "!echo hi") == "hi\n"
    assert await output_of(session, "x = !echo a b\nx[0].split()") == "['a', 'b']\n"
    assert await output_of(session, "%%bash\necho from bash") == "from bash\n"
    assert await output_of(session, "%cd -q /tmp\n%pwd") == "'/tmp'\n"
    assert "Return the number of items" in await output_of(session, "len?")
    assert session.about.startswith("ipython ")


async def test_plain_python_reports_that_it_has_no_magics(session: PythonSession) -> None:
    assert "without IPython's magics" in await raised(session, "!ls")
    assert session.about.startswith("python 3.")


@BOTH
async def test_changes_of_a_cell_to_its_streams_are_undone(session: PythonSession) -> None:
    for harm in (
        "import io, os, signal, sys; sys.stdout = sys.stderr = io.StringIO()",
        "sys.stdout.close(); sys.stderr.close()",
        "os.close(1); os.close(2)",
        "os.dup2(os.open('/dev/null', os.O_WRONLY), 1); import builtins; builtins.input = lambda: 1",
        "signal.signal(signal.SIGINT, signal.SIG_IGN); None",
    ):
        await session.run(harm, 20.0)
        assert await output_of(session, "print('back')") == "back\n", harm
    assert "EOFError" in await raised(session, "input()")
    assert not (await session.run("import time; time.sleep(1000)", 0.2)).is_restarted


@BOTH
async def test_a_forked_child_sends_no_reply(session: PythonSession) -> None:
    code = "import os, sys\nif pid := os.fork():\n    os.waitpid(pid, 0)\nelse:\n    print('child')"
    assert await output_of(session, code) == "child\n"
    assert await output_of(session, "'parent'") == "'parent'\n"


async def test_children_do_not_inherit_the_pipes(session: PythonSession) -> None:
    links = await output_of(
        session,
        "import subprocess\nprint(subprocess.run(['ls', '-l', '/proc/self/fd'], capture_output=True).stdout.decode())",
    )
    numbers = {int(line.split()[8]) for line in links.splitlines() if "->" in line}
    assert numbers <= {0, 1, 2, 3}


# --- interrupts, deaths, restarts ---------------------------------------------------------------------


@BOTH
async def test_a_timeout_interrupts_and_names_are_kept(session: PythonSession) -> None:
    await output_of(session, "import time, subprocess\nx = 5")
    for code in ("time.sleep(1000)", "while True: pass", "subprocess.run(['sleep', '1000'])"):
        result = await session.run(code, 0.3)
        assert (result.outcome, result.is_restarted) == (CellOutcome.TIMEOUT, False), code
        assert "KeyboardInterrupt" in result.output
        assert await output_of(session, "x") == "5\n"


async def test_an_interrupt_that_comes_before_the_cell_is_not_lost(session: PythonSession) -> None:
    await output_of(session, "x = 5")
    result = await session.run("while True: pass", 0.0)
    assert (result.outcome, result.is_restarted) == (CellOutcome.TIMEOUT, False)
    assert await output_of(session, "x") == "5\n"


async def test_a_cell_that_cannot_be_interrupted_is_killed(
    session: PythonSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard.tools.ipython.INTERRUPT_S", 0.2)
    await output_of(session, "import signal\nx = 5")
    code = "print('begun')\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    result = await session.run(code, 1.5)
    assert (result.outcome, result.is_restarted, result.output) == (CellOutcome.TIMEOUT, True, "begun\n")
    assert "NameError" in await raised(session, "x")


@BOTH
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("if os.fork(): os._exit(4)\nelse: time.sleep(1000)", 4),  # the child keeps all pipes open
    ],
)
async def test_a_dead_process_is_reported_and_replaced(session: PythonSession, code: str, status: int) -> None:
    result = await session.run(f"import os, signal, time\nx = 5\nprint('last words')\n{code}", 20.0)
    assert (result.outcome, result.status, result.is_restarted) == (CellOutcome.DIED, status, True)
    assert result.output == "last words\n"
    assert "NameError" in await raised(session, "x")


async def test_code_is_not_run_in_a_new_process_without_its_names(session: PythonSession, sandbox: Sandbox) -> None:
    end = "def end():\n    while not os.path.exists('end'): time.sleep(0.01)\n    os._exit(4)"
    await output_of(session, f"import os, threading, time\n{end}\nthreading.Thread(target=end).start()")
    await sandbox.write("end", b"")  # only now: the cell has ended
    assert session._live is not None
    assert await session._live.ended(20.0) == 4
    result = await session.run("print('was run')", 20.0)
    assert (result.outcome, result.status, result.output) == (CellOutcome.DIED, 4, "")
    assert await output_of(session, "1") == "1\n"


async def test_a_cancelled_cell_is_killed_and_the_next_call_reports_it(session: PythonSession) -> None:
    await output_of(session, "x = 5")
    running = asyncio.ensure_future(session.run("print('begun')\nwhile True: pass", 1000.0))
    while not session._output.total_bytes:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await session.run("x", 20.0)).is_restarted
    assert "NameError" in await raised(session, "x")


async def test_one_cell_at_a_time(session: PythonSession) -> None:
    results = await asyncio.gather(*[session.run(f"print({n})\n{n}", 20.0) for n in range(5)])
    assert [result.output for result in results] == [f"{n}\n{n}\n" for n in range(5)]


# --- forged replies -----------------------------------------------------------------------------------

PIPES = """
import os
pipes = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
pipes = [fd for fd in pipes if os.path.exists(f"/proc/self/fd/{fd}") and "pipe:" in os.readlink(f"/proc/self/fd/{fd}")]
def forge(data):
    for fd in pipes:
        try: os.write(fd, data)
        except OSError: pass
"""


@BOTH
async def test_forged_replies_do_not_desynchronize_the_session(session: PythonSession) -> None:
    await output_of(session, PIPES)
    for forged in (rb"\xff\n\n 7\nok\n-1 ok\n", rb"99 ok\n0 ipython 1\n", b"".join(b"%d ok\\n" % n for n in range(99))):
        await session.run(f"forge(b'{forged.decode()}')\nprint('late')", 20.0)
        await session.run("pass", 20.0)  # consumes forged replies
        for n in range(5):
            assert await output_of(session, f"{n}") == f"{n}\n"


async def test_a_flood_of_replies_ends_the_process(session: PythonSession) -> None:
    await output_of(session, PIPES)
    result = await session.run(f"forge(b'x' * {REPLY_BYTES + 1})", 20.0)
    assert (result.outcome, result.is_restarted) == (CellOutcome.DIED, True)
    assert await output_of(session, "1") == "1\n"


async def test_closing_the_pipes_ends_the_process(session: PythonSession) -> None:
    result = await session.run("import os\nos.closerange(3, 4096)", 20.0)
    assert (result.outcome, result.is_restarted) == (CellOutcome.DIED, True)
    assert await output_of(session, "1") == "1\n"


# --- start --------------------------------------------------------------------------------------------


async def test_cells_can_import_the_agents_files_and_the_worker_does_not(sandbox: Sandbox) -> None:
    for name in ("ast", "IPython", "linecache", "traceback"):
        await sandbox.write(f"{name}.py", b"raise SystemExit('shadowed')")
    await sandbox.write("mine.py", b"value = 7")
    async with PythonSession(sandbox, [IMAGES_OWN], output_bytes=1000) as session:
        assert await output_of(session, "import mine, os; mine.value, os.getcwd()") == "(7, '/workspace')\n"


async def test_an_image_without_python_gets_the_portable_python(tmp_path: Path, python: PortablePython) -> None:
    spec = SandboxSpec(image=str(busybox_image(tmp_path / "image")), binds=(Bind(python.folder, INSIDE),))
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(spec, lease_s=60.0)
        tool = await IPYTHON.open(ToolContext(sandbox, python=python))
        result = await tool.call({"code": "import sys\nprint(sys.prefix)\n!echo hi"}, timeout_s=20.0)
        assert (result.content, result.info["outcome"]) == (f"{INSIDE}\nhi", "completed")
        assert str(result.info["python"]).startswith("ipython ")
        await tool.close()


async def test_a_missing_python_is_reported(tmp_path: Path) -> None:
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(image=str(busybox_image(tmp_path / "image"))), lease_s=60.0)
        tool = await IPYTHON.open(ToolContext(sandbox))
        for _ in range(2):
            result = await tool.call({"code": "1"}, timeout_s=20.0)
            assert result.is_error and "no Python starts in this sandbox" in result.content
        await tool.close()


async def test_starting_an_unresponsive_python_times_out(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.tools.ipython.START_S", 0.2)
    async with PythonSession(sandbox, [(("sh", "-c", "sleep 1000"), {})], output_bytes=1000) as session:
        with pytest.raises(NoPython):
            await session.run("1", 20.0)


async def test_python_starts_without_an_accessible_working_directory(sandbox: Sandbox) -> None:
    async with PythonSession(sandbox, [IMAGES_OWN], output_bytes=1000, cwd="/nowhere") as session:
        assert await output_of(session, "import os; os.getcwd()") == "'/'\n"


async def test_ipython_starts_with_an_unwritable_home(sandbox: Sandbox, python: PortablePython) -> None:
    command = (python.argv, {**python.env, "HOME": "/proc"})
    async with PythonSession(sandbox, [command], output_bytes=1000) as session:
        assert await output_of(session, "!echo hi") == "hi\n"


async def test_both_pythons_run_in_the_local_runtime(tmp_path: Path, python: PortablePython) -> None:
    async with LocalRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
        portable = python.on_host()
        for command in (IMAGES_OWN, (portable.argv, portable.env)):
            async with PythonSession(sandbox, [command], output_bytes=1000) as session:
                assert await output_of(session, "import os; os.path.samefile('.', os.environ['HOME'])") == "True\n"


async def test_the_end_of_the_sandbox_is_not_hidden(sandbox: Sandbox, session: PythonSession) -> None:
    await output_of(session, "1")
    await sandbox.kill()
    with pytest.raises((SandboxLost, SandboxEndedByPolicy)):
        await session.run("1", 20.0)


async def test_a_session_that_was_never_used_can_be_closed(sandbox: Sandbox, python: PortablePython) -> None:
    for _ in range(3):
        await (await IPYTHON.open(ToolContext(sandbox, python=python))).close()


def test_the_worker_is_valid_python_3_8() -> None:
    ast.parse(Path(_ipython_worker.__file__).read_text(), feature_version=(3, 8))


def test_it_works_on_uvloop_too(tmp_path: Path) -> None:
    checks: list[Callable[[PythonSession], Coroutine[None, None, None]]] = [
        test_names_persist_and_the_last_value_is_shown,
        test_a_timeout_interrupts_and_names_are_kept,
        test_one_cell_at_a_time,
    ]

    async def main() -> None:
        async with BubblewrapRuntime(root=tmp_path) as runtime:
            for check in checks:
                sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
                async with PythonSession(sandbox, [IMAGES_OWN], output_bytes=1 << 20) as session:
                    await check(session)
                await sandbox.kill()

    uvloop.run(main())


# --- the tool -----------------------------------------------------------------------------------------


async def test_the_tools_output_contains_what_the_model_needs(sandbox: Sandbox, python: PortablePython) -> None:
    assert tool_kind("ipython") is IPYTHON and IPYTHON.needs_sandbox and IPYTHON.needs_python
    tool = await IPYTHON.open(ToolContext(sandbox, 2000, python))
    assert tool._session.about == ""  # opening does not wait

    async def run_tool(code: str, timeout_s: float = 20.0, **more: bool) -> str:
        return (await tool.call({"code": code, **more}, timeout_s=timeout_s)).content

    assert await run_tool("x = 5\nprint('hi')") == "hi"
    assert await run_tool("pass") == "(no output)"
    assert "timed out after 0.2 s and was interrupted]" in await run_tool("import os, time; time.sleep(100)", 0.2)
    assert await run_tool("x") == "5"
    assert await run_tool("x", restart=True) != "5"
    assert (await tool.call({"restart": True}, timeout_s=20.0)).content == "[Python was started anew, as asked]"
    died = await run_tool("import os; os._exit(7)")
    assert "ended with status 7" in died and "are lost" in died
    assert "perhaps for want of memory" in await run_tool("import os; os.kill(os.getpid(), 9)")
    assert len(await run_tool("'x' * 100_000")) < 2200
    result = await tool.call({"code": "1 / 0"}, timeout_s=20.0)
    assert not result.is_error and result.info["is_raised"] is True
    for bad in ({}, {"code": 3}, {"code": "1", "restart": "yes"}, {"code": "1", "other": 1}, {"restart": False}):
        assert (await tool.call(bad, timeout_s=20.0)).is_error
    await tool.close()
    assert IPYTHON.spec.schema()["type"] == "function"
