// The button that chooses light or dark, or follows the system. The choice lasts as long as the browser's tab.
import { html, signal, useLayoutEffect } from "./dom.js";

const NEXT = { "": "light", light: "dark", dark: "" };

function stored() {
  try { return sessionStorage.getItem("theme") || ""; } catch { return ""; } // a file may have no storage
}

const theme = signal(stored());

export function ThemeButton() {
  useLayoutEffect(() => {
    if (theme.value) document.documentElement.dataset.theme = theme.value;
    else delete document.documentElement.dataset.theme;
    try { sessionStorage.setItem("theme", theme.value); } catch { /* as above */ }
  }, [theme.value]);
  return html`<button type="button" class="quiet" onClick=${() => { theme.value = NEXT[theme.value]; }} title="Light, dark, or as the system">Theme: ${theme.value || "system"}</button>`;
}
