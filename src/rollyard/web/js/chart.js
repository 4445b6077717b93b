// Line charts by uPlot, in the colours of the page, with a table of the same values for screen readers.
import { html, useEffect, useRef } from "./dom.js";
import uPlot from "../vendor/uplot.js";
import { short } from "./format.js";

const TABLE_ROWS = 12;
const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * x: numbers, or seconds since 1970 with `isTime`. series: {label, values, colour?}; a value may be null.
 * `range`: [lowest, highest] of the vertical axis. `format`: of a value.
 */
export function Chart({ label, x, series, isTime = false, height = 170, range, format = short, xLabel = "" }) {
  const frame = useRef(null);
  const plot = useRef(null);
  const shape = `${isTime} ${height} ${series.map((one) => one.label).join("|")}`;
  const data = [x, ...series.map((one) => one.values)];
  useEffect(() => {
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
    const options = {
      width: frame.current.clientWidth || 300, height,
      cursor: { y: false, points: { size: 6 } },
      legend: { live: true },
      scales: { x: { time: isTime }, y: range ? { range } : {} },
      axes: [{ ...axis, ...(isTime ? {} : { values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) }) },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => format(tick)) }],
      series: [isTime ? {} : { label: xLabel || "x", value: (_, value) => (value === null ? "–" : String(value)) },
        ...series.map((one, index) => ({ label: one.label, stroke: colour(one.colour || COLOURS[index % COLOURS.length]), width: 1.75, spanGaps: false, points: { show: x.length < 40 }, value: (_, value) => (value === null || value === undefined ? "–" : format(value)) }))],
    };
    plot.current = new uPlot(options, data, frame.current);
    const resized = new ResizeObserver(() => plot.current && plot.current.setSize({ width: frame.current.clientWidth, height }));
    resized.observe(frame.current);
    return () => { resized.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { if (plot.current) plot.current.setData(data); });
  const step = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
  const rows = x.map((_, index) => index).filter((index) => index % step === 0 || index === x.length - 1);
  return html`<figure class="chart">
    <figcaption>${label}</figcaption>
    <div ref=${frame} aria-hidden="true"></div>
    <table class="visually-hidden"><caption>${label}</caption>
      <thead><tr><th scope="col">${xLabel || (isTime ? "time" : "x")}</th>${series.map((one) => html`<th scope="col">${one.label}</th>`)}</tr></thead>
      <tbody>${rows.map((index) => html`<tr><th scope="row">${isTime ? new Date(1000 * x[index]).toLocaleTimeString() : x[index]}</th>${series.map((one) => html`<td>${one.values[index] === null || one.values[index] === undefined ? "–" : format(one.values[index])}</td>`)}</tr>`)}</tbody>
    </table>
  </figure>`;
}
