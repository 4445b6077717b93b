// A group: its members beside each other, the spread of their rewards, and where two of them part.
import { html, useEffect, useState } from "../dom.js";
import { usePolled } from "../api.js";
import { count, percent, reward } from "../format.js";
import { Link, paths, place, setQuery } from "../router.js";
import { Visible } from "../text.js";
import { Badge, Card, Empty, Loading, Page, Problem, Stat, Time } from "../ui.js";
import { advantageOf } from "../rollout/data.js";
import { Differences } from "../rollout/differences.js";

const LIVE_MS = 2000; // open, or with members that are being cancelled: they end after their group
const COMPLETE_MS = 10_000; // it may wait for a batch of its draw
const FEW = 100; // members shown at first, and added per click
const MOST_LEVELS = 12; // dots above each other

export default function Group({ run, id }) {
  const [everyMs, setEvery] = useState(LIVE_MS);
  const read = usePolled(`/v1/groups/${encodeURIComponent(id)}`, { run }, { everyMs });
  const state = read.data?.state, isLive = state === "open" || Boolean(read.data?.members.some((one) => one.state !== "ended"));
  useEffect(() => { if (state) setEvery(isLive ? LIVE_MS : state === "complete" ? COMPLETE_MS : 0); }, [state, isLive]);
  if (read.error) {
    return html`<${Page} title="Group"><${Problem} error=${read.error}>${read.error.status === 404 && html`<p>There is no group <code><${Visible} text=${id} /></code> in run <code><${Visible} text=${run} /></code>.</p>`}<p><${Link} path=${paths.run(run)}>The run<//></p><//><//>`;
  }
  if (!read.data) return html`<${Loading} />`;
  return html`<${Known} group=${read.data} run=${run} />`;
}

function Known({ group, run }) {
  const stats = group.stats || {};
  const members = [...group.members].sort((a, b) => a.index - b.index);
  const instruction = group.task && group.task.data && group.task.data.instruction;
  return html`<${Page} title=${html`Group <${Visible} text=${group.id} />`} subtitle=${typeof instruction === "string" ? html`<${Visible} text=${instruction.slice(0, 200)} />` : undefined}>
    <div class="stack">
      <section class="card" aria-label="Summary">
        <p class="crumbs"><${Badge} value=${group.state} /> <span>run <${Link} path=${paths.run(group.run)}><${Visible} text=${group.run} /><//></span>
          ${group.draw && html`<span>draw <${Link} path=${paths.draw(group.run, group.draw)}><${Visible} text=${group.draw} /><//>${group.batch === null ? "" : ` batch ${group.batch}`}</span>`}
          ${group.task && html`<span>environment <${Visible} text=${group.task.environment} /></span>`}<span class="note"><${Time} at=${group.updated_at} /></span></p>
        ${group.reason && html`<p class="why"><${Visible} text=${group.reason} /></p>`}
        <div class="stats">
          <${Stat} label="mean reward" value=${reward(stats.mean)} note=${stats.lowest === null || stats.lowest === undefined ? undefined : `${reward(stats.lowest)} to ${reward(stats.highest)}`} />
          <${Stat} label="spread" value=${reward(stats.spread)} note="standard deviation" />
          <${Stat} label="pass rate" value=${percent(stats.pass_rate)} />
          <${Stat} label="members" value=${`${count(stats.members ?? members.filter((one) => one.is_member).length)} of ${group.size}`} note=${stats.trainable === undefined ? undefined : `${stats.trainable} trainable`} />
          <${Stat} label="sampled tokens" value=${count(stats.sampled_tokens)} />
          <${Stat} label="weight version" value=${group.oldest_version < 0 ? "–" : group.oldest_version === group.newest_version ? String(group.oldest_version) : `${group.oldest_version}–${group.newest_version}`} note=${group.staleness === null ? undefined : `staleness ${group.staleness}`} />
        </div>
      </section>
      <${Card} title="Rewards"><${Spread} members=${members} stats=${stats} /><//>
      <${Card} title="Members" note=${group.state === "open" ? "live" : ""}><${Members} members=${members} group=${group} run=${run} /><//>
      <${Compared} members=${members} run=${run} />
    </div>
  <//>`;
}

