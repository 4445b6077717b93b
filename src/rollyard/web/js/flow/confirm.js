// A button whose action is asked for once more in a dialog.
import { html, useEffect, useRef, useState } from "../dom.js";
import { ApiError } from "../api.js";
import { Problem } from "../ui.js";

/**
 * `act` returns a promise; the dialog closes when it is fulfilled and shows the error when it is rejected. The browser
 * keeps the focus inside the dialog, closes it on Escape, and returns the focus to the button.
 */
export function Confirmed({ label, title, children, confirm = label, tone = "", act }) {
  const [isOpen, setOpen] = useState(false);
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const dialog = useRef(null);
  useEffect(() => { if (isOpen) dialog.current.showModal(); }, [isOpen]);
  const close = () => { if (!isBusy) dialog.current.close(); };
  const run = async () => {
    setBusy(true);
    setError(null);
    try {
      await act();
      dialog.current?.close();
    } catch (failure) {
      setError(failure);
    } finally {
      setBusy(false);
    }
  };
  return html`<button type="button" class=${tone} onClick=${() => { setError(null); setOpen(true); }}>${label}</button>
    ${isOpen && html`<dialog ref=${dialog} class="confirm" aria-label=${title} onClose=${() => setOpen(false)} onCancel=${(event) => isBusy && event.preventDefault()}>
      <h2>${title}</h2>
      ${children}
      ${error && (error instanceof ApiError ? html`<${Problem} error=${error} isFinal=${true} />`
        : html`<p class="problem" role="alert">The service did not answer, so it is not known whether this was done. Look at the state, then try again.</p>`)}
      <div class="confirm-buttons">
        <button type="button" autofocus onClick=${close} disabled=${isBusy}>Cancel</button>
        <button type="button" class=${tone || "primary"} onClick=${run} disabled=${isBusy}>${isBusy ? "Working…" : confirm}</button>
      </div>
    </dialog>`}`;
}
