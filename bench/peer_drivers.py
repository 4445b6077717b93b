"""Finds the peers' drivers, and creates the virtual environment of each.

A driver is `bench/peers/NAME.py`. If it needs packages, all of them are pinned in `NAME.txt` beside it; they are
installed on first use below ~/.cache/rollyard/bench, never into our own environment. A peer that cannot be installed or
measured raises `PeerError`, which a bench reports as {"error": reason}: the bench does not fail.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import rollyard
from rollyard.core import Json

DRIVERS = Path(rollyard.__file__).parents[2] / "bench" / "peers"
CACHE = Path.home() / ".cache" / "rollyard" / "bench"
INSTALL_S = 300.0
PEER_S = 180.0
TAIL = 500  # characters of a failing peer's output


class PeerError(Exception):
    """A peer cannot be measured; the message gives the reason."""


def driver_argv(peer: str) -> list[str]:
    """Installs the packages of a peer's driver and returns its command. Blocks: call it in a thread."""
    driver, requirements = DRIVERS / f"{peer}.py", DRIVERS / f"{peer}.txt"
    if not driver.is_file():
        raise PeerError("the peers' drivers are in the repository's bench folder, not in the installed package")
    try:
        python = _environment(peer, requirements) if requirements.is_file() else Path(sys.executable)
    except subprocess.CalledProcessError as error:
        raise PeerError(f"its installation ended with {error.returncode}: {error.stderr.strip()[-TAIL:]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"it was not installed: {error}"[-TAIL:]) from None
    # -P: a driver may have the name of the package that it uses, and must not be imported instead.
    return [str(python), "-P", str(driver)]


def measure(peer: str, count: int) -> Json:
    """Returns the figures of a driver that measures itself, `count` times. Blocks: call it in a thread."""
    try:
        argv = [*driver_argv(peer), str(count)]
        completed = subprocess.run(argv, capture_output=True, text=True, timeout=PEER_S, check=True)
        figures = json.loads(next(line for line in completed.stdout.splitlines() if line.startswith("{")))
        return {name: round(value, 3) for name, value in figures.items()}
    except subprocess.CalledProcessError as error:
        return {"error": f"{error.cmd[0]} ended with {error.returncode}: {error.stderr.strip()[-TAIL:]}"}
    except (PeerError, OSError, subprocess.TimeoutExpired, ValueError, StopIteration) as error:
        return {"error": str(error)[-TAIL:]}


def _environment(peer: str, requirements: Path) -> Path:
    """Returns the Python of the peer's virtual environment, created on first use and for each change of its pins."""
    pins = requirements.read_bytes() + sys.version.encode()
    folder = CACHE / f"{peer}-{blake2b(pins, digest_size=6).hexdigest()}"
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for argv in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements)],
        ):
            subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=True)
        (folder / "ready").touch()
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        raise
    return python
