// The rows of the rollouts table. Only those on the screen are elements, whatever the number of rollouts.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../dom.js";
import { count, reward, seconds, short } from "../format.js";
import { go, href, paths } from "../router.js";
import { Visible } from "../text.js";
import { Badge, Time } from "../ui.js";
import { keepPlace } from "./feed.js";

const NARROW_PX = 720;
const SPARE_ROWS = 8;
const AHEAD_ROWS = 60; // before the end of what is loaded, the next page is read

const heightOf = (isNarrow, hasMatch) => (isNarrow ? 62 : 36) + (hasMatch ? 24 : 0);
const versions = (row) => (row.newest_version === null || row.newest_version === undefined || row.newest_version < 0 ? "–" : row.oldest_version === row.newest_version ? String(row.newest_version) : `${row.oldest_version}–${row.newest_version}`);
const took = (row) => (row.seconds ? Object.entries(row.seconds).reduce((sum, [name, value]) => (name === "model" || name === "tool" ? sum : sum + (value || 0)), 0) : null);

const COLUMNS = [
  ["name", "Rollout"], ["how", "Outcome"], ["reward", "Reward"], ["environment", "Environment"], ["version", "Version"], ["turns", "Turns"], ["tokens", "Tokens"], ["took", "Time"], ["when", "Ended"],
];

function Match({ match }) {
  return html`<div class="match"><${Visible} text=${match.before} /><mark><${Visible} text=${match.hit} /></mark><${Visible} text=${match.after} /></div>`;
}

function Row({ row, index, top, height, isSelected, hasMatch, onOpen }) {
  const path = paths.rollout(row.run, row.id);
  const isEnded = row.state === "ended";
  return html`<div role="row" id=${`row-${index}`} aria-rowindex=${index + 2} aria-selected=${isSelected} class="row ${isSelected ? "selected" : ""} ${row.hasLeft ? "left" : ""}" style=${{ top: `${top}px`, height: `${height}px` }} onClick=${(event) => onOpen(event, row, index)}>
    <div role="gridcell" class="name"><a href=${href(path)} tabindex="-1"><${Visible} text=${row.name || row.id} /></a> <span class="note"><${Visible} text=${row.name ? row.id : ""} /></span></div>
    <div role="gridcell" class="how">${row.hasLeft ? html`<${Badge} value="ended" />` : html`<${Badge} value=${isEnded ? row.outcome : row.state} />`} ${row.code && html`<${Badge} value=${row.code} tone=${row.blame === "policy" ? "warn" : "bad"} />`}</div>
    <div role="gridcell" class="reward numeric">${isEnded ? reward(row.reward) : "–"}${isEnded && !row.trainable && row.reward !== null ? html`<span class="untrained" title="not trainable"> ∅<span class="visually-hidden"> not trainable</span></span>` : ""}</div>
    <div role="gridcell" class="environment"><${Visible} text=${row.environment || ""} />${row.agent && row.agent !== "native" ? html` <span class="note"><${Visible} text=${row.agent} /></span>` : ""}</div>
    <div role="gridcell" class="version numeric">${versions(row)}</div>
    <div role="gridcell" class="turns numeric">${count(row.turns)}<span class="unit">${row.turns === 1 ? " turn" : " turns"}</span></div>
    <div role="gridcell" class="tokens numeric">${short(row.sampled_tokens)}<span class="unit"> tokens</span></div>
    <div role="gridcell" class="took numeric">${seconds(took(row))}</div>
    <div role="gridcell" class="when"><${Time} at=${row.ended_at || row.created_at} /></div>
    ${hasMatch && html`<div role="gridcell" class="found">${row.match ? html`<${Match} match=${row.match} />` : ""}</div>`}
  </div>`;
}

