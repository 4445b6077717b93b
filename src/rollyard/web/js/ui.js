// Small components that several views use.
import { html, signal, useEffect, useErrorBoundary, useRef } from "./dom.js";
import { ApiError, caller, isTransient } from "./api.js";
import { ago, table, time } from "./format.js";
import { enter } from "./router.js";
import { Visible } from "./text.js";

const TITLE_CHARACTERS = 80;
const TICK_MS = 30_000;

/**
 * The frame of a view: its heading, an optional line below it, and controls on the right. The window gets its title, and
 * the heading of a view that was just entered gets the focus.
 */
export function Page({ title, subtitle, controls, children }) {
  const heading = useRef(null);
  useEffect(() => {
    const text = heading.current.textContent.slice(0, TITLE_CHARACTERS).trim();
    const full = text ? `${text} – Rollyard` : "Rollyard";
    if (document.title !== full) document.title = full;
    enter(heading.current);
  });
  return html`<header class="page-head">
      <div><h1 ref=${heading} tabindex="-1">${title}</h1>${subtitle && html`<p class="subtitle">${subtitle}</p>`}</div>
      ${controls && html`<div class="controls">${controls}</div>`}
    </header>
    ${children}`;
}

export function Card({ title, note, className = "", children, id }) {
  return html`<section class="card ${className}" id=${id}>
    ${title && html`<h2>${title}${note && html`<span class="note">${note}</span>`}</h2>`}
    ${children}
  </section>`;
}

export function Stat({ label, value, note, title }) {
  return html`<div class="stat" title=${title}><span class="label">${label}</span><span class="value">${value}</span>${note && html`<span class="note">${note}</span>`}</div>`;
}

const TONES = table({
  completed: "good", up: "good", delivered: "good", done: "good", active: "good", resumed: "good",
  run: "busy", init: "busy", eval: "busy", ready: "busy", running: "busy", open: "busy", complete: "busy", starting: "busy",
  policy_failed: "warn", filtered: "warn", paused: "warn", draining: "warn", drained: "warn", dropped: "warn", truncated: "warn",
  infra_failed: "bad", task_failed: "bad", failed: "bad", down: "bad", quarantined: "bad", suspect: "warn", lost: "bad",
});

/** A state, an outcome or a code. The colour repeats what the word says. */
export function Badge({ value, tone }) {
  if (value === null || value === undefined || value === "") return null;
  return html`<span class="badge ${tone || TONES[value] || "plain"}"><${Visible} text=${String(value)} /></span>`;
}

const tick = signal(0); // so that "5 s ago" does not stay on a page whose data no longer changes
setInterval(() => { if (!document.hidden) tick.value += 1; }, TICK_MS);

export function Time({ at }) {
  void tick.value;
  return at ? html`<time datetime=${new Date(1000 * at).toISOString()} title=${time(at)}>${ago(at)}</time>` : "–";
}

/** A part of a page. If it cannot be shown, its place says so, and the rest of the page stays. */
export function Boundary({ children }) {
  const [error, retry] = useErrorBoundary((failure) => console.warn(failure));
  if (!error) return children;
  return html`<div class="problem" role="alert"><h2>This part cannot be shown</h2><p>The page failed: <${Visible} text=${String(error.message || error).slice(0, 300)} /></p>
    <p>The data is not affected: <code>rollyard rollouts show</code> prints it.</p><button type="button" onClick=${retry}>Try again</button></div>`;
}

export function Loading() {
  return html`<p class="loading" role="status">Loading…</p>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

/** The runs that the caller's token reads, in words; empty if it reads all of them. */
export function ownRuns() {
  const who = caller.value;
  if (!who || who.access === "admin" || (who.access === "reader" && !who.runs.length)) return "";
  const bound = who.runs.join(", ");
  return who.access === "reader" ? `the runs ${bound}` : `its own runs${bound ? ` and ${bound}` : ""}`;
}

const TITLES = table({ 401: "Not signed in", 403: "Not allowed", 404: "Not found", 410: "No longer stored", 429: "Too many calls" });

/** An error of the API or of the connection: what happened, and what to do. `isFinal`: the page does not try again. */
export function Problem({ error, isFinal = false, children }) {
  const isApi = error instanceof ApiError;
  const title = !isApi ? "The service does not answer" : TITLES[error.status] || (error.status >= 500 ? "The service has a problem" : "That did not work");
  const runs = error.status === 404 ? ownRuns() : "";
  return html`<div class="problem" role="alert">
    <h2>${title}</h2>
    <p><${Visible} text=${isApi ? error.message : "Is it still running?"} /></p>
    ${!isFinal && isTransient(error) && html`<p>The page tries again by itself.</p>`}
    ${error.remedy && html`<p><${Visible} text=${error.remedy} /></p>`}
    ${runs && html`<p>Your token finds only <${Visible} text=${runs} />. If it may be in another run, sign in with a token that reads that run.</p>`}
    ${children}
  </div>`;
}

/** Data of `usePolled`: its problem, a sign that it loads, or the children called with it. */
export function Loaded({ of, children }) {
  if (of.error) return html`<${Problem} error=${of.error} />`;
  if (of.data === undefined) return html`<${Loading} />`;
  return children(of.data);
}

const MORE_PX = 24; // of the next element: it shows that the row goes on

/** Scrolls a row that is wider than the screen until the element is in view. The page itself does not move. */
export function reveal(element) {
  if (!element) return;
  const row = element.parentElement, own = element.getBoundingClientRect(), seen = row.getBoundingClientRect();
  if (own.left < seen.left) row.scrollLeft -= seen.left - own.left + MORE_PX;
  else if (own.right > seen.right) row.scrollLeft += own.right - seen.right + MORE_PX;
}

/** A table of few rows. `columns`: {name, label, numeric?, cell(row)}. Wide tables scroll in their own frame. */
export function Table({ label, columns, rows, rowKey, empty = "None." }) {
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  return html`<div class="table-frame" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.numeric ? "numeric" : ""}>${column.label}</th>`)}</tr></thead>
      <tbody>${rows.map((row, index) => html`<tr key=${rowKey ? rowKey(row) : index}>
        ${columns.map((column) => html`<td class=${column.numeric ? "numeric" : ""}>${column.cell(row)}</td>`)}</tr>`)}</tbody>
    </table></div>`;
}

/** Parts of a whole as a bar with a legend. `parts`: {label, value, tone}. */
export function ShareBar({ label, parts, format }) {
  const total = parts.reduce((sum, part) => sum + (part.value || 0), 0);
  if (!total) return html`<${Empty}>No data yet.<//>`;
  return html`<div class="share" role="img" aria-label=${`${label}: ${parts.map((part) => `${part.label} ${format(part.value / total)}`).join(", ")}`}>
    <div class="share-bar">${parts.filter((part) => part.value).map((part) => html`<span class="share-part ${part.tone}" style=${{ flexGrow: part.value }}></span>`)}</div>
    <ul class="legend">${parts.map((part) => html`<li><span class="dot ${part.tone}"></span>${part.label} <b>${format(part.value / total)}</b></li>`)}</ul>
  </div>`;
}
