// What the colour of a token in the strip means: one mode per column of a trace.
//
// A mode gives each token a number (null: none) and a class of css/rollout.css for the number.
import { count, reward } from "../format.js";

const SURPRISE = [0.99, 0.9, 0.5, 0.2, 0.05, 0.01]; // lower ends of probability, from certain to surprising
const ENTROPY = [0.05, 0.2, 0.5, 1, 2, 3]; // upper ends in nats
const ADVANTAGE = [-1.5, -0.75, -0.05, 0.05, 0.75, 1.5];

const number = (value) => String(Number(value.toPrecision(4)));

function below(value, bounds) {
  let bucket = 0;
  while (bucket < bounds.length && value >= bounds[bucket]) bucket++;
  return bucket;
}

/** Entropy per token from the engine's columns: `entropy/TURN` for each span, base64 of float32. Null: it gave none. */
export function entropyOf(trace) {
  const found = new Float32Array(trace.token_ids.length).fill(NaN);
  let has = false;
  for (const span of trace.spans) {
    const data = trace.columns && trace.columns[`entropy/${span.turn}`];
    const values = typeof data === "string" ? floats(data) : null;
    if (!values) continue;
    for (let at = 0; at < values.length && span.start + at < span.end; at++) found[span.start + at] = values[at];
    has = true;
  }
  const whole = trace.columns && typeof trace.columns.entropy === "string" ? floats(trace.columns.entropy) : null;
  if (whole && whole.length === found.length) return whole;
  return has ? found : null;
}

function floats(text) {
  try {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
    return new Float32Array(bytes.buffer, 0, bytes.length >> 2);
  } catch { return null; }
}

/** Marks which tokens are copies of what another trace owns. */
function copiesOf(trace) {
  const copied = new Uint8Array(trace.token_ids.length);
  for (const span of trace.spans) if (!span.is_owned) copied.fill(1, span.start, span.end);
  return copied;
}

/**
 * The modes of one trace: {name, label, value(index), style(index), text(value), legend: [[class, words]], missing?}.
 * `advantage`: of the rollout, or null with the reason in `whyNoAdvantage`.
 */
export function modesOf(trace, advantage, whyNoAdvantage) {
  const { mask, logprobs, versions } = trace;
  const entropy = entropyOf(trace), copied = copiesOf(trace);
  const known = [...new Set(versions)].filter((version) => version >= 0).sort((a, b) => a - b);
  const rank = new Map(known.map((version, index) => [version, index % 6]));
  const sampled = (value, style) => ({
    value: (index) => (mask[index] ? value(index) : null),
    style: (index) => (mask[index] ? style(value(index)) : "context"),
  });
  const adv = advantage === null ? 3 : below(advantage, ADVANTAGE);
  return [
    { name: "logprob", label: "Logprob", missing: logprobs ? "" : "The engine gave no logprobs.", text: number,
      ...sampled((index) => (logprobs ? logprobs[index] : null), (value) => (value === null ? "context" : `heat${surprise(value)}`)),
      legend: [["heat0", "p ≥ 0.99"], ["heat1", "≥ 0.9"], ["heat2", "≥ 0.5"], ["heat3", "≥ 0.2"], ["heat4", "≥ 0.05"], ["heat5", "≥ 0.01"], ["heat6", "< 0.01"], ["context", "not sampled"]] },
    { name: "mask", label: "Loss mask", missing: "", text: String,
      value: (index) => mask[index], style: (index) => (mask[index] ? "mask1" : copied[index] ? "mask2" : "context"),
      legend: [["mask1", "1: trained on"], ["mask2", "0: a copy, owned by another trace"], ["context", "0: context"]] },
    { name: "version", label: "Weight version", missing: known.length ? "" : "The engine named no weight version.", text: count,
      ...sampled((index) => (versions[index] < 0 ? null : versions[index]), (value) => (value === null ? "context" : `version${rank.get(value)}`)),
      legend: [...known.slice(0, 12).map((version) => [`version${rank.get(version)}`, `version ${version}`]), ...(known.length > 12 ? [["context", `and ${known.length - 12} more`]] : []), ["context", "not sampled"]] },
    { name: "entropy", label: "Entropy", missing: entropy ? "" : "The engine gives no entropy.", text: (value) => `${number(value)} nats`,
      ...sampled((index) => (entropy && !Number.isNaN(entropy[index]) ? entropy[index] : null), (value) => (value === null ? "context" : `heat${below(value, ENTROPY)}`)),
      legend: [["heat0", "< 0.05 nats"], ["heat1", "< 0.2"], ["heat2", "< 0.5"], ["heat3", "< 1"], ["heat4", "< 2"], ["heat5", "< 3"], ["heat6", "≥ 3"], ["context", "not sampled"]] },
    { name: "advantage", label: "Advantage", missing: advantage === null ? whyNoAdvantage : "", text: reward,
      ...sampled(() => advantage, () => `adv${adv}`),
      legend: [[`adv${adv}`, `this rollout: ${advantage === null ? "–" : reward(advantage)}`], ["adv0", "≤ −1.5"], ["adv2", "below the mean"], ["adv3", "about 0"], ["adv4", "above the mean"], ["adv6", "≥ 1.5"], ["context", "not sampled"]] },
  ];
}

function surprise(logprob) {
  const p = Math.exp(logprob);
  let bucket = 0;
  while (bucket < SURPRISE.length && p < SURPRISE[bucket]) bucket++;
  return bucket;
}
