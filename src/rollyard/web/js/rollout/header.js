// The head of the rollout view: how it ended or where it is, and what a trainer gets from it.
import { html } from "../dom.js";
import { count, reward, seconds } from "../format.js";
import { isOffline, Link, paths } from "../router.js";
import { Visible } from "../text.js";
import { Badge, Stat, Time } from "../ui.js";
import { advantageOf, memberOf } from "./data.js";

/** Whether a trainer learns from it, and why not. */
export function trainability(record, traces) {
  if (record.trainable) return { is: true, why: "" };
  if (record.state !== "ended") return { is: false, why: "not ended yet" };
  const named = (traces || []).map((trace) => trace.reason).find(Boolean);
  if (named) return { is: false, why: named };
  if (record.failure) return { is: false, why: `it ended with ${record.failure.code}` };
  return { is: false, why: "its run is not for training, or a trace is not trainable" };
}

/** What the task is called: the same as `name` in GET /v1/results. Empty if it has no name. */
export function nameOf(record) {
  const data = (record.task && record.task.data) || {};
  for (const key of ["id", "name", "instance_id", "family", "instruction", "question", "prompt"]) {
    if (typeof data[key] === "string" && data[key].trim()) return data[key].slice(0, 480).trim().replace(/\s+/g, " ").slice(0, 120);
  }
  return "";
}

const versions = (summary) => (!summary || summary.oldest_version < 0 ? "–" : summary.oldest_version === summary.newest_version ? String(summary.oldest_version) : `${summary.oldest_version}–${summary.newest_version}`);

export function Header({ record, live, traces, group }) {
  const summary = record.summary || {}, task = record.task || {};
  const train = trainability(record, traces);
  const isEnded = record.state === "ended";
  const components = Object.entries((record.score && record.score.components) || {});
  const advantage = advantageOf(group, memberOf(group, record.index)).value;
  const total_s = record.timings ? ["queued_s", "init_s", "ready_s", "run_s", "eval_wait_s", "eval_s"].reduce((sum, name) => sum + (record.timings[name] || 0), 0) : null;
  return html`<section class="card rollout-head" aria-label="Summary">
    <p class="crumbs">
      <${Badge} value=${isEnded ? record.outcome : record.state} tone=${isEnded ? undefined : "busy"} />
      ${record.failure && html` <${Badge} value=${record.failure.code} tone=${record.failure.blame === "policy" ? "warn" : "bad"} />`}
      ${isEnded && html` <${Badge} value=${train.is ? "trainable" : "not trainable"} tone=${train.is ? "good" : "plain"} />`}
      <span>run ${isOffline ? html`<${Visible} text=${record.run} />` : html`<${Link} path=${paths.run(record.run)}><${Visible} text=${record.run} /><//>`}</span>
      ${record.group && html`<span>group ${isOffline ? html`<${Visible} text=${record.group} />` : html`<${Link} path=${paths.group(record.run, record.group)}><${Visible} text=${record.group} /><//>`} #${record.index}</span>`}
      ${task.environment && html`<span>environment ${isOffline ? html`<${Visible} text=${task.environment} />` : html`<${Link} path="/rollouts" query=${{ environment: task.environment }}><${Visible} text=${task.environment} /><//>`}</span>`}
      ${task.agent && task.agent.name && html`<span>agent <${Visible} text=${task.agent.name} /></span>`}
      <span class="note"><${Time} at=${record.updated_at} /></span>
    </p>
    ${isEnded && !train.is && html`<p class="why">Not trained on: <${Visible} text=${train.why} /></p>`}
    ${record.failure && html`<p class="why"><${Visible} text=${record.failure.detail || record.failure.code} /> <span class="note">blame ${record.failure.blame}${record.failure.stage ? `, in ${record.failure.stage.toUpperCase()}` : ""}</span></p>`}
    <div class="stats">
      <${Stat} label="reward" value=${reward(record.reward)} note=${advantage === null ? undefined : `advantage ${reward(advantage)}`} />
      ${components.slice(0, 4).map(([name, value]) => html`<${Stat} label=${html`<${Visible} text=${name} />`} value=${reward(value)} />`)}
      <${Stat} label="turns" value=${count(isEnded ? summary.turns : live.turns)} />
      <${Stat} label="sampled tokens" value=${count(isEnded ? summary.sampled_tokens : live.sampled_tokens)} note=${summary.prompt_tokens ? `${count(summary.prompt_tokens)} prompt` : undefined} />
      <${Stat} label="weight version" value=${versions(summary)} note=${summary.engine ? html`<${Visible} text=${summary.engine} />` : undefined} />
      <${Stat} label="time" value=${seconds(total_s)} note=${record.timings && record.timings.run_s ? `model ${seconds(record.timings.model_s)}, tools ${seconds(record.timings.tool_s)}` : undefined} />
      <${Stat} label="attempt" value=${String(record.attempt)} note=${record.lost && record.lost.length ? `${record.lost.length} lost` : summary.node ? html`on <${Visible} text=${summary.node} />` : undefined} />
      ${summary.ended_by && html`<${Stat} label="ended by" value=${html`<${Visible} text=${summary.ended_by} />`} />`}
    </div>
  </section>`;
}
