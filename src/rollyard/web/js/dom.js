// Preact, htm, hooks and signals under one name. Views import from here only.
import { h, render, Fragment } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { h, render, Fragment };
export { useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState, useCallback } from "../vendor/hooks.js";
export { signal, computed, effect, batch, useSignal, useComputed } from "../vendor/signals.js";

export const html = htm.bind(h);
