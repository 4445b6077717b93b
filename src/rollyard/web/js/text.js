// Untrusted text, shown as text.
//
// What agents and tools wrote may contain terminal escapes, control characters, characters that change the direction of
// text, and lines of megabytes. Escapes of colours become classes; other escapes are dropped; invisible characters are
// shown as their names; long texts are folded. Nothing here becomes markup.
import { html, useMemo, useState } from "./dom.js";
import { bytes } from "./format.js";

const FOLD_CHARACTERS = 4000;
const FOLD_LINES = 40;
const CHUNK_CHARACTERS = 200_000; // shown per click: more would stall the page
const CHUNK_LINES = 2000;
const CHUNK_PARTS = 2000; // colours and invisible characters: each is an element of its own

const NAMES = new Map([["\u2028", "LS"], ["\u2029", "PS"], ["\u200b", "ZWSP"], ["\u200c", "ZWNJ"], ["\u200d", "ZWJ"],
  ["\u2060", "WJ"], ["\ufeff", "BOM"], ["\u00ad", "SHY"], ["\u034f", "CGJ"], ["\u180e", "MVS"], ["\u061c", "ALM"],
  ["\u200e", "LRM"], ["\u200f", "RLM"], ["\u202a", "LRE"], ["\u202b", "RLE"], ["\u202c", "PDF"], ["\u202d", "LRO"],
  ["\u202e", "RLO"], ["\u2066", "LRI"], ["\u2067", "RLI"], ["\u2068", "FSI"], ["\u2069", "PDI"]]);

// Controls, separators, half surrogate pairs, and all that Unicode says may be shown as nothing: zero width, directions,
// soft hyphens, fillers, variation selectors, tags. Those that emoji need (pictures, keycaps, joined ones) stay.
const INVISIBLE = new RegExp(
  String.raw`(?!(?<=\p{Extended_Pictographic})\ufe0f|(?<=[#*0-9])\ufe0f(?=\u20e3)|(?<=\p{Extended_Pictographic}[\ufe0f\u{1f3fb}-\u{1f3ff}]?)\u200d(?=\p{Extended_Pictographic}))` +
  String.raw`[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\ufff9-\ufffb\u{13430}-\u{1343f}\ud800-\udfff\p{Noncharacter_Code_Point}\p{Default_Ignorable_Code_Point}]`, "u");
const ALL_INVISIBLE = new RegExp(INVISIBLE.source, "gu");

