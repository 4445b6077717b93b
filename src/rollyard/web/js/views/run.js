// Run: how a run's rollouts did, over time or over the weight version that sampled them.
import { html } from "../dom.js";
import { usePolled } from "../api.js";
import { Link, place } from "../router.js";
import { Badge, Card, Empty, Loaded, Page, Problem, ShareBar, Stat, Time } from "../ui.js";
import { Chart } from "../chart.js";
import { LongText } from "../text.js";
import { Choice, Pages, Toggle } from "../flow/controls.js";
import { Facts, Failures, Line } from "../flow/figures.js";
import { GroupTable, GROUP_STATES } from "../flow/groups.js";
import { count, percent, reward, short } from "../format.js";
import { StatesBar } from "./runs.js";

const MOST_FAILURES = 6; // lines in the chart of failures; the list has all
const PAGE = 25;

const SHARE = [["model", "model"], ["tool", "tools"], ["waiting", "waiting"], ["other", "other"]];

/** Time shares of all points together, weighted by their rollouts. */
function timeShares(series) {
  return SHARE.map(([name, label], index) => ({
    label, tone: `tone-${index + 1}`,
    value: (series.share[name] || []).reduce((sum, one, at) => sum + (one || 0) * (series.count[at] || 0), 0),
  }));
}

const ENDS = [
  { label: "kept", colour: 3, states: ["delivered", "complete"] },
  { label: "filtered", colour: 5, states: ["filtered"] },
  { label: "failed", colour: 2, states: ["failed"] },
  { label: "cancelled, dropped or undone", colour: 4, states: ["cancelled", "dropped", "void"] },
];

function groupShares(groups) {
  const parts = [...ENDS, { label: "open", colour: 1, states: ["open"] }];
  return parts.map(({ label, colour, states }) => ({ label, tone: `tone-${colour}`, value: states.reduce((sum, state) => sum + (groups[state] || 0), 0) }));
}

/** Columns by state → one column for each of `ends`. */
function sums(columns, ends, size) {
  return ends.map(({ states }) => Array.from({ length: size }, (_, at) => states.reduce((sum, state) => sum + (columns[state]?.[at] || 0), 0)));
}

/** Ended groups by what became of them, as shares at each point. Null where none ended. */
function groupCurves({ group_counts: counts, x }) {
  const columns = sums(counts, ENDS, x.length);
  const totals = x.map((_, at) => columns.reduce((sum, column) => sum + column[at], 0));
  return ENDS.map(({ label, colour }, index) => ({ label, colour: `--series-${colour}`, values: columns[index].map((value, at) => (totals[at] ? value / totals[at] : null)) }));
}

/** Tokens of ended groups that no trainer gets. */
function thrownAway({ group_tokens: tokens, x }) {
  const lost = [ENDS[1], { label: "failed, cancelled, dropped or undone", colour: 2, states: [...ENDS[2].states, ...ENDS[3].states] }];
  return sums(tokens, lost, x.length).map((values, index) => ({ label: lost[index].label, colour: `--series-${lost[index].colour}`, values }));
}

/** Tokens of the groups of draws by what became of them. The rest: of other rollouts, and of groups that wait or run. */
function tokenShares(tokens) {
  const rest = Math.max(0, tokens.sampled - tokens.delivered - tokens.filtered - tokens.lost);
  return [{ label: "delivered", tone: "tone-3", value: tokens.delivered }, { label: "filtered", tone: "tone-5", value: tokens.filtered },
    { label: "lost", tone: "tone-2", value: tokens.lost }, { label: "of no draw, or waiting", tone: "tone-1", value: rest }];
}

const failureLabel = ({ code, blame }) => `${code.slice(0, 40)} (${blame})`;

function Charts({ series }) {
  const isTime = series.by === "time";
  const at = { x: series.x, isTime, xLabel: isTime ? "" : "weight version", spanGaps: true };
  const failures = series.failures.slice(0, MOST_FAILURES);
  const hasGroups = Object.keys(series.group_counts).length > 0;
  const one = (label, name, more = {}) => html`<${Card} key=${name}><${Chart} label=${label} ...${at} series=${[{ label: label.toLowerCase(), values: series[name], colour: more.colour }]} ...${more} /><//>`;
  return html`<div class="charts">
    ${one("Mean reward", "reward", { format: reward })}
    ${one("Pass rate", "pass_rate", { range: [0, 1], format: percent, colour: "--series-3" })}
    ${one("Response length (tokens)", "response_tokens", { colour: "--series-2" })}
    ${one("Turns", "turns", { colour: "--series-4" })}
    ${one("Staleness (versions)", "staleness", { colour: "--series-5" })}
    <${Card}><${Chart} label="Rollout time" ...${at} isStacked=${true} spanGaps=${false} range=${[0, 1]} format=${percent} series=${SHARE.map(([name, label]) => ({ label, values: series.share[name] || [] }))} /><//>
    ${one("Rollouts ended", "count", { colour: "--series-6" })}
    ${hasGroups && html`<${Card}><${Chart} label="Groups" ...${at} isStacked=${true} spanGaps=${false} range=${[0, 1]} format=${percent} series=${groupCurves(series)} /><//>`}
    ${hasGroups && html`<${Card}><${Chart} label="Tokens thrown away" ...${at} isStacked=${true} spanGaps=${false} range=${(_, _low, high) => [0, high > 0 ? high * 1.1 : 1]} series=${thrownAway(series)} /><//>`}
    ${failures.length > 0 && html`<${Card}><${Chart} label=${failures.length === 1 ? html`Failures <span class="note"><${Line} text=${failureLabel(failures[0])} /></span>` : "Failures"} ...${at} spanGaps=${false} series=${failures.map((failure) => ({ label: failureLabel(failure), values: failure.counts }))} /><//>`}
  </div>`;
}

function Summary({ run, series }) {
  const { results } = run;
  const totals = series?.totals;
  const thrown = series ? series.tokens.filtered + series.tokens.lost : null;
  return html`<${Card}><div class="stats">
    <${Stat} label="Rollouts" value=${html`<${StatesBar} states=${results.states} />`} />
    <${Stat} label="Mean reward" value=${reward(results.mean_reward)} note=${`of ${count(results.rewarded)}`} />
    <${Stat} label="Pass rate" value=${percent(totals?.pass_rate, 1)} note="reward of 1 or more" />
    <${Stat} label="Trainable" value=${count(results.trainable)} />
    <${Stat} label="Tokens sampled" value=${short(series?.tokens.sampled)} />
    <${Stat} label="Tokens thrown away" value=${short(thrown)} note=${thrown && series.tokens.sampled ? percent(thrown / series.tokens.sampled, 1) : ""} title="Of groups that were filtered, or that failed, were cancelled, dropped or undone" />
    <${Stat} label="Last activity" value=${html`<${Time} at=${results.active_at ?? run.created_at} />`} />
  </div><//>`;
}

