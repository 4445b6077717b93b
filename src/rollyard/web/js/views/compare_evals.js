// Two evaluations, task by task: ?a=RUN/ID&b=RUN/ID.
import { html, useMemo } from "../dom.js";
import { usePolled } from "../api.js";
import { Link, paths, place, setQuery } from "../router.js";
import { Badge, Card, Empty, Loading, Page, Problem, Stat } from "../ui.js";
import { Choice, DataTable, Filter } from "../flow/controls.js";
import { Interval, Line, paired, signed, wilson } from "../flow/figures.js";
import { count, plural } from "../format.js";
import { partColumns, partsOf } from "./eval.js";
import { nameOf, passAt } from "./evals.js";

/** The run and the id of "RUN/ID", or null. */
function parse(text) {
  const [run, id, more] = (text || "").split("/");
  return run && id && more === undefined ? { run, id } : null;
}

/**
 * Pairs the tasks of two evaluations by name. Tasks of one name are paired in their order, so that evaluations of the
 * same file are paired line by line even where texts repeat. Returns [{name, a, b, difference}].
 */
export function pairs(before, after) {
  const keyed = (tasks) => {
    const seen = new Map(), found = new Map();
    for (const task of [...tasks].sort((one, other) => one.index - other.index)) {
      const number = seen.get(task.name) || 0;
      seen.set(task.name, number + 1);
      found.set(JSON.stringify([task.name, number]), task);
    }
    return found;
  };
  const rate = (task) => (task?.samples ? task.passes / task.samples : null);
  const left = keyed(before), right = keyed(after);
  return [...new Set([...left.keys(), ...right.keys()])].map((key) => {
    const a = left.get(key), b = right.get(key);
    const difference = rate(a) === null || rate(b) === null ? null : rate(b) - rate(a);
    return { key, name: (a || b).name, index: (a || b).index, a, b, difference };
  });
}

const kind = (pair) => (pair.difference === null ? "missing" : pair.difference > 0 ? "improved" : pair.difference < 0 ? "worse" : "same");

/** Whether the intervals of both rates do not overlap: the difference is unlikely to be chance. */
function isClear(pair) {
  const a = wilson(pair.a?.passes, pair.a?.samples), b = wilson(pair.b?.passes, pair.b?.samples);
  return Boolean(a && b && (a.high < b.low || b.high < a.low));
}

function Difference({ pair }) {
  if (pair.difference === null) return html`<${Badge} value=${!pair.a ? "only in B" : !pair.b ? "only in A" : "no sample"} tone="plain" />`;
  const tone = pair.difference > 0 ? "good" : pair.difference < 0 ? "bad" : "plain";
  return html`<${Badge} value=${signed(pair.difference)} tone=${tone} />${isClear(pair) ? html` <span class="muted" title="Their 95 % intervals do not overlap">clear</span>` : ""}`;
}

function Side({ task, run, label, tone }) {
  if (!task) return html`<span class="muted">not in ${label}</span>`;
  const text = `${task.passes}/${task.samples}${task.missing ? `, ${task.missing} missing` : ""}`;
  return html`<span class="side"><${Interval} label=${`pass rate in ${label}`} of=${wilson(task.passes, task.samples)} tone=${tone} /> ${task.group ? html`<${Link} path=${paths.group(run, task.group)} aria-label=${`Group of ${label}: ${text}`}>${text}<//>` : text}</span>`;
}

function columns(a, b, parts) {
  return [
    { name: "difference", label: "B − A", sort: (pair) => pair.difference, cell: (pair) => html`<${Difference} pair=${pair} />` },
    { name: "name", label: "Task", sort: (pair) => pair.name, cell: (pair) => html`<span class="task-name"><${Line} text=${pair.name || `task ${pair.index}`} /></span>` },
    ...partColumns(parts, (pair) => pair.a || pair.b),
    { name: "a", label: "Pass rate of A", sort: (pair) => wilson(pair.a?.passes, pair.a?.samples)?.mean, cell: (pair) => html`<${Side} task=${pair.a} run=${a.run} label="A" tone="tone-1" />` },
    { name: "b", label: "Pass rate of B", sort: (pair) => wilson(pair.b?.passes, pair.b?.samples)?.mean, cell: (pair) => html`<${Side} task=${pair.b} run=${b.run} label="B" tone="tone-2" />` },
  ];
}

const SHOW = [["", "all tasks"], ["improved", "improved"], ["worse", "got worse"], ["same", "the same"], ["missing", "missing in one"], ["clear", "clear differences"]];

function Tasks({ a, b, all }) {
  const { q = "", show = "" } = place.value.query;
  const parts = useMemo(() => partsOf(all.map((pair) => pair.a || pair.b)), [all]);
  const found = all.filter((pair) => (!show || (show === "clear" ? isClear(pair) : kind(pair) === show)) && (!q || `${pair.name} ${Object.values((pair.a || pair.b).by || {}).join(" ")}`.toLowerCase().includes(q.toLowerCase())));
  return html`<${Card} title="Tasks" note="paired by name; the rate's 95 % interval is of its own samples">
    <div class="controls card-controls"><${Filter} label="Filter tasks" /><${Choice} label="Show" name="show" options=${SHOW} /></div>
    <${DataTable} label="Tasks of both evaluations" columns=${columns(a, b, parts)} rows=${found} rowKey=${(pair) => pair.key} sort="-difference" empty="No task matches." /><//>`;
}

