"""The part of the `ipython` tool in the sandbox: a process that runs cells, one after the other.

Run as `python3 _ipython_worker.py REQUESTS REPLIES PATH`: two descriptors and a file. A request is a line
`NUMBER BYTES`; the code is that many bytes of the file. When the cell has ended and all its output is written, the
reply is the line `NUMBER WORD`. The first reply, `0 KIND VERSION`, names the interpreter: IPython, if it can be
imported, or plain Python.

This is a self-contained program for Python 3.8 and newer that uses only the standard library. A cell's output is
written unbuffered to descriptors 1 and 2, which are one pipe, so output of Python, child processes and C code is in
order. Changes that a cell made to these descriptors, the streams or the handling of SIGINT are undone before the next
cell.
"""

# ruff: noqa: PTH111, T201  (little to load, and printing is its work)

from __future__ import annotations

import ast
import builtins
import fcntl
import io
import linecache
import os
import signal
import sys
import tempfile
import traceback
import types
import warnings

OUT_OF_REACH = 900
"""The number to which descriptors are moved: above those that a cell gets by opening files, or closes in a loop from
3."""

AWAITABLE = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # new in Python 3.8: an older one fails here and is not used
AWAITS = 0x80
"""Set in the flags of code with a top-level `await`: evaluating it returns a coroutine."""

SIGHT = {"image/png": "_repr_png_", "image/jpeg": "_repr_jpeg_", "image/svg+xml": "_repr_svg_"}
TEXTS = ("text/plain", "text/markdown", "text/latex", "text/html", "application/json")


def as_text(data):
    """Returns the displayed data as text."""
    lines = [str(data[kind]) for kind in TEXTS if data.get(kind) is not None][:1]
    for kind, value in data.items():
        if kind.startswith(("image/", "audio/", "video/", "application/pdf")) and value is not None:
            size = len(value.rstrip("=\n")) * 3 // 4 if isinstance(value, str) and "svg" not in kind else len(value)
            lines.append(f"<{kind}, {size} bytes>")
    return "\n".join(lines)


class Stream(io.TextIOWrapper):
    """Flushes after each write, so that the output of child processes stays in order."""

    def write(self, text):
        count = super().write(text)
        self.flush()
        return count


def without_own_frames(frames):
    """Returns a traceback without the frames of this file."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    at = frames
    while at is not None:
        while at.tb_next is not None and at.tb_next.tb_frame.f_code.co_filename == __file__:
            at.tb_next = at.tb_next.tb_next
        at = at.tb_next
    return frames


# --- what runs a cell ---------------------------------------------------------------------------------


class Plain:
    """Python without IPython: the value of a last expression is shown, `await` works, names persist."""

    def __init__(self):
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module  # so that definitions in cells can be pickled
        self.names = module.__dict__
        self.names.update(__builtins__=builtins, display=self.display)
        self.count = 0
        self.loop = None
        sys.displayhook = self.show

    def version(self):
        return "python " + ".".join(map(str, sys.version_info[:3]))

    def show(self, value):
        if value is not None:
            self.names["_"] = value
            self.display(value)

    def display(self, *values):
        for value in values:
            data = {"text/plain": repr(value)}
            for kind, method in SIGHT.items():
                if not isinstance(value, type) and callable(getattr(value, method, None)):
                    data[kind] = getattr(value, method)()
            print(as_text(data))

    def run(self, code):
        """Runs a cell. Returns True if it raised nothing."""
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            body = ast.parse(code, name).body
            last = body.pop().value if body and isinstance(body[-1], ast.Expr) else None
            self.do(ast.Module(body, []), name, "exec")
            if last is not None:
                sys.displayhook(self.do(ast.Expression(last), name, "eval"))
            return True
        except SystemExit as error:
            print(f"SystemExit: {error.code}")  # names are kept: only the service ends this process
        except SyntaxError as error:
            traceback.print_exception(type(error), error, None)
            if code.lstrip().startswith(("!", "%")):
                print("(this is plain Python, without IPython's magics; use subprocess for commands)", file=sys.stderr)
        except BaseException as error:
            traceback.print_exception(type(error), error, without_own_frames(error.__traceback__))
        return False

    def do(self, tree, name, mode):
        code = compile(tree, name, mode, AWAITABLE, dont_inherit=True)
        value = eval(code, self.names)
        if not code.co_flags & AWAITS:
            return value
        if self.loop is None:
            import asyncio

            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(value)


class Interactive:
    """IPython's own shell, without history on disk, colours and pagers."""

    def __init__(self):
        from IPython import __version__
        from IPython.core.displayhook import DisplayHook
        from IPython.core.displaypub import DisplayPublisher
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        class Shown(DisplayHook):
            def write_output_prompt(self):
                pass

            def write_format_data(self, format_dict, md_dict=None):
                print(as_text(format_dict))

        class Published(DisplayPublisher):
            def publish(self, data, *_, **__):
                print(as_text(data))

            def clear_output(self, wait=False):
                pass

        class Shell(InteractiveShell):
            displayhook_class = Shown
            display_pub_class = Published
            system = InteractiveShell.system_raw  # directly to the descriptors, not through a terminal

            def _get_exc_info(self, exc_tuple=None):
                kind, error, frames = super()._get_exc_info(exc_tuple)
                return kind, error, without_own_frames(frames)

            def ask_exit(self):
                print("(Python goes on; its state is kept)")

        config = Config()
        config.DisplayFormatter.active_types = ["text/plain", *SIGHT]
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        config.InteractiveShell.display_page = True
        config.InteractiveShell.enable_tip = False
        config.InteractiveShell.colors = "NoColor" if int(__version__.partition(".")[0]) < 9 else "nocolor"
        for advice in ("To exit: use", "Output cache limit"):  # shown after sys.exit() and after a thousand values
            warnings.filterwarnings("ignore", message=advice)
        folder = None  # IPython's default, in the home folder
        if not os.access(os.path.expanduser("~"), os.W_OK):
            folder = tempfile.mkdtemp(prefix="ipython-")
        self.shell = Shell.instance(config=config, ipython_dir=folder)
        self.about = f"ipython {__version__}"

    def version(self):
        return self.about

    def run(self, code):
        return self.shell.run_cell(code, store_history=True).success


