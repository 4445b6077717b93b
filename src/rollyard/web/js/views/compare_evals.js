import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function CompareEvals() {
  return html`<${Page} title="Two evaluations" />`;
}
