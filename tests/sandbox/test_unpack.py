"""Unpacks valid and hostile layers into real folders. Nothing outside the folder may change."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollyard.sandbox.images import HostileImage, ImageError, UnpackBounds, Unpacker
from tests.sandbox.registry import Entry, file, folder, hard, link, tar


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that no layer may change."""
    outside_folder = tmp_path / "outside"
    outside_folder.mkdir()
    (outside_folder / "secret").write_text("secret")
    return outside_folder


def unpack(tmp_path: Path, *layers: Sequence[Entry], bounds: UnpackBounds | None = None) -> Path:
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    with Unpacker(root, bounds) as unpacker:
        for number, entries in enumerate(layers):
            path = tmp_path / f"layer{number}"
            path.write_bytes(tar(*entries))
            unpacker.layer(path)
    return root


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_unpacked_files_belong_to_the_current_user(tmp_path: Path):
    root = unpack(
        tmp_path,
        [
            folder("etc"),
            file("etc/shadow", "x", 0o000),
            file("./usr/bin/su", "y", 0o4755),
            file("/absolute", "z"),
            folder("closed", 0o000),
            folder("tmp", 0o1777),
            link("lib", "usr/lib"),
            hard("usr/bin/again", "usr/bin/su"),
        ],
    )
    assert tree(root) == {
        *("etc", "etc/shadow", "usr", "usr/bin", "usr/bin/su", "usr/bin/again", "absolute", "closed", "tmp", "lib")
    }
    modes = {name: (root / name).stat().st_mode & 0o7777 for name in ("etc/shadow", "usr/bin/su", "closed", "tmp")}
    assert modes == {"etc/shadow": 0o400, "usr/bin/su": 0o755, "closed": 0o700, "tmp": 0o1777}
    assert {path.lstat().st_uid for path in root.rglob("*")} == {os.geteuid()}
    assert (root / "usr/bin/again").samefile(root / "usr/bin/su")
    assert (root / "lib").readlink() == Path("usr/lib")
    assert (root / "etc/shadow").stat().st_mtime == 1_000_000_000, "a .pyc is valid only with its source's mtime"


def test_whiteouts_hide_lower_layers_but_not_their_own(tmp_path: Path):
    root = unpack(
        tmp_path,
        [folder("a"), file("a/old"), file("a/kept"), folder("b/deep"), file("b/deep/old"), file("c/old"), file("d")],
        [
            file("a/.wh.old"),
            file("b/new"),
            file("b/.wh..wh..opq"),
            file("c/new"),
            file(".wh.c"),
            file(".wh.d"),
            file(".wh.never-there"),
            file("a/.wh..wh.plnk"),
        ],
    )
    assert tree(root) == {"a", "a/kept", "b", "b/new", "c", "c/new"}


def test_later_layers_replace_folders_by_files_and_files_by_folders(tmp_path: Path):
    root = unpack(
        tmp_path,
        [folder("was-folder/deep"), file("was-file"), file("one", "old"), hard("two", "one")],
        [file("was-folder", "file"), file("was-file/inside"), file("one", "new")],
    )
    assert (root / "was-folder").read_text() == "file"
    assert (root / "was-file/inside").is_file()
    assert ((root / "one").read_text(), (root / "two").read_text()) == ("new", "old"), (
        "hard links are not written through"
    )


def test_links_are_resolved_inside_the_image(tmp_path: Path, outside: Path):
    root = unpack(
        tmp_path,
        [folder("usr/lib"), link("lib", "usr/lib"), link("abs", "/usr/lib"), link("up", "../../../../usr/lib")],
        [file("lib/one"), file("abs/two"), file("up/three"), hard("lib/four", "abs/two")],
    )
    assert tree(root / "usr/lib") == {"one", "two", "three", "four"}
    assert (root / "lib").is_symlink()


@pytest.mark.parametrize("target", ["{outside}", "../outside", "../../../../../..{outside}"])
def test_no_link_leads_out(tmp_path: Path, outside: Path, target: str):
    leads = target.format(outside=outside)
    root = unpack(
        tmp_path,
        [link("evil", leads), link("evil-file", f"{leads}/secret")],
        [
            file("evil/written", "x"),
            file("evil-file", "overwritten"),
            file("evil/.wh.secret"),
            file("evil/.wh..wh..opq"),
            folder("evil/folder", 0o777),
        ],
    )
    assert tree(outside) == {"secret"}
    assert (outside / "secret").read_text() == "secret"
    assert outside.stat().st_mode & 0o777 != 0o777
    assert (root / "evil-file").read_text() == "overwritten"


