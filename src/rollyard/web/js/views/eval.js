// Eval: pass@k with intervals, per environment and family, and every task.
import { html, useEffect, useMemo, useState } from "../dom.js";
import { usePolled } from "../api.js";
import { Link, paths, place } from "../router.js";
import { Badge, Card, Empty, Loaded, Page, Problem, Stat, Time } from "../ui.js";
import { Choice, DataTable, Filter, Toggle } from "../flow/controls.js";
import { Facts, Interval, Line, Meter, wilson } from "../flow/figures.js";
import { count, percent, plural, reward, seconds, short, table } from "../format.js";

const MOST_PIPS = 32;
const NOT_FAILURES = new Set(["version_changed", "not_begun"]); // causes that no rollout has as its code

function Curve({ result }) {
  const rows = Object.entries(result.all.pass_at).map(([k, estimate]) => ({ k: Number(k), estimate })).sort((one, other) => one.k - other.k);
  return html`<dl class="intervals">${rows.map(({ k, estimate }) => html`<div key=${k}><dt>pass@${k}</dt><dd><${Interval} label=${`pass@${k}`} of=${estimate} /></dd></div>`)}
    <div><dt>mean reward</dt><dd><${Interval} label="mean reward" of=${result.all.reward} tone="tone-2" /></dd></div></dl>`;
}

function Parts({ title, note, parts, k, prefix }) {
  const columns = [
    { name: "name", label: title, sort: (one) => one.name, cell: (one) => html`<b><${Line} text=${one.name || "(none)"} /></b>` },
    { name: "pass", label: `pass@${k}`, sort: (one) => one.pass_at[String(k)]?.mean, cell: (one) => html`<${Interval} label=${`pass@${k} of ${one.name}`} of=${one.pass_at[String(k)]} />` },
    { name: "reward", label: "Mean reward", numeric: true, sort: (one) => one.reward?.mean, cell: (one) => reward(one.reward?.mean) },
    { name: "tasks", label: "Tasks", numeric: true, sort: (one) => one.tasks, cell: (one) => count(one.tasks) },
    { name: "missing", label: "Missing", numeric: true, sort: (one) => one.missing, cell: (one) => count(one.missing) },
    { name: "turns", label: "Turns", numeric: true, sort: (one) => one.turns, cell: (one) => short(one.turns) },
    { name: "tokens", label: "Tokens", numeric: true, sort: (one) => one.sampled_tokens, cell: (one) => short(one.sampled_tokens) },
    { name: "run", label: "RUN", numeric: true, sort: (one) => one.run_s, cell: (one) => seconds(one.run_s) },
  ];
  const rows = Object.entries(parts).map(([name, one]) => ({ name, ...one }));
  return html`<${Card} title=${`By ${title.toLowerCase()}`} note=${note}><${DataTable} label=${title} columns=${columns} rows=${rows} rowKey=${(one) => one.name} sort="name" prefix=${prefix} /><//>`;
}

