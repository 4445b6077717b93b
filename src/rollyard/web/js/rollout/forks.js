// The traces of a rollout as a tree: which trace continues the tokens of which, and why it is not the same trace.
import { html } from "../dom.js";
import { count, plural, table } from "../format.js";
import { Link, place } from "../router.js";
import { Visible } from "../text.js";
import { Badge } from "../ui.js";

const REASONS = table({
  "new conversation": "shares no message with an earlier one: a second agent, or a compaction that started again",
  "history rewritten": "shares the beginning of an earlier one, then differs: a compaction or an edited history",
  "reasoning removed": "the client left the reasoning out",
  branched: "extends a history that another request extended, or repeats a request",
  "other tools": "the same history with other tools",
  "not extended": "the new prompt could not be proven to start with the old tokens",
  abandoned: "no client received the completion, so nothing can extend it",
});

/** The tree: [{index, shared, children}]. A trace's parent owns the last span that the trace has as a copy. */
export function treeOf(traces) {
  const nodes = traces.map((_, index) => ({ index, shared: 0, children: [] }));
  const owners = new Map();
  traces.forEach((trace, index) => trace.spans.forEach((span) => { if (span.is_owned) owners.set(span.turn, index); }));
  const roots = [];
  traces.forEach((trace, index) => {
    const copies = trace.spans.filter((span) => !span.is_owned);
    const last = copies[copies.length - 1];
    const parent = last ? owners.get(last.turn) : undefined;
    if (parent !== undefined && parent < index) {
      nodes[index].shared = last.end;
      nodes[parent].children.push(nodes[index]);
    } else roots.push(nodes[index]);
  });
  return roots;
}

function Bar({ trace, longest }) {
  const parts = [];
  let at = 0;
  const add = (kind, to) => { if (to > at) parts.push({ kind, size: to - at }); at = to; };
  for (const span of trace.spans) { add("given", span.start); add(span.is_owned ? "sampled" : "copied", span.end); }
  add("given", trace.token_ids.length);
  return html`<div class="trace-bar" aria-hidden="true" style=${{ width: `${(100 * trace.token_ids.length) / longest}%` }}>${parts.slice(0, 2000).map((part) => html`<span class=${part.kind} style=${{ flexGrow: part.size }}></span>`)}</div>`;
}

function Node({ node, traces, longest }) {
  const trace = traces[node.index], owned = trace.spans.filter((span) => span.is_owned);
  const sampled = owned.reduce((sum, span) => sum + span.end - span.start, 0);
  const first = owned[0], last = owned[owned.length - 1];
  return html`<li>
    <div class="trace-node">
      <div><${Link} path=${place.value.path} query=${{ ...place.value.query, tab: "tokens", trace: node.index, token: "" }}>Trace ${node.index}<//>
        ${trace.fork_reason ? html` <b class="fork-reason"><${Visible} text=${trace.fork_reason} /></b> <span class="note">${REASONS[trace.fork_reason] || ""}</span>` : html` <span class="note">the first conversation</span>`}</div>
      <div class="note">${plural(trace.token_ids.length, "token")}, ${count(sampled)} sampled${first ? ` in ${plural(owned.length, "turn")} (${first.turn}${last.turn === first.turn ? "" : `–${last.turn}`})` : ""}${node.shared ? `; the first ${count(node.shared)} are those of its parent` : ""}
        ${" "}<${Badge} value=${trace.trainable ? "trainable" : "not trainable"} tone=${trace.trainable ? "good" : "warn"} /> ${!trace.trainable && trace.reason && html`<${Visible} text=${trace.reason} />`}</div>
      <${Bar} trace=${trace} longest=${longest} />
    </div>
    ${node.children.length > 0 && html`<ul class="fork-tree">${node.children.map((child) => html`<${Node} node=${child} traces=${traces} longest=${longest} />`)}</ul>`}
  </li>`;
}

export function Forks({ traces }) {
  const longest = Math.max(1, ...traces.map((trace) => trace.token_ids.length));
  return html`<ul class="fork-tree root">${treeOf(traces).map((node) => html`<${Node} node=${node} traces=${traces} longest=${longest} />`)}</ul>
    <ul class="legend"><li><span class="swatch given"></span>given</li><li><span class="swatch sampled"></span>sampled here</li><li><span class="swatch copied"></span>sampled in another trace</li></ul>`;
}
