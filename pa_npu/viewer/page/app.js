/* Header, views, keys, and the look every two seconds for what is new. */

const VIEWS = [["overview", "Overview", overviewView], ["timeline", "Timeline", timelineView], ["samples", "Samples", samplesView], ["evaluation", "Evaluation", evaluationView], ["configuration", "Configuration", configurationView], ["processes", "Processes", processesView]];
const POLL_MS = 2000;

const theme = {
  stored() { try { return localStorage.getItem("pa_npu theme") || "auto"; } catch { return "auto"; } },
  apply() {
    const wanted = theme.stored();
    document.documentElement.dataset.theme = wanted === "auto" ? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light") : wanted;
  },
  next() {
    const order = ["auto", "light", "dark"];
    try { localStorage.setItem("pa_npu theme", order[(order.indexOf(theme.stored()) + 1) % 3]); } catch { /* a page from a file may have no storage */ }
    theme.apply();
    drawHeader();
  },
};

function drawHeader() {
  const { word, iterations, total } = state.run.state, current = place.read().view;
  const focused = document.activeElement?.id;
  fill(document.getElementById("header"),
    h("div", { class: "title" }, h("h1", {}, shown(state.run.name)), state.lost ? h("span", { class: "chip silent", role: "alert" }, `no answer from pa-npu view since ${state.lost}; what is shown is old`) : h("span", { class: "chip " + word }, word), h("span", { class: "quiet" }, `${iterations} ${total ? `of ${total} ` : ""}iterations done${iterations ? `: 0 to ${iterations - 1}` : ""}`),
      state.compare.length > 0 && h("span", { class: "quiet beside" }, "beside ", shown(state.compare.map((run) => run.name).join(", "))), h("span", { class: "spacer" }),
      h("button", { class: "plain", id: "theme", onclick: theme.next, "aria-label": "colours: " + theme.stored(), title: "colours" }, { auto: "◐", light: "○", dark: "●" }[theme.stored()], h("span", { class: "word" }, " ", theme.stored()))),
    h("nav", { role: "tablist", "aria-label": "views" }, VIEWS.map(([name, label], i) => h("button", { role: "tab", id: "tab-" + name, "aria-selected": String(name === current), "aria-controls": "main", tabindex: name === current ? 0 : -1, title: "key " + (i + 1), onclick: () => show(name) }, label))));
  arrowKeys(document.querySelector("nav"), "button", false);
  if (focused) document.getElementById(focused)?.focus();
}

let drawing = 0;
async function draw() {
  const current = place.read().view, mine = ++drawing;
  const view = VIEWS.find(([name]) => name === current) || VIEWS[0];
  const main = h("div");
  tip.hide();
  try { await view[2](main); } catch (error) { fill(main, h("div", { class: "panel empty" }, "This view could not be drawn: ", String(error))); }
  if (mine === drawing) { document.getElementById("main").replaceChildren(main); document.getElementById("main").dataset.view = view[0]; }
}

/* Another view, or the same with other choices; what belongs to a view only is forgotten. */
function show(view, changes = {}) {
  const before = place.read();
  const kept = view === before.view ? before : { i: before.i };
  history.pushState(null, "", location.pathname + location.search + "#" + view);
  place.write({ ...kept, ...changes, view });
  drawHeader();
  return draw();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !state.run) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName || "");
  if (event.key === "Escape" && typing) { document.activeElement.blur(); return; }
  if (typing) return;
  if (/^[1-6]$/.test(event.key)) show(VIEWS[Number(event.key) - 1][0]);
  else if (event.key === "/") document.getElementById("search")?.focus();
  else if (event.key === "[" || event.key === "]") document.querySelector(`[data-step="${event.key === "[" ? -1 : 1}"]`)?.click();
  else if (event.key === "t") theme.next();
  else return;
  event.preventDefault();
});

/* New data is drawn where nobody is in the middle of something: typing, or reading a group. */
async function poll() {
  try {
    const run = await load("run?stamp=" + encodeURIComponent(state.run.stamp));
    if (state.lost) { state.lost = null; drawHeader(); }
    if (run) {
      state.run = run;
      drawHeader();
      const busy = ["samples", "configuration"].includes(place.read().view) || document.querySelector("#main :focus");
      if (!busy) { const top = scrollY; await draw(); scrollTo(0, top); }
    }
  } catch { if (!state.lost) { state.lost = new Date().toLocaleTimeString(); drawHeader(); } }
  setTimeout(poll, POLL_MS);
}

async function begin() {
  theme.apply();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme.apply);
  state.run = await load("run", true);
  state.compare = (await load("compare", true)) || [];
  document.title = `${state.run.name} – pa_npu`;
  addEventListener("popstate", () => { drawHeader(); draw(); });
  addEventListener("hashchange", () => { drawHeader(); draw(); });
  drawHeader();
  await draw();
  document.documentElement.dataset.ready = "yes";
  if (!EMBEDDED) setTimeout(poll, POLL_MS);
}

begin();
