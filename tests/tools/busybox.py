"""An image that contains only busybox: no bash, no coreutils, no libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

BUSYBOX = Path("/bin/busybox")


def busybox_image(image: Path) -> Path:
    """Creates an image from Debian's busybox-static, whose programs are links to it."""
    if not BUSYBOX.is_file():
        pytest.skip("no busybox here: apt-get install busybox-static")
    if subprocess.run(["ldd", BUSYBOX], capture_output=True, check=False).returncode == 0:
        pytest.skip("this busybox is not static: apt-get install busybox-static")
    (image / "bin").mkdir(parents=True)
    shutil.copy(BUSYBOX, image / "bin" / "busybox")
    listed = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout
    for name in set(listed.split()) - {"busybox", "bash"}:
        os.link(image / "bin" / "busybox", image / "bin" / name)
    return image
