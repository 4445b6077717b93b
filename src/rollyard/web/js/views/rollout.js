// One rollout: summary, waterfall, and tabs with conversation, tokens, traces, requests, terminal, evidence and record.
//
// The view reads exactly these addresses, in this form (R: run, I: rollout, G: its group, if it has one). The exporter
// records the replies of an ended rollout; each but the first may be missing, and its part says so.
//   /v1/rollouts/I?run=R                          the record; polled until the rollout has ended
//   /v1/rollouts/I?include=trajectory&run=R       messages, traces, artifacts, info; once it has ended
//   /v1/rollouts/I/timeline?run=R                 polled until the rollout has ended
//   /v1/rollouts/I/texts?run=R                    once it has ended
//   /v1/rollouts/I/requests?run=R                 with the tab "requests"; polled until the rollout has ended
//   /v1/rollouts/I/artifacts?run=R                with the tab "evidence"
//   /v1/groups/G?run=R                            polled until the group is complete
//   /v1/rollouts/I/messages?after=N&run=R         only while the rollout has not ended
//   /v1/rollouts/I/artifacts/NAME?run=R           a download; never in an exported file
import { html, useEffect, useState } from "../dom.js";
import { usePolled } from "../api.js";
import { count, plural } from "../format.js";
import { isOffline, Link, place } from "../router.js";
import { Visible } from "../text.js";
import { Boundary, Card, Empty, Loading, Page, Problem } from "../ui.js";
import { Conversation } from "../rollout/conversation.js";
import { addressesOf, advantageOf, memberOf, useLiveMessages } from "../rollout/data.js";
import { Details } from "../rollout/details.js";
import { Evidence } from "../rollout/evidence.js";
import { Forks } from "../rollout/forks.js";
import { Header, nameOf } from "../rollout/header.js";
import { Proof } from "../rollout/proof.js";
import { Replay } from "../rollout/replay.js";
import { Requests } from "../rollout/requests.js";
import { Strip } from "../rollout/strip.js";
import { Tabs } from "../rollout/tabs.js";
import { Waterfall } from "../rollout/waterfall.js";

const EMPTY = [];
const TEXTS = new Set(["tokens", "requests"]);

export default function Rollout({ run, id }) {
  const at = addressesOf(run, id);
  const [everyMs, setEvery] = useState(2000);
  const read = usePolled(...at.record, { everyMs });
  const isEnded = Boolean(read.data && read.data.state === "ended");
  useEffect(() => { if (isEnded) setEvery(0); }, [isEnded]);
  if (read.error) {
    return html`<${Page} title="Rollout"><${Problem} error=${read.error}>${read.error.status === 404 && html`<p>There is no rollout <code><${Visible} text=${id} /></code> in run <code><${Visible} text=${run} /></code>. It may have been deleted with its run, or never submitted.</p>`}
      <p><${Link} path="/rollouts" query=${{ run }}>All rollouts of this run<//></p><//><//>`;
  }
  if (!read.data) return html`<${Loading} />`;
  return html`<${Known} run=${run} id=${id} record=${read.data} />`;
}

function Known({ run, id, record }) {
  const at = addressesOf(run, id, record.group);
  const isLive = record.state !== "ended";
  const ended = (address) => (isLive ? [null, {}] : address);
  const tab = place.value.query.tab || "conversation";
  const loaded = usePolled(...ended(at.trajectory), { everyMs: 0 });
  const needsTexts = loaded.data ? hasTraces(loaded.data) : TEXTS.has(tab); // on these tabs, both are read at once
  const texts = usePolled(...(needsTexts ? ended(at.texts) : [null, {}]), { everyMs: 0 });
  const timeline = usePolled(...at.timeline, { everyMs: isLive ? 2000 : 0 });
  const [isGroupOpen, setGroupOpen] = useState(true);
  const group = usePolled(...at.group, { everyMs: isGroupOpen ? 5000 : 0 });
  useEffect(() => { if (group.data) setGroupOpen(group.data.state === "open"); }, [group.data]);
  const requests = usePolled(...(tab === "requests" ? at.requests : [null, {}]), { everyMs: isLive ? 2000 : 0 });
  const live = useLiveMessages(at.messages, isLive);

  const trajectory = (loaded.data && loaded.data.trajectory) || null;
  const traces = trajectory ? trajectory.traces : EMPTY;
  const messages = trajectory ? trajectory.messages : live.messages;
  const messageTurns = trajectory ? (trajectory.info || {}).message_turns : live.messageTurns;
  const isPruned = !isLive && Boolean(loaded.data) && !trajectory && Boolean(record.summary && record.summary.traces);
  const tabs = [
    { name: "conversation", label: "Conversation", note: messages.length ? count(messages.length) : undefined },
    { name: "tokens", label: "Tokens" },
    { name: "traces", label: "Traces", note: traces.length > 1 ? count(traces.length) : undefined },
    { name: "requests", label: "Requests" },
    { name: "terminal", label: "Terminal" },
    { name: "evidence", label: "Evidence" },
    { name: "record", label: "Record" },
  ];
  const selected = tabs.some((one) => one.name === tab) ? tab : "conversation";
  const name = nameOf(record);
  return html`<${Page} title=${html`${name && html`<${Visible} text=${name} /> `}<code class="id"><${Visible} text=${record.id} /></code>`}>
    <div class="stack rollout">
      <${Header} record=${record} live=${live} traces=${traces} group=${group.data} />
      ${isPruned && html`<${Pruned} record=${record} />`}
      ${(timeline.data || isLive || !isOffline) && html`<${Card} title="Time" className="time-card">${timeline.data ? html`<${Waterfall} timeline=${timeline.data} isLive=${isLive} />` : timeline.error ? html`<${Empty}>The times of its stages are not available.<//>` : html`<${Loading} />`}<//>`}
      <${Tabs} label="Parts of the rollout" tabs=${tabs} selected=${selected}>
        <${Boundary} key=${selected}><${Panel} tab=${selected} ...${{ record, isLive, isPruned, live, loaded, trajectory, traces, messages, messageTurns, texts, timeline, group, requests, at }} /><//>
      <//>
    </div>
  <//>`;
}

