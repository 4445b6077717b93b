"""A real PostgreSQL server for tests and benchmarks, in a temporary folder, on 127.0.0.1.

    with PgServer() as server:
        store = await PostgresStore.open(server.url)

PostgreSQL does not run as root: a root process uses the user `postgres`, which Debian's package creates.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Self

USER, PASSWORD = "yard", "s3cr3t/word"

OPTIONS = ("-c", "fsync=off", "-c", "max_connections=100")


def find_postgres() -> Path | None:
    """Returns the folder with `initdb` and `postgres`: on PATH, or else the newest of Debian's packages."""
    if (initdb := shutil.which("initdb")) is not None:
        return Path(initdb).resolve().parent
    folders = [file.parent for file in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(folders, key=lambda folder: int(folder.parent.name), default=None)


class PgServer:
    """A server, used as a context manager. Everything is deleted on exit. `stop` and `start` simulate failures."""

    def __init__(self, *options: str, port: int | None = None) -> None:
        """`options` of `postgres` replace OPTIONS (which are fast, but lose data when the machine fails). Without a
        port it uses a free one."""
        programs = find_postgres()
        if programs is None:
            raise FileNotFoundError("PostgreSQL's initdb was not found: apt-get install postgresql")
        self._programs = programs
        self._options = options or OPTIONS
        self._user = "postgres" if os.getuid() == 0 else None
        self._is_up = False
        self.port = port or _free_port()

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{self.port}/yard"

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="rollyard-postgres-"))
        self._folder.chmod(0o755)  # PostgreSQL's user must have access
        password = self._folder / "password"
        password.write_text(PASSWORD + "\n")
        (self._folder / "data").mkdir(mode=0o700)
        if self._user is not None:
            for path in (self._folder, password, self._folder / "data"):
                shutil.chown(path, self._user)
        try:
            self._run(
                *("initdb", "--pgdata", "data", "--username", USER, "--pwfile", "password", "--no-sync"),
                *("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C"),
            )
            self.start()
            self._run("createdb", "yard", env=self._env)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        """Returns when the server accepts connections."""
        where = ("-k", str(self._folder), "-h", "127.0.0.1", "-p", str(self.port))
        self._run("pg_ctl", "start", "-w", "-D", "data", "-l", "log", "-o", " ".join((*where, *self._options)))
        self._is_up = True

    def stop(self) -> None:
        """Stops immediately: closes every connection and saves nothing, as when it is killed."""
        if self._is_up:
            self._run("pg_ctl", "stop", "-w", "-D", "data", "-m", "immediate")
            self._is_up = False

    def create_database(self, name: str, *options: str) -> str:
        """Creates a database and returns its URL."""
        self._run("createdb", *options, name, env=self._env)
        return self.url.removesuffix("yard") + name

    @property
    def _env(self) -> dict[str, str]:
        place = {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGUSER": USER, "PGPASSWORD": PASSWORD}
        return {**os.environ, **place, "PGDATABASE": "postgres"}

    def _run(self, program: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        completed = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self._folder,
            user=self._user,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if program == "pg_ctl" else subprocess.PIPE,  # the server would keep the pipe
            text=True,
        )
        if completed.returncode:
            log = self._folder / "log"
            output = completed.stderr or (log.read_text()[-2000:] if log.exists() else "")
            raise RuntimeError(f"{program} failed: {output}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
