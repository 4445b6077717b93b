"""Tokens, the token file, and which calls the gate admits (on a real port)."""

import os
import stat
import threading
from pathlib import Path

import pytest

from rollyard.core.access import Access
from rollyard.core.failure import Unauthorized
from rollyard.service.security.auth import split_host
from rollyard.service.security.tokens import Tokens, load_tokens, own_token
from rollyard.service.settings import Settings, SettingsError

ADMIN, TRAINER = "a" * 32, "t" * 32


def settings(tmp_path: Path, **values: object) -> Settings:
    return Settings.model_validate({"data_dir": tmp_path, **values})


def test_a_token_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    token = own_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 32
    assert own_token(path) == token
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_concurrent_starts_use_the_same_token(tmp_path: Path) -> None:
    tokens: list[str] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        tokens.append(own_token(tmp_path / "token"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 8
    assert len(set(tokens)) == 1


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    own_token(path)
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="can be read by other users: chmod 600"):
        own_token(path)


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    os.close(os.open(path, os.O_CREAT, 0o600))
    with pytest.raises(SettingsError, match="contains no valid token"):
        own_token(path)


def test_beyond_loopback_tokens_must_be_configured(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"is reachable from other machines: set admin_tokens"):
        load_tokens(settings(tmp_path, host="0.0.0.0"))
    assert not (tmp_path / "token").exists()
    load_tokens(settings(tmp_path, host="0.0.0.0", trainer_tokens=[TRAINER]))


def test_tokens_are_read_from_settings_and_files(tmp_path: Path) -> None:
    file = tmp_path / "trainers"
    file.write_text(f"# our trainers\n{TRAINER}\n\n{'u' * 32}\n")
    file.chmod(0o600)
    tokens = load_tokens(settings(tmp_path, admin_tokens=[ADMIN], trainer_tokens=[f"@{file}"]))
    assert tokens.caller(f"Bearer {ADMIN}").access is Access.ADMIN
    assert tokens.caller(f"bearer {TRAINER}").access is Access.TRAINER
    assert tokens.caller(f"Bearer {'u' * 32}").name != tokens.caller(f"Bearer {TRAINER}").name
    assert not (tmp_path / "token").exists()


@pytest.mark.parametrize("token", ["short", "with space in it, long enough", "ümlaut-ümlaut-ümlaut"])
def test_a_weak_token_is_refused_and_not_shown(token: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="admin_tokens: a token is 16") as caught:
        load_tokens(settings(tmp_path, admin_tokens=[token]))
    assert token not in str(caught.value)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {ADMIN}", ADMIN])
def test_an_unknown_token_is_unauthorized(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        Tokens([ADMIN]).caller(header)


@pytest.mark.parametrize(
    ("host", "parts"),
    [
        ("localhost:8127", ("localhost", 8127)),
        ("[::1]:8127", ("::1", 8127)),
        ("gpu1", ("gpu1", 80)),
        ("a:b:c", ("", 0)),
        ("", ("", 0)),
    ],
)
def test_a_host_header_is_parsed(host: str, parts: tuple[str, int]) -> None:
    assert split_host(host) == parts
