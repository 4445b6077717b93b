"""200 hostile trajectories in the rollout view: nothing runs, nothing leaves the page, and the page answers.

The store gets them directly: as instruction, messages, reasoning, tool calls and outputs, names of scores, evidence,
notes and failure details. Some more come through a real agent's messages and a real shell's output.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from rollyard.core import (
    Ending,
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
from rollyard.core.failure import Blame, Failure
from rollyard.core.json import Json
from rollyard.core.rollout import LostAttempt, Summary
from rollyard.core.task import Sampling
from rollyard.core.trace import Span
from rollyard.store import open_store
from rollyard.store.base import Store, Submission
from rollyard.testing.script import FolderTokenizer, Reply
from rollyard.testing.store_conformance import advance
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import Site, engine_table, finish, open_site, scripted, settings, shell, task
from tests.web.conftest import NewVisitor
from tests.web.payloads import COUNT, LARGE, payloads
from tests.web.visitor import Visitor

TABS = ("tokens", "traces", "requests", "terminal", "evidence", "record")

RUN = "constructor"
"""A name that every object of a script has."""

GUARD = """
globalThis.pwned = () => troubles.push("a script ran");
globalThis.isSamePage = true;
globalThis.prototypeNames = Object.getOwnPropertyNames(Object.prototype).join();
"""

VISIT = """async (to) => {
  const never = "script iframe object embed base meta link style template video audio math animate".split(" ");
  const addresses = "href src xlink:href action formaction srcdoc data".split(" ");
  const main = document.getElementById("main");
  const frame = () => new Promise(requestAnimationFrame);
  const shown = async () => {
    await frame();
    do await frame(); while (!main.querySelector("h1") || main.querySelector(".loading"));
  };
  history.pushState(null, "", to);
  dispatchEvent(new Event("popstate"));
  await shown();
  for (const details of main.querySelectorAll("details")) details.open = true;
  for (const button of [...main.querySelectorAll("button.fold")].slice(0, 2)) button.click();
  await shown();

  const found = [...troubles];
  if (main.querySelector(".problem")) found.push(main.querySelector(".problem").textContent);
  for (const element of main.querySelectorAll("*")) {
    if (never.includes(element.localName)) found.push(`<${element.localName}>`);
    for (const { name, value } of element.attributes) {
      if (/^on/i.test(name)) found.push(`attribute ${name}`);
      const isForeign = addresses.includes(name) && new URL(value, location).origin !== location.origin;
      if (isForeign) found.push(`${name}=${value}`);
    }
  }
  if (!/Rollyard$/.test(document.title)) found.push(`the title is ${document.title}`);
  const names = Object.getOwnPropertyNames(Object.prototype).join();
  if (names !== globalThis.prototypeNames) found.push(`a prototype was changed: ${names}`);
  if (!globalThis.isSamePage) found.push("the page was left");
  return found;
}"""
"""Shows a view, opens what is folded, and returns what must not be there."""


NOTHING_TO_SEE = (
    *(0x00, 0x08, 0x1B, 0x7F, 0x85, 0xAD, 0x034F, 0x061C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFEFF, 0xFFA0),
    *(*range(0x180B, 0x1810), *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070)),
    *(*range(0xFE00, 0xFE10), *range(0xFFF9, 0xFFFC), *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B)),
    *(0xFFFE, 0xFFFF, 0xE0001, *range(0xE0020, 0xE0080), *range(0xE0100, 0xE01F0)),
)

SHOWN = {
    "pay\u00adpal\u200c\u200d\u2062": "pay<SHY>pal<ZWNJ><ZWJ><U+2062>",
    "ok\U000e0049\U000e0047\U000e007f": "ok<TAG I><TAG G><U+E007F>",
    "a\ufe00\U000e0100": "a<VS1><VS17>",
    "\u26a0\ufe0f 1\ufe0f\u20e3 \U0001f469\u200d\U0001f4bb": "\u26a0\ufe0f 1\ufe0f\u20e3 \U0001f469\u200d\U0001f4bb",
    "\u26a0\ufe0f\ufe0f\ufe01 1\ufe0f \U0001f469\u200dx": "\u26a0\ufe0f<VS16><VS2> 1<VS16> \U0001f469<ZWJ>x",
    "line\r\nend\r x\u202ey": "line\nend<\u240d> x<RLO>y",
    "fine: \u00e9 \u4e2d \u05d0 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd": (
        "fine: \u00e9 \u4e2d \u05d0 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd"
    ),
}
"""Texts, and how they are shown: emoji stay whole."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    folder = tmp_path_factory.mktemp("hostile")
    place = settings(folder).store_path
    place.parent.mkdir(mode=0o700)
    async with await open_store(place) as store:
        await fill(store)
    async with scripted() as engine, open_site(folder, engines=[engine_table(engine)]) as opened:
        engine.script = lambda turn: Reply("ok") if "<|im_start|>" not in turn.text else spoken(turn.number)
        yield opened


