import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Rollouts() {
  return html`<${Page} title="Rollouts" />`;
}
