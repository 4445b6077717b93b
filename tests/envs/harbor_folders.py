"""Writes Harbor task folders as in Harbor's documentation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollyard.envs.harbor import HarborEnvironment
from tests.sandbox.runtimes import image

TOML = """\
version = "1.0"

[metadata]
author_name = "An Author"
difficulty = "easy"
tags = ["trivial"]

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 90.0

[environment]
build_timeout_sec = 600.0
docker_image = "some-org/some-name:some-tag"
cpus = 1
memory_mb = 2048
storage_mb = 10240
allow_internet = false
"""

TEST = """\
#!/bin/bash
if grep -qx 'Hello, world!' /app/hello.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""

SOLVE = """\
#!/bin/bash
echo 'Hello, world!' > hello.txt
"""


def write(folder: Path, files: Mapping[str, str | bytes | None] | None = None) -> Path:
    """Writes a task folder. `files` replace its files; None removes one."""
    whole: dict[str, str | bytes | None] = {
        "task.toml": TOML,
        "instruction.md": "Write 'Hello, world!' to hello.txt.\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": SOLVE,
        **(files or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in whole.items():
        if content is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def imported(folder: Path, **options: str) -> dict[str, Any]:
    """The body of the only task in the folder."""
    (body,) = HarborEnvironment().from_folder(folder, {key.replace("__", "."): value for key, value in options.items()})
    return dict(body)


def local(body: Mapping[str, Any], *, is_sif: bool = False) -> dict[str, Any]:
    """The body with an image of this machine, as with `--set images=PATH`."""
    return {**body, "sandbox": {**body["sandbox"], "image": image(is_sif=is_sif)}}


def ready(folder: Path, files: Mapping[str, str | bytes | None] | None = None, **options: str) -> dict[str, Any]:
    return local(imported(write(folder, files), **options))
