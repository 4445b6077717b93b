// The token strip's lines: which tokens are in which line, for a number of characters per line.
//
// Computed once per trace and width, in one pass; only lines on the screen become elements.
import { visible } from "../text.js";

const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6]|[\ud83c-\ud83e][\udc00-\udfff]/g;

/** A token's text as the strip shows it: one line, invisible characters by name. */
export function shownToken(text, id) {
  if (text === null || text === undefined) return `⟨${id}⟩`;
  if (text === "") return "·";
  let shown = "";
  for (const part of visible(text.length > 400 ? text.slice(0, 400) : text)) shown += part.name ? `‹${part.name}›` : part.text;
  return shown.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

/** The parts of a trace in order: {start, end, span?}. Without `span` it is context. */
export function segmentsOf(trace) {
  const segments = [];
  let at = 0;
  for (const span of trace.spans) {
    if (span.start > at) segments.push({ start: at, end: span.start, span: null });
    segments.push({ start: span.start, end: span.end, span });
    at = span.end;
  }
  if (at < trace.token_ids.length) segments.push({ start: at, end: trace.token_ids.length, span: null });
  return segments;
}

/**
 * Returns {lines, lineOf, shown}. A line is {segment} (a heading) or {start, end}. lineOf[token]: its line.
 * `texts` null: the ids are shown.
 */
export function layOut(trace, texts, columns) {
  const ids = trace.token_ids, lines = [], lineOf = new Uint32Array(ids.length), cache = new Map();
  const shown = new Array(ids.length);
  for (const segment of segmentsOf(trace)) {
    lines.push({ segment });
    let start = segment.start, used = 0;
    for (let index = segment.start; index < segment.end; index++) {
      const text = texts ? texts[index] : null;
      let known = text === null ? undefined : cache.get(text);
      if (known === undefined) {
        let one = shownToken(text, ids[index]);
        if (one.length > columns) one = `${one.slice(0, Math.max(1, columns - 1))}…`;
        known = { one, width: one.length + (one.match(WIDE) || []).filter((wide) => wide.length === 1).length };
        if (text !== null) cache.set(text, known);
      }
      if (used && used + known.width > columns) {
        lines.push({ start, end: index });
        start = index;
        used = 0;
      }
      shown[index] = known.one;
      lineOf[index] = lines.length;
      used += known.width;
      if (text !== null && text.includes("\n")) {
        lines.push({ start, end: index + 1 });
        start = index + 1;
        used = 0;
      }
    }
    if (start < segment.end) lines.push({ start, end: segment.end });
  }
  return { lines, lineOf, shown };
}
