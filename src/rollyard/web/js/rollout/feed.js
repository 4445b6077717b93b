// The pages of GET /v1/results: read by cursor as the reader scrolls, and the first page again every two seconds.
//
// New rows wait in `fresh` until the reader asks for them: nothing that is on the screen moves.
import { useEffect, useRef, useState } from "../dom.js";
import { get } from "../api.js";

const PATH = "/v1/results";
const PAGE_ROWS = 100;
const POLL_MS = 2000;
const START = { rows: [], next: null, total: 0, isExact: true, behind: 0, fresh: 0, error: null, isLoaded: false, isReading: false };

const keyOf = (row) => `${row.run}~${row.id}`;

let kept = { key: null }; // of the last list, so that the back button returns to the same place

/** Remembers where the reader is in the list. */
export function keepPlace(place) {
  Object.assign(kept, place);
}

/** Returns {…state, more, showFresh, reload, kept}. `query`: the parameters of GET /v1/results. */
export function useFeed(query) {
  const key = JSON.stringify(query);
  const [state, setState] = useState(() => (kept.key === key ? kept.state : START));
  const current = useRef(null);
  if (!current.current || current.current.key !== key) {
    if (current.current) current.current.abort.abort();
    current.current = { key, abort: new AbortController(), state: kept.key === key ? kept.state : START, pending: [], isGap: false };
    if (kept.key !== key) kept = { key, state: START, top: 0, selected: -1 };
  }
  const feed = current.current;
  const update = (changes) => {
    feed.state = { ...feed.state, ...changes };
    if (kept.key === feed.key) kept.state = feed.state;
    if (current.current === feed) setState(feed.state);
  };
  const page = (after) => get(PATH, { ...query, after, limit: PAGE_ROWS }, feed.abort.signal);
  const figures = (reply) => ({ total: reply.total, isExact: reply.total_is_exact !== false, behind: reply.behind || 0 });

  const reload = async () => {
    update({ isReading: true });
    try {
      const reply = await page();
      feed.pending = [];
      feed.isGap = false;
      update({ ...figures(reply), rows: reply.rows, next: reply.next, fresh: 0, error: null, isLoaded: true, isReading: false });
    } catch (error) {
      if (!feed.abort.signal.aborted) update({ error, isReading: false });
    }
  };
  const more = async () => {
    if (feed.state.isReading || !feed.state.next) return;
    update({ isReading: true });
    try {
      const reply = await page(feed.state.next);
      const known = new Set(feed.state.rows.map(keyOf));
      update({ rows: [...feed.state.rows, ...reply.rows.filter((row) => !known.has(keyOf(row)))], next: reply.next, isReading: false, error: null });
    } catch (error) {
      if (!feed.abort.signal.aborted) setTimeout(() => update({ isReading: false }), 2000); // scrolling tries again
    }
  };
  const poll = async () => {
    const reply = await page();
    if (!feed.state.isLoaded || (!feed.state.rows.length && (reply.rows.length || !reply.next))) {
      update({ ...figures(reply), rows: reply.rows, next: reply.next, fresh: 0, error: null, isLoaded: true });
      return;
    }
    if (!feed.state.rows.length) return; // further pages are being read
    const now = new Map(reply.rows.map((row) => [keyOf(row), row])), known = new Set(feed.state.rows.map(keyOf));
    feed.pending = reply.rows.filter((row) => !known.has(keyOf(row)));
    feed.isGap = feed.pending.length === reply.rows.length && reply.rows.length > 0;
    let isChanged = false;
    const rows = feed.state.rows.map((row, index) => {
      const found = now.get(keyOf(row));
      if (found && JSON.stringify(found) !== JSON.stringify(row)) { isChanged = true; return found; }
      if (!found && query.state === "live" && index < reply.rows.length && !feed.isGap && !row.hasLeft) { isChanged = true; return { ...row, hasLeft: true }; }
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
