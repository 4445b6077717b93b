// The shell session of a rollout: each call with its output and its times.
//
// Times are those of the timeline's calls of the same turn. The tools of an agent program run inside it: its calls begin
// when the model call that wrote them ended, and end when the conversation's next one started.
import { callsOf, textOf } from "./data.js";

const STEP_S = 1; // between calls if there are no times on both sides
const MOST_NAME_CHARACTERS = 100; // of a call in the log

/** The one closed ```bash block of a message, as a call of the shell: a list of one or none. One pass, as text is hostile. */
function blockOf(message) {
  const text = textOf(message.content), opening = /^```bash[^\S\n]*$/gm, closing = /^```[^\S\n]*$/gm, blocks = [];
  for (let open = opening.exec(text); open && blocks.length < 2; open = opening.exec(text)) {
    closing.lastIndex = opening.lastIndex;
    const close = closing.exec(text);
    if (!close) break;
    blocks.push(text.slice(opening.lastIndex + 1, close.index).replace(/\n$/, ""));
    opening.lastIndex = closing.lastIndex;
  }
  return blocks.length === 1 ? [{ id: "", name: "shell", given: { command: blocks[0] } }] : [];
}

/** Whether this agent may call the shell in a block of text, which the next user message answers. */
function mayUseBlocks(task) {
  const { name, options } = (task && task.agent) || {};
  return name && name !== "native" ? true : Boolean(options && options.format === "bash_block");
}

/** The calls of a message, each with its output: [{call, output}]. `replies`: the messages up to the next turn. */
function answered(message, replies, mayBeBlock) {
  const calls = callsOf(message);
  if (!calls.length && mayBeBlock) {
    const output = replies.find((reply) => reply.role === "user");
    return output ? blockOf(message).map((call) => ({ call, output })) : [];
  }
  const tools = replies.filter((reply) => reply.role === "tool"), unnamed = tools.filter((reply) => !reply.tool_call_id);
  return calls.map((call) => ({ call, output: tools.find((reply) => reply.tool_call_id && String(reply.tool_call_id) === call.id) || unnamed.shift() || null }));
}

/**
 * The part of each call of a turn, or null: a call that was refused (an unknown tool, wrong arguments) never ran. If the
 * log lacks the beginning of the turn, its parts are those of the last calls.
 */
function partsOf(calls, parts, isCutInFront) {
  const found = new Array(calls.length).fill(null), left = [...parts], order = [...calls.keys()];
  if (isCutInFront) { order.reverse(); left.reverse(); }
  for (const index of order) {
    const at = left.findIndex((part) => part.name === calls[index].call.name.slice(0, MOST_NAME_CHARACTERS));
    if (at >= 0) found[index] = left.splice(0, at + 1)[at];
  }
  return found;
}

/**
 * Returns {events, untimed}. An event is {call, output, from_s, to_s, took_s, isRunning}; the first begins at 0.
 * `untimed`: how many have no time of their own (the log keeps the first and the last calls of a long rollout): they are
 * spread over the time between the others. `turns`: of each message, from turnsOf.
 */
export function sessionOf(messages, turns, timeline, task) {
  const attempt = timeline && timeline.attempts.length ? timeline.attempts[timeline.attempts.length - 1] : null;
  const isLive = Boolean(timeline) && timeline.state !== "ended", mayBeBlock = mayUseBlocks(task);
  const models = new Map(), tools = new Map();
  for (const part of attempt ? attempt.parts : []) {
    if (part.kind === "model" && !(models.has(part.turn) && part.is_error)) models.set(part.turn, part);
    if (part.kind === "tool") tools.set(part.turn, [...(tools.get(part.turn) || []), part]);
  }
  const spoken = [...messages.keys()].filter((at) => messages[at].role === "assistant"), events = [];
  spoken.forEach((at, index) => {
    const following = spoken[index + 1], model = models.get(turns[at]), next = models.get(turns[following]);
    const calls = answered(messages[at], messages.slice(at + 1, following ?? messages.length), mayBeBlock);
    const logged = tools.get(turns[at]) || [], parts = partsOf(calls, logged, timeline && timeline.dropped_calls > 0 && !model);
    calls.forEach(({ call, output }, number) => {
      const part = parts[number];
      if (!output && !part && (logged.length || (tools.size && !isLive))) return; // it has not run: another one ended the turn, or runs
      const isSpread = !part && parts.some(Boolean); // between the others of its turn
      const from_s = part ? part.start_s : isSpread || !model ? null : model.end_s;
      const to_s = part ? part.end_s : isSpread || !next ? null : next.start_s;
      events.push({ call, output, from_s, to_s, isRunning: isLive && !output && following === undefined });
    });
  });
  const untimed = events.filter((event) => typeof event.from_s !== "number").length;
  return { events: timed(events), untimed };
}

/** The events with a time each, in order. */
function timed(events) {
  const nextKnown = new Array(events.length);
  for (let at = events.length - 1, known = -1; at >= 0; at--) {
    nextKnown[at] = known;
    if (typeof events[at].from_s === "number") known = at;
  }
  let last_s = null, after_s = null, origin_s = 0; // the last start, and the end of all so far
  return events.map((event, at) => {
    const known = nextKnown[at], isKnown = typeof event.from_s === "number";
    let from_s = event.from_s;
    if (!isKnown && after_s === null) from_s = known < 0 ? 0 : events[known].from_s - STEP_S * (known - at);
    else if (!isKnown) from_s = after_s + (known < 0 ? STEP_S : Math.max(0, events[known].from_s - after_s) / (known - at + 1));
    if (last_s === null) origin_s = from_s;
    else from_s = Math.max(from_s, last_s);
    const to_s = Math.max(from_s, event.to_s ?? from_s);
    last_s = from_s;
    after_s = Math.max(after_s ?? to_s, to_s);
    const took_s = isKnown && typeof event.to_s === "number" ? to_s - from_s : null;
    return { ...event, from_s: from_s - origin_s, to_s: to_s - origin_s, took_s };
  });
}

/** The same session with waits of at most `most_s`. What each call took is unchanged. */
export function shortened(events, most_s) {
  const moments = [...new Set(events.flatMap((event) => [event.from_s, event.to_s]))].sort((a, b) => a - b);
  const moved = new Map();
  let at_s = 0, last_s = moments[0];
  for (const moment_s of moments) {
    at_s += Math.min(moment_s - last_s, most_s);
    moved.set(moment_s, at_s);
    last_s = moment_s;
  }
  return events.map((event) => ({ ...event, from_s: moved.get(event.from_s), to_s: moved.get(event.to_s) }));
}
