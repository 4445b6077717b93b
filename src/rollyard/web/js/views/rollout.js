import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Rollout() {
  return html`<${Page} title="Rollout" />`;
}
