import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Draw() {
  return html`<${Page} title="Draw" />`;
}
