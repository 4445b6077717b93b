// Tabs that the address holds (?tab=). Arrow keys move between them.
import { html, useLayoutEffect } from "../dom.js";
import { setQuery } from "../router.js";
import { reveal } from "../ui.js";

/** `tabs`: [{name, label, note?}]. The children are the panel of the selected one. */
export function Tabs({ label, tabs, selected, children }) {
  useLayoutEffect(() => reveal(document.getElementById(`tab-${selected}`)), [selected, tabs.map((tab) => tab.note !== undefined).join()]);
  const choose = (name) => setQuery({ tab: name === tabs[0].name ? "" : name }, { replace: true });
  const onKeyDown = (event) => {
    const at = tabs.findIndex((tab) => tab.name === selected);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    choose(next.name);
    document.getElementById(`tab-${next.name}`).focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${onKeyDown}>
      ${tabs.map((tab) => html`<button type="button" role="tab" id=${`tab-${tab.name}`} aria-controls="panel" aria-selected=${tab.name === selected} tabindex=${tab.name === selected ? 0 : -1} onClick=${() => choose(tab.name)}>${tab.label}${tab.note !== undefined && html`<span class="note">${tab.note}</span>`}</button>`)}
    </div>
    <div role="tabpanel" id="panel" aria-labelledby=${`tab-${selected}`}>${children}</div>`;
}
