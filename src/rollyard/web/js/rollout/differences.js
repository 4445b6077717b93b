// Two members of a group beside each other: the messages that they share, the first action in which they differ, and
// how each went on.
import { html, useEffect, useState } from "../dom.js";
import { get, isTransient, pauseMs } from "../api.js";
import { count, plural } from "../format.js";
import { LongText } from "../text.js";
import { Empty, Loading, Problem } from "../ui.js";
import { Message } from "./conversation.js";
import { addressesOf, callsOf, conversationOf, newPages, reasoningOf, textOf, turnsOf } from "./data.js";

const MOST_MESSAGES = 2000;
const CHUNK = 40;
const LIVE_MS = 2000; // between two reads of a rollout that runs

/**
 * The first messages of a rollout, page by page, and those that follow while it runs: {messages, isCut, isAvailable,
 * isLive, error}. `isCut`: there may be more than `MOST_MESSAGES`, and no more are read.
 * A new attempt starts them again. So does its end: what is stored is not cut.
 */
export function useAllMessages(run, id) {
  const [state, setState] = useState({ id, messages: null, error: null });
  useEffect(() => {
    const abort = new AbortController();
    const [path, query] = addressesOf(run, id).messages;
    const pages = newPages();
    let failures = 0, timer = 0;
    const read = async () => {
      let waitMs = 0;
      try {
        const reply = await get(path, { after: pages.messages.length, ...query }, abort.signal);
        const isLive = reply.state !== "ended";
        const isSame = !reply.available || pages.add(reply, `${conversationOf(reply)} ${isLive}`); // or its node did not answer
        const { messages, messageTurns } = pages;
        failures = 0;
        if (isSame && (!reply.messages.length || messages.length >= MOST_MESSAGES)) {
          const isCut = messages.length >= MOST_MESSAGES;
          setState({ id, messages: messages.slice(0, MOST_MESSAGES), messageTurns: messageTurns.slice(0, MOST_MESSAGES), isCut, isAvailable: reply.available, isLive: isLive && !isCut, error: null });
          if (!isLive || isCut) return;
          waitMs = LIVE_MS;
        }
      } catch (error) {
        if (abort.signal.aborted) return;
        if (!isTransient(error)) { setState({ id, messages: null, error }); return; }
        setState((old) => (old.id === id && old.messages ? old : { id, messages: null, error }));
        waitMs = pauseMs(error, failures++);
      }
      timer = setTimeout(read, waitMs);
    };
    read();
    return () => { abort.abort(); clearTimeout(timer); };
  }, [run, id]);
  return state.id === id ? state : { id, messages: null, error: null };
}

/** What a message says, without ids that differ in every rollout. */
function saying(message) {
  return JSON.stringify([message.role, textOf(message.content), reasoningOf(message), callsOf(message).map((call) => [call.name, call.given])]);
}

/**
 * Where two conversations part: {shared, outputs}. `shared`: the messages before the first action (or prompt) that
 * differs. Outputs of tools differ by times and process ids without any consequence: their numbers are in `outputs`,
 * and they count as the place only if all actions are the same.
 */
export function parting(a, b) {
  const outputs = [];
  let at = 0;
  for (; at < a.length && at < b.length; at++) {
    if (saying(a[at]) === saying(b[at])) continue;
    if (a[at].role !== "tool" || b[at].role !== "tool") break;
    outputs.push(at);
  }
  const isSame = at === a.length && at === b.length;
  return { shared: isSame && outputs.length ? outputs[0] : at, outputs: outputs.filter((one) => one < at), isSame: isSame && !outputs.length };
}

/** The place of the first character in which two texts differ. */
export function firstDifference(a, b) {
  const end = Math.min(a.length, b.length);
  let at = 0;
  while (at < end && a.charCodeAt(at) === b.charCodeAt(at)) at++;
  return at;
}

function actionOf(message) {
  if (!message) return "";
  const calls = callsOf(message).map((call) => `${call.name} ${typeof call.given === "string" ? call.given : JSON.stringify(call.given)}`);
  return [reasoningOf(message), textOf(message.content), ...calls].filter(Boolean).join("\n");
}

const none = (isLive) => (isLive ? "It runs and has not got this far." : "It had ended.");

function Action({ message, other, name, isLive }) {
  const text = actionOf(message), at = firstDifference(text, actionOf(other));
  if (!message) return html`<section class="parted"><h3>${name}</h3><p class="empty">${none(isLive)}</p></section>`;
  const from = Math.max(0, at - 200);
  return html`<section class="parted"><h3>${name}</h3>
    <div class="parting" data-at=${at}>${at > 0 && html`<span class="same">${from > 0 ? "…" : ""}<${Plain} text=${text.slice(from, at)} /></span>`}<mark class="different"><${Plain} text=${text.slice(at, at + 600)} /></mark>${text.length > at + 600 ? "…" : ""}</div></section>`;
}

