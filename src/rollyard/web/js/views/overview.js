import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Overview() {
  return html`<${Page} title="Overview" />`;
}
