// Draw: its batches, what its filter kept, and what became of the rest.
import { html } from "../dom.js";
import { usePolled } from "../api.js";
import { Link, paths, place } from "../router.js";
import { Badge, Card, Loaded, Page, Problem, ShareBar, Stat, Table, Time } from "../ui.js";
import { LongText } from "../text.js";
import { Pages, Toggle } from "../flow/controls.js";
import { Facts, Line, Meter } from "../flow/figures.js";
import { GroupTable } from "../flow/groups.js";
import { count, percent, plural, reward, seconds, short } from "../format.js";

const PAGE = 25;
const STATES = [["filtered", "Filtered"], ["failed", "Failed"], ["dropped", "Dropped"], ["cancelled", "Cancelled"], ["void", "Undone"], ["delivered", "Delivered"], ["complete", "Complete"], ["open", "Open"]];

function keepText(keep) {
  if (keep.kind === "all") return "every group";
  if (keep.kind === "spread") return `groups whose rewards have a spread above ${reward(keep.above)}`;
  if (keep.kind === "pass_rate") return `groups with a pass rate of ${percent(keep.low)} to ${percent(keep.high)}`;
  return `groups that the filter ${keep.name} accepts`;
}

function Summary({ draw }) {
  const { figures } = draw;
  const open = Math.max(0, draw.batch - draw.acked);
  return html`<${Card}><div class="stats">
    <${Stat} label="Batches" value=${count(draw.batch)} note=${draw.batch ? `${count(draw.acked)} acknowledged${open ? `, ${count(open)} not yet` : ""}` : ""} />
    <${Stat} label="Groups delivered" value=${count(figures.delivered)} note=${`of ${count(figures.admitted)} started`} />
    <${Stat} label="Keep rate" value=${percent(figures.keep_rate, 1)} note="of recent groups" />
    <${Stat} label="Mean reward" value=${reward(figures.reward_before)} note="before filtering" />
    <${Stat} label="Pass rate" value=${percent(figures.pass_rate_before, 1)} note="before filtering" />
    <${Stat} label="All failed" value=${count(figures.all_zero)} note=${figures.judged ? `${percent(figures.all_zero / figures.judged)} of judged groups` : ""} title="Groups in which every member got 0 or less" />
    <${Stat} label="All passed" value=${count(figures.all_one)} note=${figures.judged ? `${percent(figures.all_one / figures.judged)} of judged groups` : ""} />
    <${Stat} label="Stale" value=${count(figures.stale)} note="delivered" title="Delivered although older than max_staleness" />
    <${Stat} label="Weight version" value=${count(draw.version)} />
    <${Stat} label="Created" value=${html`<${Time} at=${draw.created_at} />`} />
  </div><//>`;
}

const batchFigure = (name, format) => (batch) => format(batch.figures?.[name]);

/** For how long a batch was or is open. */
function age(batch) {
  if (batch.state === "open") return html`${seconds(Math.max(0, Math.floor(Date.now() / 1000 - batch.created_at)))} <span class="muted">so far</span>`;
  return html`<span title="from its opening to its close">${seconds(batch.closed_at && batch.closed_at - batch.created_at)}</span>`;
}

const BATCHES = [
  { name: "number", label: "Batch", numeric: true, cell: (batch) => html`<b>${batch.number}</b>` },
  { name: "state", label: "State", cell: (batch) => html`<${Badge} value=${batch.state} tone=${batch.state === "open" ? "busy" : "plain"} />${batch.reason && html` <span class="muted"><${Line} text=${batch.reason.replaceAll("_", " ")} /></span>`}` },
  { name: "acked", label: "Acknowledged", cell: (batch) => (batch.acked ? html`<${Badge} value="yes" tone="good" />` : batch.state === "open" ? "–" : html`<${Badge} value="not yet" tone="warn" />`) },
  { name: "groups", label: "Groups", cell: (batch) => html`<${Meter} label=${`groups of batch ${batch.number}`} value=${batch.delivered} most=${batch.want} tone="busy" text=${`${count(batch.delivered)} of ${count(batch.want)}`} />` },
  { name: "version", label: "Version", numeric: true, cell: (batch) => batch.version },
  { name: "opened", label: "Opened", numeric: true, cell: (batch) => html`<${Time} at=${batch.created_at} />` },
  { name: "took", label: "Open for", numeric: true, cell: age },
  { name: "closed", label: "Closed", numeric: true, cell: (batch) => html`<${Time} at=${batch.closed_at} />` },
  { name: "keep", label: "Keep rate", numeric: true, cell: batchFigure("keep_rate", percent) },
  { name: "filtered", label: "Filtered", numeric: true, cell: batchFigure("filtered", count) },
  { name: "failed", label: "Failed", numeric: true, cell: batchFigure("failed", count) },
  { name: "reward", label: "Reward before", numeric: true, cell: batchFigure("reward_before", reward) },
  { name: "pass", label: "Pass rate before", numeric: true, cell: batchFigure("pass_rate_before", percent) },
  { name: "stale", label: "Stale", numeric: true, cell: batchFigure("stale", count) },
  { name: "tokens", label: "Tokens", numeric: true, cell: batchFigure("tokens_sampled", short) },
];

