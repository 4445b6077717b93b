"""`rollyard bench web`: what the dashboard asks of the service, with a hundred thousand stored rollouts.

Parts, each in its own file:
- `_web_tables`: pages of results, searches and the overview over HTTP, and the filling of the catalog;
- `_web_live`: the CPU of ten open pages while rollouts are in flight;
- `_web_browser`: the first paint and a long rollout in Chromium. Without Chromium these are null, with the reason.
"""

from __future__ import annotations

from bench._chromium import NoChromium
from bench._web_browser import BROWSER_METRICS, browser_times
from bench._web_live import live_pages
from bench._web_tables import tables
from rollyard.core import Json


async def bench_web(*, quick: bool = False, peers: bool = True) -> dict[str, Json]:
    metrics, versus = await tables(rollouts=5_000 if quick else 100_000, with_versus=peers)
    metrics |= await live_pages(in_flight=50 if quick else 1_000, window_s=2.0 if quick else 10.0)
    try:
        metrics |= await browser_times(repeats=3 if quick else 5)
    except NoChromium as error:
        metrics |= dict.fromkeys(BROWSER_METRICS) | {"browser_null": str(error)}
    return {"metrics": metrics, "versus": versus}
