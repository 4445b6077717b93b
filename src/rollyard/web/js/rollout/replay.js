// The shell session in time: commands appear when they were called, and their output when it was there.
import { html, useEffect, useMemo, useRef, useState } from "../dom.js";
import { count, plural, seconds } from "../format.js";
import { place, setQuery } from "../router.js";
import { LongText, Visible } from "../text.js";
import { Empty } from "../ui.js";
import { commandOf, textOf, turnsOf } from "./data.js";
import { sessionOf, shortened } from "./session.js";

const SPEEDS = [1, 2, 4, 8, 16, 64];
const MOST_WAIT_S = 1.5; // with "skip waits"
const MOST_SHOWN = 60; // commands above the current one

export function Replay({ messages, messageTurns, timeline, task }) {
  const session = useMemo(() => sessionOf(messages, turnsOf(messages, messageTurns), timeline, task), [messages, messageTurns, timeline, task]);
  const skips = place.value.query.waits !== "keep";
  const events = useMemo(() => (skips ? shortened(session.events, MOST_WAIT_S) : session.events), [session, skips]);
  const end_s = events.length ? events.reduce((most, event) => Math.max(most, event.to_s), 0) + 0.01 : 0;
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
    ${session.untimed > 0 && html`<p class="note">The times of ${session.untimed === events.length ? "these calls" : `${count(session.untimed)} of ${plural(events.length, "call")}`} were not stored: they are spread over the time between the others.</p>`}
    <div class="terminal" ref=${screen} tabindex="0" role="region" aria-label="Terminal" data-started=${started.length}>
      ${started.length > MOST_SHOWN && html`<p class="note">${plural(started.length - MOST_SHOWN, "earlier command")}: see the conversation.</p>`}
      ${started.slice(-MOST_SHOWN).map((event) => html`<${Command} key=${events.indexOf(event)} event=${event} isDone=${event.to_s <= at_s && !event.isRunning} />`)}
      ${!started.length && html`<p class="note">Press play, or move the slider.</p>`}
    </div>
  </div>`;
}

function Command({ event, isDone }) {
  const command = commandOf(event.call);
  return html`<div class="terminal-command">
    <div class="prompt"><span aria-hidden="true">$ </span><${LongText} text=${command === null ? `${event.call.name} ${typeof event.call.given === "string" ? event.call.given : JSON.stringify(event.call.given)}` : command} /></div>
    ${!isDone ? html`<p class="note"><span class="pulse" aria-hidden="true"></span> running</p>` : event.output ? html`<${LongText} text=${textOf(event.output.content)} ansi />` : html`<p class="note">no output</p>`}
    ${isDone && html`<p class="note took-note"><${Visible} text=${event.call.name} />${event.took_s === null ? "" : ` · ${seconds(event.took_s)}`}</p>`}
  </div>`;
}
