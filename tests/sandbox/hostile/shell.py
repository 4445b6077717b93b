"""Attacks on the shell: on the status it reports, on the terminal, on the reader of its output.

Its status only informs the model, and code in the same shell can forge it. What must hold is that a forgery is over
when its command is: the next command's output and status are its own, or the model reads that the shell was lost.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from rollyard.sandbox.base import Runtime
from rollyard.testing.sandbox_conformance import marked
from rollyard.tools.shell import Shell, ShellOutcome
from tests.sandbox.hostile.cases import LONG_S, SECONDS, hostile, python, started

CAP = 10_000


@asynccontextmanager
async def shell_in(runtime: Runtime) -> AsyncGenerator[Shell, None]:
    async with started(runtime) as sandbox:
        shell = await Shell.open(sandbox, output_bytes=CAP)
        try:
            yield shell
        finally:
            await shell.close()


async def in_step(shell: Shell, after: str) -> None:
    """The next two commands answer for themselves; one may find that the shell was lost, and says so. More may be said
    (by `set -x`, or late by the attack itself), but nothing that belongs to another of these commands."""
    was_lost, earlier = False, set[str]()
    for status in (3, 0, 4):
        token = marked()
        result = await shell.run(f"echo {token}; answer() {{ return {status}; }}; answer", SECONDS)
        if result.is_restarted and not was_lost:
            was_lost = True
            continue
        details = (after, result.outcome, result.status, result.output[-300:])
        assert (result.outcome, result.status) == (ShellOutcome.COMPLETED, status), details
        assert token in result.output and not any(other in result.output for other in earlier), details
        earlier.add(token)


_RECORDS = "for n in $(seq 0 300); do printf '%s 0 /forged\\0' $n; done"

_DESCRIPTORS = "9 10 11 12 13 14 60"
"""The status pipe's number, and where a shell puts it aside while a command runs."""

_FORGERIES = (
    # Records on the status pipe: for every number that there may be, broken ones, and no record at all.
    f"for f in {_DESCRIPTORS}; do ({_RECORDS}) >&$f; done 2>/dev/null",
    f"for f in {_DESCRIPTORS}; do printf '1 2' >&$f; done 2>/dev/null",
    f"for f in {_DESCRIPTORS}; do (head -c 100000 /dev/zero) >&$f; done 2>/dev/null",
    f'for f in /proc/$$/fd/*; do case "$(readlink $f)" in pipe:*) ({_RECORDS}) > $f;; esac; done 2>/dev/null',
    # The right number, too early: the command that does it is cut short, and it alone.
    '{ eval "$PROMPT_COMMAND"; } 60>&10 2>/dev/null; sleep 0.3; echo late',
    # What the shell does before each prompt, and the words that our line is made of.
    f'PROMPT_COMMAND="({_RECORDS}) >&60"',
    "unset PROMPT_COMMAND",
    "readonly PROMPT_COMMAND=true",
    "PROMPT_COMMAND=(true true true); PS1='forged '; PS2='forged '; PS0='forged '",
    "builtin() { echo forged; }; eval() { echo forged; }; printf() { echo forged; }",
    "alias builtin='echo forged' eval='echo forged'; shopt -s expand_aliases",
    "enable -n builtin eval printf",
    "set -e; set -u; set -n",
    "set -o posix; set -o noclobber; set -x",
    "trap 'echo forged' DEBUG; trap 'echo forged' ERR EXIT INT QUIT",
    "exec 60>&-",
    "exec 60>/dev/null",
    "exec >/dev/null 2>&1",
    "exec </dev/null",
    # The terminal and the shell itself.
    "stty raw -echo; stty 0",
    "stty echo echonl opost onlcr; tput rmam 2>/dev/null; true",
    "printf '\\033[6n\\033[c\\005'",
    "kill -STOP $$",
    "kill -9 $$",
    "exec sleep 1000",
    "exec bash --norc -i",
    "exit 3",
    "logout",
    "suspend -f",
    "sleep 1000 & disown; bg; fg",
    "mkdir gone; cd gone; rmdir ../gone",
    "ulimit -n 3; ulimit -f 0",
    "ulimit -u 1; ulimit -v 1000",
)


@hostile
async def a_forged_status(runtime: Runtime) -> None:
    """Each status repeats the number of its command, and stale ones are dropped; everything that a command did to the
    shell is set anew before the next, or costs the shell."""
    async with started(runtime) as sandbox:
        places = asyncio.Semaphore(8)  # most of the time they wait

        async def forge(attack: str) -> None:
            async with places:
                shell = await Shell.open(sandbox, output_bytes=CAP)
                try:
                    await shell.run(attack, 2.0)
                    await in_step(shell, attack)
                finally:
                    await shell.close()

        async with asyncio.TaskGroup() as group:
            for attack in _FORGERIES:
                group.create_task(forge(attack))


