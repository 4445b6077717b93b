// The start of the page: signs in, then shows the view of the address inside the frame.
import { html, render, signal, useEffect, useRef } from "./dom.js";
import { caller, connection, get, isTransient, lastRefusal, pauseMs, refuse, signIn, signOut } from "./api.js";
import { go, isOffline, leave, Link, match, place } from "./router.js";
import { ThemeButton } from "./theme.js";
import { Boundary, Loading, ownRuns, Page, Problem, reveal } from "./ui.js";

Object.preventExtensions(Object.prototype); // hostile keys in data cannot change what all objects have

const VIEWS = [
  ["/", () => import("./views/overview.js")],
  ["/runs", () => import("./views/runs.js")],
  ["/runs/:run", () => import("./views/run.js")],
  ["/rollouts", () => import("./views/rollouts.js")],
  ["/rollouts/:run/:id", () => import("./views/rollout.js")],
  ["/groups/:run/:id", () => import("./views/group.js")],
  ["/draws", () => import("./views/draws.js")],
  ["/draws/:run/:id", () => import("./views/draw.js")],
  ["/evals", () => import("./views/evals.js")],
  ["/evals/compare", () => import("./views/compare_evals.js")],
  ["/evals/:run/:id", () => import("./views/eval.js")],
  ["/engines", () => import("./views/engines.js")],
  ["/nodes", () => import("./views/nodes.js")],
];
const NAVIGATION = [["/", "Overview"], ["/runs", "Runs"], ["/rollouts", "Rollouts"], ["/draws", "Draws"], ["/evals", "Evals"], ["/engines", "Engines"], ["/nodes", "Nodes"]];

const loaded = signal({}); // pattern → the view's component, or the error of loading it; null while it loads
const trouble = signal(null); // why the page cannot start yet

/** Returns what `ask` returns. After an error that may pass, calls `onTrouble` with it, waits, and asks again. */
async function patiently(ask, onTrouble) {
  for (let failures = 0; ; failures++) {
    try {
      return await ask();
    } catch (error) {
      if (!isTransient(error)) throw error;
      onTrouble(error);
      await new Promise((resolve) => setTimeout(resolve, pauseMs(error, failures)));
    }
  }
}

async function loadView(pattern, load) {
  const set = (found) => { loaded.value = { ...loaded.value, [pattern]: found }; };
  if (Object.hasOwn(loaded.value, pattern)) return;
  set(null);
  const found = await patiently(() => load().catch((error) => {
    if (error instanceof SyntaxError) return { default: error }; // of another version than this page; it stays so
    throw error;
  }), set);
  set(found.default);
}

/** The script of a view that has not arrived. It is requested again; one that does not fit to the others never will. */
function Unloaded({ error }) {
  if (error instanceof SyntaxError) {
    return html`<${Page} title="Reload this page"><p>The service was updated while this page was open.</p><p><button type="button" onClick=${() => location.reload()}>Reload</button></p><//>`;
  }
  return html`<${Page} title="Not loaded yet"><${Problem} error=${error} /><//>`;
}

function View() {
  const { path } = place.value;
  for (const [pattern, load] of VIEWS) {
    const parameters = match(pattern, path);
    if (!parameters) continue;
    const view = loaded.value[pattern];
    if (!view) {
      queueMicrotask(() => loadView(pattern, load));
      return html`<${Loading} />`;
    }
    if (view instanceof Error) return html`<${Unloaded} error=${view} />`;
    return html`<${Boundary} key=${path}><${view} key=${path} ...${parameters} /><//>`;
  }
  return html`<${Page} title="Not found"><p>There is no page ${path}.</p><p><${Link} path="/">Go to the overview<//></p><//>`;
}

function Frame() {
  const { path } = place.value;
  const views = useRef(null);
  useEffect(() => reveal(views.current.querySelector("[aria-current=page]")), [path]);
  const isHere = (target) => (target === "/" ? path === "/" : path === target || path.startsWith(`${target}/`));
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <header class="top">
      <${Link} path="/" class="brand">Rollyard<//>
      <nav aria-label="Views" ref=${views}>${NAVIGATION.map(([target, name]) => html`<${Link} path=${target} aria-current=${isHere(target) ? "page" : undefined}>${name}<//>`)}</nav>
      <div class="who">
        <${ThemeButton} />
        <span class="access" title=${ownRuns() && `reads ${ownRuns()}`}>${caller.value.access}</span>
        <button type="button" class="quiet" onClick=${signOut}>Sign out</button>
      </div>
    </header>
    ${connection.value === "lost" && html`<p class="banner" role="alert">The service does not answer. This page shows the last known state and tries again.</p>`}
    <main id="main" tabindex="-1"><${View} /></main>`;
}

function SignIn() {
  const submit = async (event) => {
    event.preventDefault();
    const token = event.target.elements.token.value.trim();
    event.target.reset();
    try {
      await signIn({ token });
      leave();
    } catch (error) {
      refuse(error);
    }
  };
  const refusal = lastRefusal.value;
  useEffect(() => { document.title = "Sign in – Rollyard"; }, []);
  return html`<main id="main" class="sign-in">
    <h1>Rollyard</h1>
    ${refusal && refusal.code !== "signed_out" && html`<${Problem} error=${refusal} isFinal=${true} />`}
    <form onSubmit=${submit}>
      <label for="token">Token</label>
      <input id="token" name="token" type="password" autocomplete="off" required spellcheck=${false} />
      <button type="submit">Sign in</button>
    </form>
    <p>On the machine of the service, <code>rollyard open</code> opens this page and signs in.</p>
    <p>A token with the scope <code>reader</code> can look at everything and change nothing:${" "}
      <code>rollyard access create reader</code></p>
  </main>`;
}

function App() {
  if (caller.value === undefined) return trouble.value ? html`<main id="main" class="sign-in"><h1>Rollyard</h1><${Problem} error=${trouble.value} /></main>` : html`<${Loading} />`;
  return caller.value === null ? html`<${SignIn} />` : html`<${Frame} />`;
}

async function start() {
  dispatchEvent(new Event("rollyard:started")); // to start.js
  const app = document.getElementById("app");
  app.replaceChildren();
  render(html`<${App} />`, app);
  const untilAnswered = (ask) => patiently(ask, (error) => { trouble.value = error; });
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  let refusal = null;
  if (code) {
    history.replaceState(null, "", location.pathname + location.search);
    try {
      await untilAnswered(() => signIn({ code }));
      return;
    } catch (error) {
      refusal = error; // a link that was opened twice must not hide that the browser is signed in
    }
  }
  try {
    caller.value = await untilAnswered(() => get("/v1/login"));
    lastRefusal.value = null;
  } catch (error) {
    refuse(refusal || (error.status === 401 ? null : error)); // without a cookie: not an error of the visitor
  }
}

addEventListener("hashchange", () => { if (!isOffline && location.hash.startsWith("#code=")) location.reload(); }); // a link to sign in
start();
export { go };
