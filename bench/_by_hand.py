"""The peers of `rollyard bench sandbox`: the same programs on the command line, from start to output.

They do less than our sandboxes: they have no limits, no doorway, no seccomp filter and no verified end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from bench._parts import Images, Missing, engine, quantiles_ms
from rollyard.core import Json

RUN_S = 60.0


def by_hand(images: Images, count: int) -> dict[str, Json]:
    """Returns the figures of each peer, or {"error": reason}. Blocks: call it in a thread."""
    bwrap = ["bwrap", "--unshare-all", "--cap-drop", "ALL", *_host_root(), "echo", "ok"]
    apptainer = ["apptainer", "--silent", "exec", "--userns", "--containall", "--net", "--network", "none"]
    by_image = {"apptainer_dir_start_p50_ms": [*apptainer, str(images.folder), "echo", "ok"]}
    if images.sif is not None:
        by_image["apptainer_sif_start_p50_ms"] = [*apptainer, str(images.sif), "echo", "ok"]
    return {
        "bwrap": _measured({"bubblewrap_start_p50_ms": bwrap}, count),
        "apptainer exec": _measured(by_image, count),
        "podman run": _container(images, count),
    }


def _host_root() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for name in ("bin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    return words


def _container(images: Images, count: int) -> Json:
    name = f"localhost/rollyard-bench:{os.getpid()}"
    try:
        command = engine()
        with subprocess.Popen(["tar", "-C", str(images.folder), "-c", "."], stdout=subprocess.PIPE) as tar:
            argv = [*command, "import", "-", name]
            completed = subprocess.run(
                argv, stdin=tar.stdout, capture_output=True, text=True, timeout=RUN_S, check=False
            )
        if completed.returncode != 0:
            return {"error": f"import: {completed.stderr.strip()[-300:]}"}
        # Both limits, because podman as root requests more than some machines allow.
        limits = ["--ulimit", "nofile=4096", "--ulimit", "nproc=32768"]
        run = [*command, "run", "--rm", "--network", "none", *limits, name, "/bin/echo", "ok"]
        return _measured({"oci_start_p50_ms": run}, count)
    except (Missing, OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    finally:
        with contextlib.suppress(Missing, OSError, subprocess.TimeoutExpired):
            subprocess.run([*engine(), "rmi", name], capture_output=True, timeout=RUN_S, check=False)


def _measured(commands: dict[str, list[str]], count: int) -> Json:
    try:
        return {metric: _median_ms(argv, count) for metric, argv in commands.items()}
    except (Missing, OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}


def _median_ms(argv: Sequence[str], count: int) -> float:
    times: list[float] = []
    for _ in range(count + 1):  # the first one warms up the caches
        started_at = time.perf_counter()
        completed = subprocess.run(argv, capture_output=True, timeout=RUN_S, check=False, stdin=subprocess.DEVNULL)
        times.append(time.perf_counter() - started_at)
        if completed.stdout.strip() != b"ok":
            raise Missing(
                f"{argv[0]} ended with {completed.returncode}: {completed.stderr.decode(errors='replace')[-300:]}"
            )
    return quantiles_ms(times[1:])[0]