/** The name of an invisible character. A tag's is the character that it stands for. */
function nameOf(character) {
  const number = character.codePointAt(0);
  if (NAMES.has(character)) return NAMES.get(character);
  if (number < 32) return String.fromCodePoint(0x2400 + number);
  if (number >= 0xfe00 && number <= 0xfe0f) return `VS${number - 0xfe00 + 1}`;
  if (number >= 0xe0100 && number <= 0xe01ef) return `VS${number - 0xe0100 + 17}`;
  if (number > 0xe0020 && number < 0xe007f) return `TAG ${String.fromCharCode(number - 0xe0000)}`;
  return `U+${number.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Splits a text into plain parts and names of invisible characters: [{text} | {name}]. */
export function visible(text) {
  if (!INVISIBLE.test(text)) return [{ text }];
  const given = text.replace(/\r+\n/g, "\n"), parts = [];
  let last = 0;
  for (const found of given.matchAll(ALL_INVISIBLE)) {
    if (found.index > last) parts.push({ text: given.slice(last, found.index) });
    parts.push({ name: nameOf(found[0]) });
    last = found.index + found[0].length;
  }
  if (last < given.length) parts.push({ text: given.slice(last) });
  return parts;
}

export function Visible({ text }) {
  const parts = visible(text);
  if (parts.length === 1 && parts[0].text !== undefined) return parts[0].text;
  return parts.map((part) => (part.name ? html`<span class="invisible" title="an invisible character">${part.name}</span>` : part.text));
}

// CSI … final byte | OSC, DCS, SOS, PM, APC … until ST or BEL | other two-byte escapes | C1 forms of CSI
// A string escape without its end is a two-byte escape: otherwise an agent could hide the rest of its output.
const ESCAPE = /\u001b\[([0-?]*)[ -/]*([@-~])|\u001b[\]PX^_][^\u0007\u001b]{0,4096}(?:\u0007|\u001b\\)|\u001b[ -/]*[0-~]?|\u009b([0-?]*)[ -/]*([@-~])/g;

/** A terminal's output whose carriage returns are line breaks: every state of a progress bar has its own line. */
const lines = (text) => (text.includes("\r") ? text.replace(/\r+\n?/g, "\n") : text);

/** Splits a terminal's output into parts with classes for colours: [{text, classes}]. All other escapes are dropped. */
export function terminal(text) {
  if (!text.includes("\u001b") && !text.includes("\u009b")) return [{ text, classes: "" }];
  const parts = [];
  let style = { fg: "", bg: "", bold: false, dim: false, italic: false, underline: false };
  let last = 0;
  const add = (piece) => { if (piece) parts.push({ text: piece, classes: classesOf(style) }); };
  for (const found of text.matchAll(ESCAPE)) {
    add(text.slice(last, found.index));
    last = found.index + found[0].length;
    if ((found[2] || found[4]) === "m") style = styled(style, found[1] ?? found[3] ?? "");
  }
  add(text.slice(last));
  return parts;
}

function styled(style, codes) {
  const next = { ...style };
  const numbers = codes.split(/[;:]/).map(Number);
  for (let index = 0; index < numbers.length; index++) {
    const code = numbers[index] || 0;
    if (code === 0) Object.assign(next, { fg: "", bg: "", bold: false, dim: false, italic: false, underline: false });
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 22) next.bold = next.dim = false;
    else if (code === 23) next.italic = false;
    else if (code === 24) next.underline = false;
    else if (code === 38 || code === 48) {
      const isPalette = numbers[index + 1] === 5;
      const rest = numbers.slice(index + 2, index + (isPalette ? 3 : 5));
      next[code === 38 ? "fg" : "bg"] = isPalette ? ofPalette(rest[0]) : nearest(...rest);
      index += isPalette ? 2 : 4;
    }
    else if (code === 39) next.fg = "";
    else if (code === 49) next.bg = "";
    else if (code >= 30 && code <= 37) next.fg = String(code - 30);
    else if (code >= 90 && code <= 97) next.fg = String(code - 90);
    else if (code >= 40 && code <= 47) next.bg = String(code - 40);
    else if (code >= 100 && code <= 107) next.bg = String(code - 100);
  }
  return next;
}

/** The one of the eight colours of a terminal that is nearest: those are readable in both themes. "" for no colour. */
function nearest(red, green, blue) {
  const parts = [red, green, blue];
  if (!parts.every((part) => part >= 0 && part <= 255)) return "";
  const [least, most] = [Math.min(...parts), Math.max(...parts)];
  if (most - least < 32) return ""; // a grey: shown as other text is
  return String(parts.reduce((sum, part, bit) => sum + (part > (least + most) / 2 ? 1 << bit : 0), 0));
}

/** A number of the palette of 256: 16 named colours, a cube of 6 × 6 × 6, and 24 greys. */
function ofPalette(number) {
  if (number < 16) return String(number % 8);
  if (!(number < 232)) return "";
  const level = (step) => (step ? 55 + 40 * step : 0);
  const place = number - 16;
  return nearest(level(Math.floor(place / 36)), level(Math.floor(place / 6) % 6), level(place % 6));
}

function classesOf(style) {
  const names = [];
  if (style.fg) names.push(`fg${style.fg}`);
  if (style.bg) names.push(`bg${style.bg}`);
  for (const name of ["bold", "dim", "italic", "underline"]) if (style[name]) names.push(name);
  return names.join(" ");
}

const SPECIAL = new RegExp(`\u001b|\u009b|${INVISIBLE.source}`, "gu");

/** The end of a chunk: at a number of lines, characters or special characters, and never inside a surrogate pair. */
export function cut(text, from, characters, lines) {
  let end = Math.min(text.length, from + characters);
  for (let line = 0, at = from; line < lines; line++) {
    const next = text.indexOf("\n", at);
    if (next < 0 || next >= end) break;
    at = next + 1;
    if (line === lines - 1) end = at;
  }
  let parts = 0;
  for (const found of text.slice(from, end).matchAll(SPECIAL)) {
    if (++parts === CHUNK_PARTS) { end = from + found.index + 1; break; }
  }
  const code = text.charCodeAt(end - 1);
  return code >= 0xd800 && code < 0xdc00 && end < text.length ? end - 1 : end;
}

/** Where a text is folded. A short rest is not worth a button. */
function folded(text) {
  const end = cut(text, 0, FOLD_CHARACTERS, FOLD_LINES);
  return cut(text, end, FOLD_CHARACTERS / 8, FOLD_LINES / 8) === text.length ? text.length : end;
}

/** A long text of an agent or a tool. `ansi`: colours of a terminal are shown. */
export function LongText({ text, ansi = false, className = "" }) {
  const given = typeof text === "string" ? text : String(text ?? "");
  const value = useMemo(() => (ansi ? lines(given) : given), [given, ansi]);
  const first = useMemo(() => folded(value), [value]);
  const [end, setEnd] = useState(null);
  const shown = end === null ? first : Math.min(Math.max(end, first), value.length);
  const body = value.slice(0, shown);
  const parts = ansi ? terminal(body) : [{ text: body, classes: "" }];
  const rest = value.length - shown;
  return html`<div class="long-text ${className}">
    <pre tabindex="0" dir="ltr">${parts.map((part) => (part.classes ? html`<span class=${part.classes}><${Visible} text=${part.text} /></span>` : html`<${Visible} text=${part.text} />`))}</pre>
    ${rest > 0 && html`<button type="button" class="fold" onClick=${() => setEnd(cut(value, shown, CHUNK_CHARACTERS, CHUNK_LINES))}>Show more (${bytes(rest)} left)</button>`}
    ${rest === 0 && end !== null && html`<button type="button" class="fold" onClick=${() => setEnd(null)}>Show less</button>`}
  </div>`;
}