@hostile
async def a_status_forged_in_the_background(runtime: Runtime) -> None:
    """What a forger's record cuts short is not put to the next command's account once the forger is gone."""
    async with started(runtime) as sandbox:
        shell = await Shell.open(sandbox, output_bytes=CAP)
        try:
            once = f"for f in {_DESCRIPTORS}; do ({_RECORDS}) >&$f; done 2>/dev/null"
            await shell.run(f"(for i in 1 2 3 4 5 6; do {once}; sleep 0.1; done; : > gone) &", SECONDS)
            for _ in range(3):
                await shell.run("sleep 0.3; echo late", SECONDS)
            await sandbox.exec("for i in $(seq 50); do [ ! -e gone ] || break; sleep 0.1; done", timeout_s=SECONDS)
            await shell.run("true", SECONDS)
            await in_step(shell, "a forger in the background")
        finally:
            await shell.close()


@hostile
async def typing_into_the_own_terminal(runtime: Runtime) -> None:
    """TIOCSTI is refused, or what it typed is flushed: it runs nowhere, and the server's terminal is out of reach."""
    script = (
        "import fcntl, termios\nfor byte in b'touch injected; echo injected\\n':\n"
        " try: fcntl.ioctl(0, termios.TIOCSTI, bytes([byte]))\n except OSError: pass"
    )
    async with started(runtime) as sandbox:
        shell = await Shell.open(sandbox, output_bytes=CAP)
        try:
            await sandbox.write("type.py", script.encode())
            await shell.run("python3 type.py", SECONDS)
            await in_step(shell, "typing")
            assert (await shell.run("ls injected", SECONDS)).status != 0
        finally:
            await shell.close()
        opened = await python(sandbox, "open('/dev/tty')")
        assert opened.status == 1, "a command has a terminal, though none was given to it"


@hostile
async def a_gigabyte_on_the_terminal(runtime: Runtime) -> None:
    """Output is kept head and tail under its cap, read with pauses, and interrupted at the deadline."""
    async with shell_in(runtime) as shell:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        worst = 0.0

        async def beat() -> None:
            nonlocal worst
            loop = asyncio.get_running_loop()
            while True:
                at = loop.time()
                await asyncio.sleep(0.01)
                worst = max(worst, loop.time() - at)

        pulse = asyncio.ensure_future(beat())
        try:
            result = await shell.run("head -c 1000000000 /dev/zero | tr '\\0' x", 5.0)
        finally:
            pulse.cancel()
            await asyncio.wait([pulse])
        assert result.outcome in (ShellOutcome.COMPLETED, ShellOutcome.TIMEOUT)
        assert len(result.output) <= 2 * CAP and result.omitted_bytes > CAP
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # in KiB
        assert worst < 5.0, f"the event loop stood still for {worst} s"
        await in_step(shell, "a flood")


@hostile
async def output_that_is_no_text(runtime: Runtime) -> None:
    """Bytes come back as they are from a command, and as text that can be sent on from a shell."""
    async with started(runtime) as sandbox:
        noise = await python(sandbox, "import sys; sys.stdout.buffer.write(bytes(range(256)) * 4096)")
        assert noise.stdout == bytes(range(256)) * 4096
        shell = await Shell.open(sandbox, output_bytes=CAP)
        try:
            for command in (
                "head -c 100000 /dev/urandom",
                r"printf '\377\376\000\303'",  # ends in the middle of a character
                r"printf '\xed\xa0\x80 \xf4\x90\x80\x80 \xc0\xaf'",  # a surrogate, too high, too long
                r"printf '\033c\033[2J\033]0;title\007\033P+q\033\\ \r\b\b\016\017'",
            ):
                result = await shell.run(command, SECONDS)
                result.output.encode()
                await in_step(shell, command)
        finally:
            await shell.close()


@hostile
async def programs_that_wait_for_input(runtime: Runtime) -> None:
    """A reader of the terminal is found and interrupted; a command has an empty stdin and no terminal at all."""
    async with started(runtime) as sandbox:
        for command in ("cat", "read x", "python3 -i", "sh -c 'read x < /dev/tty'"):
            result = await sandbox.exec(command, timeout_s=SECONDS)
            assert not result.is_timed_out, command
        shell = await Shell.open(sandbox, output_bytes=CAP)
        try:
            for command in ("cat", "read x", "python3", "sh -c 'read x < /dev/tty'", "stty raw; cat"):
                result = await shell.run(command, SECONDS)
                assert result.outcome is ShellOutcome.AWAITING_INPUT, (command, result)
                await in_step(shell, command)
        finally:
            await shell.close()


@hostile
async def a_megabyte_to_the_shell(runtime: Runtime) -> None:
    """A command is handed over in a file, never typed: no line is too long, and none of it runs as another."""
    async with shell_in(runtime) as shell:
        result = await shell.run(f"printf %s {'x' * (1 << 20)} | wc -c", LONG_S)
        assert (result.output.split(), result.status) == (["1048576"], 0), result
        await in_step(shell, "a long command")
