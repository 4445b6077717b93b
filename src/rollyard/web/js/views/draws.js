import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Draws() {
  return html`<${Page} title="Draws" />`;
}