def refuse_input(prompt="", *_, **__):
    raise EOFError("nobody can type here: give the value in the code, or read a file")


# --- the loop -----------------------------------------------------------------------------------------


def out_of_reach(fd):
    """Moves a pipe to a number that cells do not use by chance, and that child processes do not inherit."""
    for floor in (OUT_OF_REACH, 100, 3):
        try:
            moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)
        except OSError:  # above the limit of open files
            continue
        return moved
    raise OSError("no descriptor is left")


class Worker:
    def __init__(self, requests, replies, path):
        self.requests, self.replies, self.output = (out_of_reach(fd) for fd in (requests, replies, 1))
        os.close(requests)
        os.close(replies)
        self.path = path
        self.pid = os.getpid()
        self.is_at_work = False
        self.buffer = b""
        self.stdout, self.stderr = self.stream(1), self.stream(2)
        try:
            import ctypes

            self.flush_c = ctypes.CDLL(None).fflush
        except Exception:  # a Python without ctypes, or without shared libraries
            self.flush_c = lambda _: None

    def stream(self, fd):
        return Stream(open(fd, "wb", closefd=False), encoding="utf-8", errors="backslashreplace")

    def restore(self):
        for fd in (1, 2):
            os.dup2(self.output, fd)
        if self.stdout.closed or self.stderr.closed:
            self.stdout, self.stderr = self.stream(1), self.stream(2)
        sys.stdout, sys.stderr = self.stdout, self.stderr
        builtins.input = refuse_input
        signal.signal(signal.SIGINT, self.on_interrupt)

    def on_interrupt(self, *_):
        if self.is_at_work:  # else it came late: the cell had already ended
            raise KeyboardInterrupt

    def next_code(self):
        while b"\n" not in self.buffer:
            data = os.read(self.requests, 4096)
            if not data:
                os._exit(0)  # the service has closed the pipe
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        number, size = map(int, line.split())
        with open(self.path, "rb") as file:
            return number, file.read(size).decode("utf-8", "replace")

    def cell(self, runner, code):
        try:
            try:
                self.is_at_work = True
                return "ok" if runner.run(code) else "raised"
            finally:
                self.is_at_work = False
        except KeyboardInterrupt:
            print("KeyboardInterrupt", file=self.stderr)
        except BaseException:
            traceback.print_exc(file=self.stderr)
        return "raised"

    def flush(self):
        for stream in {sys.stdout, sys.stderr, self.stdout, self.stderr}:
            try:
                stream.flush()
            except Exception:  # closed, or replaced by the cell
                pass
        self.flush_c(None)

    def serve(self, runner):
        self.restore()
        self.reply(0, runner.version())
        while True:
            number, code = self.next_code()
            self.restore()
            word = self.cell(runner, code)
            self.flush()
            if os.getpid() != self.pid:  # the cell forked, and this process is the child
                os._exit(0)
            self.reply(number, word)

    def reply(self, number, text):
        try:
            os.write(self.replies, f"{number} {text}\n".encode())
        except OSError:  # the service has closed the pipe
            os._exit(0)


def main():
    sys.path.pop(0)  # the folder of this file
    worker = Worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.argv[:] = [""]
    try:
        runner = Interactive()
    except Exception:  # missing or broken
        runner = Plain()
    sys.path.insert(0, "")  # as in any interactive Python; after the import, so that the agent's files cannot shadow it
    worker.serve(runner)


if __name__ == "__main__":
    main()
