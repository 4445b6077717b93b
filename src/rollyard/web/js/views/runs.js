// Runs: the jobs of trainers, with their rollouts in numbers.
import { html } from "../dom.js";
import { usePolled } from "../api.js";
import { Link, paths, place } from "../router.js";
import { Badge, Card, Empty, Loaded, ownRuns, Page, Time } from "../ui.js";
import { Choice, DataTable, Filter } from "../flow/controls.js";
import { Line } from "../flow/figures.js";
import { count, plural, reward } from "../format.js";

const COUNTED_MS = 10_000; // the service counts all rollouts of the runs for each reply
const LIVE = ["init", "ready", "run", "eval"];

export const live = (states) => LIVE.reduce((sum, name) => sum + (states[name] || 0), 0);

/** Rollouts of a run by state: a bar of queued, live and ended ones. */
export function StatesBar({ states }) {
  const parts = [["ended", states.ended || 0, "tone-3"], ["live", live(states), "tone-1"], ["queued", states.queued || 0, "tone-5"]];
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return html`<span class="muted">none</span>`;
  const text = parts.filter(([, value]) => value).map(([name, value]) => `${count(value)} ${name}`).join(", ");
  return html`<span class="states"><span class="share-bar" aria-hidden="true">${parts.filter(([, value]) => value).map(([name, value, tone]) => html`<span key=${name} class="share-part ${tone}" style=${{ flexGrow: value }}></span>`)}</span>
    <span class="states-text">${text}</span></span>`;
}

const COLUMNS = [
  { name: "id", label: "Run", sort: (run) => run.id, cell: (run) => html`<${Link} path=${paths.run(run.id)}><${Line} text=${run.id} /><//>${run.state === "deleting" && html` <${Badge} value="deleting" tone="warn" />`}` },
  { name: "mode", label: "Mode", sort: (run) => run.mode, cell: (run) => run.mode },
  { name: "policy", label: "Policy", sort: (run) => run.policy, cell: (run) => html`<${Line} text=${run.policy} />` },
  { name: "rollouts", label: "Rollouts", sort: (run) => Object.values(run.results.states).reduce((sum, one) => sum + one, 0), cell: (run) => html`<${StatesBar} states=${run.results.states} />` },
  { name: "live", label: "Live", numeric: true, sort: (run) => live(run.results.states), cell: (run) => count(live(run.results.states)) },
  { name: "reward", label: "Mean reward", numeric: true, sort: (run) => run.results.mean_reward, cell: (run) => reward(run.results.mean_reward) },
  { name: "trainable", label: "Trainable", numeric: true, sort: (run) => run.results.trainable, cell: (run) => count(run.results.trainable) },
  { name: "active", label: "Last activity", numeric: true, sort: (run) => run.results.active_at ?? run.created_at, cell: (run) => html`<${Time} at=${run.results.active_at ?? run.created_at} />` },
];

export default function Runs() {
  const { q = "", mode = "", policy = "" } = place.value.query;
  const polled = usePolled("/v1/runs", { include: "results" }, { everyMs: COUNTED_MS });
  const all = polled.data?.runs || [];
  const found = all.filter((run) => (!mode || run.mode === mode) && (!policy || run.policy === policy) && (!q || `${run.id} ${run.policy}`.toLowerCase().includes(q.toLowerCase())));
  const values = (name) => [["", "all"], ...[...new Set(all.map((run) => run[name]))].sort().map((value) => [value, value])];
  const controls = html`<${Filter} label="Filter by name" /><${Choice} label="Mode" name="mode" options=${values("mode")} /><${Choice} label="Policy" name="policy" options=${values("policy")} />`;
  return html`<${Page} title="Runs" subtitle=${polled.data && (found.length === all.length ? plural(all.length, "run") : `${count(found.length)} of ${plural(all.length, "run")}`)} controls=${controls}>
    <${Loaded} of=${polled}>${() => (all.length === 0
      ? html`<${Empty}>${ownRuns() ? html`No run yet: your token reads <${Line} text=${ownRuns()} />.` : html`No run yet. The first <code>rollyard submit tasks.jsonl</code> creates one.`}<//>`
      : html`<${Card}><${DataTable} label="Runs" columns=${COLUMNS} rows=${found} rowKey=${(run) => run.id} sort="-active" empty="No run matches." /><//>`)}<//>
  <//>`;
}
