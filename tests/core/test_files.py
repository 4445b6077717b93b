"""A file is replaced whole, or not at all."""

from pathlib import Path

import pytest

from rollyard.core.files import replacing


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_file_is_replaced_at_the_end(tmp_path: Path, is_durable: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path, mode=0o600, is_durable=is_durable) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_two_writers_do_not_share_a_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]
