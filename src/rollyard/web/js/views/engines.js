import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Engines() {
  return html`<${Page} title="Engines" />`;
}
