// The data of one rollout: its addresses, its conversation while it runs, and values that several parts derive from it.
import { useEffect, useState } from "../dom.js";
import { get } from "../api.js";
import { isDeeper, jsonText } from "../format.js";

/** The addresses that the rollout view reads. js/views/rollout.js lists them for the exporter. */
export function addressesOf(run, id, group) {
  const base = `/v1/rollouts/${encodeURIComponent(id)}`;
  return {
    record: [base, { run }],
    trajectory: [base, { include: "trajectory", run }],
    timeline: [`${base}/timeline`, { run }],
    texts: [`${base}/texts`, { run }],
    requests: [`${base}/requests`, { run }],
    artifacts: [`${base}/artifacts`, { run }],
    messages: [`${base}/messages`, { run }],
    group: group ? [`/v1/groups/${encodeURIComponent(group)}`, { run }] : [null, {}],
  };
}

/** Which conversation a reply of GET …/messages is of: pages of two conversations do not belong together. */
export const conversationOf = (reply) => `${reply.attempt} ${reply.conversation ?? 0}`;

/**
 * The pages of a conversation so far: {messages, messageTurns, add}. `add` takes the next reply, and the name of the
 * conversation that it is of. It returns false if that is another one than before: read it again from its start.
 */
export function newPages() {
  let shown = null;
  const pages = { messages: [], messageTurns: [] };
  pages.add = (reply, name) => {
    const isOther = name !== shown && pages.messages.length > 0; // this page began in the middle of the other one
    shown = name;
    if (isOther) [pages.messages, pages.messageTurns] = [[], []];
    else if (reply.messages.length) {
      pages.messages = [...pages.messages, ...reply.messages];
      pages.messageTurns = [...pages.messageTurns, ...(reply.message_turns || [])];
    }
    return !isOther;
  };
  return pages;
}

/**
 * The conversation of a rollout that runs, read every second from where the last reply ended. It starts again with a new
 * attempt, and when another conversation of an agent program is now the longest. Returns {messages,
 * messageTurns, attempt, turns, sampled_tokens, isAvailable}; `isAvailable` false: it runs on a node that does not send them.
 */
export function useLiveMessages([path, query], isLive) {
  const [state, setState] = useState({ messages: [], messageTurns: [], attempt: 0, turns: 0, sampled_tokens: 0, isAvailable: true, isLoaded: false });
  useEffect(() => {
    if (!isLive) return undefined;
    const abort = new AbortController();
    const pages = newPages();
    let timer = 0;
    const read = async () => {
      let waitMs = 1000;
      try {
        const reply = await get(path, { after: pages.messages.length, ...query }, abort.signal);
        if (reply.available && !pages.add(reply, conversationOf(reply))) {
          timer = setTimeout(read, 1);
          return;
        }
        if (reply.messages.length) waitMs = 50;
        const { messages, messageTurns } = pages;
        setState({ messages, messageTurns, attempt: reply.attempt, turns: reply.turns, sampled_tokens: reply.sampled_tokens, isAvailable: reply.available, isLoaded: true });
      } catch (error) {
        if (abort.signal.aborted) return;
        if (error.status === 404) return;
        waitMs = error.retryAfterMs || 2000;
      }
      timer = setTimeout(read, document.hidden ? Math.max(waitMs, 5000) : waitMs);
    };
    read();
    return () => { abort.abort(); clearTimeout(timer); };
  }, [path, isLive]);
  return state;
}

/** The text of a message's content: a string, or a list of parts of which only texts are shown. */
export function textOf(content) {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (!Array.isArray(content)) return jsonText(content);
  return content.map((part) => {
    if (typeof part === "string") return part;
    if (part && typeof part.text === "string") return part.text;
    return `[${part && part.type ? part.type : "part"}]`;
  }).join("\n");
}

const MOST_LEVELS = 100; // of arguments; deeper ones are shown as the text that they are

/** The tool calls of a message: [{id, name, given}], where `given` is an object, or a text that is shown as it is. */
export function callsOf(message) {
  if (!Array.isArray(message.tool_calls)) return [];
  return message.tool_calls.map((call) => {
    const inner = (call && call.function) || call || {};
    let given = inner.arguments;
    if (typeof given === "string") {
      try {
        const parsed = JSON.parse(given);
        if (parsed && typeof parsed === "object" && !Array.isArray(parsed) && !isDeeper(parsed, MOST_LEVELS)) given = parsed;
      } catch { /* shown as the text that it is */ }
    }
    if (isDeeper(given, MOST_LEVELS)) given = jsonText(given);
    return { id: String((call && call.id) || ""), name: String(inner.name || "?"), given: given === undefined || given === null ? {} : given };
  });
}

export function reasoningOf(message) {
  return textOf(message.reasoning_content ?? message.reasoning ?? "");
}

/** The command of a shell call, or null. */
export function commandOf(call) {
  const given = call.given;
  if (typeof given !== "object") return null;
  for (const name of ["command", "cmd", "script", "code"]) {
    if (typeof given[name] === "string") return given[name];
    if (Array.isArray(given[name]) && given[name].every((part) => typeof part === "string")) return given[name].join(" ");
  }
  return null;
}

/**
 * The turn (from 0) of each message: the number of the model call that sampled it or, of other messages, that read it.
 * `known`: the turn of each that was sampled in this rollout, null for the others. A conversation need not have all turns
 * of its rollout, and an assistant's message may have been given. Without `known`, the assistant's messages are counted.
 */
export function turnsOf(messages, known) {
  const isKnown = Array.isArray(known) && known.length === messages.length && known.every((turn) => turn === null || Number.isInteger(turn));
  if (!isKnown) {
    let turn = 0;
    return messages.map((message) => (message.role === "assistant" ? turn++ : turn));
  }
  let next = known.reduce((most, turn) => (turn === null ? most : Math.max(most, turn)), -1) + 1;
  const turns = new Array(known.length);
  for (let at = known.length - 1; at >= 0; at--) {
    if (known[at] !== null) next = known[at];
    turns[at] = known[at] === null && messages[at].role === "assistant" ? undefined : next;
  }
  return turns;
}

export const memberOf = (group, index) => group?.members.find((one) => one.index === index);

/**
 * The advantage of a member of a group: {value, why}. The value is (reward − mean) / spread of the members that are
 * trained on, 0 without a spread; null with the reason if it has none.
 */
export function advantageOf(group, member) {
  const none = (why) => ({ value: null, why });
  if (!group || !group.stats || group.state === "open") return none("Its group is not complete yet.");
  const { mean, spread } = group.stats;
  if (!member || typeof member.reward !== "number") return none("It has no reward.");
  if (!member.is_member) return none("Its group does not count it.");
  if (!member.trainable || typeof mean !== "number") return none("It is not trained on.");
  return { value: spread ? (member.reward - mean) / spread : 0, why: "" };
}

/** The traces' spans by turn: turn → {trace, span} of the trace that owns it. */
export function spansByTurn(traces) {
  const found = new Map();
  traces.forEach((trace, index) => trace.spans.forEach((span, at) => { if (span.is_owned) found.set(span.turn, { trace: index, at, span }); }));
  return found;
}
