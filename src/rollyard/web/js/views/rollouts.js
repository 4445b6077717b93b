// All rollouts: filters, search, and a table that reads its rows as the reader scrolls.
import { html, useEffect } from "../dom.js";
import { count, plural } from "../format.js";
import { place } from "../router.js";
import { Empty, Loading, Page, Problem } from "../ui.js";
import { useFeed } from "../rollout/feed.js";
import { Filters, filtersOf } from "../rollout/filters.js";
import { Rows } from "../rollout/rows.js";

export default function Rollouts() {
  const filters = filtersOf(place.value.query);
  const feed = useFeed(filters);
  useEffect(() => { if (feed.isLoaded && !feed.rows.length && feed.next) feed.more(); }, [feed.isLoaded, feed.next, feed.isReading]); // a page may be empty
  const isLive = filters.state === "live";
  const found = `${feed.isExact ? count(feed.total) : `more than ${count(feed.total)}`} ${isLive ? "not ended" : "ended"}`;
  return html`<${Page} title="Rollouts" subtitle=${feed.isLoaded ? html`<span role="status">${found}${feed.behind && !isLive ? `; ${plural(feed.behind, "more is", "more are")} being indexed` : ""}</span>` : " "}>
    <${Filters} rows=${feed.rows} />
    ${feed.error && !feed.isLoaded ? html`<${Problem} error=${feed.error} />` : feed.error && feed.error.status ? html`<${Problem} error=${feed.error} />` : null}
    ${!feed.isLoaded && !feed.error && html`<${Loading} />`}
    ${feed.isLoaded && !feed.rows.length && feed.next && html`<${Loading} />`}
    ${feed.isLoaded && !feed.rows.length && !feed.next && html`<${Empty}>${isLive && Object.keys(filters).length === 1 ? "All rollouts have ended." : Object.keys(filters).length ? "No rollout matches these filters." : "No rollout has ended yet."}<//>`}
    ${feed.rows.length > 0 && html`<${Rows} key=${JSON.stringify(filters)} feed=${feed} hasMatch=${Boolean(filters.search)} />`}
  <//>`;
}