function Groups({ run }) {
  const { after, groups: state } = place.value.query;
  const polled = usePolled("/v1/groups", { run, state, after, limit: PAGE }, { everyMs: after ? 0 : 5000 });
  return html`<${Card} title="Groups" note="newest first">
    <${Choice} label="State" name="groups" options=${[["", "all"], ...GROUP_STATES.map((one) => [one, one])]} />
    <${Loaded} of=${polled}>${(data) => html`<${GroupTable} groups=${data.groups} empty="No group." />`}<//>
    <${Pages} label="Pages of groups" name="after" of=${polled} /><//>`;
}

function Settings({ run }) {
  const onOff = (value) => (value ? "yes" : "no");
  return html`<${Card} title="Settings of the run">
    <${Facts} facts=${[["Mode", run.mode], ["Policy", html`<${Link} path="/engines"><${Line} text=${run.policy} /><//>`], ["Seed", run.seed], ["Priority", run.priority], ["Most live rollouts", run.max_live ?? "no bound"],
      ["Most queued rollouts", run.max_queued ?? "no bound"], ["Trainable on a deadline", onOff(run.trainable_on_deadline)], ["Mask truncated ones", onOff(run.mask_truncated)],
      ["Overlong penalty", run.overlong_penalty ? JSON.stringify(run.overlong_penalty) : "none"], ["Created", html`<${Time} at=${run.created_at} />`]]} />
    ${Object.keys(run.defaults || {}).length > 0 && html`<h3>Defaults of its tasks</h3><${LongText} text=${JSON.stringify(run.defaults, null, 2)} className="code" />`}<//>`;
}

function Series({ series }) {
  if (!series.x.length) return html`<${Empty}>No rollout has ended yet. Curves start with the first.<//>`;
  return html`<${Charts} series=${series} />`;
}

export default function Run({ run: id }) {
  const { query } = place.value;
  const by = query.by === "version" ? "version" : "time";
  const run = usePolled(`/v1/runs/${encodeURIComponent(id)}`, { include: "results" }, { everyMs: 10_000 });
  const series = usePolled(run.data ? `/v1/runs/${encodeURIComponent(id)}/series` : null, { by, points: 60 }, { everyMs: 10_000 });
  if (run.error) return html`<${Page} title=${html`Run <${Line} text=${id} />`}><${Problem} error=${run.error}><p><${Link} path="/runs">All runs<//></p><//><//>`;
  const controls = html`<${Link} class="button" path="/rollouts" query=${{ run: id }}>Rollouts<//><${Link} class="button" path="/draws" query=${{ run: id }}>Draws<//><a class="button" href="#groups" onClick=${(event) => { event.preventDefault(); document.getElementById("groups")?.focus(); }}>Groups</a>
    <${Toggle} label="Horizontal axis" name="by" options=${[["time", "Over time"], ["version", "Over weight version"]]} />`;
  const subtitle = run.data && html`${run.data.mode}, policy <${Line} text=${run.data.policy} />${run.data.state === "deleting" ? html` <${Badge} value="deleting" tone="warn" /> ${count(run.data.left)} left` : ""}${series.data?.environments?.length ? html`, ${series.data.environments.slice(0, 8).map((name) => html`<${Badge} value=${name} /> `)}` : ""}`;
  return html`<${Page} title=${html`Run <${Line} text=${id} />`} subtitle=${subtitle} controls=${controls}>
    <${Loaded} of=${run}>${(data) => html`<div class="stack">
      <${Summary} run=${data} series=${series.data} />
      <${Loaded} of=${series}>${(curves) => html`<div class="stack">
        <${Series} series=${curves} />
        <div class="grid">
          <${Card} title="Rollout time" note="of all points"><${ShareBar} label="Rollout time" parts=${timeShares(curves)} format=${percent} />
            <p class="muted">Waiting: in the queue, in READY and before EVAL. Other: INIT, EVAL, and RUN between calls.</p><//>
          <${Card} title="Groups" note="by how they ended"><${ShareBar} label="Groups" parts=${groupShares(curves.groups)} format=${percent} /><//>
          <${Card} title="Tokens" note=${`${short(curves.tokens.sampled)} sampled`}><${ShareBar} label="Tokens" parts=${tokenShares(curves.tokens)} format=${percent} /><//>
          <${Card} title="Failures by code"><${Failures} failures=${curves.totals.failures} query=${{ run: id }} empty="No rollout of this run failed." /><//>
        </div></div>`}<//>
      <div id="groups" tabindex="-1"><${Groups} run=${id} /></div>
      <${Settings} run=${data} />
    </div>`}<//>
  <//>`;
}