/** `feed`: of useFeed. `hasMatch`: each row shows where the search matched. */
export function Rows({ feed, hasMatch }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600, isNarrow: false });
  const [selected, setSelected] = useState(feed.kept.selected ?? -1);
  const height = heightOf(view.isNarrow, hasMatch);
  useLayoutEffect(() => {
    const measure = () => {
      const frame = box.current;
      if (!frame) return;
      frame.style.setProperty("--above", `${Math.round(frame.getBoundingClientRect().top + scrollY)}px`);
      setView((old) => ({ ...old, height: frame.clientHeight, isNarrow: frame.clientWidth < NARROW_PX }));
    };
    const observed = new ResizeObserver(measure);
    observed.observe(box.current);
    observed.observe(document.body);
    measure();
    box.current.scrollTop = feed.kept.top || 0;
    return () => observed.disconnect();
  }, []);
  const first = Math.max(0, Math.floor(view.top / height) - SPARE_ROWS);
  const last = Math.min(feed.rows.length, Math.ceil((view.top + view.height) / height) + SPARE_ROWS);
  useEffect(() => { if (feed.next && last + AHEAD_ROWS > feed.rows.length) feed.more(); }, [last, feed.rows.length, feed.isReading]);

  const select = (index) => {
    const to = Math.min(feed.rows.length - 1, Math.max(0, index)), frame = box.current, top = to * height;
    setSelected(to);
    keepPlace({ selected: to });
    const head = view.isNarrow ? 0 : height; // the heading covers this much of the frame
    if (top < frame.scrollTop) frame.scrollTop = top;
    else if (top + height + head > frame.scrollTop + frame.clientHeight) frame.scrollTop = top + height + head - frame.clientHeight;
  };
  const open = (row, index) => { keepPlace({ selected: index, top: box.current.scrollTop }); go(paths.rollout(row.run, row.id)); scrollTo(0, 0); };
  const onOpen = (event, row, index) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    if (getSelection().toString()) return; // the reader marks text
    event.preventDefault();
    open(row, index);
  };
  const onKeyDown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(view.height / height) - 2);
    const to = { ArrowDown: selected + 1, ArrowUp: selected - 1, PageDown: selected + page, PageUp: selected - page, Home: 0, End: feed.rows.length - 1 }[event.key];
    if (to !== undefined && feed.rows.length) { event.preventDefault(); select(to); }
    else if (event.key === "Enter" && feed.rows[selected]) { event.preventDefault(); open(feed.rows[selected], selected); }
  };
  const showFresh = async () => {
    const added = feed.fresh;
    await feed.showFresh();
    box.current.scrollTop = 0;
    if (selected >= 0) setSelected(feed.isGap ? -1 : selected + added);
    box.current.focus();
  };
  const onScroll = (event) => { const { scrollTop } = event.currentTarget; keepPlace({ top: scrollTop }); setView((old) => ({ ...old, top: scrollTop })); };
  return html`<div class="rollout-rows ${view.isNarrow ? "cards" : ""}">
    ${feed.fresh > 0 && html`<button type="button" class="fresh" onClick=${showFresh}>${feed.fresh}${feed.isGap ? "+" : ""} new</button>`}
    <div class="rows-frame" ref=${box} role="grid" tabindex="0" aria-label="Rollouts; arrow keys move, Enter opens" aria-rowcount=${feed.next ? -1 : feed.rows.length + 1} aria-activedescendant=${selected >= first && selected < last ? `row-${selected}` : undefined} onScroll=${onScroll} onKeyDown=${onKeyDown}>
      <div role="rowgroup" class="rows-head"><div role="row" aria-rowindex="1" class="row head">${COLUMNS.map(([name, label]) => html`<div role="columnheader" class=${`${name} ${["reward", "version", "turns", "tokens", "took"].includes(name) ? "numeric" : ""}`}>${label}</div>`)}</div></div>
      <div role="rowgroup" class="rows-space" style=${{ height: `${feed.rows.length * height}px` }}>
        ${feed.rows.slice(first, last).map((row, at) => html`<${Row} key=${`${row.run}~${row.id}`} row=${row} index=${first + at} top=${(first + at) * height} height=${height} isSelected=${first + at === selected} hasMatch=${hasMatch} onOpen=${onOpen} />`)}
      </div>
    </div>
  </div>`;
}
