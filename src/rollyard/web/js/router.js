// The address of the page is the whole state of a view: a copied link shows the same.
//
// A page of the service uses paths; an exported file, which has no server, uses the part after `#`.
import { html, signal } from "./dom.js";

export const isOffline = document.documentElement.hasAttribute("data-offline");

const isAnchor = () => isOffline && location.hash !== "" && !location.hash.startsWith("#/"); // a place within the view

function read() {
  const address = isOffline ? (isAnchor() ? "/" : location.hash.slice(1) || "/") : location.pathname + location.search;
  const [path, search = ""] = address.split("?");
  return { path, query: Object.fromEntries(new URLSearchParams(search)) };
}

export const place = signal(read());

let left = null; // what had the focus when the last view was left; null: the heading of this one had its turn

/** A view is left. The heading of the next one takes the focus: what had it is gone. */
export function leave() {
  left = document.activeElement || document.body;
}

/** Focuses the heading of a view that was just entered, unless the visitor has moved the focus meanwhile. */
export function enter(heading) {
  if (!left) return;
  if (!document.activeElement || [left, document.body].includes(document.activeElement)) heading.focus({ preventScroll: true });
  left = null;
}

function follow() {
  if (isAnchor()) return;
  const next = read();
  if (next.path !== place.value.path) leave();
  place.value = next;
}

addEventListener("popstate", follow);
addEventListener("hashchange", follow);

/** Returns an address. Empty values are left out of the query. */
export function href(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(kept).toString();
  return (isOffline ? "#" : "") + path + (search ? `?${search}` : "");
}

/** Shows another view. `replace`: the back button skips the current address. */
export function go(path, query = {}, { replace = false } = {}) {
  const to = href(path, query);
  if (replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  follow();
}

/** Changes some parameters of the query of this view. */
export function setQuery(changes, options) {
  go(place.value.path, { ...place.value.query, ...changes }, options);
}

export function Link({ path, query, children, ...rest }) {
  const onClick = (event) => {
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    go(path, query);
    scrollTo(0, 0);
  };
  return html`<a href=${href(path, query)} onClick=${onClick} ...${rest}>${children}</a>`;
}

/** Returns the parameters of a path such as "/runs/:run", or null if the path does not match. */
export function match(pattern, path) {
  const want = pattern.split("/"), have = path.replace(/(.)\/$/, "$1").split("/");
  if (want.length !== have.length) return null;
  const found = {};
  for (const [index, part] of want.entries()) {
    if (part.startsWith(":")) {
      try { found[part.slice(1)] = decodeURIComponent(have[index]); } catch { return null; }
    } else if (part !== have[index]) return null;
  }
  return found;
}

const at = (kind) => (run, id) => `/${kind}/${encodeURIComponent(run)}/${encodeURIComponent(id)}`;
export const paths = {
  run: (run) => `/runs/${encodeURIComponent(run)}`,
  rollout: at("rollouts"), group: at("groups"), draw: at("draws"), eval: at("evals"),
};
