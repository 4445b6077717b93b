// The shell session in time: commands appear when they were called, and their output when it was there.
//
// Times are those of the tool calls in the timeline. The tools of an agent program run inside it: their commands are
// shown when the model call that wrote them ended, their output when the next one started.
import { html, useEffect, useMemo, useRef, useState } from "../dom.js";
import { plural, seconds } from "../format.js";
import { place, setQuery } from "../router.js";
import { LongText, Visible } from "../text.js";
import { Empty } from "../ui.js";
import { callsOf, commandOf, textOf } from "./data.js";

const SPEEDS = [1, 2, 4, 8, 16, 64];
const STEP_S = 1; // between events whose times are not known
const MOST_WAIT_S = 1.5; // with "skip waits"
const MOST_SHOWN = 60; // commands above the current one

/** The session: [{call, output, from_s, to_s}] in order, and whether their times are known. */
export function sessionOf(messages, timeline) {
  const attempt = timeline && timeline.attempts.length ? timeline.attempts[timeline.attempts.length - 1] : null;
  const parts = attempt ? attempt.parts : [];
  const tools = parts.filter((part) => part.kind === "tool"), models = new Map();
  for (const part of parts) if (part.kind === "model" && part.turn !== undefined) models.set(part.turn, part);
  const outputs = new Map(), unnamed = [];
  for (const message of messages) {
    if (message.role !== "tool") continue;
    if (message.tool_call_id) outputs.set(String(message.tool_call_id), message);
    else unnamed.push(message);
  }
  const events = [];
  let turn = 0, isTimed = true, after_s = 0;
  for (const message of messages) {
    if (message.role !== "assistant") continue;
    for (const call of callsOf(message)) {
      const output = outputs.get(call.id) || unnamed.shift() || null;
      const tool = tools[events.length], model = models.get(turn), next = models.get(turn + 1);
      let from_s = tool ? tool.start_s : model && model.end_s, to_s = tool ? tool.end_s : next && next.start_s;
      if (typeof from_s !== "number") { isTimed = false; from_s = after_s + STEP_S; }
      if (typeof to_s !== "number") to_s = from_s + (output ? STEP_S : 0);
      from_s = Math.max(from_s, after_s);
      to_s = Math.max(to_s, from_s);
      after_s = to_s;
      events.push({ call, output, from_s, to_s });
    }
    turn++;
  }
  const origin_s = events.length ? events[0].from_s : 0;
  for (const event of events) { event.from_s -= origin_s; event.to_s -= origin_s; }
  return { events, isTimed };
}

/** The same session with waits of at most `most_s`. */
export function shortened(events, most_s) {
  let cut_s = 0, last_s = 0;
  return events.map((event) => {
    cut_s += Math.max(0, event.from_s - last_s - most_s);
    const from_s = event.from_s - cut_s;
    cut_s += Math.max(0, event.to_s - event.from_s - most_s);
    last_s = event.to_s;
    return { ...event, from_s, to_s: event.to_s - cut_s };
  });
}

export function Replay({ messages, timeline }) {
  const session = useMemo(() => sessionOf(messages, timeline), [messages, timeline]);
  const skips = place.value.query.waits !== "keep";
  const events = useMemo(() => (skips ? shortened(session.events, MOST_WAIT_S) : session.events), [session, skips]);
  const end_s = events.length ? events[events.length - 1].to_s + 0.01 : 0;
  const [at_s, setAt] = useState(0);
  const [isPlaying, setPlaying] = useState(false);
  const [speed, setSpeed] = useState(4);
  const screen = useRef(null);
  useEffect(() => {
    if (!isPlaying) return undefined;
    let last = performance.now();
    const timer = setInterval(() => {
      const now = performance.now(), passed_s = ((now - last) / 1000) * speed;
      last = now;
      setAt((old) => Math.min(end_s, old + passed_s));
    }, 50);
    return () => clearInterval(timer);
  }, [isPlaying, speed, end_s]);
  useEffect(() => { if (at_s >= end_s) setPlaying(false); }, [at_s >= end_s]);
  const started = events.filter((event) => event.from_s <= at_s);
  const done = started.filter((event) => event.to_s <= at_s).length;
  useEffect(() => { if (screen.current) screen.current.scrollTop = screen.current.scrollHeight; }, [started.length, done]);
  if (!events.length) return html`<${Empty}>No tool was called.<//>`;
  const play = () => {
    if (!isPlaying && at_s >= end_s) setAt(0);
    setPlaying(!isPlaying);
  };
  return html`<div class="replay">
    <div class="replay-controls">
      <button type="button" onClick=${play} aria-label=${isPlaying ? "Pause" : "Play"}>${isPlaying ? "❚❚ Pause" : "▶ Play"}</button>
      <input type="range" min="0" max=${end_s} step="any" value=${at_s} aria-label="Time in the session" aria-valuetext=${`${seconds(at_s)} of ${seconds(end_s)}`} onInput=${(event) => setAt(Number(event.target.value))} />
      <span class="mono replay-time">${seconds(at_s)} / ${seconds(end_s)}</span>
      <label>Speed <select value=${String(speed)} onChange=${(event) => setSpeed(Number(event.target.value))}>${SPEEDS.map((one) => html`<option value=${String(one)}>${one}×</option>`)}</select></label>
      <label><input type="checkbox" checked=${skips} onChange=${(event) => setQuery({ waits: event.target.checked ? "" : "keep" }, { replace: true })} /> skip waits</label>
      <button type="button" class="quiet" onClick=${() => setAt(end_s)}>To the end</button>
    </div>
    ${!session.isTimed && html`<p class="note">The times of these calls were not stored: each takes a second here.</p>`}
    <div class="terminal" ref=${screen} tabindex="0" role="region" aria-label="Terminal" data-started=${started.length}>
      ${started.length > MOST_SHOWN && html`<p class="note">${plural(started.length - MOST_SHOWN, "earlier command")}: see the conversation.</p>`}
      ${started.slice(-MOST_SHOWN).map((event) => html`<${Command} key=${events.indexOf(event)} event=${event} isDone=${event.to_s <= at_s} />`)}
      ${!started.length && html`<p class="note">Press play, or move the slider.</p>`}
    </div>
  </div>`;
}

function Command({ event, isDone }) {
  const command = commandOf(event.call);
  return html`<div class="terminal-command">
    <div class="prompt"><span aria-hidden="true">$ </span><${LongText} text=${command === null ? `${event.call.name} ${typeof event.call.given === "string" ? event.call.given : JSON.stringify(event.call.given)}` : command} /></div>
    ${!isDone ? html`<p class="note"><span class="pulse" aria-hidden="true"></span> running</p>` : event.output ? html`<${LongText} text=${textOf(event.output.content)} ansi />` : html`<p class="note">no output</p>`}
    ${isDone && html`<p class="note took-note"><${Visible} text=${event.call.name} /> · ${seconds(event.to_s - event.from_s)}</p>`}
  </div>`;
}
