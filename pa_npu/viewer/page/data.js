/* Where data comes from: inside the page (exported), or the server that sent it.
   And what the page is looking at, in its address. */

const EMBEDDED = JSON.parse(document.getElementById("data").textContent);
const MAX_CACHED = 80;
const cache = new Map();

/* The data at a path, null where there is none. Answers to the same question are kept, unless it
   must be fresh. */
async function load(path, fresh = false) {
  if (EMBEDDED) return Object.hasOwn(EMBEDDED, path) ? EMBEDDED[path] : null;
  if (!fresh && cache.has(path)) return cache.get(path);
  const compared = location.search.slice(1);
  const joint = path.includes("?") ? "&" : "?";
  const response = await fetch("api/" + path + (compared ? joint + compared : ""));
  const value = response.ok ? await response.json() : null;
  if (value !== null && !path.includes("?")) {
    cache.set(path, value);
    if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
  }
  return value;
}

/* The address after #: view?name=value&... */
const place = {
  read() {
    const [view, query] = location.hash.slice(1).split("?");
    return { view: view || "overview", ...Object.fromEntries(new URLSearchParams(query || "")) };
  },
  write(changes) {
    const { view, ...rest } = { ...place.read(), ...changes };
    const isSet = ([, value]) => value !== null && value !== "" && value !== undefined;
    const query = new URLSearchParams(Object.entries(rest).filter(isSet));
    const hash = "#" + view + (query.size ? "?" + query : "");
    if (hash !== location.hash) history.replaceState(null, "", hash);
  },
};

/* run: the one that is viewed. compare: the others. runs: the table of a folder, where the page
   is that. lost: since when no answer came. */
const state = { run: null, compare: [], runs: null, lost: null };

function column(name, run = state.run) {
  return run.columns[name] || [];
}

function last(name, run = state.run) {
  const values = column(name, run);
  for (let index = values.length - 1; index >= 0; index--) {
    if (values[index] !== null) return values[index];
  }
  return null;
}
