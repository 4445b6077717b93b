// The waterfall: when each stage, model call and tool call of each attempt ran, in lanes along one axis of time.
//
// One call is under the pointer or chosen by arrow keys; a line below the lanes describes it. A table has all of them.
import { html, useEffect, useState } from "../dom.js";
import { count, plural, seconds, table } from "../format.js";
import { place, setQuery } from "../router.js";
import { Visible } from "../text.js";
import { Badge, Empty } from "../ui.js";

const STAGES = table({ queued: "Queued", init: "INIT", prepare: "Set-up", ready: "READY", run: "RUN", eval_wait: "Waiting for EVAL", eval: "EVAL", model: "Model", tool: "Tool" });
const LANES = [["Stages", (part) => part.kind !== "model" && part.kind !== "tool"], ["Model", (part) => part.kind === "model"], ["Tools", (part) => part.kind === "tool"]];
const TICKS = 6;
const TABLE_ROWS = 200;

function ticksOf(length) {
  const rough = length / TICKS, power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) || power;
  const ticks = [];
  for (let at = 0; at <= length * 1.0001 && ticks.length < 20; at += step) ticks.push(at);
  return ticks;
}

const described = (part, end) => `${STAGES[part.kind] || part.kind}${part.name && part.name !== part.engine ? ` ${part.name}` : ""}${part.turn === undefined || part.turn === null ? "" : `, turn ${part.turn}`}: ${seconds(end - part.start_s)}${part.end_s === null ? " so far" : ""}${part.tokens ? `, ${plural(part.tokens, "token")}` : ""}${part.engine ? `, ${part.engine}` : ""}${part.is_error ? ", failed" : ""}`;

function Attempt({ attempt, now, isOnly, hidesWait }) {
  const parts = attempt.parts;
  const [chosen, setChosen] = useState(null);
  const [most, setMost] = useState(0);
  const calls = parts.filter((part) => part.kind === "model" || part.kind === "tool");
  const endOf = (part) => Math.max(part.start_s, part.end_s ?? now);
  const waited = parts.find((part) => part.kind === "queued");
  const from = hidesWait && waited && parts.length > 1 ? endOf(waited) : Math.min(...parts.map((part) => part.start_s));
  const length = Math.max(...parts.map(endOf)) - from || 0.001;
  const shown = parts.filter((part) => endOf(part) > from || !hidesWait);
  const percent = (value) => `${Math.min(100, Math.max(0, (100 * (value - from)) / length))}%`;
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
    if (!step) return;
    event.preventDefault();
    setChosen((old) => Math.min(shown.length - 1, Math.max(0, (old ?? (step > 0 ? -1 : shown.length)) + step)));
  };
  const part = chosen === null ? null : shown[chosen];
  const over = (event) => { const at = event.target.dataset.part; if (at !== undefined) setChosen(Number(at)); };
  return html`<div class="attempt">
    ${!isOnly && html`<h3>Attempt ${attempt.attempt} ${attempt.code && html`<${Badge} value=${attempt.code} tone="bad" />`} ${attempt.detail && html`<span class="note"><${Visible} text=${attempt.detail} /></span>`}</h3>`}
    <div class="lanes" tabindex="0" role="group" aria-label=${`Times of attempt ${attempt.attempt}; use the arrow keys`} onKeyDown=${onKeyDown} onPointerOver=${over} onPointerDown=${over}>
      ${LANES.map(([name, isIn]) => (shown.some(isIn) ? html`<div class="lane"><span class="lane-name">${name}</span><div class="lane-parts">
        ${shown.map((one, index) => (isIn(one) ? html`<span class="part kind-${STAGES[one.kind] ? one.kind : "other"} ${one.is_error ? "error" : ""} ${index === chosen ? "chosen" : ""} ${one.end_s === null ? "running" : ""}" data-part=${index}
          style=${{ left: percent(one.start_s), width: `calc(${percent(from + endOf(one) - Math.max(from, one.start_s))} + 1px)` }}></span>` : null))}
      </div></div>` : null))}
      <div class="lane axis" aria-hidden="true"><span class="lane-name"></span><div class="lane-parts">${ticksOf(length).map((at) => html`<span class="tick ${at > 0.93 * length ? "last" : ""}" style=${{ left: percent(from + at) }}>${at ? seconds(at) : "0"}</span>`)}</div></div>
    </div>
    <p class="under-pointer" role="status">${part ? html`<span class="dot kind-${part.kind}"></span><${Visible} text=${described(part, endOf(part))} /> <span class="note">from ${seconds(part.start_s - from)}</span>` : calls.length > 0 && html`<span class="note">${plural(calls.filter((one) => one.kind === "model").length, "model call")}, ${plural(calls.filter((one) => one.kind === "tool").length, "tool call")}. Point at a bar, or focus it and use the arrow keys.</span>`}</p>
    ${calls.length > 0 && html`<details class="calls-table" onToggle=${(event) => setMost(event.currentTarget.open ? TABLE_ROWS : 0)}><summary>All calls <span class="note">${count(calls.length)}</span></summary>
      ${most > 0 && html`<div class="table-frame" tabindex="0" role="region" aria-label="Calls"><table><thead><tr><th scope="col" class="numeric">turn</th><th scope="col">call</th><th scope="col" class="numeric">from</th><th scope="col" class="numeric">took</th><th scope="col" class="numeric">tokens</th><th scope="col" class="wide">when</th></tr></thead>
        <tbody>${calls.slice(0, most).map((one) => html`<tr><td class="numeric">${one.turn ?? "–"}</td><td>${STAGES[one.kind]} <${Visible} text=${String(one.name || one.engine || "")} /> ${one.is_error && html`<${Badge} value="failed" />`}</td><td class="numeric">${seconds(one.start_s - from)}</td><td class="numeric">${seconds(endOf(one) - one.start_s)}</td><td class="numeric">${count(one.tokens)}</td>
          <td class="wide"><div class="lane-parts small"><span class="part kind-${one.kind}" style=${{ left: percent(one.start_s), width: `calc(${percent(from + endOf(one) - one.start_s)} + 1px)` }}></span></div></td></tr>`)}</tbody></table></div>`}
      ${most > 0 && most < calls.length && html`<button type="button" onClick=${() => setMost(most + 5 * TABLE_ROWS)}>Show more</button>`}
    </details>`}
  </div>`;
}

