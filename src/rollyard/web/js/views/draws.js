// Draws: streams of useful groups (dynamic sampling).
import { html } from "../dom.js";
import { usePolled } from "../api.js";
import { Link, paths, place } from "../router.js";
import { Badge, Card, Empty, Loaded, Page, Time } from "../ui.js";
import { Choice, DataTable, Filter } from "../flow/controls.js";
import { Line, Meter } from "../flow/figures.js";
import { count, percent, plural, reward } from "../format.js";

const COLUMNS = [
  { name: "id", label: "Draw", sort: (draw) => draw.id, cell: (draw) => html`<${Link} path=${paths.draw(draw.run, draw.id)}><${Line} text=${draw.id} /><//>` },
  { name: "run", label: "Run", sort: (draw) => draw.run, cell: (draw) => html`<${Link} path=${paths.run(draw.run)}><${Line} text=${draw.run} /><//>` },
  { name: "state", label: "State", sort: (draw) => draw.state, cell: (draw) => html`<${Badge} value=${draw.state} />${draw.reason && html` <span class="muted"><${Line} text=${draw.reason.replaceAll("_", " ")} /></span>`}` },
  { name: "batch", label: "Batches", numeric: true, sort: (draw) => draw.batch, cell: (draw) => count(draw.batch) },
  { name: "acked", label: "Acknowledged", numeric: true, sort: (draw) => draw.acked, cell: (draw) => count(draw.acked) },
  { name: "delivered", label: "Groups delivered", numeric: true, sort: (draw) => draw.figures.delivered, cell: (draw) => count(draw.figures.delivered) },
  { name: "keep", label: "Keep rate", sort: (draw) => draw.figures.keep_rate, cell: (draw) => (draw.figures.keep_rate === null ? "–" : html`<${Meter} label=${`keep rate of ${draw.id}`} value=${draw.figures.keep_rate} most=${1} tone="busy" text=${percent(draw.figures.keep_rate)} />`) },
  { name: "filtered", label: "Filtered", numeric: true, sort: (draw) => draw.figures.filtered, cell: (draw) => count(draw.figures.filtered) },
  { name: "failed", label: "Failed", numeric: true, sort: (draw) => draw.figures.failed, cell: (draw) => count(draw.figures.failed) },
  { name: "reward", label: "Reward before filtering", numeric: true, sort: (draw) => draw.figures.reward_before, cell: (draw) => reward(draw.figures.reward_before) },
  { name: "created", label: "Created", numeric: true, sort: (draw) => draw.created_at, cell: (draw) => html`<${Time} at=${draw.created_at} />` },
];

export default function Draws() {
  const { q = "", run = "", state = "" } = place.value.query;
  const polled = usePolled("/v1/draws", {}, { everyMs: 5000 });
  const all = polled.data?.draws || [];
  const found = all.filter((draw) => (!run || draw.run === run) && (!state || draw.state === state) && (!q || `${draw.id} ${draw.run}`.toLowerCase().includes(q.toLowerCase())));
  const runs = [...new Set([...all.map((draw) => draw.run), ...(run ? [run] : [])])].sort();
  const controls = html`<${Filter} label="Filter by name" /><${Choice} label="Run" name="run" options=${[["", "all"], ...runs.map((one) => [one, one])]} />
    <${Choice} label="State" name="state" options=${[["", "all"], ["active", "active"], ["ended", "ended"]]} />`;
  return html`<${Page} title="Draws" subtitle=${polled.data && (found.length === all.length ? plural(all.length, "draw") : `${count(found.length)} of ${plural(all.length, "draw")}`)} controls=${controls}>
    <${Loaded} of=${polled}>${() => (all.length === 0
      ? html`<${Empty}>No draw yet. A trainer creates one with <code>POST /v1/draws</code> to get groups in batches.<//>`
      : html`<${Card}><${DataTable} label="Draws" columns=${COLUMNS} rows=${found} rowKey=${(draw) => `${draw.run}/${draw.id}`} sort="-created" empty="No draw matches." /><//>`)}<//>
  <//>`;
}
