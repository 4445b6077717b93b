// Overview: what the service does now, and what is wrong with it.
import { html, useState } from "../dom.js";
import { caller, usePolled } from "../api.js";
import { Link } from "../router.js";
import { Badge, Card, Loaded, Page } from "../ui.js";
import { Chart } from "../chart.js";
import { DataTable } from "../flow/controls.js";
import { Failures, KvUse, Line, Meter, Sessions } from "../flow/figures.js";
import { fullPools, Stages } from "../flow/stages.js";
import { count, plural, seconds, short } from "../format.js";

const MOST_ROWS = 12;
const WHERE = [[/engine|polic/, "/engines"], [/node/, "/nodes"]]; // alerts by kind → the view with more

function Alerts({ alerts }) {
  if (!alerts.length) return null;
  return html`<ul class="alerts" aria-label="Alerts">${alerts.map((alert) => {
    const target = WHERE.find(([kind]) => kind.test(alert.kind));
    return html`<li key=${`${alert.kind} ${alert.what}`} class=${alert.severity === "bad" ? "bad" : ""}>
      <b>${alert.severity === "bad" ? "Problem" : "Note"}: ${alert.kind.replaceAll("_", " ")}</b> <${Line} text=${alert.what} />
      ${alert.detail && html` – <${Line} text=${alert.detail} />`} ${target && html`<${Link} path=${target[1]}>Show<//>`}</li>`;
  })}</ul>`;
}

function Command({ text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); setCopied(true); } catch { setCopied(false); }
  };
  return html`<div class="command"><pre tabindex="0">${text}</pre>
    <button type="button" class="quiet" onClick=${copy} aria-label="Copy the command">${isCopied ? "Copied" : "Copy"}</button></div>`;
}

function FirstContact({ hasEngine }) {
  if (caller.value?.access === "reader") {
    return html`<${Card} title="Nothing has run yet" className="welcome"><p>This page fills with the first rollout. Your token may look and change nothing.</p><//>`;
  }
  return html`<${Card} title="Nothing has run yet" className="welcome">
    <p>A rollout is one task for an agent: Rollyard prepares a sandbox, lets the model work in it, and scores the result.
      ${hasEngine ? " Submit a first one" : " It needs an engine and a task. Enter this"} in a terminal on the machine of the service:</p>
    <ol>
      ${!hasEngine && html`<li><p>Add an engine, such as a vLLM server:</p><${Command} text="rollyard engines add http://127.0.0.1:8000" /></li>`}
      <li><p>Write a task:</p><${Command} text=${`echo '{"environment": "math", "data": {"question": "2 + 2?", "answer": "4"}}' > tasks.jsonl`} /></li>
      <li><p>Submit it, and watch it here pass through the stages:</p><${Command} text="rollyard submit tasks.jsonl" /></li>
    </ol>
    <p>No model at hand? <code>rollyard demo --scripted</code> runs everything else, with a script in place of the model.</p>
  <//>`;
}

const HISTORY = [["turns", "Turns per second"], ["tokens", "Tokens per second"], ["ended", "Rollouts ended per minute"], ["live", "Rollouts live"]];

/** Steps of the history as rates. Ended rollouts are counted over the last minute: a step has too few of them. */
function rates(history) {
  const { step_s } = history;
  const perMinute = Math.max(1, Math.round(60 / step_s));
  const sum = (values, to) => {
    const part = values.slice(Math.max(0, to + 1 - perMinute), to + 1).filter((one) => one !== null);
    return part.length ? (part.reduce((total, one) => total + one, 0) * 60) / (part.length * step_s) : null;
  };
  const perSecond = (values) => values.map((one) => (one === null ? null : one / step_s));
  return {
    turns: perSecond(history.turns), tokens: perSecond(history.tokens), live: history.live,
    ended: history.ended.map((one, index) => (one === null ? null : sum(history.ended, index))),
  };
}

function History({ history }) {
  const values = rates(history);
  const size = history.turns.length;
  const x = history.turns.map((_, index) => history.end_at - (size - 1 - index) * history.step_s);
  return html`<div class="charts">${HISTORY.map(([name, label]) => html`<${Card} key=${name}>
    <${Chart} label=${html`${label} <b class="now">${short(values[name].at(-1))}</b>`} isTime=${true} x=${x} height=${140} range=${(_, _low, high) => [0, high > 0 ? high * 1.1 : 1]}
      series=${[{ label: label.toLowerCase(), values: values[name], colour: `--series-${1 + HISTORY.findIndex(([one]) => one === name)}` }]} /><//>`)}</div>`;
}

const isWell = (engine) => engine.state === "up" && !engine.paused;

