// Small drawings of numbers: a meter, an interval, bars of counts; and the statistics that the views compute.
import { html } from "../dom.js";
import { Link } from "../router.js";
import { Badge, Empty, Time } from "../ui.js";
import { Visible } from "../text.js";
import { count, percent } from "../format.js";

const TEXT_CHARACTERS = 300;

/** A short text of untrusted origin, in one line. */
export function Line({ text }) {
  const value = String(text ?? "");
  return html`<${Visible} text=${value.length > TEXT_CHARACTERS ? `${value.slice(0, TEXT_CHARACTERS)}…` : value} />`;
}

/** How much of something is in use. `tone` of a full one: "warn" unless given. */
export function Meter({ label, value, most, tone, text }) {
  const share = most > 0 ? Math.min(1, value / most) : 0;
  const colour = tone || (share >= 1 ? "warn" : "busy");
  return html`<span class="meter-line"><span class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax=${most || 0} aria-valuenow=${Math.min(value, most || 0)} aria-valuetext=${text}>
    <span class="meter-fill ${colour}" style=${{ width: `${100 * share}%` }}></span></span>${text && html`<span class="meter-text">${text}</span>`}</span>`;
}

/** KV cache use of an engine, 0 to 1. */
export function KvUse({ engine }) {
  if (engine.kv_use === null || engine.kv_use === undefined) return "–";
  const tone = engine.kv_use >= 0.97 ? "bad" : engine.kv_use >= 0.9 ? "warn" : "busy";
  return html`<${Meter} label=${`KV cache of ${engine.id}`} value=${engine.kv_use} most=${1} tone=${tone} text=${percent(engine.kv_use)} />`;
}

/** Sessions of an engine and its cap. */
export function Sessions({ engine }) {
  if (engine.cap === null || engine.cap === undefined) return html`${count(engine.sessions)} <span class="muted">no cap</span>`;
  return html`<${Meter} label=${`sessions of ${engine.id}`} value=${engine.sessions} most=${engine.cap} text=${`${count(engine.sessions)} of ${count(engine.cap)}`} />`;
}

const ratio = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));

/** An estimate {mean, low, high} between 0 and 1 as a point on a line, and as text. */
export function Interval({ label, of, tone = "tone-1" }) {
  if (!of || of.mean === null) return html`<span class="muted">too few samples</span>`;
  const has = of.low !== null && of.low !== undefined;
  const text = has ? `${ratio(of.mean)} [${ratio(of.low)}, ${ratio(of.high)}]` : ratio(of.mean);
  const at = (value) => `${100 * Math.min(1, Math.max(0, value))}%`;
  return html`<span class="interval"><span class="interval-track" role="img" aria-label=${`${label}: ${text}`}>
      ${has && html`<span class="interval-bar ${tone}" style=${{ left: at(of.low), width: `${100 * Math.max(0.004, Math.min(1, of.high) - Math.max(0, of.low))}%` }}></span>`}
      <span class="interval-point ${tone}" style=${{ left: at(of.mean) }}></span></span>
    <span class="interval-text">${text}</span></span>`;
}

/** Failures by code, each with a link to its rollouts. `failures`: {code, blame, count, last_at?}. */
export function Failures({ failures, query = {}, empty }) {
  if (!failures.length) return html`<${Empty}>${empty}<//>`;
  const most = Math.max(...failures.map((one) => one.count));
  return html`<ul class="bars">${failures.map((one) => html`<li key=${`${one.code} ${one.blame}`}>
    <span class="bar-head"><${Link} path="/rollouts" query=${{ ...query, code: one.code }}><${Line} text=${one.code} /><//>
      <${Badge} value=${one.blame} tone=${{ policy: "warn", infra: "bad", task: "bad" }[one.blame]} />
      <span class="bar-count">${count(one.count)}${one.last_at ? html` <span class="muted">last <${Time} at=${one.last_at} /></span>` : ""}</span></span>
    <span class="meter" aria-hidden="true"><span class="meter-fill ${one.blame === "policy" ? "warn" : "bad"}" style=${{ width: `${(100 * one.count) / most}%` }}></span></span>
  </li>`)}</ul>`;
}

/** A name with its value; for settings. Values that are null are left out. */
export function Facts({ facts }) {
  return html`<dl class="facts">${facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** 95 % Wilson score interval of `passes` of `samples`: {mean, low, high}, or null without a sample. */
export function wilson(passes, samples) {
  if (!samples) return null;
  const z = 1.959964, mean = passes / samples, scale = 1 + (z * z) / samples;
  const middle = (mean + (z * z) / (2 * samples)) / scale;
  const half = (z / scale) * Math.sqrt((mean * (1 - mean)) / samples + (z * z) / (4 * samples * samples));
  return { mean, low: Math.max(0, middle - half), high: Math.min(1, middle + half) };
}

/** Mean of differences with a 95 % interval (normal approximation over tasks): {mean, low, high}, or null. */
export function paired(differences) {
  const size = differences.length;
  if (!size) return null;
  const mean = differences.reduce((sum, one) => sum + one, 0) / size;
  if (size < 2) return { mean, low: null, high: null };
  const variance = differences.reduce((sum, one) => sum + (one - mean) ** 2, 0) / (size - 1);
  const half = 1.959964 * Math.sqrt(variance / size);
  return { mean, low: mean - half, high: mean + half };
}

/** A difference of two rates. */
export const signed = (value) => (value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${value.toFixed(3)}`.replace("-", "−"));
