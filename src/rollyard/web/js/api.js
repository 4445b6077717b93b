// Calls of the service's API, and polled data for views.
//
// Every call sends the page's key in the header x-rollyard-page: the service accepts the cookie only with the key of the
// same sign-in. Browsers send the cookie to every port of the host; the key stays with this origin. An exported file
// has the replies of the API in itself (`recorded`): an address, with the parameters of its query in alphabetical order,
// gives [status, body].
import { signal, useEffect, useRef, useState } from "./dom.js";
import { isOffline } from "./router.js";

export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `HTTP ${status}`);
    this.status = status;
    this.code = problem.code || "";
    this.remedy = problem.remedy || "";
    this.problem = problem;
  }
}

/** "ok", or "lost" while the service does not answer. */
export const connection = signal("ok");

/** Who is signed in: undefined (not known yet), null (signed out), or {access, name, runs, expires_at}. */
export const caller = signal(undefined);

/** Why the last sign-in ended: an ApiError, or null. Shown on the sign-in page. */
export const lastRefusal = signal(null);

const REPLY_MS = 30_000; // a connection whose other end is gone may never report it (a tunnel, after the machine slept)
const LARGE_REPLY_MS = 180_000; // for a trajectory, over a slow connection
const KEY = "rollyard-page-key";
let ownKey = ""; // where the browser keeps nothing

/** All tabs share the cookie, so they share its key: it is read again for each call. */
function pageKey() {
  try { return localStorage.getItem(KEY) || ownKey; } catch { return ownKey; }
}

function keepPageKey(key) {
  ownKey = key;
  try {
    if (key) localStorage.setItem(KEY, key);
    else localStorage.removeItem(KEY);
  } catch { /* this tab has it */ }
}

if (!isOffline) { // another tab has signed in or out: this one may show what only the former caller could read
  addEventListener("storage", (event) => { if (event.key === KEY && caller.value !== undefined) location.reload(); });
}

const recorded = isOffline ? JSON.parse(document.getElementById("recorded").textContent) : null;

export function address(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(kept).toString();
  return path + (search ? `?${search}` : "");
}

function replay(method, path, query = {}) {
  const url = address(path, Object.fromEntries(Object.entries(query).sort(([a], [b]) => (a < b ? -1 : 1))));
  if (method !== "GET" || !Object.hasOwn(recorded, url)) throw new ApiError(404, { code: "not_exported", detail: "This exported file does not contain it." });
  const [status, body] = recorded[url];
  if (status >= 400) throw new ApiError(status, body);
  return body;
}

/** A signal that aborts with `abort`, or when the time is over. `end` must be called. */
function limited(abort, ms) {
  const own = new AbortController(), stop = () => own.abort();
  const timer = setTimeout(stop, ms);
  if (abort?.aborted) stop();
  abort?.addEventListener("abort", stop);
  return { signal: own.signal, end: () => { clearTimeout(timer); abort?.removeEventListener("abort", stop); } };
}

async function call(method, path, { query, body, abort } = {}) {
  if (isOffline) return replay(method, path, query);
  const url = address(path, query);
  const headers = { accept: "application/json", "x-rollyard-page": pageKey() || "none" };
  if (body !== undefined) headers["content-type"] = "application/json";
  let response, text;
  const limit = method === "GET" ? limited(abort, query?.include === "trajectory" || path.endsWith("/texts") ? LARGE_REPLY_MS : REPLY_MS) : null;
  try {
    response = await fetch(url, {
      method, headers, body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin", redirect: "error", signal: limit ? limit.signal : abort, cache: "no-store",
    });
    text = await response.text();
  } catch (error) {
    if (!abort?.aborted) connection.value = "lost";
    throw error;
  } finally {
    limit?.end();
  }
  connection.value = "ok";
  let data = null;
  try { data = text ? JSON.parse(text) : null; } catch { data = { detail: text.slice(0, 500) }; }
  if (response.ok) return data;
  const error = new ApiError(response.status, data || {});
  error.retryAfterMs = 1000 * Number(response.headers.get("retry-after") || 0);
  if (response.status === 401) {
    lastRefusal.value = error;
    caller.value = null;
  }
  throw error;
}

