"""Runs the shell and Python blocks of a documentation page as they are written, from top to bottom.

    python tests/docs/page.py docs/quickstart.md          runs a page in its own namespaces
    python tests/docs/page.py --not-run                   lists the blocks that are not run, with their reasons

The rules:

- `sh` blocks of a page run in one bash, in a new folder that has this checkout's `examples`, `scripts` and `src` and a
  virtual environment in `.venv`. Every command must succeed.
- A command that runs until it is stopped (`rollyard serve`, `engine`, `gym-agent`, a scripted engine) starts in the
  background; the next command starts when it listens. It must still run at the end of the page. A second
  `rollyard serve` (`engine`, `gym-agent`) replaces the first. `rollyard top` prints one frame.
- `python` blocks of a page run in one process and share their names, as one file would. The variables that the shell
  exported are in their environment.
- The page has its own network namespace: it may use any port, reaches nothing outside, and the machines `gpu1` to
  `gpu9` are this one. It cannot write to the system: `/` is read-only.
- Comments in HTML, which the rendered page does not show, change this for one block or add to it:

      <!-- not run: needs a GPU -->     the next block is not run; `not-run.txt` lists it
      <!-- file: task.json -->          the next block, in any language, is saved; the second one of a file is appended
      <!-- the reader has:
      cp examples/tasks.jsonl tasks.jsonl
      -->                               shell commands that stand for what the page assumes its reader to have

This file needs nothing but the standard library, because it runs in the page's own virtual environment.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_RUN = Path(__file__).with_name("not-run.txt")
RUN = ("sh", "python")
AMBIGUOUS = ("", "bash", "console", "shell", "py", "python3")
"""Languages that a block must not have, because it could be a command that is not run. All others are only shown."""

KEPT = ("ROLLYARD_SANDBOX_UIDS",)
"""Rollyard's variables that a page inherits: none of a developer's settings, only what a test worker owns."""

SERVICES_S = 20.0
"""How long the commands in the background have to end."""

_BLOCK = re.compile(
    r"^<!--\s*(?P<mark>.*?)\s*-->$|^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page, or the commands of a comment."""

    page: Path
    line: int  # of its first line of code
    language: str
    code: str
    reason: str = ""  # not to run it
    file: str = ""  # to save it in

    def __str__(self) -> str:
        first, *others = self.code.splitlines()
        shown = first.partition("  #")[0].strip()
        more = f" (and {len(others)} more lines)" if others else ""
        return f"{self.page.relative_to(ROOT)}: {self.reason}: {textwrap.shorten(shown, 60, placeholder='…')}{more}"


