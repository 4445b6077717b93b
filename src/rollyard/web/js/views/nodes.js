import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Nodes() {
  return html`<${Page} title="Nodes" />`;
}
