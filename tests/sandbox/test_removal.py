"""The launcher removes what sandboxes left, and never what their links lead to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollyard.sandbox.launcher.program import Removal, remove_small


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder of the host that no sandbox may change."""
    folder = tmp_path / "host"
    folder.mkdir(mode=0o500)
    return folder


def test_a_link_is_removed_and_not_followed(tmp_path: Path, host: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(host)
    remove_small(str(link))
    assert host.is_dir() and not link.is_symlink()


def test_a_folder_with_links_is_removed_without_their_targets(tmp_path: Path, host: Path) -> None:
    (tmp_path / "own" / "folder").mkdir(parents=True)
    (tmp_path / "own" / "folder" / "link").symlink_to(host)
    remove_small(str(tmp_path / "own"))
    assert host.is_dir() and not (tmp_path / "own").exists()


def test_of_a_large_folder_nothing_is_removed(tmp_path: Path) -> None:
    for number in range(17):
        (tmp_path / str(number)).touch()
    with pytest.raises(OSError, match="too many entries"):
        remove_small(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 17


def test_the_mode_of_a_links_target_is_not_changed(tmp_path: Path, host: Path) -> None:
    reader, writer = os.pipe()
    link = tmp_path / "link"
    removal = Removal([], writer)
    link.symlink_to(host)  # as if it could not be removed
    removal.paths, removal.step = [str(link)], 1
    while (pid := removal.next_step()) is not None:
        os.waitpid(pid, 0)
    assert os.read(reader, 1) == b"0" and not link.is_symlink()
    os.close(reader)
    assert host.stat().st_mode & 0o777 == 0o500
