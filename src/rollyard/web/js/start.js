// Loads the page again if a file of it did not arrive: main.js cannot, as it may be what is missing.
//
// A classic script, so that it runs whatever happens to the modules. The pause grows with each start that failed, and the
// page stays as it is, with its message, until the service sends main.js again.
(() => {
  const KEY = "rollyard-starts"; // failed ones in a row, of this tab
  const [FIRST_MS, MOST_MS] = [1000, 15_000];
  let failures = 0;
  try { failures = Number(sessionStorage.getItem(KEY)) || 0; } catch { /* each start is the first */ }
  const keep = (number) => { try { sessionStorage.setItem(KEY, number); } catch { /* likewise */ } };

  async function tryAgain() {
    await new Promise((resolve) => setTimeout(resolve, Math.min(MOST_MS, FIRST_MS * 2 ** failures++)));
    const reply = await fetch("/assets/js/main.js", { cache: "no-store" }).catch(() => null);
    if (!reply?.ok) return tryAgain();
    keep(failures);
    return location.reload();
  }

  addEventListener("error", (event) => { if (event.target instanceof HTMLScriptElement) tryAgain(); }, true);
  addEventListener("rollyard:started", () => keep(0));
})();