@pytest.mark.parametrize(
    "entries",
    [
        [file("../outside/written")],
        [file("a/../../outside/written")],
        [file("..")],
        [hard("stolen", "../outside/secret")],
        [link("out", "../outside"), hard("stolen", "out/secret")],
        [link("out", "/nowhere"), hard("stolen", "out/secret")],
        [hard("stolen", "/etc/passwd")],
        [folder("d"), hard("stolen", "d")],
        [file(".wh...")],
        [file(".wh..")],
        [file("a/.wh.")],
        [link("a", "b"), link("b", "a"), file("a/x")],
        [folder("/".join("d" * 300))],
        [link("deep", "/".join("d" * 200)), folder("/".join("d" * 200)), folder("deep/" + "/".join("e" * 100))],
        [file("x" * 300)],
    ],
)
def test_hostile_layers_are_refused(tmp_path: Path, outside: Path, entries: list[Entry]):
    with pytest.raises(ImageError):
        unpack(tmp_path, entries)
    assert tree(outside) == {"secret"} and (outside / "secret").stat().st_nlink == 1
    assert not (tmp_path / "root" / "stolen").exists()


def test_devices_and_fifos_are_left_out_and_counted(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "layer").write_bytes(tar(("dev/mem", "device", b"", 0o666), ("pipe", "fifo", b"", 0o666), file("x")))
    with Unpacker(root) as unpacker:
        unpacker.layer(tmp_path / "layer")
        assert unpacker.skipped == 2
    assert tree(root) == {"dev", "x"}


def test_bytes_and_entries_are_bounded(tmp_path: Path):
    with pytest.raises(HostileImage, match="larger than 100 bytes"):
        unpack(tmp_path, [file("a", b"x" * 60)], [file("b", b"x" * 60)], bounds=UnpackBounds(total_bytes=100))
    with pytest.raises(HostileImage, match="more than 3 entries"):
        unpack(tmp_path, [file(str(number)) for number in range(4)], bounds=UnpackBounds(entries=3))


def test_a_header_of_gigabytes_is_not_read_into_memory(tmp_path: Path):
    import tarfile

    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 3 << 30
    (tmp_path / "layer").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + b"x" * 4096)
    (tmp_path / "root").mkdir()
    with Unpacker(tmp_path / "root") as unpacker, pytest.raises(HostileImage, match="a header has"):
        unpacker.layer(tmp_path / "layer")


@pytest.mark.parametrize("cut", [100, 700, 1600])
def test_an_incomplete_layer_is_an_error(tmp_path: Path, cut: int):
    whole = tar(file("a", b"x" * 5000))
    (tmp_path / "layer").write_bytes(whole[:cut] if cut > 100 else b"no tar at all" * 100)
    (tmp_path / "root").mkdir()
    with Unpacker(tmp_path / "root") as unpacker, pytest.raises(ImageError):
        unpacker.layer(tmp_path / "layer")


@pytest.mark.skipif(shutil.which("zstd") is None, reason="this machine has no zstd")
def test_a_layer_may_be_compressed_by_zstd(tmp_path: Path):
    packed = subprocess.run(["zstd", "-qc"], input=tar(file("a", "b")), capture_output=True, check=True).stdout
    (tmp_path / "layer").write_bytes(packed)
    (tmp_path / "broken").write_bytes(packed[:-8])
    (tmp_path / "root").mkdir()
    with Unpacker(tmp_path / "root") as unpacker:
        unpacker.layer(tmp_path / "layer")
        assert (tmp_path / "root/a").read_text() == "b"
        with pytest.raises(ImageError):
            unpacker.layer(tmp_path / "broken")


def test_thousands_of_consecutive_headers_are_an_error(tmp_path: Path):
    import tarfile

    (tmp_path / "layer").write_bytes(tarfile.TarInfo.create_pax_global_header({"a": "b"}) * 5000)
    (tmp_path / "root").mkdir()
    with Unpacker(tmp_path / "root") as unpacker, pytest.raises(ImageError, match="is not a complete tar archive"):
        unpacker.layer(tmp_path / "layer")