function Headline({ a, b, all }) {
  const number = (name) => all.filter((pair) => kind(pair) === name).length;
  const difference = paired(all.filter((pair) => pair.difference !== null).map((pair) => pair.difference));
  const shared = all.length - number("missing");
  const ks = [...new Set([a.k, b.k].flatMap((k) => [1, k]))].filter((k) => k <= Math.min(a.k, b.k)).sort((one, other) => one - other);
  return html`<div class="grid">
    <${Card} title="Difference" note=${`B − A over ${plural(shared, "shared task")}`}>
      <p class="big-number ${difference && difference.low > 0 ? "good-text" : difference && difference.high < 0 && difference.high !== null ? "error-text" : ""}">${difference ? signed(difference.mean) : "–"}
        ${difference && difference.low !== null && html`<span class="note"> 95 % interval ${signed(difference.low)} to ${signed(difference.high)}</span>`}</p>
      <div class="stats"><${Stat} label="Improved" value=${count(number("improved"))} /><${Stat} label="Got worse" value=${count(number("worse"))} /><${Stat} label="The same" value=${count(number("same"))} /><${Stat} label="Missing in one" value=${count(number("missing"))} /></div><//>
    <${Card} title="Both" note="95 % intervals over tasks"><dl class="intervals">${ks.flatMap((k) => [["A", a, "tone-1"], ["B", b, "tone-2"]].map(([label, one, tone]) => html`<div key=${`${k}${label}`}><dt>${label}: pass@${k}</dt><dd><${Interval} label=${`pass@${k} of ${label}`} of=${passAt(one, k)} tone=${tone} /></dd></div>`))}</dl>
      ${a.threshold !== b.threshold && html`<p class="warn-text">They count different rewards as passed: ${a.threshold} and ${b.threshold}.</p>`}<//>
  </div>`;
}

function Chooser({ label, name, evals, value }) {
  return html`<label class="choice">${label} <select value=${value || ""} onChange=${(event) => setQuery({ [name]: event.target.value })}>
    <option value="" selected=${!value}>choose…</option>${evals.map((one) => html`<option key=${nameOf(one)} value=${nameOf(one)} selected=${nameOf(one) === value}>${one.id}${one.version === null ? "" : ` (${one.policy} ${one.version})`}</option>`)}</select></label>`;
}

/** An evaluation and its tasks; `problem` of either. */
function useEval(name) {
  const found = parse(name);
  const one = usePolled(found && `/v1/evals/${encodeURIComponent(found.id)}`, { run: found?.run }, { everyMs: 3000 });
  const tasks = usePolled(found && `/v1/evals/${encodeURIComponent(found.id)}/tasks`, { run: found?.run, limit: 1000 }, { everyMs: one.data?.state === "running" ? 5000 : 0, list: "tasks" });
  return { one: one.data, tasks: tasks.data?.tasks, isCut: Boolean(tasks.data?.next), problem: one.error || tasks.error };
}

export default function CompareEvals() {
  const { a: nameA, b: nameB } = place.value.query;
  const list = usePolled("/v1/evals", {}, { everyMs: 5000 });
  const a = useEval(nameA), b = useEval(nameB);
  const all = useMemo(() => (a.tasks && b.tasks ? pairs(a.tasks, b.tasks).filter((pair) => (pair.a || !a.isCut) && (pair.b || !b.isCut)) : null), [a.tasks, b.tasks]);
  const cut = [["A", a], ["B", b]].filter(([, side]) => side.isCut).map(([name, side]) => `${count(side.tasks.length)} tasks of ${name}`);
  const evals = [...(list.data?.evals || [])].reverse();
  const controls = html`<${Chooser} label="A" name="a" evals=${evals} value=${nameA} /><${Chooser} label="B" name="b" evals=${evals} value=${nameB} />
    <button type="button" disabled=${!nameA || !nameB} onClick=${() => setQuery({ a: nameB, b: nameA })}>Swap</button>`;
  let body;
  if (a.problem || b.problem) body = html`<${Problem} error=${a.problem || b.problem}><p><${Link} path="/evals">All evaluations<//></p><//>`;
  else if (!parse(nameA) || !parse(nameB)) body = html`<${Empty}>Choose two evaluations: A is the earlier one, B the one to judge.<//>`;
  else if (!all || !a.one || !b.one) body = html`<${Loading} />`;
  else body = html`<div class="stack">${cut.length > 0 && html`<p class="notice" role="note">There are too many samples to read all of them here: only the first ${cut.join(" and the first ")} are compared.</p>`}<${Headline} a=${a.one} b=${b.one} all=${all} /><${Tasks} a=${a.one} b=${b.one} all=${all} /></div>`;
  const title = (one) => html`<${Link} path=${paths.eval(one.run, one.id)}><${Line} text=${one.id} /><//>`;
  return html`<${Page} title="Two evaluations" subtitle=${a.one && b.one && html`A: ${title(a.one)}, B: ${title(b.one)}`} controls=${controls}>${body}<//>`;
}
