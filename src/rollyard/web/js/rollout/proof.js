// The prompt-digest proof: recomputes in this browser, from the trace's token ids, the digests that were taken when each
// request was sent and when its reply arrived. If both agree, the sampled ids were sampled from exactly this prefix.
//
// A digest that was not recorded (traces of other tools have none) proves nothing and refutes nothing.
//
// The digest is BLAKE2b with 16 bytes of the ids as little-endian int32. Browsers have none, so it is in blake2b.js; it
// needs no secure context.
import { html, useEffect, useState } from "../dom.js";
import { count, plural } from "../format.js";
import { Visible } from "../text.js";
import { Blake2b } from "./blake2b.js";

const SLICE_MS = 12; // of work before the page may do something else
const STEP_TOKENS = 4096;
const MOST_ROWS = 300;

function bytesOf(ids, start, end) {
  const data = new DataView(new ArrayBuffer(4 * (end - start)));
  for (let at = start; at < end; at++) data.setInt32(4 * (at - start), ids[at], true);
  return new Uint8Array(data.buffer);
}

/**
 * Yields {trace, span, isPrompt, isSampled} for each span; yields undefined in long ones. Each is true, false, or null if
 * its digest was not recorded.
 */
export function* checks(traces) {
  for (const [index, trace] of traces.entries()) {
    const hash = new Blake2b(16);
    let read = 0;
    const upTo = function* (end) {
      while (read < end) {
        const next = Math.min(end, read + STEP_TOKENS);
        hash.update(bytesOf(trace.token_ids, read, next));
        read = next;
        yield undefined;
      }
    };
    for (const span of trace.spans) {
      yield* upTo(span.start);
      const isPrompt = span.prompt_digest ? read === span.start && hash.hex() === span.prompt_digest : null;
      yield* upTo(span.end);
      yield { trace: index, span, isPrompt, isSampled: span.sampled_digest ? hash.hex() === span.sampled_digest : null };
    }
  }
}

/** Runs the checks in slices. Returns {rows, isDone}. */
export function useProof(traces) {
  const [state, setState] = useState({ rows: [], isDone: false });
  useEffect(() => {
    const rows = [], work = checks(traces);
    let timer = 0;
    const slice = () => {
      const until = performance.now() + SLICE_MS;
      while (performance.now() < until) {
        const { value, done } = work.next();
        if (done) { setState({ rows, isDone: true }); return; }
        if (value) rows.push(value);
      }
      timer = setTimeout(slice);
    };
    timer = setTimeout(slice);
    return () => clearTimeout(timer);
  }, [traces]);
  return state;
}

const Mark = ({ is }) => (is === null ? html`<span class="note" title="no digest was recorded">–</span>` : is ? html`<span class="proven" title="equal">✓</span>` : html`<span class="refuted" title="different">✗</span>`);

export function Proof({ traces }) {
  const proof = useProof(traces);
  if (!proof.isDone) return html`<p class="note" role="status">Computing digests…</p>`;
  const isBad = (row) => row.isPrompt === false || row.isSampled === false;
  const isOpen = (row) => !isBad(row) && (row.isPrompt === null || row.isSampled === null);
  const bad = proof.rows.filter(isBad).length, open = proof.rows.filter(isOpen).length, proven = proof.rows.length - bad - open;
  const result = bad ? "bad" : open || !proven ? "open" : "good";
  const rank = (row) => (isBad(row) ? 0 : isOpen(row) ? 1 : 2);
  const shown = [...proof.rows].sort((a, b) => rank(a) - rank(b)).slice(0, MOST_ROWS);
  return html`<p class="verdict ${result}" role="status" data-proof=${result}>${result === "good"
    ? html`<span class="proven">✓</span> ${plural(proven, "model call")}: the ids in the ${traces.length === 1 ? "trace" : "traces"} are those that the engine got and returned.`
    : result === "bad" ? html`<span class="refuted">✗</span> ${plural(bad, "model call")} of ${count(proof.rows.length)}: the ids in the trace are not those that the engine got or returned.`
    : proof.rows.length ? `${plural(open, "model call")} of ${count(proof.rows.length)}: not all digests were recorded, so the ids cannot be proven.`
    : "No model call is in the traces: there is nothing to prove."}</p>
    <p class="note">Computed in this browser: BLAKE2b of the token ids, compared with the digest taken when each request was sent and when its reply arrived.</p>
    <details><summary>Each model call</summary><div class="table-frame" tabindex="0" role="region" aria-label="Digests"><table>
      <thead><tr><th scope="col" class="numeric">trace</th><th scope="col" class="numeric">turn</th><th scope="col">prompt</th><th scope="col">prompt and reply</th><th scope="col">digest of the prompt</th><th scope="col">request</th></tr></thead>
      <tbody>${shown.map((row) => html`<tr><td class="numeric">${row.trace}</td><td class="numeric">${row.span.turn}</td><td><${Mark} is=${row.isPrompt} /> ${count(row.span.start)} tokens</td><td><${Mark} is=${row.isSampled} /> ${count(row.span.end)} tokens</td><td><code><${Visible} text=${row.span.prompt_digest} /></code></td><td><code><${Visible} text=${row.span.request_id || "–"} /></code></td></tr>`)}</tbody></table></div>
      ${proof.rows.length > shown.length && html`<p class="note">${count(proof.rows.length - shown.length)} more are not listed.</p>`}</details>`;
}
