// Each request as the agent sent it, beside the tokens that the engine got for it.
//
// The engine's side is the text of the trace's tokens before the turn's span: the part that was new for the engine is
// shown, the part that it shared with the turn before is folded.
import { html, useState } from "../dom.js";
import { bytes, count, plural, seconds } from "../format.js";
import { LongText, Visible } from "../text.js";
import { Badge, Empty } from "../ui.js";
import { Message } from "./conversation.js";
import { spansByTurn } from "./data.js";

const CHUNK = 50;

function joined(texts, trace, start, end) {
  if (texts) return texts.slice(start, end).join("");
  return trace.token_ids.slice(start, end).map((id) => `⟨${id}⟩`).join("");
}

function EngineSide({ owned, traces, texts, isLive }) {
  const [isWhole, setWhole] = useState(false);
  if (!owned && isLive) return html`<${Empty}>Its tokens are available when the rollout has ended.<//>`;
  if (!owned) return html`<${Empty}>No trace has this turn: its model call failed, or its traces were deleted.<//>`;
  const { span } = owned, trace = traces[owned.trace], own = texts && texts[owned.trace];
  const before = trace.spans[owned.at - 1];
  const kept = before ? before.end : 0;
  return html`<p class="note">Trace ${owned.trace}: ${plural(span.start, "token")}, of which ${count(span.start - kept)} are new${span.cached_tokens ? `; the engine had ${count(span.cached_tokens)} in its cache` : ""}.</p>
    ${kept > 0 && html`<button type="button" class="fold" aria-expanded=${isWhole} onClick=${() => setWhole(!isWhole)}>${isWhole ? "Hide" : "Show"} the ${count(kept)} tokens before</button>`}
    ${isWhole && html`<div class="kept"><${LongText} text=${joined(own, trace, 0, kept)} /></div>`}
    <${LongText} text=${joined(own, trace, kept, span.start)} />`;
}

function AgentSide({ request }) {
  if (!request) return html`<${Empty}>The native agent: its messages are rendered to tokens directly.<//>`;
  const fields = Object.entries(request.fields || {});
  return html`<p class="note">${request.dialect} · ${bytes(request.bytes)} · at ${seconds(request.start_s)}${request.tools ? ` · ${plural(request.tools, "tool")}` : ""}${request.kept_messages ? ` · ${plural(request.kept_messages, "message")} as before` : ""}</p>
    ${request.overruled && request.overruled.length > 0 && html`<p>Overruled by the task: ${request.overruled.slice(0, 50).map((name) => html`<${Badge} value=${name} tone="warn" /> `)}</p>`}
    ${fields.length > 0 && html`<dl class="arguments">${fields.slice(0, 60).map(([name, value]) => html`<div class="argument short"><dt><${Visible} text=${name} /></dt><dd><${LongText} text=${typeof value === "string" ? value : JSON.stringify(value)} /></dd></div>`)}</dl>`}
    ${(request.new_messages || []).map((message) => html`<${Message} message=${message} />`)}`;
}

function Turn({ turn, request, owned, traces, texts, isLive }) {
  const [isOpen, setOpen] = useState(false);
  const size = owned ? owned.span.start : null;
  return html`<details class="request" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Turn ${turn} <span class="note">${request ? `${plural((request.new_messages || []).length, "new message")}, ${bytes(request.bytes)}` : ""}${request && size !== null ? " → " : ""}${size !== null ? plural(size, "token") : ""}</span></summary>
    ${isOpen && html`<div class="two-sides"><section><h3>The agent sent</h3><${AgentSide} request=${request} /></section><section><h3>The engine got</h3><${EngineSide} owned=${owned} traces=${traces} texts=${texts} isLive=${isLive} /></section></div>`}
  </details>`;
}

/** `requests`: the reply of GET …/requests, or null if it is not there. `isLive`: of a rollout that runs, without its traces. */
export function Requests({ requests, agent, traces, texts, isLive = false }) {
  const [most, setMost] = useState(CHUNK);
  const owned = spansByTurn(traces);
  const sent = new Map();
  for (const request of (requests && requests.requests) || []) sent.set(request.turn, request);
  const turns = [...new Set([...sent.keys(), ...owned.keys()])].sort((a, b) => a - b);
  if (!turns.length && isLive && agent === "native") return html`<${Empty}>The native agent sends no requests: the service renders its messages. What the engine got is here when the rollout has ended.<//>`;
  if (!turns.length && isLive) return html`<${Empty}>No request is known yet.<//>`;
  if (!turns.length) return html`<${Empty}>No model call was recorded.<//>`;
  const isEmpty = requests && requests.requests.length === 0;
  const isCut = requests && requests.is_complete === false;
  return html`${isEmpty && isCut && html`<p class="note">The requests are not known yet: the agent runs on a node.</p>`}
    ${isEmpty && !isCut && html`<p class="note">The native agent sends no requests: the service renders its messages. Below is what the engine got.</p>`}
    ${isCut && !isEmpty && html`<p class="note">The requests were too long to keep all of them: the middle ones are missing.</p>`}
    ${turns.slice(0, most).map((turn) => html`<${Turn} key=${turn} turn=${turn} request=${sent.get(turn)} owned=${owned.get(turn)} traces=${traces} texts=${texts} isLive=${isLive} />`)}
    ${most < turns.length && html`<button type="button" onClick=${() => setMost(most + 200)}>Show more turns (${count(turns.length - most)} left)</button>`}`;
}