/** `timeline`: the reply of GET …/timeline. */
export function Waterfall({ timeline, isLive }) {
  const [passed_s, setPassed] = useState(0); // since the reply: the clock of the browser may differ from the service's
  useEffect(() => {
    setPassed(0);
    if (!isLive) return undefined;
    const start = performance.now();
    const timer = setInterval(() => setPassed((performance.now() - start) / 1000), 500);
    return () => clearInterval(timer);
  }, [isLive, timeline]);
  const attempts = timeline.attempts.filter((attempt) => attempt.parts.length);
  const bare = timeline.attempts.filter((attempt) => !attempt.parts.length);
  const hidesWait = place.value.query.wait === "hide";
  const kinds = [...new Set(attempts.flatMap((attempt) => attempt.parts.map((part) => part.kind)))].filter((kind) => STAGES[kind]);
  if (!timeline.attempts.length) return html`<${Empty}>Nothing has started yet.<//>`;
  return html`<div class="waterfall">
    <div class="waterfall-head"><ul class="legend">${kinds.map((kind) => html`<li><span class="dot kind-${kind}"></span>${STAGES[kind]}</li>`)}</ul>
      <button type="button" class="quiet" aria-pressed=${hidesWait} onClick=${() => setQuery({ wait: hidesWait ? "" : "hide" }, { replace: true })}>Without the queue</button></div>
    ${bare.map((attempt) => html`<p>Attempt ${attempt.attempt} ${attempt.code && html`<${Badge} value=${attempt.code} tone="bad" />`} <span class="note"><${Visible} text=${String(attempt.detail || "its times were not stored")} /></span></p>`)}
    ${attempts.map((attempt) => html`<${Attempt} key=${attempt.attempt} attempt=${attempt} now=${(timeline.at || timeline.origin) + passed_s - timeline.origin} isOnly=${timeline.attempts.length === 1} hidesWait=${hidesWait} />`)}
  </div>`;
}
