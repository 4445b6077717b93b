import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Runs() {
  return html`<${Page} title="Runs" />`;
}
