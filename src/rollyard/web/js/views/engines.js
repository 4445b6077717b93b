// Engines and policies: which weights each engine has and had, pauses, admission, load.
import { html } from "../dom.js";
import { usePolled } from "../api.js";
import { place } from "../router.js";
import { Badge, Card, Empty, Loaded, Loading, Page } from "../ui.js";
import { Chart } from "../chart.js";
import { DataTable, Filter, Toggle } from "../flow/controls.js";
import { KvUse, Line, Sessions } from "../flow/figures.js";
import { count, percent, plural, seconds, short } from "../format.js";

const HOURS = [["24", "24 hours"], ["1", "1 hour"], ["6", "6 hours"], ["168", "7 days"]];
const MOST_LINES = 12; // engines in one chart

/**
 * Changes of versions per engine → one horizontal axis from `start` to `end`, and per engine its version at each point of
 * it. A change before `start` is the version that the engine had then. A service whose clock is ahead extends the axis.
 */
export function versionSeries(engines, start, end) {
  const changed = Object.values(engines).flatMap((changes) => changes.map(([at]) => Math.max(start, at)));
  const times = [...new Set([start, ...changed, end])].sort((one, other) => one - other);
  const series = Object.entries(engines).slice(0, MOST_LINES).map(([label, changes]) => {
    let next = 0, version = null;
    return { label, values: times.map((at) => {
      while (next < changes.length && changes[next][0] <= at) version = changes[next++][1];
      return version;
    }) };
  });
  return { x: times, series };
}

function Versions({ policy, hours }) {
  const polled = usePolled(`/v1/policies/${encodeURIComponent(policy.name)}/versions`, { hours }, { everyMs: 15_000 });
  if (polled.error) return html`<${Empty}>The history of its versions is not available: ${polled.error.message.slice(0, 200)}<//>`;
  if (!polled.data) return html`<${Loading} />`;
  const engines = polled.data.engines;
  if (!Object.values(engines).some((changes) => changes.length)) return html`<${Empty}>No version was recorded in this time.<//>`;
  const end = Date.now() / 1000;
  const { x, series } = versionSeries(engines, end - 3600 * Number(hours), end);
  const left = Object.keys(engines).length - series.length;
  return html`<${Chart} label="Weight version per engine" isTime=${true} isStep=${true} x=${x} series=${series} height=${180} />
    ${left > 0 && html`<p class="muted">${plural(left, "engine")} more not shown.</p>`}`;
}

function pauseText(policy) {
  if (policy.state === "running") return null;
  const lease = policy.lease_left_s === null ? "" : `, lease ends in ${seconds(Math.max(0, policy.lease_left_s))} of ${seconds(policy.lease_s)}`;
  return html`<p class="pause"><b>${policy.state}</b>${policy.mode ? ` (${policy.mode})` : ""}, held by <code><${Line} text=${policy.holder || "a resume"} /></code>${lease}.
    ${policy.state === "abandoned" ? " Its lease expired: rollouts wait until a resume names a version." : " New calls wait until it resumes."}</p>`;
}

function Policy({ policy, hours }) {
  const behind = policy.engines.filter((engine) => engine.version !== policy.version);
  return html`<${Card} title=${html`<${Line} text=${policy.name} />`} note=${html`version <b>${policy.version}</b> <${Badge} value=${policy.state} /> on ${plural(policy.engines.length, "engine")}${policy.owner ? html`, changed by <${Line} text=${policy.owner} />` : ""}`}>
    ${pauseText(policy)}
    ${behind.length > 0 && html`<ul class="alerts">${behind.map((engine) => html`<li key=${engine.id}><${Line} text=${engine.id} /> has version ${engine.version}, not ${policy.version} <${Badge} value=${engine.state} />${engine.error ? html` <${Line} text=${engine.error} />` : ""}</li>`)}</ul>`}
    <${Versions} policy=${policy} hours=${hours} /><//>`;
}

