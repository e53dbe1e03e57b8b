/* Where data comes from: inside the page (exported), or the server that sent it. And what the page is looking at, in its address. */

const EMBEDDED = JSON.parse(document.getElementById("data").textContent);
const cache = new Map();

async function load(path, fresh = false) {
  if (EMBEDDED) return path in EMBEDDED ? EMBEDDED[path] : null;
  if (!fresh && cache.has(path)) return cache.get(path);
  const response = await fetch("/api/" + path);
  const value = response.ok ? await response.json() : null;
  if (value !== null && !path.includes("?")) cache.set(path, value);
  return value;
}

/* The address after #: view?name=value&... */
const place = {
  read() {
    const [view, query] = location.hash.slice(1).split("?");
    return { view: view || "overview", ...Object.fromEntries(new URLSearchParams(query || "")) };
  },
  write(changes) {
    const next = { ...place.read(), ...changes };
    const { view, ...rest } = next;
    const query = new URLSearchParams(Object.entries(rest).filter(([, value]) => value !== null && value !== "" && value !== undefined));
    const hash = "#" + view + (query.size ? "?" + query : "");
    if (hash !== location.hash) history.replaceState(null, "", hash);
  },
};

const state = { run: null, compare: [], lost: null };

function column(name, run = state.run) { return run.columns[name] || []; }
function last(name, run = state.run) {
  const values = column(name, run);
  for (let index = values.length - 1; index >= 0; index--) if (values[index] !== null) return values[index];
  return null;
}
