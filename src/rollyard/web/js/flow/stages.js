// The stages as a flow: queue → INIT → READY → RUN → EVAL, with the use of their pools.
import { html } from "../dom.js";
import { Link } from "../router.js";
import { Meter } from "./figures.js";
import { count, plural } from "../format.js";

const STAGES = [
  { name: "Queue", flow: "queued", pool: "queue", unit: "place", what: "Rollouts that wait for a slot of INIT" },
  { name: "INIT", flow: "init", pool: "init", unit: "slot", what: "A sandbox is made and set up" },
  { name: "READY", flow: "ready", pool: "ready", unit: "place", what: "Prepared, waiting for a slot of RUN" },
  { name: "RUN", flow: "run", pool: "run", unit: "slot", what: "The agent works" },
  { name: "EVAL", flow: "eval", pool: "eval", unit: "slot", what: "The result is scored" },
];

/** The pools that are full while others wait for them. The last one is what holds up the stages before it. */
export function fullPools(pools) {
  return STAGES.filter(({ pool }) => pools[pool]?.waiting > 0 && pools[pool].active >= pools[pool].size).map((stage) => stage.name);
}

function waitingNote(name, waiting) {
  if (!waiting) return null;
  return name === "READY" ? `${count(waiting)} wait for an engine` : `${count(waiting)} wait`;
}

function Stage({ stage, value, pool }) {
  const isFull = pool && pool.waiting > 0 && pool.active >= pool.size;
  return html`<li class="stage ${isFull ? "is-full" : ""} ${value ? "is-busy" : ""}" title=${stage.what}>
    <span class="stage-name">${stage.name}</span>
    <span class="stage-count">${count(value)}</span>
    ${pool && html`<${Meter} label=${`${stage.name}: places in use`} value=${pool.active} most=${pool.size} tone=${isFull ? "warn" : "busy"} />
      <span class="stage-note">${count(pool.active)} of ${plural(pool.size, stage.unit)}${pool.waiting ? html`<br /><b>${waitingNote(stage.name, pool.waiting)}</b>` : ""}</span>`}
  </li>`;
}

export function Stages({ flow, pools }) {
  return html`<ol class="flow" aria-label="Stages">
    ${STAGES.map((stage) => html`<${Stage} key=${stage.name} stage=${stage} value=${flow[stage.flow] || 0} pool=${pools[stage.pool]} />`)}
    <li class="stage is-end"><span class="stage-name">Ended</span><span class="stage-count"><${Link} path="/rollouts">${count(flow.ended || 0)}<//></span><span class="stage-note">since the service started</span></li>
  </ol>`;
}
