// The rest of the record: limits, attempts, egress, sandbox, and the task as submitted.
import { html } from "../dom.js";
import { bytes, count, seconds, time } from "../format.js";
import { LongText, Visible } from "../text.js";
import { Badge, Card, Empty, Table } from "../ui.js";

function Pairs({ values, format = String }) {
  const entries = Object.entries(values || {}).filter(([, value]) => value !== null && value !== undefined);
  if (!entries.length) return html`<${Empty}>None.<//>`;
  return html`<dl class="numbers">${entries.slice(0, 200).map(([name, value]) => html`<div><dt><${Visible} text=${name} /></dt><dd><${Visible} text=${typeof value === "object" ? JSON.stringify(value) : format(value, name)} /></dd></div>`)}</dl>`;
}

function limit(value, name) {
  if (typeof value !== "number") return String(value);
  return name.endsWith("_s") ? seconds(value) : name.endsWith("_bytes") ? bytes(value) : count(value);
}

function Egress({ egress, offered }) {
  if (!egress || !egress.hosts) return html`<${Empty}>${offered ? "It tried no connection." : "It was offline."}<//>`;
  return html`<p>${bytes(egress.sent_bytes)} sent, ${bytes(egress.received_bytes)} received${egress.unnamed ? `, ${count(egress.unnamed)} attempts to other hosts` : ""}</p>
    <${Table} label="Hosts" rows=${egress.hosts.slice(0, 200)} columns=${[
      { label: "host", cell: (row) => html`<${Visible} text=${`${row.host}:${row.port}`} />` },
      { label: "verdict", cell: (row) => html`<${Badge} value=${row.verdict} tone=${row.verdict === "allowed" ? "good" : "bad"} />` },
      { label: "count", numeric: true, cell: (row) => count(row.count) },
      { label: "sent", numeric: true, cell: (row) => bytes(row.sent_bytes) },
      { label: "received", numeric: true, cell: (row) => bytes(row.received_bytes) },
    ]} />`;
}

export function Details({ record, trajectory }) {
  const summary = record.summary || {}, task = record.task || {};
  return html`<div class="grid details">
    <${Card} title="Times" note="of the last attempt"><${Pairs} values=${record.timings} format=${seconds} /><p class="note">Submitted ${time(record.created_at)}, changed ${time(record.updated_at)}.</p><//>
    <${Card} title="Limits"><${Pairs} values=${task.limits} format=${limit} /><//>
    <${Card} title="Limits in force" note="and the mechanism that enforces each"><${Pairs} values=${summary.limits_in_force} /><//>
    <${Card} title="Lost attempts" note=${`attempt ${record.attempt} is the last`}>
      <${Table} label="Lost attempts" rows=${(record.lost || []).slice(0, 100)} empty="None was lost." columns=${[
        { label: "attempt", numeric: true, cell: (row) => row.attempt },
        { label: "code", cell: (row) => html`<${Badge} value=${row.code} tone="bad" />` },
        { label: "what happened", cell: (row) => html`<${Visible} text=${row.detail} />` },
        { label: "stage", cell: (row) => row.stage || "–" },
        { label: "tokens lost", numeric: true, cell: (row) => count(row.tokens_lost) },
        { label: "where", cell: (row) => html`<${Visible} text=${[row.engine, row.node].filter(Boolean).join(", ") || "–"} />` },
      ]} /><//>
    <${Card} title="Egress"><${Egress} egress=${summary.egress} offered=${task.sandbox && task.sandbox.egress} /><//>
    <${Card} title="Notes">${(summary.notes || []).length ? html`<ul>${summary.notes.slice(0, 100).map((note) => html`<li><${Visible} text=${note} /></li>`)}</ul>` : html`<${Empty}>None.<//>`}<//>
    <${Card} title="Sandbox"><${Pairs} values=${task.sandbox} format=${limit} />${summary.layer && html`<p class="note">Set-up layer: ${summary.layer}</p>`}<//>
    <${Card} title="Sampling"><${Pairs} values=${task.sampling} /><//>
    ${trajectory && html`<${Card} title="Tools" className="whole" note=${count((trajectory.tools || []).length)}><${LongText} text=${JSON.stringify(trajectory.tools, null, 2)} className="code" /><//>`}
    <${Card} title="Task" className="whole"><${LongText} text=${JSON.stringify({ environment: task.environment, agent: task.agent, data: task.data }, null, 2)} className="code" /><//>
  </div>`;
}