function Engines({ engines, policies }) {
  const rows = [...engines].sort((one, other) => isWell(one) - isWell(other)).slice(0, MOST_ROWS);
  const columns = [
    { name: "id", label: "Engine", cell: (engine) => html`<b><${Line} text=${engine.id} /></b>` },
    { name: "state", label: "State", cell: (engine) => html`<${Badge} value=${engine.state} />${engine.paused && html` <${Badge} value="paused" />`}` },
    { name: "version", label: "Version", numeric: true, cell: (engine) => engine.version },
    { name: "sessions", label: "Sessions", cell: (engine) => html`<${Sessions} engine=${engine} />` },
    { name: "kv", label: "KV use", cell: (engine) => html`<${KvUse} engine=${engine} />` },
    { name: "tokens", label: "Tokens/s", numeric: true, cell: (engine) => short(engine.tokens_per_s) },
  ];
  const up = engines.filter(isWell).length;
  return html`<${Card} title="Engines" note=${engines.length ? `${count(up)} of ${count(engines.length)} up` : ""}>
    ${policies.length > 0 && html`<p class="policies">${policies.slice(0, MOST_ROWS).map((policy) => html`<span key=${policy.name}>policy <b><${Line} text=${policy.name} /></b> at version <b>${policy.version}</b> <${Badge} value=${policy.state} /></span>`)}</p>`}
    <${DataTable} label="Engines" columns=${columns} rows=${rows} rowKey=${(engine) => engine.id} empty="No engine. Rollouts wait until one is added." prefix="e-" />
    <p class="more"><${Link} path="/engines">Engines and policies<//></p><//>`;
}

function Nodes({ nodes }) {
  if (!nodes.length) return null;
  const columns = [
    { name: "name", label: "Node", cell: (node) => html`<b><${Line} text=${node.name} /></b>` },
    { name: "state", label: "State", cell: (node) => html`<${Badge} value=${node.state} />` },
    { name: "live", label: "Live", numeric: true, cell: (node) => count(node.live) },
    { name: "run", label: "RUN slots", cell: (node) => (node.pools.run ? html`<${Meter} label=${`RUN slots of ${node.name}`} value=${node.pools.run.active} most=${node.pools.run.size} text=${`${node.pools.run.active} of ${node.pools.run.size}`} />` : "–") },
    { name: "heard", label: "Last call", numeric: true, cell: (node) => `${seconds(node.heard_s_ago)} ago` },
  ];
  const rows = [...nodes].sort((one, other) => (one.state === "up") - (other.state === "up") || other.heard_s_ago - one.heard_s_ago).slice(0, MOST_ROWS);
  return html`<${Card} title="Nodes" note=${`${count(nodes.filter((node) => node.state === "up").length)} of ${count(nodes.length)} up`}>
    <${DataTable} label="Nodes" columns=${columns} rows=${rows} rowKey=${(node) => node.name} prefix="n-" />
    <p class="more"><${Link} path="/nodes">All nodes<//></p><//>`;
}

function Flow({ data }) {
  const { flow, pools } = data;
  const live = pools.live;
  const full = fullPools(pools);
  return html`<${Card} title="Stages" note=${live ? `${count(live.active)} of ${plural(live.size, "rollout")} live` : ""}>
    <${Stages} flow=${flow} pools=${pools} />
    ${full.length > 0 && html`<p class="flow-note">${full.at(-1)} is full and others wait for it: more slots there raise the throughput (<code>rollyard pools resize</code>), if the machine has room.</p>`}
  <//>`;
}

export default function Overview() {
  const polled = usePolled("/v1/overview", {}, { everyMs: 2000 });
  const data = polled.data;
  const isIdle = data && !["queued", "init", "ready", "run", "eval", "ended"].some((name) => data.flow[name]);
  const runs = usePolled(isIdle ? "/v1/runs" : null, {}, { everyMs: 5000 });
  const isNew = isIdle && runs.data?.runs.length === 0;
  const subtitle = data && html`Rollyard ${data.version}, up for ${seconds(data.uptime_s)}${data.is_draining ? ", draining" : ""}`;
  return html`<${Page} title="Overview" subtitle=${subtitle}>
    <${Loaded} of=${polled}>${(now) => html`<div class="stack">
      <${Alerts} alerts=${now.alerts} />
      ${isNew && html`<${FirstContact} hasEngine=${now.engines.length > 0} />`}
      <${Flow} data=${now} />
      ${!isNew && html`<${History} history=${now.history} />`}
      <div class="main-and-side">
        <div class="stack"><${Engines} engines=${now.engines} policies=${now.policies} /><${Nodes} nodes=${now.nodes} /></div>
        <${Card} title="Failures" note="of the last hour"><${Failures} failures=${now.failures} empty="No rollout failed in the last hour." /><//>
      </div>
    </div>`}<//>
  <//>`;
}
