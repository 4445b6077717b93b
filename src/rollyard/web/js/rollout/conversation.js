// The conversation: messages with reasoning, tool calls and outputs, whole but folded when long.
//
// In a long one, messages off the screen cost no layout (content-visibility in css/rollout.css), so hundreds are shown at
// once and the browser's own search finds text in all of them.
import { html, useLayoutEffect, useMemo, useRef, useState } from "../dom.js";
import { count, jsonText, plural, short, table } from "../format.js";
import { href, place, setQuery } from "../router.js";
import { LongText, Visible } from "../text.js";
import { Empty } from "../ui.js";
import { callsOf, commandOf, reasoningOf, textOf, turnsOf } from "./data.js";

const CHUNK_MESSAGES = 500; // shown before "Show more"
const FEW_MESSAGES = 60; // laid out at once
const MOST_ARGUMENTS = 40; // fields of one call; the others are shown as one JSON text
const NEAR_END_PX = 80; // a reader this close to the end follows a conversation that grows

function Argument({ name, value }) {
  const text = useMemo(() => (typeof value === "string" ? value : jsonText(value)), [value]);
  const isShort = text.length <= 100 && !text.includes("\n");
  return html`<div class="argument ${isShort ? "short" : ""}"><dt><${Visible} text=${name} /></dt><dd><${LongText} text=${text} /></dd></div>`;
}

/** A tool call with its arguments: a command as a terminal shows it, other arguments by name. */
export function Call({ call }) {
  const command = commandOf(call);
  const given = typeof call.given === "object" ? Object.entries(call.given) : null;
  const others = given && command !== null ? given.filter(([, value]) => value !== command && !Array.isArray(value)) : given;
  return html`<div class="call">
    <div class="call-name"><span class="call-mark" aria-hidden="true">→</span> <b><${Visible} text=${call.name} /></b></div>
    ${command !== null && html`<div class="command"><${LongText} text=${command} /></div>`}
    ${others && others.length > 0 && html`<dl class="arguments">${others.slice(0, MOST_ARGUMENTS).map(([name, value]) => html`<${Argument} name=${name} value=${value} />`)}</dl>`}
    ${others && others.length > MOST_ARGUMENTS && html`<${LongText} text=${JSON.stringify(Object.fromEntries(others.slice(MOST_ARGUMENTS)))} />`}
    ${!given && html`<${LongText} text=${String(call.given)} />`}
  </div>`;
}

const ROLES = table({ system: "System", developer: "Developer", user: "User", assistant: "Assistant", tool: "Tool" });

export function Message({ message, number, turn, mark = "", id }) {
  const role = String(message.role || "?");
  const text = useMemo(() => textOf(message.content), [message]);
  const reasoning = useMemo(() => reasoningOf(message), [message]);
  const calls = useMemo(() => callsOf(message), [message]);
  const known = ROLES[role] ? role : "other";
  return html`<article class="message ${known} ${mark}" id=${id} tabindex="-1">
    <header><h3><${Visible} text=${ROLES[role] || role} />${role === "tool" && message.name ? html` <span class="note"><${Visible} text=${String(message.name)} /></span>` : ""}</h3>
      <span class="note">${turn !== undefined && `turn ${turn}`}${number !== undefined && html` · <a href=${href(place.value.path, { ...place.value.query, message: number })} onClick=${(event) => jump(event, number)}>#${number}</a>`}</span></header>
    ${reasoning && html`<${Reasoning} text=${reasoning} />`}
    ${text && html`<div class="body"><${LongText} text=${text} ansi=${role === "tool"} /></div>`}
    ${calls.map((call) => html`<${Call} call=${call} />`)}
    ${!text && !reasoning && !calls.length && html`<p class="empty">Empty.</p>`}
  </article>`;
}

/** Makes this message a part of the address, so that a copied link leads to it. */
function jump(event, number) {
  if (event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  event.currentTarget.closest("article").focus();
  setQuery({ message: number }, { replace: true });
}

/** Reasoning is rendered when it is opened: it is often longer than the reply. */
function Reasoning({ text }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="reasoning" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Reasoning <span class="note">${short(text.length)} characters</span></summary>
    ${isOpen && html`<${LongText} text=${text} />`}
  </details>`;
}

/** `messages` may grow while the rollout runs. Messages that have been rendered are not rendered again. */
export function Conversation({ messages, messageTurns, isLive }) {
  const [most, setMost] = useState(() => Math.max(CHUNK_MESSAGES, anchored() + 1));
  const rendered = useRef(new WeakMap());
  const turns = useMemo(() => turnsOf(messages, messageTurns), [messages, messageTurns]);
  const wasNearEnd = useRef(false);
  const root = document.documentElement;
  wasNearEnd.current = isLive && root.scrollHeight - root.clientHeight - root.scrollTop < NEAR_END_PX && root.scrollTop > 0;
  useLayoutEffect(() => {
    if (wasNearEnd.current) root.scrollTop = root.scrollHeight;
  }, [messages.length]);
  useLayoutEffect(() => {
    const target = messages.length && place.value.query.message ? document.getElementById(`message-${anchored()}`) : null;
    if (target) { target.scrollIntoView(); target.focus({ preventScroll: true }); }
  }, [messages.length > 0]);
  if (!messages.length) return html`<${Empty}>${isLive ? "No message yet." : "No messages were stored."}<//>`;
  const nodes = messages.slice(0, most).map((message, index) => {
    let node = rendered.current.get(message);
    if (!node) {
      node = html`<${Message} key=${index} message=${message} number=${index} turn=${turns[index]} id=${`message-${index}`} />`;
      rendered.current.set(message, node);
    }
    return node;
  });
  return html`<div class="conversation ${nodes.length > FEW_MESSAGES ? "many" : ""}" data-messages=${nodes.length} aria-busy=${isLive ? "true" : undefined}>${nodes}</div>
    ${most < messages.length && html`<button type="button" onClick=${() => setMost(most + CHUNK_MESSAGES)}>Show ${plural(Math.min(CHUNK_MESSAGES, messages.length - most), "more message", "more messages")} of ${count(messages.length)}</button>`}
    ${isLive && html`<p class="note live-mark" role="status"><span class="pulse" aria-hidden="true"></span> running, ${plural(messages.length, "message")}</p>`}`;
}

/** The message that the address names. */
const anchored = () => (/^\d{1,6}$/.test(place.value.query.message || "") ? Number(place.value.query.message) : 0);