/** Every member's reward on one line, with the mean. */
function Spread({ members, stats }) {
  const scored = members.filter((member) => typeof member.reward === "number");
  if (!scored.length) return html`<${Empty}>No member has a reward yet.<//>`;
  const low = Math.min(0, ...scored.map((member) => member.reward)), high = Math.max(1, ...scored.map((member) => member.reward));
  const at = (value) => `${(100 * (value - low)) / (high - low)}%`;
  const stacked = new Map();
  const dots = scored.map((member) => {
    const place = Math.round((40 * (member.reward - low)) / (high - low)), level = stacked.get(place) || 0;
    stacked.set(place, level + 1);
    return { member, level };
  });
  const levels = Math.max(...stacked.values());
  const words = scored.length <= FEW ? scored.map((member) => `member ${member.index} ${reward(member.reward)}`).join(", ")
    : `${count(scored.length)} members from ${reward(Math.min(...scored.map((member) => member.reward)))} to ${reward(Math.max(...scored.map((member) => member.reward)))}`;
  const tall = [...stacked].filter(([, number]) => number > MOST_LEVELS + 1);
  return html`<div class="spread" role="img" aria-label=${`Rewards: ${words}`} style=${{ height: `${46 + 14 * Math.min(levels, MOST_LEVELS + 2)}px` }}>
    ${typeof stats.mean === "number" && typeof stats.spread === "number" && stats.spread > 0 && html`<span class="spread-band" style=${{ left: at(Math.max(low, stats.mean - stats.spread)), right: `calc(100% - ${at(Math.min(high, stats.mean + stats.spread))})` }}></span>`}
    ${typeof stats.mean === "number" && html`<span class=${`spread-mean ${stats.mean > (low + high) / 2 ? "high" : ""}`} style=${{ left: at(stats.mean) }}><span>mean ${reward(stats.mean)}</span></span>`}
    ${dots.filter(({ level }) => level <= MOST_LEVELS).map(({ member, level }) => html`<span class="spread-dot ${member.trainable ? "" : "hollow"}" style=${{ left: at(member.reward), bottom: `${24 + 14 * level}px` }} title=${`member ${member.index}: ${reward(member.reward)}`}></span>`)}
    ${tall.map(([column, number]) => html`<span class="spread-count" style=${{ left: `${(100 * column) / 40}%`, bottom: `${24 + 14 * (MOST_LEVELS + 1)}px` }}>${count(number)}</span>`)}
    <span class="spread-axis"></span><span class="spread-end">${reward(low)}</span><span class="spread-end high">${reward(high)}</span>
  </div>
  <p class="note">A hollow dot is not trained on. The band is one standard deviation around the mean.</p>`;
}

function Members({ members, group, run }) {
  const [most, setMost] = useState(FEW);
  const longest = Math.max(1, ...members.map((member) => member.sampled_tokens || 0));
  const shown = members.slice(0, most);
  const { a, b } = place.value.query;
  const choose = (index) => {
    const chosen = [a, b].filter((one) => one !== undefined && one !== "");
    const key = String(index);
    const next = chosen.includes(key) ? chosen.filter((one) => one !== key) : [...chosen, key].slice(-2);
    setQuery({ a: next[0] || "", b: next[1] || "" }, { replace: true });
  };
  return html`<p class="note">Choose two members to see where they part.</p><div class="table-frame" tabindex="0" role="region" aria-label="Members"><table class="members">
    <thead><tr><th scope="col">compare</th><th scope="col">member</th><th scope="col">outcome</th><th scope="col" class="numeric">reward</th><th scope="col" class="numeric">advantage</th><th scope="col">length</th></tr></thead>
    <tbody>${shown.map((member) => {
      const advantage = advantageOf(group, member).value;
      return html`<tr key=${member.index} class=${member.is_member || group.state === "open" ? "" : "spare"}>
        <td><input type="checkbox" checked=${[a, b].includes(String(member.index))} onChange=${() => choose(member.index)} aria-label=${`Compare member ${member.index}`} /></td>
        <td><${Link} path=${paths.rollout(run, member.rollout)}>#${member.index}<//> ${member.index >= group.size && html`<span class="note">spare</span>`}</td>
        <td><${Badge} value=${member.state === "ended" ? member.outcome : member.state} /> ${member.code && html`<${Badge} value=${member.code} tone=${member.blame === "policy" ? "warn" : "bad"} />`} ${member.state === "ended" && !member.trainable && html`<span class="note">not trainable</span>`}</td>
        <td class="numeric"><b>${reward(member.reward)}</b></td>
        <td class="numeric">${advantage === null ? "–" : html`<span class=${advantage > 0.05 ? "plus" : advantage < -0.05 ? "minus" : ""}>${advantage > 0 ? "+" : ""}${reward(advantage)}</span>`}</td>
        <td class="length"><span class="length-bar" style=${{ width: `${(70 * (member.sampled_tokens || 0)) / longest}%` }}></span> ${count(member.sampled_tokens)} <span class="note">tokens</span></td></tr>`;
    })}</tbody></table></div>
    ${most < members.length && html`<button type="button" class="fold" onClick=${() => setMost(most + FEW)}>Show more (${count(members.length - most)} left)</button>`}`;
}

function Compared({ members, run }) {
  const { a, b } = place.value.query;
  const find = (index) => members.find((member) => String(member.index) === index);
  const left = find(a), right = find(b);
  if (!left || !right || left === right) return null;
  return html`<${Card} title=${`Member ${left.index} and member ${right.index}`} id="compared"><${Differences} key=${`${a} ${b}`} run=${run} a=${left} b=${right} /><//>`;
}