async def fill(store: Store) -> None:
    await store.put_run(Run(RUN), {})
    tokenizer = FolderTokenizer(tokenizer_dir())
    for number, text in enumerate(payloads()):
        rollout_id = key_of(RUN, f"h{number}")
        body: dict[str, Json] = {
            "instruction": text[:50_000],
            "checks": ["true"],
            text[:100]: text[:100],
            "name": text[:100],
        }
        rollout = Rollout(rollout_id, RUN, Task("shell", body))
        await store.submit([Submission(rollout, {"id": rollout_id})])
        at = await advance(store, rollout_id, State.RUN)
        if number % 4 == 0:
            lost = LostAttempt(1, "engine_lost", text[:1000], "run", 10, engine=text[:50])
            await store.requeue(rollout_id, at, lost)
            at = await advance(store, rollout_id, State.RUN, attempt=2)
        await store.end(rollout_id, at, _ending(number, text), _trajectory(rollout_id, at, text, tokenizer))


def _ending(number: int, text: str) -> Ending:
    summary = Summary(
        turns=2,
        sampled_tokens=10,
        traces=1,
        ended_by=text[:100],
        engine=text[:100],
        node=text[:100],
        limits_in_force={text[:100]: text[:100], "constructor": "x"},
        notes=(text[:500], "__proto__"),
    )
    if number % 3 == 0:
        failure = Failure("constructor", Blame.INFRA, text[:2000], stage=text[:50], data={text[:50]: text[:2000]})
        return Ending(Outcome.FAILED, failure=failure, summary=summary)
    numbers = {text[:100]: 1.0, "__proto__": 0.5, "toString": 0.0}
    return Ending(Outcome.COMPLETED, Score(1.0, numbers, numbers), is_trainable=True, summary=summary)


def _trajectory(rollout_id: str, at: Position, text: str, tokenizer: FolderTokenizer) -> Trajectory:
    ids = tokenizer.encode(text[:2000])[:1000] or [0]
    trace = Trace(
        token_ids=ids_array([1, *ids]),
        mask=bytearray([0, *(1 for _ in ids)]),
        logprobs=logprobs_array([0.0, *(-0.1 for _ in ids)]),
        versions=ids_array([-1, *(0 for _ in ids)]),
        spans=(Span(1, 1 + len(ids), 1, text[:20], text[:64], text[:64], engine=text[:50], request_id=text[:50]),),
        sampling=Sampling(),
        policy="default",
        model=text[:100],
        fork_reason=text[:200],
    )
    call = {"id": text[:100], "type": "function", "function": {"name": text[:200] or "x", "arguments": text[:100_000]}}
    messages: tuple[dict[str, Json], ...] = (
        {"role": "system", "content": text[:2000]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": text[:50_000]},
                {"type": "image_url", "image_url": {"url": text[:500]}},
            ],
        },
        {"role": "assistant", "content": text[:500_000], "reasoning_content": text[:50_000], "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": text[:100], "name": text[:100]},
        {
            "role": text[:40],
            "content": {"type": "img", "props": {"src": "x", "onerror": text[:500]}},
            "__proto__": text[:50],
        },
    )
    evidence = [
        {"kind": kind, "name": text[:200], "text": text[:16_000], "passed": None}
        for kind in ("check", "tests", "judge", "patch")
    ]
    info: dict[str, Json] = {
        "evidence": evidence,
        "calls": [["model", 1, 0.1, 0.2, text[:50], 5], ["tool", 1, 0.2, 0.3, text[:50], None]],
        "constructor": text[:200],
        text[:50]: text[:200],
    }
    tools = ({"type": "function", "function": {"name": text[:100], "description": text[:500], "parameters": {}}},)
    return Trajectory(rollout_id, at.attempt, (trace,), messages, tools, turns=2, ended_by=text[:100], info=info)


