// A patch with colours. Folded: a patch may have megabytes.
import { html, useState } from "../dom.js";
import { plural } from "../format.js";
import { Visible } from "../text.js";

const FIRST_LINES = 200;
const CHUNK_LINES = 2000;
const MOST_LINE = 2000; // characters of one line

function kindOf(line) {
  if (/^(diff |index |--- |\+\+\+ |new file|deleted file|similarity |rename |old mode|new mode|Binary )/.test(line)) return "head";
  if (line.startsWith("@@")) return "hunk";
  return line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "";
}

export function Diff({ text }) {
  const [most, setMost] = useState(FIRST_LINES);
  const lines = text.replace(/\n$/, "").split("\n");
  let added = 0, removed = 0;
  for (const line of lines) { const kind = kindOf(line); if (kind === "added") added++; else if (kind === "removed") removed++; }
  return html`<div class="diff"><p class="note"><span class="plus">+${added}</span> <span class="minus">−${removed}</span> in ${plural((text.match(/^\+\+\+ /gm) || []).length, "file")}</p>
    <pre tabindex="0" dir="ltr" aria-label="Patch">${lines.slice(0, most).map((line) => html`<span class="diff-line ${kindOf(line)}"><${Visible} text=${line.length > MOST_LINE ? `${line.slice(0, MOST_LINE)}… (${line.length - MOST_LINE} more characters)` : line} />${"\n"}</span>`)}</pre>
    ${most < lines.length && html`<button type="button" class="fold" onClick=${() => setMost(most + CHUNK_LINES)}>Show more (${plural(lines.length - most, "line")} left)</button>`}</div>`;
}
