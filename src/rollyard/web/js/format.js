// Numbers, times and names as texts.

export const NONE = "–";

/** A table for untrusted keys: without a prototype, "constructor" and "__proto__" are not found in it. */
export const table = (entries) => Object.assign(Object.create(null), entries);

export function count(value) {
  if (value === null || value === undefined) return NONE;
  return Math.round(value).toLocaleString("en-US");
}

/** A short number: 950, 12.3k, 4.56M. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trimmed(value / 1e9)}G`;
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)}k`;
  return size >= 100 || Number.isInteger(value) ? count(value) : trimmed(value);
}

const trimmed = (value) => String(Number(value.toPrecision(3)));

export function reward(value) {
  if (value === null || value === undefined) return NONE;
  return Number.isInteger(value) ? value.toFixed(1) : String(Number(value.toFixed(4)));
}

export function percent(value, digits = 0) {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(digits)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)} s`;
  const minutes = Math.floor(Math.round(value) / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value) % 60} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1024) return `${value} B`;
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${trimmed(value / 1024 ** power)} ${["", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** A time of the service (seconds since 1970) as local date and time. */
export function time(value) {
  if (!value) return NONE;
  const date = new Date(1000 * value);
  const two = (number) => String(number).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function ago(value) {
  if (!value) return NONE;
  const past = Date.now() / 1000 - value;
  return past < 1 ? "now" : `${seconds(Math.floor(past))} ago`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

const MOST_INDENTED = 12; // levels: the spaces before deeper lines would be longer than the value

/** Whether a value is nested deeper than `most` levels. */
export function isDeeper(value, most) {
  let level = [value];
  for (let depth = 0; level.length; depth++) {
    if (depth > most) return true;
    level = level.flatMap((one) => (one && typeof one === "object" ? Object.values(one) : []));
  }
  return false;
}

/** A value as JSON for people to read. */
export function jsonText(value) {
  try {
    return JSON.stringify(value, null, isDeeper(value, MOST_INDENTED) ? 0 : 2) ?? "";
  } catch {
    return "(nested too deeply to show)";
  }
}