def spoken(number: int) -> Reply:
    """A turn of a real agent: hostile words, and a command that prints hostile bytes."""
    commands = (
        r"printf '\033]0;PWNED-TITLE\007\033]8;;javascript:pwned(1)\033\\click\033]8;;\033\\\n'",
        r"printf '\377\376\303\050\355\240\200 \000 \342\200\256 rtl\n'; printf '<img src=x onerror=pwned(1)>\n'",
        r"head -c 3000000 /dev/zero | tr '\0' '<'",
    )
    if number < len(commands):
        return Reply(f"<think><script>pwned(1)</script></think><img src=x onerror=pwned(1)>{shell(commands[number])}")
    return Reply(finish())


async def troubles_of(visitor: Visitor, path: str) -> list[str]:
    return [f"{path}: {trouble}" for trouble in await visitor.page.evaluate(VISIT, path)]


async def answers(page: Page) -> None:
    """The page handles a key press."""
    await page.evaluate("() => addEventListener('keydown', () => { globalThis.isAnswered = true; }, { once: true })")
    await page.keyboard.press("Shift")
    await page.wait_for_function("() => globalThis.isAnswered")
    await page.evaluate("() => { globalThis.isAnswered = false; }")


@pytest.mark.timeout(600)
async def test_nothing_that_an_agent_or_a_tool_wrote_runs_or_leaves_the_page(
    site: Site, new_visitor: NewVisitor
) -> None:
    visitor = await new_visitor(site)
    await visitor.context.add_init_script(GUARD)
    page = await visitor.open(f"/rollouts?run={RUN}")
    found: list[str] = []
    for number in range(COUNT):
        is_large = number >= COUNT - len(LARGE)
        found += await troubles_of(visitor, f"/rollouts/{RUN}/h{number}")
        for tab in TABS if is_large else TABS[number % 24 : number % 24 + 1]:  # the tabs in turn, of every fourth one
            found += await troubles_of(visitor, f"/rollouts/{RUN}/h{number}?tab={tab}")
        if number % 20 == 0 or is_large:
            await answers(page)
    found += await troubles_of(visitor, f"/rollouts?run={RUN}")
    found += await troubles_of(visitor, f"/runs/{RUN}")
    found += await troubles_of(visitor, "/")
    assert found == []


async def test_words_and_outputs_of_a_real_agent_stay_text(site: Site, new_visitor: NewVisitor) -> None:
    hostile = task("<script>pwned(1)</script>", limits={**task()["limits"], "output_bytes": 1_000_000})
    assert (await site.post("/v1/groups", {"id": "real", "task": hostile, "size": 2})).status < 300
    bad = {
        **hostile,
        "data": {**hostile["data"], "setup": [r"printf '<img src=x onerror=pwned(1)>\033[31m\377' >&2; exit 1"]},
    }
    await site.submit("real-failure", task=bad)
    await site.ended("real-failure")
    for index in range(2):
        await site.ended(f"real-{index}")
    visitor = await new_visitor(site)
    await visitor.context.add_init_script(GUARD)
    page = await visitor.open("/rollouts")
    found: list[str] = []
    for path in (
        "/rollouts/default/real-0",
        "/rollouts/default/real-failure",
        "/groups/default/real",
        "/rollouts",
        "/",
    ):
        found += await troubles_of(visitor, path)
    await answers(page)
    assert found == []


async def test_invisible_characters_are_shown_by_name(site: Site, new_visitor: NewVisitor) -> None:
    page = await (await new_visitor(site)).open("/nodes")
    shown = await page.evaluate(
        """async (texts) => {
          const { visible } = await import("/assets/js/text.js");
          return texts.map((text) => visible(text).map((part) => (part.name ? `<${part.name}>` : part.text)).join(""));
        }""",
        [*SHOWN, *(f"a{chr(number)}b" for number in NOTHING_TO_SEE)],
    )
    assert shown[: len(SHOWN)] == list(SHOWN.values())
    plain = [
        f"U+{number:04X}" for number, text in zip(NOTHING_TO_SEE, shown[len(SHOWN) :], strict=True) if "<" not in text
    ]
    assert plain == []


def test_there_are_200_different_payloads() -> None:
    made = payloads()
    assert len(set(made)) == COUNT
    assert max(map(len, made)) == 5_000_000
