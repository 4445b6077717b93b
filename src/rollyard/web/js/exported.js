// The start of an exported file: the rollout view without a service, after a list if the file has several rollouts.
//
// `rollyard.exports.html` joins this module and its imports into one script. All data is in the file (api.js).
import { html, render, useState } from "./dom.js";
import { usePolled } from "./api.js";
import { reward, short } from "./format.js";
import { Link, match, paths, place } from "./router.js";
import { Visible } from "./text.js";
import { ThemeButton } from "./theme.js";
import { Badge, Loaded, Page, Table } from "./ui.js";
import Rollout from "./views/rollout.js";

Object.preventExtensions(Object.prototype); // hostile keys in data cannot change what all objects have

const ROWS = 200; // shown per click

const COLUMNS = [
  { label: "Rollout", cell: (row) => html`<${Link} path=${paths.rollout(row.run, row.id)}><${Visible} text=${row.id} /><//>` },
  { label: "Task", cell: (row) => html`<${Visible} text=${row.name || ""} />` },
  { label: "Outcome", cell: (row) => html`<${Badge} value=${row.code || row.outcome || row.state} />` },
  { label: "Reward", numeric: true, cell: (row) => reward(row.reward) },
  { label: "Turns", numeric: true, cell: (row) => short(row.turns) },
  { label: "Tokens", numeric: true, cell: (row) => short(row.sampled_tokens) },
];

function List({ rows }) {
  const [end, setEnd] = useState(ROWS);
  return html`<${Page} title="Rollouts" subtitle=${`${rows.length} in this file`}>
    <${Table} label="Rollouts" columns=${COLUMNS} rows=${rows.slice(0, end)} empty="This file has no rollouts." />
    ${end < rows.length && html`<button type="button" class="fold" onClick=${() => setEnd(end + 5 * ROWS)}>Show more (${rows.length - end} left)</button>`}
  <//>`;
}

function View({ rows }) {
  const { path } = place.value;
  const at = match("/rollouts/:run/:id", path);
  const row = at ? rows.find((one) => one.id === at.id && one.run === at.run) : path === "/" && rows.length === 1 ? rows[0] : null;
  if (row) return html`<${Rollout} key=${`${row.run}/${row.id}`} run=${row.run} id=${row.id} />`;
  if (path === "/") return html`<${List} rows=${rows} />`;
  return html`<${Page} title="Not in this file">
    <p>This file has the pages of its rollouts only. Others are on the service's dashboard: <code>rollyard open</code></p>
    <p><${Link} path="/">What this file has<//></p>
  <//>`;
}

function App() {
  const listed = usePolled("/v1/results");
  return html`<header class="top">
      <${Link} path="/" class="brand">Rollyard<//>
      <span class="access">exported file</span>
      <div class="who"><${ThemeButton} /></div>
    </header>
    <main id="main" tabindex="-1"><${Loaded} of=${listed}>${({ rows }) => html`<${View} rows=${rows} />`}<//></main>`;
}

const app = document.getElementById("app");
app.replaceChildren();
render(html`<${App} />`, app);