const agentOf = (record) => (record.task && record.task.agent && record.task.agent.name) || "native";

const hasTraces = (data) => Boolean(data.trajectory && data.trajectory.traces.length);

function Pruned({ record }) {
  return html`<div class="notice" role="note"><h2>The conversation and its tokens are no longer stored</h2>
    <p>They are deleted when a trainer has acknowledged them, or after the service's retention period. ${plural(record.summary.traces, "trace")} with ${plural(record.summary.sampled_tokens, "sampled token")} were here.</p>
    <p>Still here: the record with its score, times, limits, attempts and task (tab <b>Record</b>). To keep trajectories longer, raise the retention in the service's settings, or export them before they are acknowledged.</p></div>`;
}

/** Why there are no traces to show, or null if there are some. */
function missing({ isLive, isPruned, loaded, traces, record }) {
  if (isLive) return record.state === "queued" ? "It is in the queue: nothing has been sampled yet." : "Tokens are available when the rollout has ended.";
  if (isPruned) return "The traces were acknowledged or have expired.";
  if (loaded.error) return null;
  if (!loaded.data) return null;
  if (traces.length) return null;
  return record.summary && record.summary.sampled_tokens ? "Its tokens are not stored." : "Nothing was sampled.";
}

function Panel(all) {
  const { tab, record, isLive, isPruned, live, loaded, trajectory, traces, messages, messageTurns, texts, timeline, group, requests, at } = all;
  if (tab === "record") return html`<${Details} record=${record} trajectory=${trajectory} />`;
  if (!isLive && loaded.error) return html`<${Problem} error=${loaded.error} />`;
  const isFollowed = isLive ? record.state !== "queued" : live.isLoaded && Boolean(requests.data); // its requests
  const isKept = tab === "conversation" ? live.messages.length > 0 : tab === "requests" && isFollowed; // of the time before it ended
  if (!isLive && !loaded.data && !isKept) return html`<${Loading} />`;
  if (tab === "evidence") return html`<${Evidence} record=${record} trajectory=${trajectory} artifactsAt=${at.artifacts} />`;
  if (tab === "conversation" || tab === "terminal") {
    if (isPruned) return html`<${Empty}>The messages were deleted with the traces.<//>`;
    if (isLive && !live.isAvailable && !messages.length) return html`<${Empty}>It runs on a node of the fleet that does not send its messages now. They are here when it has ended.<//>`;
    if (isLive && record.state === "queued" && !messages.length) return html`<${Empty}>It is in the queue. The conversation appears here when it runs.<//>`;
    if (tab === "terminal") return html`<${Card} title="Shell session"><${Replay} messages=${messages} messageTurns=${messageTurns} timeline=${timeline.data} task=${record.task} /><//>`;
    return html`<${Conversation} messages=${messages} messageTurns=${messageTurns} isLive=${isLive} />`;
  }
  const areTextsLoading = !isLive && traces.length > 0 && texts.isLoading;
  if (tab === "requests" && isFollowed && (isLive || !loaded.data || areTextsLoading)) {
    if (requests.isLoading) return html`<${Loading} />`;
    return html`<${Card} title="Requests">${requests.error && html`<${Problem} error=${requests.error} />`}<${Requests} requests=${requests.data || null} agent=${agentOf(record)} traces=${EMPTY} texts=${null} isLive /><//>`;
  }
  const why = missing(all);
  if (why) return html`<${Empty}>${why}<//>`;
  if (texts.isLoading && tab !== "traces") return html`<${Loading} />`;
  const decoded = texts.data ? texts.data.texts : null;
  if (tab === "traces") {
    return html`<div class="stack"><${Card} title="Traces" note=${traces.length === 1 ? "one conversation, never forked" : plural(traces.length, "trace")}><${Forks} traces=${traces} /><//>
      <${Card} title="Proof of the prompts"><${Proof} traces=${traces} /><//></div>`;
  }
  if (tab === "requests") {
    if (requests.isLoading) return html`<${Loading} />`;
    return html`<${Card} title="Requests">${requests.error && html`<p class="note">What the agent sent is not available here; below is what the engine got.</p>`}<${Requests} requests=${requests.data || null} traces=${traces} texts=${decoded} /><//>`;
  }
  const { value: advantage, why: whyNoAdvantage } = record.group ? advantageOf(group.data, memberOf(group.data, record.index)) : { value: null, why: "It belongs to no group." };
  return html`<${Card} title="Tokens"><${Strip} key=${place.value.query.trace || "0"} traces=${traces} texts=${decoded} advantage=${advantage} whyNoAdvantage=${whyNoAdvantage} turnRewards=${(record.score && record.score.turn_rewards) || EMPTY} /><//>`;
}