function Batches({ draw }) {
  const after = place.value.query.batches;
  const polled = usePolled(`/v1/draws/${encodeURIComponent(draw.id)}/batches`, { run: draw.run, after, limit: PAGE }, { everyMs: after ? 0 : 3000 });
  return html`<${Card} title="Batches" note="newest first">
    <${Loaded} of=${polled}>${(data) => html`<${Table} label="Batches" columns=${BATCHES} rows=${data.batches} rowKey=${(batch) => batch.number} empty="The trainer has not asked for a batch yet." />`}<//>
    <${Pages} label="Pages of batches" name="batches" of=${polled} /><//>`;
}

function Groups({ draw }) {
  const { state = "filtered", after } = place.value.query;
  const polled = usePolled("/v1/groups", { run: draw.run, draw: draw.id, state, after, limit: PAGE }, { everyMs: after ? 0 : 5000 });
  return html`<${Card} title="Groups" note="by what became of them">
    <${Toggle} label="State of the groups" name="state" options=${STATES.map(([value, label]) => [value, html`${label} <span class="muted">${count(draw.figures[value] || 0)}</span>`])} />
    <${Loaded} of=${polled}>${(data) => html`<${GroupTable} groups=${data.groups} keep=${draw.config.keep} empty="None." />`}<//>
    <${Pages} label="Pages of groups" name="after" of=${polled} /><//>`;
}

function Settings({ draw }) {
  const { config } = draw;
  const source = config.source;
  return html`<${Card} title="Settings of the draw">
    <${Facts} facts=${[["Keeps", keepText(config.keep)], ["Group size", `${config.group_size}, ${config.spares} spare`], ["Least members", config.min_members ?? "all"], ["Max. staleness", `${plural(config.max_staleness, "version")}, then ${config.on_stale}`],
      ["When a batch is full", config.surplus === "cancel" ? "open groups are cancelled" : "open groups continue"], ["Most groups in flight", config.max_groups_in_flight ?? "by pace"], ["Epochs", config.epochs ?? "no limit"], ["Epoch now", draw.epoch],
      ["Patience", config.patience ?? "an epoch"], ["Priority", config.priority], ["Seed", config.seed], ["Shuffled", config.shuffle ? "yes" : "no"], ["Source", html`<${Line} text=${[source.kind, source.file || source.environment, source.split].filter(Boolean).join(" ")} />`], ["Tasks", source.size === null ? "grows" : count(source.size)],
      ...Object.entries(config.budget || {}).map(([name, value]) => [`Budget: ${name}`, value === null ? null : short(value)])]} />
    ${Object.keys(config.keep.options || {}).length > 0 && html`<h3>Options of the filter</h3><${LongText} text=${JSON.stringify(config.keep.options, null, 2)} className="code" />`}<//>`;
}

function Shares({ figures }) {
  const part = (label, name, tone) => ({ label, tone, value: figures[name] || 0 });
  return html`<div class="grid">
    <${Card} title="Groups" note=${`${count(figures.admitted)} started`}><${ShareBar} label="Groups" format=${percent} parts=${[part("delivered", "delivered", "tone-3"), part("complete", "complete", "tone-6"), part("filtered", "filtered", "tone-5"), part("failed", "failed", "tone-2"),
      { label: "cancelled, dropped or undone", tone: "tone-4", value: figures.cancelled + figures.dropped + figures.void }, part("open", "open", "tone-1")]} />
      ${figures.rejected_early > 0 && html`<p class="muted">${count(figures.rejected_early)} of the filtered ended early, ${count(figures.returned)} tasks were tried again after an infrastructure failure.</p>`}<//>
    <${Card} title="Tokens" note=${`${short(figures.tokens_sampled)} sampled`}><${ShareBar} label="Tokens" format=${percent} parts=${[part("delivered", "tokens_delivered", "tone-3"), part("filtered", "tokens_filtered", "tone-5"), part("lost", "tokens_lost", "tone-2"),
      { label: "waiting for a batch", tone: "tone-1", value: Math.max(0, figures.tokens_sampled - figures.tokens_delivered - figures.tokens_filtered - figures.tokens_lost) }]} /><//></div>`;
}

export default function Draw({ run, id }) {
  const polled = usePolled(`/v1/draws/${encodeURIComponent(id)}`, { run }, { everyMs: 3000 });
  const title = html`Draw <${Line} text=${id} />`;
  if (polled.error) return html`<${Page} title=${title}><${Problem} error=${polled.error}><p><${Link} path="/draws">All draws<//></p><//><//>`;
  const subtitle = html`of the run <${Link} path=${paths.run(run)}><${Line} text=${run} /><//> <${Badge} value=${polled.data?.state} />${polled.data?.reason ? html` ${polled.data.reason.replaceAll("_", " ")}` : ""}${polled.data?.detail ? html`: <${Line} text=${polled.data.detail} />` : ""}`;
  return html`<${Page} title=${title} subtitle=${subtitle} controls=${html`<${Link} class="button" path="/rollouts" query=${{ run }}>Rollouts of the run<//>`}>
    <${Loaded} of=${polled}>${(draw) => html`<div class="stack">
      <${Summary} draw=${draw} /><${Shares} figures=${draw.figures} /><${Batches} draw=${draw} /><${Groups} draw=${draw} /><${Settings} draw=${draw} /></div>`}<//>
  <//>`;
}
