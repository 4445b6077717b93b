// Evals: all evaluations with pass@1 and pass@k. Two that are chosen can be compared.
import { html } from "../dom.js";
import { usePolled } from "../api.js";
import { go, Link, paths, place, setQuery } from "../router.js";
import { Badge, Card, Empty, Loaded, Page, Time } from "../ui.js";
import { Choice, DataTable, Filter } from "../flow/controls.js";
import { Interval, Line, Meter } from "../flow/figures.js";
import { count, plural } from "../format.js";

export const nameOf = (one) => `${one.run}/${one.id}`;

/** An estimate of an evaluation: pass@k over all tasks, or null. */
export const passAt = (one, k) => one.result?.all?.pass_at?.[String(k)] ?? null;

/** The chosen evaluations of the address, at most two: ids contain neither "/" nor ",". */
function picked() {
  return (place.value.query.pick || "").split(",").filter(Boolean).slice(0, 2);
}

function Pick({ one }) {
  const now = picked(), name = nameOf(one);
  const isOn = now.includes(name);
  const turn = () => setQuery({ pick: (isOn ? now.filter((other) => other !== name) : [...now, name].slice(-2)).join(",") }, { replace: true });
  return html`<input type="checkbox" checked=${isOn} onChange=${turn} aria-label=${`Compare ${one.id}`} />`;
}

const COLUMNS = [
  { name: "pick", label: "Compare", cell: (one) => html`<${Pick} one=${one} />` },
  { name: "id", label: "Evaluation", sort: (one) => one.id, cell: (one) => html`<${Link} path=${paths.eval(one.run, one.id)}><${Line} text=${one.id} /><//>` },
  { name: "state", label: "State", sort: (one) => one.state, cell: (one) => html`<${Badge} value=${one.state} />${one.reason && html` <span class="muted"><${Line} text=${one.reason.replaceAll("_", " ")} /></span>`}` },
  { name: "policy", label: "Policy", sort: (one) => one.policy, cell: (one) => html`<${Line} text=${one.policy} />` },
  { name: "version", label: "Version", numeric: true, sort: (one) => one.version, cell: (one) => one.version ?? "–" },
  { name: "tasks", label: "Tasks", numeric: true, sort: (one) => one.tasks, cell: (one) => count(one.tasks) },
  { name: "done", label: "Samples", sort: (one) => (one.total ? one.done / one.total : null), cell: (one) => html`<${Meter} label=${`samples of ${one.id}`} value=${one.done} most=${one.total} tone=${one.state === "done" ? "good" : "busy"} text=${`${count(one.done)} of ${count(one.total)}`} />` },
  { name: "pass", label: "pass@1, 95 % interval", sort: (one) => passAt(one, 1)?.mean, cell: (one) => (one.result ? html`<${Interval} label="pass@1" of=${passAt(one, 1)} />` : "–") },
  { name: "passk", label: "pass@k", sort: (one) => passAt(one, one.k)?.mean, cell: (one) => (one.result && one.k > 1 ? html`<span class="side"><span class="muted">k = ${one.k}</span> <${Interval} label=${`pass@${one.k}`} of=${passAt(one, one.k)} tone="tone-3" /></span>` : "–") },
  { name: "created", label: "Started", numeric: true, sort: (one) => one.created_at, cell: (one) => html`<${Time} at=${one.created_at} />` },
];

export default function Evals() {
  const { q = "", state = "", policy = "" } = place.value.query;
  const polled = usePolled("/v1/evals", {}, { everyMs: 5000 });
  const all = polled.data?.evals || [];
  const found = all.filter((one) => (!state || one.state === state) && (!policy || one.policy === policy) && (!q || `${one.id} ${one.run} ${one.policy}`.toLowerCase().includes(q.toLowerCase())));
  const now = picked();
  const policies = [...new Set(all.map((one) => one.policy))].sort();
  const controls = all.length > 0 && html`<${Filter} label="Filter by name" /><${Choice} label="State" name="state" options=${[["", "all"], ...["running", "done", "failed", "cancelled"].map((one) => [one, one])]} />
    <${Choice} label="Policy" name="policy" options=${[["", "all"], ...policies.map((one) => [one, one])]} />
    <button type="button" disabled=${now.length !== 2} onClick=${() => go("/evals/compare", { a: now[0], b: now[1] })}>${now.length === 2 ? "Compare these two" : "Choose two to compare"}</button>`;
  return html`<${Page} title="Evaluations" subtitle=${polled.data && (found.length === all.length ? plural(all.length, "evaluation") : `${count(found.length)} of ${plural(all.length, "evaluation")}`)} controls=${controls}>
    <${Loaded} of=${polled}>${() => (all.length === 0
      ? html`<${Empty}>No evaluation yet. Start one with <code>rollyard eval tasks.jsonl --k 4</code><//>`
      : html`<${Card}><${DataTable} label="Evaluations" columns=${COLUMNS} rows=${found} rowKey=${nameOf} sort="-created" empty="No evaluation matches." /><//>`)}<//>
  <//>`;
}
