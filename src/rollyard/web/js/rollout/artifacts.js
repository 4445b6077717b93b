// Artifacts with their download. The file is fetched with the page's key and offered as a blob: a plain link would lack
// the key, and the bytes never become a page of this origin.
import { html, useState } from "../dom.js";
import { getBytes, usePolled } from "../api.js";
import { bytes } from "../format.js";
import { isOffline } from "../router.js";
import { Visible } from "../text.js";
import { Badge, Table } from "../ui.js";

const KEEP_URL_MS = 60_000;

async function download([path, query], name) {
  const bytes = await getBytes(`${path}/${encodeURIComponent(name)}`, query);
  const url = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name.replace(/[^\w.-]+/g, "_").slice(0, 100) || "artifact";
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), KEEP_URL_MS);
}

function Download({ at, artifact }) {
  const [state, setState] = useState({});
  if (isOffline) return html`<span class="note">not in this file</span>`;
  if (artifact.available === false) return html`<span class="note">no longer stored</span>`;
  const start = async () => {
    setState({ isBusy: true });
    try { await download(at, artifact.name); setState({}); } catch (error) { setState({ problem: error.message }); }
  };
  return html`<button type="button" disabled=${state.isBusy} onClick=${start} aria-label=${`Download ${artifact.name}`}>${state.isBusy ? "Loading…" : "Download"}</button>
    ${state.problem && html`<p role="alert" class="refuted"><${Visible} text=${state.problem} /></p>`}`;
}

/** `stored`: the trajectory's artifacts, shown if the reply of GET …/artifacts is not there. */
export function Artifacts({ at, stored }) {
  const listed = usePolled(...at, { everyMs: 0 });
  const artifacts = listed.data ? listed.data.artifacts : stored.map((one) => ({ ...one, available: listed.error ? false : undefined }));
  return html`<${Table} label="Artifacts" rows=${artifacts.slice(0, 500)} rowKey=${(row) => row.name} empty="It left no artifacts." columns=${[
    { label: "name", cell: (row) => html`<${Visible} text=${row.name} />` },
    { label: "path in the sandbox", cell: (row) => html`<code><${Visible} text=${row.path || ""} /></code>` },
    { label: "kind", cell: (row) => html`<${Badge} value=${row.kind} />` },
    { label: "size", numeric: true, cell: (row) => bytes(row.bytes) },
    { label: "download", cell: (row) => html`<${Download} at=${at} artifact=${row} />` },
  ]} />`;
}