/** Signs in with {code} or {token}. */
export async function signIn(body) {
  const { page_key: key, ...who } = await call("POST", "/v1/login", { body });
  keepPageKey(key);
  caller.value = who;
  lastRefusal.value = null;
}

/** Shows the sign-in page with the reason. */
export function refuse(error) {
  lastRefusal.value = error;
  caller.value = null;
}

/** Signs out. If the service does not answer, the sign-in stays there until it expires; this page has lost its key. */
export async function signOut() {
  try { await call("DELETE", "/v1/login"); } catch { /* it had ended already, or the service is away */ }
  keepPageKey("");
  lastRefusal.value = null;
  caller.value = null;
}

export const get = (path, query, abort) => call("GET", path, { query, abort });
export const post = (path, body = {}) => call("POST", path, { body });
export const del = (path) => call("DELETE", path);

/** The bytes of a file, such as an artifact. */
export async function getBytes(path, query) {
  if (isOffline) throw new ApiError(404, { code: "not_exported", detail: "This exported file does not contain it." });
  const headers = { "x-rollyard-page": pageKey() || "none" };
  const response = await fetch(address(path, query), { headers, credentials: "same-origin", redirect: "error", cache: "no-store" });
  if (response.ok) return response.arrayBuffer();
  throw new ApiError(response.status, await response.json().catch(() => ({})));
}

/** Whether a call or the loading of a script may succeed if it is repeated. */
export const isTransient = (error) => !(error instanceof ApiError) || error.status === 429 || error.status >= 500;

/** The pause before the next try, after so many `failures` before this one: what the service asks for, or 1, 2, 4, 5 s. */
export const pauseMs = (error, failures) => error.retryAfterMs || Math.min(5000, 1000 * 2 ** failures);

/** The most pages that a view reads of one list. */
const MOST_PAGES = 20;

/** A reply and the pages after it, as one: their items of `list` together. `next` stays if there are more pages. */
async function pagesOf(path, query, list, signal) {
  const data = await get(path, query, signal);
  for (let page = 1; data.next && page < MOST_PAGES; page += 1) {
    const more = await get(path, { ...query, after: data.next }, signal);
    data[list].push(...more[list]);
    data.next = more.next;
  }
  return data;
}

/**
 * Data that is read again every `everyMs` while the page is visible (0: once). Returns {data, error, isLoading, refresh}.
 *
 * After an error that may pass, the old data stays and the call is repeated after 1, 2, 4, then every 5 s; other errors
 * are returned and not repeated. `path` null: nothing is read. `list`: the name of a list of which all pages are read.
 */
export function usePolled(path, query = {}, { everyMs: interval = 2000, list = "" } = {}) {
  const everyMs = isOffline ? 0 : interval;
  const key = path === null ? null : address(path, query);
  const [state, setState] = useState({ key, data: undefined, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    setState((old) => (old.key === key ? old : { key, data: undefined, error: null }));
    if (key === null) return undefined;
    const abort = new AbortController();
    let timer = 0, failures = 0, isBusy = false;
    const read = async () => {
      clearTimeout(timer);
      if (isBusy) return;
      isBusy = true;
      let wait = everyMs;
      try {
        const data = await (list ? pagesOf(path, query, list, abort.signal) : get(path, query, abort.signal));
        failures = 0;
        setState({ key, data, error: null });
      } catch (error) {
        if (abort.signal.aborted) return;
        if (isTransient(error)) wait = pauseMs(error, failures++);
        else wait = 0;
        setState((old) => ({ ...old, key, error: isTransient(error) && old.data !== undefined ? null : error }));
      } finally {
        isBusy = false;
      }
      if (wait && !abort.signal.aborted && !document.hidden) timer = setTimeout(read, wait);
    };
    const onVisible = () => { if (!document.hidden && (everyMs || failures)) read(); };
    document.addEventListener("visibilitychange", onVisible);
    again.current = read;
    read();
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
    };
  }, [key, everyMs]);
  const current = state.key === key ? state : { data: undefined, error: null };
  return {
    data: current.data, error: current.error, isLoading: current.data === undefined && !current.error,
    refresh: () => again.current(),
  };
}
