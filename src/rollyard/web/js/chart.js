// Line charts by uPlot, in the colours of the page, with a table of the same values for screen readers.
import { html, signal, useEffect, useRef } from "./dom.js";
import uPlot from "../vendor/uplot.js";
import { short, time } from "./format.js";

const TABLE_ROWS = 12;
const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const changes = signal(0); // of the page's colours: a canvas does not follow them by itself
new MutationObserver(() => { changes.value++; }).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { changes.value++; });

const two = (number) => String(number).padStart(2, "0");

/** The label of a tick of a time axis, for ticks that are `step_s` apart. */
function tickLabel(at, step_s) {
  const date = new Date(1000 * at);
  const day = `${two(date.getMonth() + 1)}-${two(date.getDate())}`, hour = `${two(date.getHours())}:${two(date.getMinutes())}`;
  if (step_s >= 86_400) return day;
  return step_s >= 60 ? hour : `${hour}:${two(date.getSeconds())}`;
}

/** The vertical axis of values that have no fixed range. Equal values get a range of their size. */
function yRange(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : low > 0 ? [0, 1.25 * low] : [1.25 * low, 0];
}

/** Values without neighbours: no line shows them. */
function isolated(values) {
  const isNone = (value) => value === null || value === undefined;
  return values.map((_, index) => index).filter((index) => !isNone(values[index]) && isNone(values[index - 1]) && isNone(values[index + 1]));
}

/** Sums of the series up to each one, for stacked areas. A point at which all are null stays null. */
function stacked(series) {
  const sums = [];
  for (const one of series) {
    const below = sums.at(-1);
    sums.push(one.values.map((value, index) => (value === null && !below?.[index] ? below?.[index] ?? null : (below?.[index] || 0) + (value || 0))));
  }
  return sums;
}

/**
 * x: numbers, or seconds since 1970 with `isTime`. series: {label, values, colour?}; a value may be null.
 * `range`: [lowest, highest] of the vertical axis. `format`: of a value. `isStep`: a value is valid until the next one.
 * `isStacked`: areas on top of each other. `spanGaps`: lines go across missing values.
 */
export function Chart({ label, x, series, isTime = false, height = 170, range, format = short, xLabel = "", isStep = false, isStacked = false, spanGaps = false }) {
  const frame = useRef(null);
  const plot = useRef(null);
  const latest = useRef(series); // the legend shows values of the newest data
  latest.current = series;
  const shape = `${isTime} ${height} ${isStep} ${isStacked} ${changes.value} ${series.map((one) => one.label).join("|")}`;
  const data = [x, ...(isStacked ? stacked(series) : series.map((one) => one.values))];
  useEffect(() => {
    const node = frame.current;
    if (!node) return undefined; // removed before it was drawn
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
    const alone = isTime ? 60 : 0.5; // beside a single point
    const strokeOf = (one, index) => colour(one.colour || COLOURS[index % COLOURS.length]);
    const options = {
      width: node.clientWidth || 300, height,
      cursor: { y: false, points: { size: 6 } },
      legend: { live: true, markers: { fill: (_, at) => (at ? strokeOf(series[at - 1], at - 1) : "") } },
      scales: { x: { time: isTime, range: (_, low, high) => (low === high ? [low - alone, high + alone] : [low, high]) }, y: { range: range || yRange } },
      bands: isStacked ? series.slice(1).map((one, index) => ({ series: [index + 2, index + 1], fill: `${strokeOf(one, index + 1)}66` })) : [],
      axes: [{ ...axis, size: 30, values: (_, ticks, _axis, _space, step) => ticks.map((tick) => (isTime ? tickLabel(tick, step) : Number.isInteger(tick) ? String(tick) : "")) },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => format(tick)) }],
      series: [{ label: xLabel || (isTime ? "time" : "x"), value: (_, value) => (value === null ? "" : isTime ? time(value) : String(value)) },
        ...series.map((one, index) => ({
          label: one.label, stroke: strokeOf(one, index), width: 1.75, spanGaps, points: { show: () => x.length < 40 && !isStep && !isStacked, filter: (drawn, at, isShown) => (isShown ? null : isolated(drawn.data[at])) },
          ...(isStep ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
          ...(isStacked && index === 0 ? { fill: `${strokeOf(one, 0)}66` } : {}),
          value: (_plot, _value, _series, at) => { const value = latest.current[index]?.values[at]; return at === null ? "" : value === null || value === undefined ? "–" : format(value); },
        }))],
    };
    plot.current = new uPlot(options, data, node);
    const resized = new ResizeObserver(() => plot.current && plot.current.setSize({ width: node.clientWidth, height }));
    resized.observe(node);
    return () => { resized.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { if (plot.current) plot.current.setData(data); });
  const step = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
  const rows = x.map((_, index) => index).filter((index) => index % step === 0 || index === x.length - 1);
  return html`<figure class="chart ${series.length === 1 ? "is-single" : ""}">
    <figcaption>${label}</figcaption>
    <div ref=${frame} aria-hidden="true"></div>
    <table class="visually-hidden"><caption>${label}</caption>
      <thead><tr><th scope="col">${xLabel || (isTime ? "time" : "x")}</th>${series.map((one) => html`<th scope="col">${one.label}</th>`)}</tr></thead>
      <tbody>${rows.map((index) => html`<tr><th scope="row">${isTime ? new Date(1000 * x[index]).toLocaleTimeString() : x[index]}</th>${series.map((one) => html`<td>${one.values[index] === null || one.values[index] === undefined ? "–" : format(one.values[index])}</td>`)}</tr>`)}</tbody>
    </table>
  </figure>`;
}
