// Nodes: the machines of a fleet, their slots and leases, and whether they reach each engine. Admins drain them here.
import { html } from "../dom.js";
import { caller, post, usePolled } from "../api.js";
import { place } from "../router.js";
import { Badge, Card, Empty, Loaded, Page, Stat } from "../ui.js";
import { Choice, Filter } from "../flow/controls.js";
import { Confirmed } from "../flow/confirm.js";
import { Line, Meter } from "../flow/figures.js";
import { count, plural, seconds } from "../format.js";

const SILENT_S = 15; // a node calls every few seconds
const MOST_NODES = 200;

function Pools({ node }) {
  return html`<ul class="pools">${["init", "ready", "run", "eval", "live"].filter((name) => node.pools[name]).map((name) => {
    const pool = node.pools[name];
    return html`<li key=${name}><span class="label">${name === "live" ? "live" : name.toUpperCase()}</span>
      <${Meter} label=${`${name} slots of ${node.name}`} value=${pool.active} most=${pool.size} text=${`${count(pool.active)} of ${count(pool.size)}${pool.waiting ? `, ${count(pool.waiting)} wait` : ""}`} /></li>`;
  })}</ul>`;
}

function Reach({ node }) {
  const engines = Object.entries(node.engines);
  if (!engines.length) return html`<${Empty}>It has not reported on engines yet.<//>`;
  return html`<ul class="reach" aria-label=${`Engines as seen from ${node.name}`}>${engines.map(([id, use]) => html`<li key=${id}>
    <${Badge} value=${use.is_reachable ? "reachable" : "not reachable"} tone=${use.is_reachable ? "good" : "bad"} /> <b><${Line} text=${id} /></b>${" "}
    <span class="muted">${plural(use.sessions, "session")}, ${count(use.in_flight)} in flight</span>${use.error ? html` <span class="error-text"><${Line} text=${use.error} /></span>` : ""}</li>`)}</ul>`;
}

function Actions({ node, refresh }) {
  if (caller.value?.access !== "admin") return null;
  const act = (verb) => async () => { await post(`/v1/nodes/${encodeURIComponent(node.name)}/${verb}`); refresh(); };
  if (node.state === "up") {
    return html`<${Confirmed} key="drain" label="Drain" title=${`Drain ${node.name}?`} confirm="Drain the node" tone="danger" act=${act("drain")}>
      <p>It takes no more rollouts. Those that have not started go to other nodes; the other ones of its ${plural(node.live, "live rollout")} finish there.</p><//>`;
  }
  return html`<${Confirmed} key="resume" label="Resume" title=${`Resume ${node.name}?`} confirm="Resume the node" act=${act("resume")}><p>It takes rollouts again.</p><//>`;
}

function Node({ node, refresh }) {
  const isSilent = node.heard_s_ago > SILENT_S;
  return html`<${Card} className="node" title=${html`<${Line} text=${node.name} />`} note=${html`<${Badge} value=${node.state} />`}>
    <div class="node-head"><p class="muted"><${Line} text=${node.host} />, Rollyard <${Line} text=${node.version} />,
      <span class=${isSilent ? "error-text" : ""}> last call ${seconds(node.heard_s_ago)} ago</span></p><${Actions} node=${node} refresh=${refresh} /></div>
    <div class="stats"><${Stat} label="Leased rollouts" value=${count(node.live)} /><${Stat} label="Ended" value=${count(node.ended)} /><${Stat} label="Wants" value=${count(node.wants)} title="Further rollouts that it would take now" /></div>
    <${Pools} node=${node} />
    <h3>Engines</h3><${Reach} node=${node} />
  <//>`;
}

function NoFleet() {
  return html`<${Card} title="This service has no fleet"><p>It runs all rollouts itself, so there are no nodes to show. The overview has its pools.</p>
    <p>To spread rollouts over machines, start the service with <code>rollyard serve --fleet nodes</code>, then on each machine <code>rollyard node --head URL</code>.</p><//>`;
}

export default function Nodes() {
  const { q = "", state = "" } = place.value.query;
  const polled = usePolled("/v1/nodes", {}, { everyMs: 2000 });
  const all = polled.data?.nodes || [];
  const found = all.filter((node) => (!state || node.state === state) && (!q || `${node.name} ${node.host}`.toLowerCase().includes(q.toLowerCase())));
  if (polled.error?.status === 404) return html`<${Page} title="Nodes"><${NoFleet} /><//>`;
  const controls = all.length > 0 && html`<${Filter} label="Filter by name" /><${Choice} label="State" name="state" options=${[["", "all"], ["up", "up"], ["draining", "draining"], ["drained", "drained"]]} />`;
  return html`<${Page} title="Nodes" subtitle=${polled.data && (found.length === all.length ? plural(all.length, "node") : `${count(found.length)} of ${plural(all.length, "node")}`)} controls=${controls}>
    <${Loaded} of=${polled}>${() => (all.length === 0
      ? html`<${Empty}>No node has joined yet. On each machine: <code>rollyard node --head URL</code><//>`
      : html`<div class="grid">${found.slice(0, MOST_NODES).map((node) => html`<${Node} key=${node.name} node=${node} refresh=${polled.refresh} />`)}</div>
        ${found.length > MOST_NODES && html`<p class="muted">${plural(found.length - MOST_NODES, "node")} more: filter by name.</p>`}
        ${found.length === 0 && html`<${Empty}>No node matches.<//>`}`)}<//>
  <//>`;
}