def pages() -> list[Path]:
    """The pages whose blocks are run."""
    docs = ROOT / "docs"
    folders = [*sorted((docs / "tutorial").glob("*.md")), *sorted((docs / "how-to").glob("*.md"))]
    return [ROOT / "README.md", docs / "quickstart.md", *folders]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order. Raises ValueError for a comment or a language that the rules do not have."""
    found: list[Block] = []
    text = page.read_text()
    mark, mark_end = "", 0
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        if match["code"] is None:
            mark, mark_end = match["mark"], match.end()
            kind, _, rest = mark.partition(":")
            if kind == "the reader has":
                found.append(Block(page, line, "sh", rest.strip() + "\n"))
            elif kind not in ("not run", "file") or not rest.strip():
                raise ValueError(f"{page.name}:{line - 1}: `{mark}` is no comment that tests/docs/page.py knows")
            continue
        is_marked = not text[mark_end : match.start()].strip()
        kind, _, rest = mark.partition(":") if is_marked else ("", "", "")
        language, code = match["language"], re.sub(f"^{match['indent']}", "", match["code"], flags=re.M)
        if language in AMBIGUOUS:
            raise ValueError(f"{page.name}:{line - 1}: a block in `{language}`; write sh, python, or text")
        reason, file = (rest.strip() if kind == name else "" for name in ("not run", "file"))
        found.append(Block(page, line, language, code, reason, file))
    return found


def not_run() -> list[str]:
    """One line for each block that is not run: page, reason, first line."""
    return [str(block) for page in pages() for block in blocks(page) if block.reason]


# --- outside: the folder and the namespaces of a page ----------------------------------------------------------


def run(page: Path, folder: Path, *, limit_s: float, pythons: Path | None = None) -> tuple[int, str]:
    """Runs a page in its own namespaces, in an empty folder. Returns its status (124: out of time) and its output.

    `pythons` contains a portable Python that the page's service uses; without it, the service builds its own."""
    _make_environment(folder / ".venv")
    for name in ("Makefile", "examples", "scripts", "src"):
        (folder / name).symlink_to(ROOT / name)
    home = folder / ".home"
    home.mkdir()
    if pythons is not None:
        data = home / ".local/share/rollyard"
        data.mkdir(parents=True, mode=0o700)
        (data / "python").symlink_to(pythons)
    machines = "".join(f"127.0.0.1 gpu{number}\n" for number in range(1, 10))
    (home / "hosts").write_text(f"127.0.0.1 localhost\n{machines}")
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    namespaces = ["unshare", *as_root, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    first = ["bash", "-c", _FIRST, str(home / "hosts"), tempfile.gettempdir(), "user" if as_root else "root"]
    inside = [str(folder / ".venv/bin/python"), "-P", __file__, "--inside", str(page)]
    paths = (folder / ".venv/bin", Path(sys.prefix) / "bin", os.environ["PATH"])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ROLLYARD_") or name in KEPT},
        "HOME": str(home),
        "PATH": ":".join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's spelling for: no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
    }
    output = home / "output"
    with output.open("wb") as file:
        argv = [*namespaces, *first, *inside]
        program = subprocess.Popen(
            argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        try:
            status = program.wait(limit_s)
        except subprocess.TimeoutExpired:
            program.kill()  # and with it all processes of its namespace
            program.wait()
            status = 124
    return status, output.read_text(errors="replace")


_FIRST = """
ip link set lo up && mount --bind "$0" /etc/hosts || exit
if [ "$2" = root ]; then
  mount --bind "$1" "$1" && mount --bind "$PWD" "$PWD" && cd "$PWD" && mount -o remount,bind,ro / || exit
fi
"${@:3}"
exit $?
"""
"""The first process of the namespaces: bash, which reaps orphans. For root, `/` is read-only except for the page's own
folder and that of temporary files: a page that installs something into the system fails."""


def _make_environment(folder: Path) -> None:
    """A virtual environment that has the packages of this one, and to which a page may add its own."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path("lib", version, "site-packages")
    (folder / packages / "outer.pth").write_text(f"import site; site.addsitedir({str(sys.prefix / packages)!r})\n")
    for name in ("rollyard", "pip"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "$(dirname "$0")/python" -P -m {name} "$@"\n')
        program.chmod(0o755)


# --- inside: one bash and one Python for all blocks -------------------------------------------------------------


class Failed(Exception):
    """A block failed."""


class Shell:
    """The bash of a page."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._bash = subprocess.Popen(["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, text=True)
        self._send(f'PAGE_STATE="{state}"\n. "{Path(__file__).with_name("session.sh")}"\n')

    def run(self, block: Block) -> None:
        """Runs a block, then takes over the variables that it exported."""
        code, done = self._state / "block.sh", self._state / "environment"
        code.write_text(block.code)
        self._send(f'. "{code}" </dev/null\nenv -0 >"{done}.draft"\nmv "{done}.draft" "{done}"\n')
        while not done.exists():
            if self._bash.poll() is not None:
                raise Failed(f"the shell ended with status {self._bash.returncode}")
            time.sleep(0.01)
        pairs = (pair.split("=", 1) for pair in done.read_text().split("\0") if pair)
        os.environ.update({name: value for name, value in pairs if name != "_"})
        done.unlink()

    def end(self) -> None:
        """Stops the commands in the background. Raises Failed if one has ended by itself."""
        started = {int(path.name): path.read_text() for path in self._state.glob("[0-9]*")}
        ended = [f"`{command.strip()}` has ended" for pid, command in started.items() if not _is_alive(pid)]
        for pid in started:
            if _is_alive(pid):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + SERVICES_S
        while any(map(_is_alive, started)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended:
            raise Failed("; ".join(ended))

    def _send(self, text: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(text)
        self._bash.stdin.flush()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_inside(page: Path) -> Iterator[str]:
    """Runs the blocks of a page. Yields a line about each, and at its end what failed."""
    sys.path.insert(0, str(Path.cwd()))
    names: dict[str, object] = {"__name__": "__main__"}
    shell = Shell(Path(tempfile.mkdtemp(prefix="page-", dir=os.environ["HOME"])))
    for block in blocks(page):
        place = f"{page.name}:{block.line}"
        if block.reason:
            yield f"--- {place}: not run: {block.reason}"
        elif block.file:
            yield f"--- {place}: saved as {block.file}"
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            with Path(block.file).open("a") as file:
                file.write(block.code)
        elif block.language == "sh":
            yield f"--- {place}\n{block.code}"
            shell.run(block)
        elif block.language == "python":
            yield f"--- {place}: Python"
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec", dont_inherit=True), names)
    shell.end()


def main(argv: list[str]) -> int:
    if argv == ["--not-run"]:
        print(*not_run(), sep="\n")
        return 0
    if argv[0] == "--inside":
        try:
            for line in run_inside(Path(argv[1])):
                print(line, flush=True)
        except Failed as error:
            print(f"FAILED: {error}", flush=True)
            return 1
        return 0
    with tempfile.TemporaryDirectory(prefix="rollyard-page-") as folder:
        status, output = run(Path(argv[0]).resolve(), Path(folder), limit_s=600)
    print(output)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