const Plain = ({ text }) => html`<${LongText} text=${text} className="inline" />`;

function Side({ messages, from, turns, name, most, isLive }) {
  const rest = messages.slice(from, from + most);
  return html`<section class="side"><h3>${name}</h3>${rest.map((message, index) => html`<${Message} key=${from + index} message=${message} number=${from + index} turn=${turns[from + index]} mark=${index === 0 ? "first-different" : ""} />`)}
    ${!rest.length && html`<${Empty}>${none(isLive)}<//>`}</section>`;
}

export function Differences({ run, a, b }) {
  const left = useAllMessages(run, a.rollout), right = useAllMessages(run, b.rollout);
  const [most, setMost] = useState(CHUNK);
  const [showsShared, setShared] = useState(false);
  for (const side of [left, right]) if (side.error) return html`<${Problem} error=${side.error} />`;
  if (!left.messages || !right.messages) return html`<${Loading} />`;
  for (const [side, member] of [[left, a], [right, b]]) {
    if (side.messages.length) continue;
    if (side.isAvailable === false) return html`<${Empty}>Member ${member.index} runs on a node that does not send its messages now.<//>`;
    if (side.isLive) return html`<${Empty}>Member ${member.index} has no messages yet: it has not started.<//>`;
    return html`<${Empty}>Member ${member.index} has no messages: it ended before the first, or they were acknowledged or have expired.<//>`;
  }
  const { shared, outputs, isSame } = parting(left.messages, right.messages);
  const turns = [turnsOf(left.messages, left.messageTurns), turnsOf(right.messages, right.messageTurns)];
  const names = [`Member ${a.index}`, `Member ${b.index}`];
  const running = [[left, a], [right, b]].filter(([side]) => side.isLive).map(([, member]) => member.index);
  const follows = running.length > 0 && html`<p class="note live-mark" role="status">Member ${running.join(" and member ")} ${running.length === 1 ? "runs" : "run"}: this follows.</p>`;
  const isCut = left.isCut || right.isCut;
  const cut = isCut && html`<p class="note">Only the first ${count(MOST_MESSAGES)} messages of each are compared.</p>`;
  if (isSame) return html`${follows}${cut}<p>${plural(shared, "message")}: both members said the same${running.length || isCut ? " so far" : ""}.</p>`;
  const isAhead = [left, right].some((side) => side.isLive && side.messages.length === shared);
  const longest = Math.max(left.messages.length, right.messages.length) - shared;
  const turn = turns[0][shared] ?? turns[1][shared];
  return html`<div class="differences" data-shared=${shared}>
    ${follows}${cut}
    <button type="button" class="fold" aria-expanded=${showsShared} onClick=${() => setShared(!showsShared)}>${showsShared ? "Hide" : "Show"} ${plural(shared, "message")} that both share</button>
    ${showsShared && html`<div class="conversation">${left.messages.slice(0, shared).map((message, index) => html`<${Message} key=${index} message=${message} number=${index} turn=${turns[0][index]} mark=${outputs.includes(index) ? "first-different" : ""} />`)}</div>`}
    <h2 class="parting-head">${outputs.includes(shared) ? "Both took the same actions; a tool's output differs" : isAhead ? "The same so far; one is ahead" : "They part"} at ${turn === undefined ? "" : `turn ${turn}, `}message ${shared}</h2>
    ${outputs.length > 0 && outputs[0] < shared && html`<p class="note">Before that, the output of ${plural(outputs.length, "tool call")} differs; both acted the same after it. The first is message ${outputs[0]}.</p>`}
    <div class="two-sides">
      <${Action} name=${names[0]} message=${left.messages[shared]} other=${right.messages[shared]} isLive=${left.isLive} />
      <${Action} name=${names[1]} message=${right.messages[shared]} other=${left.messages[shared]} isLive=${right.isLive} />
    </div>
    <h2>How each went on</h2>
    <div class="two-sides">
      <${Side} name=${names[0]} messages=${left.messages} from=${shared} turns=${turns[0]} most=${most} isLive=${left.isLive} />
      <${Side} name=${names[1]} messages=${right.messages} from=${shared} turns=${turns[1]} most=${most} isLive=${right.isLive} />
    </div>
    ${most < longest && html`<button type="button" onClick=${() => setMost(most + 5 * CHUNK)}>Show more of ${count(longest)} messages</button>`}
  </div>`;
}
