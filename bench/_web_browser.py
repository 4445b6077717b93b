"""What a person waits for in Chromium: the first paint of the dashboard, and a long rollout until all of it is shown.

`first_paint_ms` is the browser's own first contentful paint of the overview, with an empty cache. `overview_shown_ms`
is the time until the overview has its data. `rollout_shown_ms` is the time from the navigation until all messages of a
rollout with 200 turns and 64,000 tokens are elements of the page, nothing is loading any more, and two frames have been
drawn since. All are medians.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from bench._chromium import chromium
from rollyard.cli.rig import Served, service
from rollyard.core import (
    Ending,
    Json,
    Message,
    Outcome,
    Position,
    Rollout,
    Run,
    Score,
    State,
    Task,
    Trace,
    Trajectory,
    ids_array,
    key_of,
    logprobs_array,
)
from rollyard.core.rollout import Summary
from rollyard.core.task import Sampling
from rollyard.core.trace import Span
from rollyard.store import open_store
from rollyard.store.base import Submission
from rollyard.testing.script import FolderTokenizer
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

REPEATS = 5
TURNS = 200
TOKENS = 64_000
RUN, ID = "bench", "long"
TIMEOUT_MS = 120_000.0
BROWSER_METRICS = ("first_paint_ms", "overview_shown_ms", "rollout_shown_ms")

MEASURE = """() => {
  const watch = (name, isShown) => {
    const look = () => {
      if (!isShown()) return requestAnimationFrame(look);
      return requestAnimationFrame(() => requestAnimationFrame(() => { globalThis[name] = performance.now(); }));
    };
    look();
  };
  const isLoaded = () => document.querySelector("main h1") && !document.querySelector("main .loading");
  watch("overviewShown", isLoaded);
  watch("rolloutShown", () => isLoaded() && document.querySelectorAll("main article.message").length === MESSAGES);
}"""


PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"


async def browser_times(*, repeats: int = REPEATS) -> dict[str, Json]:
    """Returns the metrics. Raises `NoChromium`."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name, "data", "rollyard.db")
        place.parent.mkdir(mode=0o700)
        trajectory = await _fill(place)
        async with ScriptedEngine(lambda turn: "ok", tokenizer=FolderTokenizer(tokenizer_dir())) as engine:
            spec = {"id": "e1", "url": engine.url, "tokenizer": str(tokenizer_dir())}
            values: dict[str, Json] = {"runtimes": ["local"], "engines": [spec]}
            async with service(Path(name), values) as served, chromium() as browser:
                return await _measured(browser, served, len(trajectory.messages), repeats)


async def _fill(place: Path) -> Trajectory:
    """Stores the long rollout."""
    key = key_of(RUN, ID)
    trajectory = _trajectory(key)
    async with await open_store(place) as store:
        await store.put_run(Run(RUN), {})
        await store.submit([Submission(Rollout(key, RUN, _task()), {"id": ID})])
        at = Position()
        for state in (State.INIT, State.READY, State.RUN):
            await store.move(key, at, at.to(state))
            at = at.to(state)
        summary = Summary(turns=TURNS, sampled_tokens=trajectory.sampled_tokens, traces=1, ended_by="finish")
        ending = Ending(Outcome.COMPLETED, Score(1.0), is_trainable=True, summary=summary)
        await store.end(key, at, ending, trajectory)
    return trajectory


async def _measured(browser: Browser, served: Served, messages: int, repeats: int) -> dict[str, Json]:
    paints: list[float] = []
    overviews: list[float] = []
    rollouts: list[float] = []
    for _ in range(repeats + 1):  # the first one also fills the service's caches, and does not count
        context = await browser.new_context(viewport={"width": 1280, "height": 900})
        try:
            page = await _new_page(context, messages)
            await page.goto(f"{served.url}/#code={await _code(served)}")
            overviews.append(await _shown(page, "overviewShown"))
            paints.append(await page.evaluate(PAINT))
            await page.goto(f"{served.url}/rollouts/{RUN}/{ID}")
            rollouts.append(await _shown(page, "rolloutShown"))
        finally:
            await context.close()
    columns = zip(BROWSER_METRICS, (paints, overviews, rollouts), strict=True)
    return {name: round(statistics.median(times[1:]), 1) for name, times in columns}


async def _code(served: Served) -> str:
    headers = {"Authorization": f"Bearer {served.token}"}
    async with aiohttp.ClientSession() as http, http.post(f"{served.url}/v1/login/codes", headers=headers) as reply:
        reply.raise_for_status()
        return (await reply.json())["code"]


async def _new_page(context: BrowserContext, messages: int) -> Page:
    context.set_default_timeout(TIMEOUT_MS)
    await context.add_init_script(f"({MEASURE.replace('MESSAGES', str(messages))})()")
    return await context.new_page()


async def _shown(page: Page, name: str) -> float:
    found: Any = await page.wait_for_function(f"() => globalThis.{name}")
    return await found.json_value()


def _task() -> Task:
    return Task("shell", {"instruction": "make the tests of the project pass", "checks": ["true"]})


def _trajectory(key: str) -> Trajectory:
    """200 turns: reasoning, a command and its output in each, and 320 tokens, of which 120 are sampled."""
    tokenizer = FolderTokenizer(tokenizer_dir())
    messages: list[Message] = [{"role": "user", "content": "make the tests of the project pass"}]
    ids: list[int] = []
    mask = bytearray()
    spans: list[Span] = []
    words = tokenizer.encode("the parser reads a line, and the test in tests/test_parser.py expects two fields of it. ")
    per_turn, sampled = TOKENS // TURNS, 120
    for turn in range(1, TURNS + 1):
        call = {"name": "shell", "arguments": f'{{"command": "sed -n {turn},{turn + 20}p src/parser.py"}}'}
        messages.append(
            {
                "role": "assistant",
                "content": f"I look at the lines from {turn} on.",
                "reasoning_content": "The failing test names this function. " * 5,
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"def part_{turn}(line):\n" * 20})
        start = len(ids) + per_turn - sampled
        ids += (words * (per_turn // len(words) + 1))[:per_turn]
        mask += bytes(per_turn - sampled) + b"\x01" * sampled
        spans.append(Span(start, len(ids), turn, "stop", "0" * 64, engine="e1"))
    trace = Trace(
        token_ids=ids_array(ids),
        mask=mask,
        logprobs=logprobs_array([-0.01 * (at % 200) if is_sampled else 0.0 for at, is_sampled in enumerate(mask)]),
        versions=ids_array([at * 4 // len(ids) if is_sampled else -1 for at, is_sampled in enumerate(mask)]),
        spans=tuple(spans),
        sampling=Sampling(),
        policy="default",
        model="scripted",
    )
    return Trajectory(key, 1, (trace,), tuple(messages), turns=TURNS, ended_by="finish")