const COLUMNS = [
  { name: "id", label: "Engine", sort: (engine) => engine.id, cell: (engine) => html`<b><${Line} text=${engine.id} /></b><br /><span class="muted"><${Line} text=${engine.url} /></span>` },
  { name: "state", label: "State", sort: (engine) => engine.state, cell: (engine) => html`<${Badge} value=${engine.state} />${engine.paused && html` <${Badge} value="paused" />`}` },
  { name: "policy", label: "Policy", sort: (engine) => engine.policy, cell: (engine) => (engine.role === "judge" ? html`<${Badge} value="judge" />` : html`<${Line} text=${engine.policy} />`) },
  { name: "version", label: "Version", numeric: true, sort: (engine) => engine.version, cell: (engine) => engine.version },
  { name: "sessions", label: "Sessions", sort: (engine) => engine.sessions, cell: (engine) => html`<${Sessions} engine=${engine} />` },
  { name: "admission", label: "Admission", sort: (engine) => engine.admission, cell: (engine) => html`${engine.admission}${engine.capacity === null || engine.capacity === undefined ? "" : html` <span class="muted">up to ${count(engine.capacity)}</span>`}` },
  { name: "kv", label: "KV use", sort: (engine) => engine.kv_use, cell: (engine) => html`<${KvUse} engine=${engine} />` },
  { name: "flight", label: "In flight", numeric: true, sort: (engine) => engine.in_flight, cell: (engine) => html`${count(engine.in_flight)}${engine.waiting ? html` <span class="muted">${count(engine.waiting)} wait</span>` : ""}` },
  { name: "tokens_s", label: "Tokens/s", numeric: true, sort: (engine) => engine.tokens_per_s, cell: (engine) => short(engine.tokens_per_s) },
  { name: "tokens", label: "Tokens", numeric: true, sort: (engine) => engine.tokens, cell: (engine) => short(engine.tokens) },
  { name: "calls", label: "Calls", numeric: true, sort: (engine) => engine.calls, cell: (engine) => short(engine.calls) },
  { name: "failures", label: "Failed", numeric: true, sort: (engine) => engine.failures, cell: (engine) => html`<span title=${engine.calls ? percent(engine.failures / engine.calls, 2) : ""}>${count(engine.failures)}</span>` },
  { name: "model", label: "Model", sort: (engine) => engine.model, cell: (engine) => html`<${Line} text=${engine.model || "–"} /> <span class="muted">${engine.kind}</span>${engine.tokenizer_verified === false && html`<br /><${Badge} value=${engine.trust_tokenizer ? "tokenizer trusted" : "tokenizer not verified"} tone="warn" />`}` },
  { name: "error", label: "Last error", cell: (engine) => html`<span class="why"><${Line} text=${engine.last_error || ""} /></span>` },
];

export default function Engines() {
  const { q = "", hours = HOURS[0][0] } = place.value.query;
  const engines = usePolled("/v1/engines", {}, { everyMs: 2000 });
  const policies = usePolled("/v1/policies", {}, { everyMs: 2000 });
  const found = (engines.data?.engines || []).filter((engine) => !q || `${engine.id} ${engine.url} ${engine.policy} ${engine.model}`.toLowerCase().includes(q.toLowerCase()));
  const chosen = HOURS.some(([value]) => value === hours) ? hours : HOURS[0][0];
  return html`<${Page} title="Engines and policies" controls=${html`<${Filter} label="Filter engines" /><${Toggle} label="Time of the charts" name="hours" options=${HOURS} />`}>
    <div class="stack">
      <${Loaded} of=${policies}>${(data) => (data.policies.length ? html`<div class="grid">${data.policies.map((policy) => html`<${Policy} key=${policy.name} policy=${policy} hours=${chosen} />`)}</div>` : null)}<//>
      <${Loaded} of=${engines}>${(data) => (data.engines.length === 0
        ? html`<${Card} title="No engine"><p>Rollouts wait until an engine is added:</p><pre tabindex="0">rollyard engines add http://127.0.0.1:8000</pre><//>`
        : html`<${Card} title="Engines" note=${plural(data.engines.length, "engine")}><${DataTable} label="Engines" columns=${COLUMNS} rows=${found} rowKey=${(engine) => engine.id} sort="id" empty="No engine matches." /><//>`)}<//>
    </div>
  <//>`;
}
