"""The client's interface: sync and async alike, errors rebuilt, settings found, nothing heavy imported."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard
from rollyard import client
from rollyard.client import AsyncClient, AsyncDraw, AsyncSession, Client, Draw, DrawEnded, Session, UnexpectedReply
from rollyard.client._discovery import find
from rollyard.client._errors import error_of
from rollyard.client.records import Record, read
from rollyard.core import CODES, RollyardError
from rollyard.core.failure import RequestError, Unauthorized
from rollyard.service.settings import load_settings


def methods(kind: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(f) for name, f in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}


@pytest.mark.parametrize(
    ("of_ours", "of_theirs"),
    [
        (AsyncClient, Client),
        (AsyncSession, Session),
        (AsyncDraw, Draw),
        (client.AsyncPolicy, client.Policy),
        (client.AsyncUpdate, client.Update),
    ],
)
def test_sync_and_async_classes_have_the_same_methods(of_ours: type, of_theirs: type):
    async_methods, sync_methods = methods(of_ours), methods(of_theirs)
    assert async_methods.keys() == sync_methods.keys()
    for name, signature in async_methods.items():
        assert list(signature.parameters.values()) == list(sync_methods[name].parameters.values()), name
        returns = re.sub(r"\bAsync", "", str(signature.return_annotation))
        assert returns == sync_methods[name].return_annotation, name


def test_the_synchronous_client_is_generated_from_the_asynchronous_one():
    script = Path(__file__).parents[2] / "scripts" / "sync-client"
    completed = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=50)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_sync_and_async_clients_have_the_same_constructor():
    assert inspect.signature(AsyncClient.__init__) == inspect.signature(Client.__init__)


def test_the_public_names():
    assert rollyard.AsyncClient is AsyncClient and rollyard.Client is Client and rollyard.DrawEnded is DrawEnded
    assert all(hasattr(client, name) for name in client.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        rollyard.Clinet  # noqa: B018


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_becomes_its_exception_class(code: str):
    body = {"type": "about:blank", "title": "t", "status": 418, "code": code, "detail": "d", "remedy": "r", "extra": 1}
    error = error_of(418, body, "GET /x")
    assert type(error) is CODES[code]
    assert (error.detail, error.remedy, error.status, error.data) == ("d", "r", 418, {"extra": 1})


def test_a_code_of_a_newer_service_is_kept():
    error = error_of(409, {"code": "brand_new", "detail": "d"}, "GET /x")
    assert type(error) is RollyardError and error.code == "brand_new"
    assert RollyardError.code == "error" and not isinstance(error, RequestError)


def test_a_response_without_a_problem_is_unexpected():
    for body in (None, "text", {"error": "x"}):
        assert isinstance(error_of(502, body, "GET /x"), UnexpectedReply)


def test_records_accept_new_fields_and_refuse_invalid_ones():
    record = read({"id": "a", "state": "ended", "reward": None, "tomorrow": [1]}, Record)
    assert record.is_ended and record.reward is None and record.raw["tomorrow"] == [1]
    with pytest.raises(UnexpectedReply, match="cannot be read"):
        read({"id": "a", "reward": "high"}, Record)
    with pytest.raises(UnexpectedReply, match="was expected"):
        read(["a"], Record)


def test_the_address_is_found_by_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {"HOME": str(tmp_path)}
    with pytest.raises(Unauthorized, match=r"ROLLYARD_TOKEN is not set.*rollyard/token"):
        find(None, None, environ)

    def check() -> None:
        settings = load_settings({}, environ).settings
        settings.token_path.parent.mkdir(parents=True, exist_ok=True)
        settings.token_path.write_text("# ours\n" + "k" * 20 + "\n")
        place = find(None, None, environ)
        assert (place.url, place.token) == (f"http://{settings.host}:{settings.port}", "k" * 20)

    check()
    (tmp_path / "rollyard.toml").write_text(f'port = 9000\ndata_dir = "{tmp_path}/d"\n')
    check()
    environ["ROLLYARD_PORT"] = "9001"
    environ["ROLLYARD_TOKEN_FILE"] = str(tmp_path / "t")
    check()
    (tmp_path / "d" / "url").write_text("http://127.0.0.1:4711\n")
    assert find(None, None, environ).url == "http://127.0.0.1:4711"
    environ |= {"ROLLYARD_URL": "http://x:1/", "ROLLYARD_TOKEN": "e"}
    assert find(None, None, environ) == find("http://x:1", "e", environ)
    assert find("http://y", "f", environ).url == "http://y"


def test_importing_the_package_or_the_client_imports_nothing_heavy():
    code = (
        "import sys, rollyard; assert 'aiohttp' not in sys.modules; rollyard.AsyncClient;"
        "heavy = {'pyarrow', 'numpy', 'fastapi', 'pydantic', 'torch'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
