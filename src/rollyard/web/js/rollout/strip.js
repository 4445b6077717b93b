// The token strip: every token of a trace, coloured by one of its columns.
//
// Only the lines on the screen are elements, so 64,000 tokens cost as much as a thousand. The arrow keys move from token
// to token; the number of the token under the pointer or the keyboard is in a line that screen readers announce.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../dom.js";
import { count, plural } from "../format.js";
import { isOffline, place, setQuery } from "../router.js";
import { Visible } from "../text.js";
import { Empty } from "../ui.js";
import { modesOf } from "./columns.js";
import { layOut } from "./layout.js";
import { Overview } from "./overview_bar.js";

const LINE_PX = 22;
const SPARE_LINES = 12; // above and below the screen

/** The width in characters of an element with a monospaced font. */
function useColumns(frame) {
  const [columns, setColumns] = useState(0);
  useLayoutEffect(() => {
    const measure = () => {
      if (!frame.current) return;
      const probe = frame.current.querySelector(".probe");
      const one = probe.getBoundingClientRect().width / 40;
      setColumns(Math.max(12, Math.floor((frame.current.clientWidth - 16) / one) - 1));
    };
    const observed = new ResizeObserver(measure);
    observed.observe(frame.current);
    measure();
    return () => observed.disconnect();
  }, []);
  return columns;
}

function Heading({ segment, trace }) {
  const { span, start, end } = segment;
  if (!span) return html`<span class="segment">context · ${plural(end - start, "token")}</span>`;
  const version = trace.versions[start];
  return html`<span class="segment sampled">turn ${span.turn} · ${plural(end - start, "token")} ${span.is_owned ? "sampled" : "of another trace"}${version >= 0 ? ` · version ${version}` : ""} · ${span.finish_reason}${span.engine ? html` · <${Visible} text=${span.engine} />` : ""}${span.cached_tokens ? ` · ${count(span.cached_tokens)} cached` : ""}</span>`;
}

function Token({ at, trace, texts, modes, turnReward }) {
  const span = trace.spans.find((one) => one.start <= at && at < one.end);
  const values = modes.filter((mode) => !mode.missing && mode.name !== "mask").map((mode) => [mode.label.toLowerCase(), mode.value(at), mode]).filter(([, value]) => value !== null);
  return html`<b>${count(at)}</b> <code class="token-text"><${Visible} text=${JSON.stringify(texts && texts[at] !== undefined ? texts[at].slice(0, 200) : `id ${trace.token_ids[at]}`)} /></code>
    <span>id ${trace.token_ids[at]}</span>
    <span>${span ? (span.is_owned ? `sampled in turn ${span.turn}` : `a copy of turn ${span.turn}`) : "context"}, loss mask ${trace.mask[at]}</span>
    ${values.map(([label, value, mode]) => html`<span>${label} <b>${mode.text(value)}</b>${mode.name === "logprob" ? ` (p ${Number(Math.exp(value).toPrecision(3))})` : ""}</span>`)}
    ${turnReward !== undefined && html`<span>turn reward <b>${turnReward}</b></span>`}`;
}

