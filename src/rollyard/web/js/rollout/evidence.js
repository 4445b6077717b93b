// What EVAL found: the score with its parts, check results, test output, the patch, the judge's words.
import { html } from "../dom.js";
import { count, reward, table, time } from "../format.js";
import { LongText, Visible } from "../text.js";
import { Badge, Card, Empty } from "../ui.js";
import { Artifacts } from "./artifacts.js";
import { Diff } from "./diff.js";

const KINDS = table({ check: "Check", tests: "Tests", judge: "Judge", patch: "Patch" });

function Numbers({ title, values }) {
  const entries = Object.entries(values || {});
  if (!entries.length) return null;
  return html`<div><h3>${title}</h3><dl class="numbers">${entries.slice(0, 200).map(([name, value]) => html`<div><dt><${Visible} text=${name} /></dt><dd>${typeof value === "number" ? reward(value) : html`<${Visible} text=${String(value)} />`}</dd></div>`)}</dl></div>`;
}

function Piece({ piece }) {
  const text = typeof piece.text === "string" ? piece.text : "";
  const isPatch = piece.kind === "patch" || (/^(diff --git |--- )/.test(text) && text.includes("\n+++ "));
  return html`<article class="evidence" data-kind=${KINDS[piece.kind] ? piece.kind : "other"}>
    <h3>${KINDS[piece.kind] || "Evidence"} <span class="note"><${Visible} text=${String(piece.name || "")} /></span>
      ${piece.passed === true && html` <${Badge} value="passed" tone="good" />`}${piece.passed === false && html` <${Badge} value="failed" tone="bad" />`}</h3>
    ${!text ? html`<p class="empty">No output.</p>` : isPatch ? html`<${Diff} text=${text} />` : html`<${LongText} text=${text} ansi />`}
  </article>`;
}

export function Evidence({ record, trajectory, artifactsAt }) {
  const info = (trajectory && trajectory.info) || {};
  const pieces = Array.isArray(info.evidence) ? info.evidence.filter((piece) => piece && typeof piece === "object") : [];
  const passed = pieces.filter((piece) => piece.passed === true).length, judged = pieces.filter((piece) => typeof piece.passed === "boolean").length;
  const score = record.score;
  return html`<div class="stack">
    <${Card} title="Score" note=${judged ? `${count(passed)} of ${count(judged)} checks passed` : ""}>
      ${score ? html`<p>Reward <b>${reward(score.reward)}</b></p><div class="number-lists"><${Numbers} title="Components" values=${score.components} /><${Numbers} title="Metrics" values=${score.metrics} /></div>` : html`<${Empty}>${record.state === "ended" ? "It has no score." : "It has not been scored yet."}<//>`}
      ${(record.scores || []).length > 0 && html`<h3>Scored again</h3><ul>${record.scores.slice(0, 50).map((one) => html`<li>reward <b>${reward(one.score ? one.score.reward : one.reward)}</b> ${one.at && html`<span class="note">${time(one.at)}</span>`}</li>`)}</ul>`}
    <//>
    <${Card} title="Evidence">${pieces.length ? pieces.slice(0, 200).map((piece) => html`<${Piece} piece=${piece} />`) : html`<${Empty}>${trajectory ? "The environment kept no output of its checks." : "What the checks printed is stored with the trajectory, which is not there."}<//>`}<//>
    <${Card} title="Artifacts"><${Artifacts} at=${artifactsAt} stored=${(trajectory && trajectory.artifacts) || []} /><//>
  </div>`;
}
