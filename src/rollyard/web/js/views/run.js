import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Run() {
  return html`<${Page} title="Run" />`;
}