export function Strip({ traces, texts, advantage, whyNoAdvantage, turnRewards = [] }) {
  const { query } = place.value;
  const index = Math.min(traces.length - 1, Math.max(0, Number(query.trace) || 0));
  const trace = traces[index];
  const own = texts && texts[index];
  const frame = useRef(null), scroller = useRef(null);
  const columns = useColumns(frame);
  const laid = useMemo(() => (columns ? layOut(trace, own, columns) : null), [trace, own, columns]);
  const modes = useMemo(() => modesOf(trace, advantage, whyNoAdvantage), [trace, advantage, whyNoAdvantage]);
  const mode = modes.find((one) => one.name === query.colour) || modes.find((one) => !one.missing) || modes[0];
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const [over, setOver] = useState(null);
  const asked = query.token === undefined ? null : Math.min(trace.token_ids.length - 1, Math.max(0, Math.floor(Number(query.token)) || 0));
  const [chosen, setChosen] = useState(asked);

  const show = (token) => {
    if (!laid || !scroller.current) return;
    const at = laid.lineOf[token] * LINE_PX, box = scroller.current;
    if (at < box.scrollTop + LINE_PX || at > box.scrollTop + box.clientHeight - 2 * LINE_PX) box.scrollTop = Math.max(0, at - box.clientHeight / 3);
  };
  useEffect(() => {
    if (!scroller.current) return undefined;
    const observed = new ResizeObserver(() => { if (scroller.current) setHeight(scroller.current.clientHeight); });
    observed.observe(scroller.current);
    return () => observed.disconnect();
  }, []);
  useEffect(() => { if (chosen !== null) show(chosen); }, [laid !== null]);
  useEffect(() => { // the address follows the keyboard, but not every repeated key
    if (chosen === null || String(chosen) === query.token) return undefined;
    const timer = setTimeout(() => setQuery({ token: chosen }, { replace: true }), 300);
    return () => clearTimeout(timer);
  }, [chosen]);

  const move = (token) => {
    const to = Math.min(trace.token_ids.length - 1, Math.max(0, token));
    setChosen(to);
    setOver(null);
    show(to);
  };
  const onKeyDown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !laid) return;
    const here = chosen ?? 0, line = laid.lines[laid.lineOf[here]];
    const besides = (step) => {
      let at = laid.lineOf[here] + step;
      while (laid.lines[at] && laid.lines[at].segment) at += Math.sign(step);
      const next = laid.lines[Math.min(laid.lines.length - 1, Math.max(1, at))];
      return next.segment ? here : Math.min(next.end - 1, next.start + here - line.start);
    };
    const page = Math.max(1, Math.floor(height / LINE_PX) - 2);
    const nextSpan = () => (trace.spans.find((span) => span.start > here) || { start: here }).start;
    const lastSpan = () => ([...trace.spans].reverse().find((span) => span.start < here) || { start: here }).start;
    const to = { ArrowRight: () => here + (chosen === null ? 0 : 1), ArrowLeft: () => here - 1, ArrowDown: () => besides(1), ArrowUp: () => besides(-1), PageDown: () => besides(page), PageUp: () => besides(-page), Home: () => 0, End: () => trace.token_ids.length - 1, n: nextSpan, p: lastSpan }[event.key];
    if (!to) return;
    event.preventDefault();
    move(to());
  };
  const tokenAt = (event) => { const at = event.target.dataset && event.target.dataset.token; return at === undefined ? null : Number(at); };
  const current = over ?? chosen;
  const span = current === null ? null : trace.spans.findIndex((one) => one.start <= current && current < one.end);
  const turnReward = turnRewards.find((one) => one.trace === index && one.span === span);
  const first = laid ? Math.max(0, Math.floor(top / LINE_PX) - SPARE_LINES) : 0;
  const last = laid ? Math.min(laid.lines.length, Math.ceil((top + height) / LINE_PX) + SPARE_LINES) : 0;
  const rows = [];
  for (let at = first; at < last; at++) rows.push(row(laid, at, trace, mode, chosen));

  return html`<div class="strip" ref=${frame} data-tokens=${laid ? trace.token_ids.length : undefined}>
    <span class="probe mono" aria-hidden="true">${"0".repeat(40)}</span>
    <div class="strip-controls">
      ${traces.length > 1 && html`<label>Trace <select value=${String(index)} onChange=${(event) => { setChosen(null); setQuery({ trace: event.target.value, token: "" }); }}>
        ${traces.map((one, at) => html`<option value=${String(at)}>${at} · ${count(one.token_ids.length)} tokens${one.fork_reason ? ` · ${one.fork_reason.slice(0, 40)}` : ""}</option>`)}</select></label>`}
      <div class="choice" role="group" aria-label="Colour of the tokens">${modes.map((one) => html`<button type="button" aria-pressed=${one === mode} disabled=${Boolean(one.missing)} title=${one.missing || undefined} onClick=${() => setQuery({ colour: one.name }, { replace: true })}>${one.label}</button>`)}</div>
      <label>Token <input type="number" min="0" max=${trace.token_ids.length - 1} value=${chosen ?? ""} onChange=${(event) => move(Math.floor(Number(event.target.value)) || 0)} /></label>
    </div>
    ${mode.missing && html`<${Empty}>${mode.missing}<//>`}
    <ul class="legend">${mode.legend.map(([style, words]) => html`<li><span class="swatch ${style}"></span>${words}</li>`)}</ul>
    ${!own && html`<p class="note">${isOffline ? "The texts of the tokens are not in this file" : "No engine serves this trace's model now, so the texts of its tokens are unknown"}: their ids are shown.</p>`}
    ${laid && html`<${Overview} trace=${trace} mode=${mode} at=${firstToken(laid, top)} to=${firstToken(laid, top + height)} onJump=${(token) => { scroller.current.scrollTop = Math.max(0, laid.lineOf[token] * LINE_PX - height / 2); }} />`}
    <p class="under-pointer" role="status">${current === null ? html`<span class="note">${plural(trace.token_ids.length, "token")}. Point at a token, or focus the strip: arrow keys move, n and p go to the next and the previous turn.</span>` : html`<${Token} at=${current} trace=${trace} texts=${own} modes=${modes} turnReward=${turnReward && turnReward.reward} />`}</p>
    <div class="strip-lines mono" ref=${scroller} tabindex="0" role="region" aria-label="Tokens; arrow keys move from token to token" onScroll=${(event) => setTop(event.currentTarget.scrollTop)} onKeyDown=${onKeyDown}
      onPointerOver=${(event) => setOver(tokenAt(event))} onPointerLeave=${() => setOver(null)} onClick=${(event) => { const at = tokenAt(event); if (at !== null) setChosen(at); }}>
      <div class="strip-space" style=${{ height: `${laid ? laid.lines.length * LINE_PX : 0}px` }}>${rows}</div>
    </div>
  </div>`;
}

/** The first token of the line at this height. */
function firstToken(laid, px) {
  const line = laid.lines[Math.min(laid.lines.length - 1, Math.floor(px / LINE_PX))];
  return px >= laid.lines.length * LINE_PX ? line.end ?? line.segment.end : line.start ?? line.segment.start;
}

function row(laid, at, trace, mode, chosen) {
  const line = laid.lines[at];
  const style = { top: `${at * LINE_PX}px` };
  if (line.segment) return html`<div class="line" key=${at} style=${style}><${Heading} segment=${line.segment} trace=${trace} /></div>`;
  const tokens = [];
  for (let index = line.start; index < line.end; index++) tokens.push(html`<span class=${`t ${mode.style(index)}${index === chosen ? " chosen" : ""}`} data-token=${index}>${laid.shown[index]}</span>`);
  return html`<div class="line" key=${at} style=${style}>${tokens}</div>`;
}
