// Controls whose state is in the address of the page: toggles, a filter, sorted tables, pages of a list.
import { html, useEffect, useRef, useState } from "../dom.js";
import { place, setQuery } from "../router.js";
import { Empty } from "../ui.js";
import { count } from "../format.js";

const TYPING_MS = 250;
const ROWS = 100; // shown at first, and added per click

/** Buttons of which one is on. `options`: [value, label]; the first is the default and leaves the address empty. */
export function Toggle({ label, name, options }) {
  const now = place.value.query[name] || options[0][0];
  return html`<div class="toggle" role="group" aria-label=${label}>
    ${options.map(([value, text]) => html`<button type="button" aria-pressed=${String(now === value)} onClick=${() => setQuery({ [name]: value === options[0][0] ? "" : value, rows: "", after: "" })}>${text}</button>`)}
  </div>`;
}

/** A field that filters a table. The address follows when the typing stops. */
export function Filter({ label, name = "q" }) {
  const now = place.value.query[name] || "";
  const [text, setText] = useState(now);
  const sent = useRef(now);
  useEffect(() => { if (now !== sent.current) { sent.current = now; setText(now); } }, [now]); // back, forward
  useEffect(() => {
    if (text === sent.current) return undefined;
    const timer = setTimeout(() => { sent.current = text; setQuery({ [name]: text, rows: "" }, { replace: true }); }, TYPING_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<label class="filter"><span class="visually-hidden">${label}</span>
    <input type="search" placeholder=${label} value=${text} maxlength="200" spellcheck=${false} onInput=${(event) => setText(event.target.value)} /></label>`;
}

/** A choice in the address. `options`: [value, label]. */
export function Choice({ label, name, options }) {
  const now = place.value.query[name] || "";
  return html`<label class="choice">${label} <select value=${now} onChange=${(event) => setQuery({ [name]: event.target.value, rows: "", after: "" })}>
    ${options.map(([value, text]) => html`<option value=${value} selected=${value === now}>${text}</option>`)}</select></label>`;
}

const words = new Intl.Collator("en", { numeric: true });
const compare = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : words.compare(String(one), String(other)));

/** The rows in the order of `sort`: a column's name, "-" before it for descending. Rows without a value come last. */
export function sorted(rows, columns, sort) {
  const column = columns.find((one) => one.name === sort.replace(/^-/, ""));
  if (!column?.sort) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  const isNone = (value) => value === null || value === undefined || Number.isNaN(value);
  return rows.map((row) => [column.sort(row), row]).sort(([one], [other]) => {
    if (isNone(one) || isNone(other)) return isNone(one) - isNone(other);
    return sign * compare(one, other);
  }).map(([, row]) => row);
}

/**
 * A table whose order and number of rows are in the address. `columns`: {name, label, numeric?, cell(row), sort?(row)}.
 * `sort`: the order if the address has none. `prefix`: of its parameters, for a second table of a view.
 */
export function DataTable({ label, columns, rows, rowKey, empty = "None.", sort = "", prefix = "" }) {
  const { query } = place.value;
  const now = query[`${prefix}sort`] || sort;
  const limit = Math.max(ROWS, Number(query[`${prefix}rows`]) || 0);
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  const turn = (name, isNumeric) => {
    const next = now === name ? `-${name}` : now === `-${name}` ? name : isNumeric ? `-${name}` : name;
    setQuery({ [`${prefix}sort`]: next === sort ? "" : next });
  };
  const shown = sorted(rows, columns, now).slice(0, limit);
  const heading = (column) => {
    const direction = now === column.name ? "ascending" : now === `-${column.name}` ? "descending" : undefined;
    return html`<th scope="col" class=${column.numeric ? "numeric" : ""} aria-sort=${direction}>
      ${column.sort ? html`<button type="button" class="sort" onClick=${() => turn(column.name, column.numeric)}>${column.label}<span aria-hidden="true">${direction ? (direction === "ascending" ? " ▲" : " ▼") : ""}</span></button>` : column.label}</th>`;
  };
  return html`<div class="table-frame" tabindex="0" role="region" aria-label=${label}>
      <table class="data">
        <thead><tr>${columns.map(heading)}</tr></thead>
        <tbody>${shown.map((row, index) => html`<tr key=${rowKey ? rowKey(row) : index}>
          ${columns.map((column) => html`<td class=${column.numeric ? "numeric" : ""}>${column.cell(row)}</td>`)}</tr>`)}</tbody>
      </table></div>
    ${rows.length > shown.length && html`<button type="button" class="fold" onClick=${() => setQuery({ [`${prefix}rows`]: String(limit + ROWS) }, { replace: true })}>Show more (${count(rows.length - shown.length)} left)</button>`}`;
}

/**
 * Steps through a list that the service returns in pages, newest first. `name`: the cursor's parameter. `of`: the page, as
 * `usePolled` returns it. The buttons stay while a page loads, and are never really disabled: both would lose the focus.
 */
export function Pages({ label, name, of }) {
  const now = place.value.query[name], next = of.data?.next;
  if (!now && !next && !of.isLoading) return null;
  const button = (text, isPossible, to) => html`<button type="button" aria-disabled=${String(!isPossible)} onClick=${() => isPossible && setQuery({ [name]: to })}>${text}</button>`;
  return html`<nav class="pages" aria-label=${label}>${button("Newest", Boolean(now), "")}${button("Older", Boolean(next), next)}</nav>`;
}
