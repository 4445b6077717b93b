// The whole trace as one bar above the token strip: its colours, and where the strip is. A click goes there.
import { html, useEffect, useRef } from "../dom.js";

const HEIGHT_PX = 22;

export function Overview({ trace, mode, at, to, onJump }) {
  const canvas = useRef(null);
  useEffect(() => {
    if (!canvas.current) return undefined; // already gone
    const draw = () => {
      if (!canvas.current) return;
      const box = canvas.current, context = box.getContext("2d");
      const width = Math.max(1, Math.round(box.clientWidth * devicePixelRatio)), length = trace.token_ids.length;
      box.width = width;
      box.height = 1;
      const colours = new Map(), probe = document.createElement("span");
      box.parentElement.append(probe);
      const colourOf = (style) => {
        if (!colours.has(style)) { probe.className = style; colours.set(style, getComputedStyle(probe).backgroundColor); }
        return colours.get(style);
      };
      for (let x = 0; x < width; x++) { // of the tokens of one pixel, the one with the highest class is shown
        const from = Math.floor((x * length) / width), to = Math.max(from + 1, Math.floor(((x + 1) * length) / width));
        let best = "context";
        for (let token = from; token < to && token < length; token++) {
          const style = mode.style(token);
          if (style !== "context" && (best === "context" || style > best)) best = style;
        }
        if (best === "context") continue;
        context.fillStyle = colourOf(best);
        context.fillRect(x, 0, 1, 1);
      }
      probe.remove();
    };
    draw();
    const resized = new ResizeObserver(draw);
    resized.observe(canvas.current);
    const themed = new MutationObserver(draw);
    themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => { resized.disconnect(); themed.disconnect(); };
  }, [trace, mode]);
  const jump = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = canvas.current.getBoundingClientRect();
    const part = Math.min(0.999999, Math.max(0, (event.clientX - box.left) / box.width));
    onJump(Math.floor(part * trace.token_ids.length));
  };
  return html`<div class="overview-bar" aria-hidden="true" onPointerDown=${jump} onPointerMove=${jump}>
    <canvas ref=${canvas} height=${HEIGHT_PX}></canvas>
    <span class="overview-place" style=${{ left: `${(100 * at) / trace.token_ids.length}%`, width: `${(100 * (to - at)) / trace.token_ids.length}%` }}></span>
  </div>`;
}
