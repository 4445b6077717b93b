"""The whole text of the errors that a newcomer meets, printed by the real program: the cause, and what to do.

Each is one line on stderr, with exit status 1 or 2 and nothing on stdout. `{…}` in a text is a value of the site.
`test_error_situations.py` has those that need a full disk or another preparation.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator

import aiohttp
import pytest

from tests.cli.error_site import ErrorSite, Printed, error_site
from tests.client.served import task
from tests.worker import free_port

pytestmark = pytest.mark.slow

START = "start the service with `rollyard serve`, or give its URL with --url or ROLLYARD_URL"

CASES: dict[str, tuple[str, int, str]] = {
    "an unknown command": ("sumbit", 2, "No such command 'sumbit'. Did you mean 'submit'? — see `rollyard --help`"),
    "an unknown option": (
        "submit t.jsonl --group-siz 3",
        2,
        "No such option: --group-siz (Possible options: --group-size) — see `rollyard submit --help`",
    ),
    "an unknown setting": (
        "config --config wrong.toml",
        1,
        "there is no setting run_slot (in wrong.toml) — did you mean run_slots?",
    ),
    "a missing image": (
        "shell image.jsonl",
        1,
        "image.jsonl:1: image 'ubuntu:24.04' is not on this machine; fetch it: rollyard images pull ubuntu:24.04 —"
        " `rollyard images list` shows the images on the service's machine, and in which form",
    ),
    "a line that is not JSON": (
        "eval bad.jsonl",
        1,
        "bad.jsonl:2: this is not JSON (Expecting value, at character 17) — write one task per line",
    ),
    "a service's URL without http://": (
        "top --once --url 127.0.0.1:8127",
        1,
        "the service's URL: '127.0.0.1:8127' is not a URL: it has no http:// or https:// — write it as"
        " http://127.0.0.1:8127",
    ),
    "a service that is not there": (
        "submit t.jsonl --url {nothing}",
        1,
        f"cannot connect to {{nothing}} (Connection refused) — {START}",
    ),
    "the engine's URL instead of the service's": (
        "top --once --url {engine}",
        1,
        "{engine} answered GET /v1/status with 404, not as Rollyard does — check that this is the URL of a Rollyard"
        " service, and that service and client have the same version",
    ),
    "a path in the service's URL": (
        "top --once --url {service}/v1",
        1,
        "there is no /v1/v1/status — give the service's URL without a path, such as http://127.0.0.1:8127",
    ),
    "an environment's place without a class": (
        "config --config place.toml",
        1,
        "environments.mine (from file place.toml): write it as FILE.py:CLASS or MODULE:CLASS — see `rollyard config`",
    ),
    "a wrong token": (
        "engines list --token wrong-wrong-wrong",
        1,
        "this token is unknown — give the service's token with --token or ROLLYARD_TOKEN, in HTTP as `Authorization:"
        " Bearer TOKEN`; `rollyard serve` prints the path of its file",
    ),
    "an engine's URL without http://": (
        "engines add gpu1:8000",
        2,
        "the engine's URL: 'gpu1:8000' is not a URL: it has no http:// or https:// — write it as http://gpu1:8000",
    ),
    "an engine that is not there": (
        "engines add {nothing} --id gpu1",
        1,
        "engine gpu1 cannot be reached: Connection refused — start it, or correct its URL ({nothing})",
    ),
    "an engine's URL with a wrong path": (
        "engines add {engine}/v1/chat/completions --id gpu1",
        1,
        "engine gpu1: /v1/models answered 404: Not Found — give the URL of an engine's API without a path, such as"
        " http://gpu1:8000",
    ),
    "an engine that needs a key": (
        "engines add {service} --id gpu1",
        1,
        "engine gpu1: /v1/models answered 401: this call needs a session's key (POST /v1/sessions) — give the engine's"
        " key with --api-key",
    ),
    "a model that the engine does not have": (
        "engines add {engine} --id gpu1 --model qwen",
        1,
        "engine gpu1 does not serve 'qwen'; it has scripted — name one of these with --model",
    ),
    "an engine that was added before": (
        "engines add {engine} --id e0 --policy other",
        1,
        "there is an engine 'e0' already — remove that engine first, or give this one another id (--id)",
    ),
    "an unknown engine": (
        "engines remove knwon",
        1,
        "there is no engine 'knwon' — `rollyard engines list` shows the engines",
    ),
    "an unknown rollout": (
        "rollouts show nothing",
        1,
        "there is no rollout 'nothing' — `rollyard rollouts list` shows the rollouts, newest first",
    ),
    "an unknown run": (
        "rollouts list --run nothing",
        1,
        "there is no run 'nothing' — `rollyard runs list` shows the runs; create one with `rollyard runs create NAME`"
        " or POST /v1/runs",
    ),
    "an evaluation's engine that is not there": (
        "eval t.jsonl --engine {nothing}",
        1,
        "--engine {nothing}: engine {address} cannot be reached: Connection refused — start it, or correct its URL"
        " ({nothing})",
    ),
    "a port in use": (
        "serve --port {taken} --data-dir other",
        1,
        "127.0.0.1:{taken} cannot be listened on: Address already in use — stop the program that uses this port, or"
        " give another one with --port",
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Generator[ErrorSite, None, None]:
    with error_site(tmp_path_factory.mktemp("errors")) as site:
        site.write("t.jsonl", task())
        site.write("bad.jsonl", task(), '{"environment": ')
        site.write("image.jsonl", task(sandbox={"image": "ubuntu:24.04", "runtime": "bubblewrap"}))
        site.write("wrong.toml", "run_slot = 3")
        site.write("place.toml", "[environments]", 'mine = "environment.py"')
        yield site


@pytest.fixture(scope="module")
def values(site: ErrorSite) -> Generator[dict[str, str], None, None]:
    address = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {
            "engine": site.engine.url,
            "nothing": f"http://{address}",
            "address": address,
            "service": site.service.url,
            "taken": str(taken.getsockname()[1]),
        }


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_reported_with_its_cause_and_what_to_do(site: ErrorSite, values: dict[str, str], name: str):
    words, status, text = CASES[name]
    argv = [word.format(**values) for word in words.split()]
    assert site.run(*argv) == Printed(status, "", f"rollyard: {text.format(**values)}\n")
    assert not (site.folder / "other").exists(), "nothing is left behind"


def test_without_a_token_the_searched_places_are_listed(site: ErrorSite):
    assert site.run("engines", "list", ROLLYARD_TOKEN="") == Printed(
        1,
        "",
        "rollyard: there is no token: --token was not given, ROLLYARD_TOKEN is not set, and there is none in"
        f" {site.folder}/home/.local/share/rollyard/token (No such file or directory) — start the service on this"
        " machine with `rollyard serve`, or give another one's with --token\n",
    )


def test_an_unknown_environment_is_reported_with_the_nearest_name(site: ErrorSite):
    async def submit() -> dict[str, object]:
        headers = {"Authorization": f"Bearer {site.service.token}"}
        body = {"rollouts": [{"task": task()}, {"task": {**task(), "environment": "shel"}}]}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{site.service.url}/v1/rollouts", json=body) as reply,
        ):
            return await reply.json(content_type="application/problem+json")

    assert asyncio.run(submit()) == {
        "type": "about:blank",
        "title": "Unknown environment",
        "status": 422,
        "code": "unknown_environment",
        "detail": "there is no environment 'shel' (did you mean 'shell'?); there are: code, gym, harbor, math,"
        " reasoning_gym, session, shell, stem, swe, yardwork",
        "remedy": "Name it under [environments] in the service's rollyard.toml, or install the package that provides"
        " it, on every node of a fleet too, and restart the service.",
        "path": "rollouts[1].task",
    }
