"""Looking at results: lists, ids by their prefix, tokens, and a service that is gone and comes back."""

import io
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from rollyard.cli.commands.top import View
from rollyard.client import AsyncClient
from rollyard.core import RollyardError
from tests.cli.conftest import Cli
from tests.cli.test_views import printed
from tests.client.served import RunningService, served, task
from tests.worker import free_port

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

EVIL = "\x1b]52;c;ZXZpbA==\x07 and \u202etxt.exe"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def looked_at(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[RunningService, None]:
    """A service with ended rollouts: `apple-1` and `apple-2` in the run `fruit`; the others in the default run."""
    async with (
        served(tmp_path_factory.mktemp("service")) as running,
        AsyncClient(running.url, running.token) as client,
    ):
        await client.create_run("fruit")
        await client.submit([task(), task(check="false")], run="fruit", ids=["apple-1", "apple-2"])
        await client.submit([task()], ids=["pear"])
        await client.wait_all(["apple-1", "apple-2", "pear"], timeout_s=60)
        script = running.engine.script
        one_turn = {**task(), "limits": {"max_turns": 1}}
        for name, reply in (("evil", EVIL), ("long", "so long " * 400)):
            running.engine.script = lambda turn, reply=reply: reply
            await client.submit([one_turn], ids=[name])
            await client.wait(name, timeout_s=60)
        running.engine.script = script
        yield running


@pytest.fixture
def view(looked_at: RunningService, monkeypatch: pytest.MonkeyPatch) -> RunningService:
    for name, value in looked_at.environ().items():
        monkeypatch.setenv(name, value)
    return looked_at


async def test_the_list_is_shown_whole_in_a_pipe(cli: Cli, view: RunningService):
    lines = (await cli("rollouts", "list", "--run", "fru", "--oldest")).out.splitlines()
    assert lines[1].split()[:7] == ["apple-1", "fruit", "shell:", "Write", "done.", "completed", "1"]
    assert lines[2].split()[:7] == ["apple-2", "fruit", "shell:", "Write", "done.", "completed", "0"]


async def test_runs_are_listed_with_their_results(cli: Cli, view: RunningService):
    lines = (await cli("runs", "list")).out.splitlines()
    heads = ["id", "policy", "queued", "init", "ready", "run", "eval", "ended", "reward", "trainable", "idle"]
    assert lines[0].split() == heads
    assert {line.split()[0] for line in lines[1:]} == {"fruit", "default"}
    fruit = next(line.split() for line in lines if line.startswith("fruit"))
    assert fruit[:10] == ["fruit", "default", "0", "0", "0", "0", "0", "2", "0.500", "100%"]
    newest = [run["id"] for run in (await cli("runs", "list", "--json")).json]
    assert [run["id"] for run in (await cli("runs", "list", "--oldest", "--json")).json] == newest[::-1]


async def test_a_unique_prefix_names_a_rollout(cli: Cli, view: RunningService):
    assert (await cli("rollouts", "show", "pe", "--json")).json[0]["id"] == "pear"
    assert (await cli("rollouts", "traces", "pe…", "--json")).status == 0, "as a table shortens it"
    assert (await cli("rollouts", "rescore", "pe")).out == "pear: 1 (originally: 1)\n"
    assert (await cli("rollouts", "cancel", "pe", "--json")).json == [{"id": "pear", "state": "ended"}]
    several = await cli("rollouts", "show", "appl")
    expected = "rollyard: several rollouts have an id that starts with appl: apple-1, apple-2 — type more of it\n"
    assert (several.status, several.err) == (1, expected)
    assert (await cli("rollouts", "cancel", "appl")).err == expected
    missing = await cli("rollouts", "show", "plum")
    assert missing.status == 1 and "there is no rollout 'plum'" in missing.err
    assert "cannot be" not in (await cli("rollouts", "show", "not an id")).err
    unknown = await cli("rollouts", "cancel", "quince")
    assert unknown.out == "quince: cancelled (it is not known: it is cancelled when it is submitted)\n"


async def test_the_tokens_of_a_rollout_are_shown_with_their_logprobs(cli: Cli, view: RunningService):
    result = await cli("rollouts", "show", "apple-1", "--tokens")
    assert result.status == 0 and "\x1b" not in result.out, "no colours in a pipe"
    assert "trace 0: " in result.out and " sampled in 2 turns" in result.out
    given, first, second = result.out.partition("trace 0")[2].split("\nturn ")
    assert "    user │ Write done." in given
    assert first.startswith("1 tokens ") and "<tool_call>(" in first and '"echo·hello' in "".join(_texts(first))
    assert second.startswith("2 tokens ") and "finish(" in second
    (trace,) = (await cli("rollouts", "traces", "apple-1", "--json")).json
    assert len(_texts(first)) + len(_texts(second)) == sum(trace["mask"])
    only = await cli("rollouts", "show", "apple-1", "--tokens", "--turn", "2")
    assert second.startswith(only.out.partition("\nturn ")[2].strip()) and "turn 1" not in only.out
    assert "  finish │ Done." in second and "finish │" not in only.out
    assert (await cli("rollouts", "show", "apple-1", "--tokens", "--turn", "3")).err == (
        "rollyard: there is no turn 3 — the last one is 2\n"
    )
    assert (await cli("rollouts", "show", "apple-1", "--tokens", "--trace", "1")).status == 2
    assert (await cli("rollouts", "show", "apple-1", "--turn", "1")).status == 2
    (record,) = (await cli("rollouts", "show", "apple-1", "--tokens", "--json")).json
    (with_texts,) = record["trajectory"]["traces"]
    assert len(with_texts["texts"]) == len(trace["token_ids"])


def _texts(turn: str) -> list[str]:
    """The texts of the tokens of a turn, each followed by its logprob."""
    return [word.rpartition("(")[0] for word in turn.split() if word.endswith(")") and "(" in word]


async def test_a_long_turn_is_folded_and_shown_whole_by_its_number(cli: Cli, view: RunningService):
    folded = (await cli("rollouts", "show", "long", "--tokens")).out
    whole = (await cli("rollouts", "show", "long", "--tokens", "--turn", "1")).out
    assert len(_texts(folded)) == 240 < len(_texts(whole))
    assert f"… {len(_texts(whole)) - 240:,} tokens …" in " ".join(folded.split())


async def test_hostile_tokens_do_not_reach_the_terminal(cli: Cli, view: RunningService):
    result = await cli("rollouts", "show", "evil", "--tokens")
    assert not set("\x1b\x07\u202e") & set(result.out)
    assert "\\x1b" in result.out and "\\u202e" in result.out


async def test_top_says_when_the_service_is_gone_and_when_it_is_back(tmp_path: Path):
    port = free_port()
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    async with served(tmp_path, port=port) as running:
        client = AsyncClient(running.url, running.token, retry_s=0.0)
        await client.__aenter__()
        shown = View(await client.status(), client.url)
        await shown.next(client, 0.1)
        assert (
            shown.is_new and not shown.change and "does not answer" not in "\n".join(printed(100, shown.frame(console)))
        )
    try:
        await shown.next(client, 10.0)  # however seldom frames are requested
        assert shown.change.startswith("the service does not answer: cannot connect to ") and not shown.is_new
        first, second, *rest = printed(100, shown.frame(console))
        assert first.startswith("The service has not answered for ") and len(first) <= 100
        assert second == "Its last known state:" and any("queue" in line for line in rest)
        await shown.next(client, 0.1)
        assert shown.change == "", "it is said once"
        async with served(tmp_path, port=port):
            await shown.next(client, 10.0)
            assert shown.change.startswith("the service answers again, after ") and shown.is_new
            assert printed(100, shown.frame(console))[0].startswith("The service answers again")
            refused = AsyncClient(client.url, "a wrong token", retry_s=0.0)
            async with refused:
                with pytest.raises(RollyardError, match="token"):
                    await shown.next(refused, 0.1)
    finally:
        await client.__aexit__(None, None, None)