function Result({ one }) {
  const { result } = one;
  const ks = Object.keys(result.all.pass_at).map(Number).sort((left, right) => left - right);
  const asked = Number(place.value.query.k);
  const k = ks.includes(asked) ? asked : ks[0];
  const missing = Object.entries(result.missing);
  return html`<div class="grid">
      <${Card} title="pass@k" note=${`${plural(result.all.tasks, "task")}, 95 % intervals over tasks`}><${Curve} result=${result} /><//>
      <${Card} title="Missing samples" note=${percent(result.missing_share, 1)}>
        ${missing.length === 0 ? html`<${Empty}>Every sample has a score.<//>` : html`<ul class="plain-list">${missing.map(([code, number]) => html`<li key=${code}>${NOT_FAILURES.has(code) ? html`<${Line} text=${code} />` : html`<${Link} path="/rollouts" query=${{ run: one.run, code }}><${Line} text=${code} /><//>`} ${count(number)}</li>`)}</ul>`}<//>
    </div>
    ${ks.length > 1 && html`<${Toggle} label="k of the tables" name="k" options=${ks.map((value) => [String(value), `pass@${value}`])} />`}
    <${Parts} title="Environment" parts=${result.environments} k=${k} prefix="env-" />
    ${result.by && html`<${Parts} title="Family" note=${html`the tasks' <code><${Line} text=${one.by || ""} /></code>`} parts=${result.by} k=${k} prefix="by-" />`}`;
}

/** One mark per sample: passed, not passed, missing. */
function Pips({ task }) {
  const text = `${count(task.passes)} of ${count(task.samples)} passed${task.missing ? `, ${count(task.missing)} missing` : ""}`;
  if (task.samples + task.missing > MOST_PIPS) return text;
  return html`<span class="pips" role="img" aria-label=${text}>${Array.from({ length: task.samples + task.missing }, (_, index) => html`<span key=${index} class="pip ${index < task.passes ? "good" : index < task.samples ? "bad" : "none"}"></span>`)}</span> <span class="muted">${task.passes}/${task.samples}</span>`;
}

/** The names of parts (environment, family) by which these tasks differ. */
export function partsOf(tasks) {
  const values = new Map();
  for (const task of tasks) for (const [name, value] of Object.entries(task.by || {})) values.set(name, (values.get(name) || new Set()).add(String(value)));
  return [...values].filter(([, found]) => found.size > 1).map(([name]) => name);
}

/** Columns of a table of tasks, one for each part. `taskOf`: the task of a row. */
export const partColumns = (parts, taskOf = (row) => row) => parts.map((name) => {
  const value = (row) => String(taskOf(row).by?.[name] ?? "");
  return { name: `by.${name}`, label: html`<${Line} text=${name} />`, sort: value, cell: (row) => html`<${Line} text=${value(row)} />` };
});

const TASKS = (run, parts) => [
  { name: "index", label: "#", numeric: true, sort: (task) => task.index, cell: (task) => task.index },
  { name: "name", label: "Task", sort: (task) => task.name, cell: (task) => html`<span class="task-name">${task.group ? html`<${Link} path=${paths.group(run, task.group)}><${Line} text=${task.name || `task ${task.index}`} /><//>` : html`<${Line} text=${task.name || `task ${task.index}`} />`}</span>` },
  ...partColumns(parts),
  { name: "samples", label: "Samples", sort: (task) => (task.samples ? task.passes / task.samples : null), cell: (task) => html`<${Pips} task=${task} />` },
  { name: "rate", label: "Pass rate, 95 % interval", sort: (task) => (task.samples ? task.passes / task.samples : null), cell: (task) => html`<${Interval} label="pass rate" of=${wilson(task.passes, task.samples)} />` },
  { name: "reward", label: "Mean reward", numeric: true, sort: (task) => task.mean_reward, cell: (task) => reward(task.mean_reward) },
  { name: "missing", label: "Missing", numeric: true, sort: (task) => task.missing, cell: (task) => count(task.missing) },
];

const SHOW = table({ "": () => true, none: (task) => task.samples > 0 && task.passes === 0, some: (task) => task.passes > 0 && task.passes < task.samples, all: (task) => task.samples > 0 && task.passes === task.samples, missing: (task) => task.missing > 0 });

function Tasks({ one }) {
  const { q = "", show = "" } = place.value.query;
  const polled = usePolled(`/v1/evals/${encodeURIComponent(one.id)}/tasks`, { run: one.run, limit: 1000 }, { everyMs: one.state === "running" ? 5000 : 0, list: "tasks" });
  const tasks = polled.data?.tasks || [];
  const parts = useMemo(() => partsOf(tasks), [polled.data]);
  const matches = SHOW[show] || SHOW[""];
  const found = tasks.filter((task) => matches(task) && (!q || `${task.index} ${task.name} ${Object.values(task.by || {}).join(" ")}`.toLowerCase().includes(q.toLowerCase())));
  const read = `${polled.data?.next ? "the first " : ""}${plural(tasks.length, "task")}`; // not all, if there are very many
  return html`<${Card} title="Tasks" note=${found.length === tasks.length ? read : `${count(found.length)} of ${read}`}>
    <div class="controls card-controls"><${Filter} label="Filter tasks" /><${Choice} label="Show" name="show" options=${[["", "all tasks"], ["none", "never passed"], ["some", "sometimes passed"], ["all", "always passed"], ["missing", "with missing samples"]]} /></div>
    <${Loaded} of=${polled}>${() => html`<${DataTable} label="Tasks" columns=${TASKS(one.run, parts)} rows=${found} rowKey=${(task) => task.index} sort="index" empty=${tasks.length ? "No task matches." : "No task yet."} />`}<//><//>`;
}

export default function Eval({ run, id }) {
  const [everyMs, setEvery] = useState(3000);
  const polled = usePolled(`/v1/evals/${encodeURIComponent(id)}`, { run }, { everyMs });
  const isOver = Boolean(polled.data && polled.data.state !== "running");
  useEffect(() => { if (isOver) setEvery(0); }, [isOver]);
  const title = html`Evaluation <${Line} text=${id} />`;
  if (polled.error) return html`<${Page} title=${title}><${Problem} error=${polled.error}><p><${Link} path="/evals">All evaluations<//></p><//><//>`;
  const one = polled.data;
  const subtitle = one && html`<${Badge} value=${one.state} /> policy <${Line} text=${one.policy} />${one.version === null ? "" : `, version ${one.version}`}${one.reason ? `, ${one.reason.replaceAll("_", " ")}` : ""}${one.detail ? html`: <${Line} text=${one.detail} />` : ""}`;
  const controls = html`<${Link} class="button" path="/rollouts" query=${{ run }}>Rollouts<//><${Link} class="button" path="/evals/compare" query=${{ a: `${run}/${id}` }}>Compare with another<//>`;
  return html`<${Page} title=${title} subtitle=${subtitle} controls=${controls}>
    <${Loaded} of=${polled}>${(data) => html`<div class="stack">
      <${Card}><div class="stats">
        <${Stat} label="Samples" value=${html`<${Meter} label="samples" value=${data.done} most=${data.total} tone=${data.state === "done" ? "good" : "busy"} text=${`${count(data.done)} of ${count(data.total)}`} />`} />
        <${Stat} label="Tasks" value=${count(data.tasks)} /><${Stat} label="Samples per task" value=${count(data.samples)} /><${Stat} label="Passes at" value=${reward(data.threshold)} />
        <${Stat} label=${data.ended_at ? "Took" : "Started"} value=${data.ended_at ? seconds(data.ended_at - data.created_at) : html`<${Time} at=${data.created_at} />`} />
      </div><//>
      ${data.result ? html`<${Result} one=${data} />` : html`<${Card}><${Empty}>${data.state === "running" ? "pass@k is computed when all samples have ended." : "It ended without a result."}<//><//>`}
      <${Tasks} one=${data} />
      <${Card} title="Settings"><${Facts} facts=${[["Run", html`<${Link} path=${paths.run(run)}><${Line} text=${run} /><//>`], ["k", data.k], ["Seed", data.seed], ["Priority", data.priority], ["Share of the RUN slots", percent(data.pool_share)], ["Most missing samples", percent(data.max_missing)],
        ["When weights change", data.on_update === "hold" ? "the change waits" : "it fails"], ["Family", data.by ? html`<${Line} text=${data.by} />` : null], ["Started", html`<${Time} at=${data.created_at} />`], ["Ended", data.ended_at ? html`<${Time} at=${data.ended_at} />` : null]]} /><//>
    </div>`}<//>
  <//>`;
}
