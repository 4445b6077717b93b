import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Evals() {
  return html`<${Page} title="Evaluations" />`;
}
