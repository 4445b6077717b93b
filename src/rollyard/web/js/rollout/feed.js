// The pages of GET /v1/results: read by cursor as the reader scrolls, and the first page again every two seconds.
//
// New rows wait in `fresh` until the reader asks for them: nothing that is on the screen moves.
import { effect, useEffect, useRef, useState } from "../dom.js";
import { caller, get } from "../api.js";

const PATH = "/v1/results";
const PAGE_ROWS = 100;
const POLL_MS = 2000;
const START = { rows: [], next: null, total: 0, isExact: true, behind: 0, fresh: 0, error: null, isLoaded: false, isReading: false };

const keyOf = (row) => `${row.run}~${row.id}`;

const NOTHING = { key: null };
let kept = NOTHING; // of the last list, so that the back button returns to the same place

effect(() => { if (!caller.value) kept = NOTHING; }); // they were rows of the person who signed out

/** The state of a list when its view opens: no page is being read, and what is new is not known yet. */
const opened = (key) => (kept.key === key ? { ...kept.state, isReading: false, fresh: 0 } : START);

const whenOf = (row) => row.ended_at || row.created_at;

/**
 * Compares the loaded rows with the first page of now: {fresh, covered}. Both are in the same order, newest first.
 * `fresh`: rows newer than all that are loaded. `covered`: so many of the loaded rows, from the first one on, must be in
 * the page if they still belong to the list. When rows leave the list, older ones, which may not be loaded yet, move up
 * into the page: they are not new, and a row at the end of what is loaded has not left because new ones came.
 */
export function compared(loaded, { rows, next }) {
  const places = new Map(loaded.map((row, index) => [keyOf(row), index]));
  const firstKnown = rows.findIndex((row) => places.has(keyOf(row)));
  const newest = loaded[0];
  const fresh = firstKnown >= 0 ? rows.slice(0, firstKnown) : rows.filter((row) => !newest || whenOf(row) > whenOf(newest));
  if (!next) return { fresh, covered: loaded.length };
  const last = rows[rows.length - 1];
  if (!last || fresh.length === rows.length) return { fresh, covered: 0 };
  return { fresh, covered: places.get(keyOf(last)) ?? loaded.length };
}

/** Remembers where the reader is in the list. */
export function keepPlace(place) {
  if (kept !== NOTHING) Object.assign(kept, place);
}

/** Returns {…state, more, showFresh, reload, kept}. `query`: the parameters of GET /v1/results. */
export function useFeed(query) {
  const key = JSON.stringify(query);
  const [state, setState] = useState(() => opened(key));
  const current = useRef(null);
  if (!current.current || current.current.key !== key) {
    if (current.current) current.current.abort.abort();
    current.current = { key, abort: new AbortController(), state: opened(key), pending: [], isGap: false, epoch: 0 };
    if (kept.key !== key) kept = { key, state: START, top: 0, selected: -1 };
  }
  const feed = current.current;
  const update = (changes) => {
    if (feed.abort.signal.aborted) return; // the view is closed, or shows another list
    feed.state = { ...feed.state, ...changes };
    if (kept.key === feed.key) kept.state = feed.state;
    if (current.current === feed) setState(feed.state);
  };
  const page = (after) => get(PATH, { ...query, after, limit: PAGE_ROWS }, feed.abort.signal);
  const figures = (reply) => ({ total: reply.total, isExact: reply.total_is_exact !== false, behind: reply.behind || 0 });

  const reload = async () => {
    const epoch = ++feed.epoch; // what was requested before belongs to other rows
    update({ isReading: true });
    try {
      const reply = await page();
      if (epoch !== feed.epoch) return;
      feed.pending = [];
      feed.isGap = false;
      update({ ...figures(reply), rows: reply.rows, next: reply.next, fresh: 0, error: null, isLoaded: true, isReading: false });
    } catch (error) {
      if (!feed.abort.signal.aborted) update({ error, isReading: false });
    }
  };
  const more = async () => {
    if (feed.state.isReading || !feed.state.next) return;
    const { epoch } = feed;
    update({ isReading: true });
    try {
      const reply = await page(feed.state.next);
      if (epoch !== feed.epoch) return;
      const known = new Set(feed.state.rows.map(keyOf));
      update({ rows: [...feed.state.rows, ...reply.rows.filter((row) => !known.has(keyOf(row)))], next: reply.next, isReading: false, error: null });
    } catch (error) {
      if (!feed.abort.signal.aborted) setTimeout(() => update({ isReading: false }), 2000); // scrolling tries again
    }
  };
  const poll = async () => {
    const { epoch } = feed;
    const reply = await page();
    if (epoch !== feed.epoch) return;
    if (!feed.state.isLoaded || (!feed.state.rows.length && (reply.rows.length || !reply.next))) {
      update({ ...figures(reply), rows: reply.rows, next: reply.next, fresh: 0, error: null, isLoaded: true });
      return;
    }
    if (!feed.state.rows.length) return; // further pages are being read
    const now = new Map(reply.rows.map((row) => [keyOf(row), row]));
    const { fresh, covered } = compared(feed.state.rows, reply);
    feed.pending = fresh;
    feed.isGap = fresh.length > 0 && fresh.length === reply.rows.length && Boolean(reply.next);
    let isChanged = false;
    const rows = feed.state.rows.map((row, index) => {
      const found = now.get(keyOf(row));
      if (found && JSON.stringify(found) !== JSON.stringify(row)) { isChanged = true; return found; }
      if (!found && query.state === "live" && index < covered && !row.hasLeft) { isChanged = true; return { ...row, hasLeft: true }; }
      return row;
    });
    update({ ...figures(reply), ...(isChanged ? { rows } : {}), fresh: feed.pending.length, isGap: feed.isGap, error: null });
  };
  const showFresh = () => {
    if (feed.isGap) return reload();
    const fresh = feed.pending;
    feed.pending = [];
    update({ rows: [...fresh, ...feed.state.rows.filter((row) => !row.hasLeft)], fresh: 0 });
    return undefined;
  };

  useEffect(() => {
    let timer = 0;
    setState(feed.state);
    const tick = async () => {
      let waitMs = POLL_MS;
      try {
        if (!document.hidden || !feed.state.isLoaded) await poll();
      } catch (error) {
        if (feed.abort.signal.aborted) return;
        const isFinal = error.status >= 400 && error.status < 500 && error.status !== 429;
        if (isFinal || !feed.state.isLoaded) update({ error, isLoaded: feed.state.isLoaded });
        if (isFinal) return;
        waitMs = error.retryAfterMs || 2 * POLL_MS;
      }
      if (!feed.abort.signal.aborted) timer = setTimeout(tick, waitMs);
    };
    tick();
    return () => { clearTimeout(timer); feed.abort.abort(); if (current.current === feed) current.current = null; };
  }, [key]);
  return { ...feed.state, more, showFresh, reload, kept };
}
