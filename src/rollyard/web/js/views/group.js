import { html } from "../dom.js";
import { Page } from "../ui.js";

export default function Group() {
  return html`<${Page} title="Group" />`;
}
