import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Eval() {
  return html`<${Page} title="Evaluation" />`;
}
