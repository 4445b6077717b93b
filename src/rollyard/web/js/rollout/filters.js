// The filters of the rollouts table. The address holds them, so a link shares them.
import { html, useEffect, useRef, useState } from "../dom.js";
import { usePolled } from "../api.js";
import { place, setQuery } from "../router.js";

const TYPING_MS = 300; // after the last key, before the service is asked
const OUTCOMES = ["completed", "truncated", "failed", "cancelled"];
export const NAMES = ["search", "run", "state", "environment", "agent", "policy", "version", "outcome", "code", "group", "trainable", "min_reward", "max_reward"];

/** The filters in the address, as parameters of GET /v1/results. A number that is none is left out. */
export function filtersOf(query) {
  const found = {};
  for (const name of NAMES) {
    const value = (query[name] || "").trim();
    if (!value) continue;
    if (["min_reward", "max_reward"].includes(name) && !Number.isFinite(Number(value))) continue;
    if (name === "version" && !/^\d{1,15}$/.test(value)) continue;
    found[name] = value;
  }
  return found;
}

function Typed({ name, label, list, ...rest }) {
  const stored = place.value.query[name] || "";
  const [text, setText] = useState(stored);
  const sent = useRef(stored);
  useEffect(() => { if (stored !== sent.current) { sent.current = stored; setText(stored); } }, [stored]); // back, forward
  useEffect(() => {
    if (text === sent.current) return undefined;
    const timer = setTimeout(() => { sent.current = text; setQuery({ [name]: text }, { replace: true }); }, TYPING_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<label class="field ${name}"><span>${label}</span><input name=${name} value=${text} list=${list && list.length ? `${name}-values` : undefined} autocomplete="off" spellcheck=${false} ...${rest} onInput=${(event) => setText(event.target.value)} />
    ${list && list.length > 0 && html`<datalist id=${`${name}-values`}>${list.map((one) => html`<option value=${one}></option>`)}</datalist>`}</label>`;
}

function Chosen({ name, label, options }) {
  return html`<label class="field ${name}"><span>${label}</span><select name=${name} value=${place.value.query[name] || ""} onChange=${(event) => setQuery({ [name]: event.target.value })}>
    ${options.map(([value, words]) => html`<option value=${value}>${words}</option>`)}</select></label>`;
}

/** `rows`: those that are loaded; their values are offered while typing. */
export function Filters({ rows }) {
  const runs = usePolled("/v1/runs", {}, { everyMs: 30_000 });
  const named = (runs.data ? runs.data.runs : []).map((run) => run.id);
  const chosen = place.value.query.run;
  const values = (name) => [...new Set(rows.slice(0, 1000).map((row) => row[name]).filter(Boolean))].sort().slice(0, 50);
  const active = NAMES.filter((name) => place.value.query[name]);
  const [isOpen, setOpen] = useState(active.some((name) => !["search", "run", "state", "outcome"].includes(name)));
  return html`<form class="filters" role="search" aria-label="Filters" onSubmit=${(event) => event.preventDefault()}>
    <div class="filter-row">
      <${Typed} name="search" label="Search in messages and tool output" type="search" placeholder="words" />
      <${Chosen} name="run" label="Run" options=${[["", "all runs"], ...(chosen && !named.includes(chosen) ? [[chosen, chosen]] : []), ...named.slice(-500).reverse().map((one) => [one, one])]} />
      <${Chosen} name="state" label="State" options=${[["", "ended"], ["live", "not ended"]]} />
      <${Chosen} name="outcome" label="Outcome" options=${[["", "any"], ...OUTCOMES.map((one) => [one, one])]} />
      <button type="button" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>${isOpen ? "Fewer filters" : "More filters"}</button>
      ${active.length > 0 && html`<button type="button" class="quiet" onClick=${() => setQuery(Object.fromEntries(NAMES.map((name) => [name, ""])))}>Clear ${active.length === 1 ? "the filter" : `${active.length} filters`}</button>`}
    </div>
    ${isOpen && html`<div class="filter-row">
      <${Typed} name="environment" label="Environment" list=${values("environment")} />
      <${Typed} name="agent" label="Agent" list=${values("agent")} />
      <${Typed} name="policy" label="Policy" list=${values("policy")} />
      <${Typed} name="version" label="Weight version" type="number" min="0" step="1" />
      <${Typed} name="code" label="Code" list=${values("code")} />
      <${Typed} name="group" label="Group" />
      <${Typed} name="min_reward" label="Reward from" type="number" step="any" />
      <${Typed} name="max_reward" label="Reward to" type="number" step="any" />
      <${Chosen} name="trainable" label="Trainable" options=${[["", "any"], ["true", "yes"], ["false", "no"]]} />
    </div>`}
  </form>`;
}
