/* Header, views, keys, and the look every two seconds for what is new. */

const VIEWS = [
  ["overview", "Overview", overviewView],
  ["timeline", "Timeline", timelineView],
  ["samples", "Samples", samplesView],
  ["evaluation", "Evaluation", evaluationView],
  ["configuration", "Configuration", configurationView],
  ["processes", "Processes", processesView],
];
const POLL_MS = 2000;
const POLL_TABLE_MS = 10000;
/* A folder's run has its page one level below the table of the folder. */
const IN_FOLDER = !EMBEDDED && location.pathname !== "/";

const theme = {
  stored() {
    try {
      return localStorage.getItem("pa_npu theme") || "auto";
    } catch {
      return "auto";
    }
  },
  apply() {
    const wanted = theme.stored();
    document.documentElement.dataset.theme =
      wanted === "auto"
        ? matchMedia("(prefers-color-scheme: dark)").matches
          ? "dark"
          : "light"
        : wanted;
  },
  next() {
    const order = ["auto", "light", "dark"];
    try {
      localStorage.setItem("pa_npu theme", order[(order.indexOf(theme.stored()) + 1) % 3]);
    } catch {
      /* a page from a file may have no storage */
    }
    theme.apply();
    drawHeader();
  },
};

/* What the run is, and how long it has been at it and will be. */
function factLine() {
  const { facts, state: run } = state.run;
  const seconds = run.started
    ? runSeconds(run.word === "running" ? { ...run, last_write: state.run.now } : run)
    : null;
  const entries = [
    ["model", facts.model],
    ["algorithm", [facts.algorithm, facts.schedule].filter(Boolean).join(", ")],
    ["data", facts.data],
    ["devices", facts.devices],
    ["started", run.started ? moment(run.started) : ""],
    ["for", seconds === null ? "" : duration(seconds)],
    ["left", run.left === null ? "" : duration(run.left)],
  ];
  return h(
    "dl",
    { class: "run-facts" },
    entries
      .filter(([, value]) => value)
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(value)))),
  );
}

function themeButton() {
  return h(
    "button",
    {
      class: "plain",
      id: "theme",
      onclick: theme.next,
      "aria-label": "colours: " + theme.stored(),
      title: "colours",
    },
    { auto: "◐", light: "○", dark: "●" }[theme.stored()],
    h("span", { class: "word" }, " ", theme.stored()),
  );
}

function stateChip(word) {
  if (state.lost)
    return h(
      "span",
      { class: "chip silent", role: "alert" },
      `no answer from pa-npu view since ${state.lost}; what is shown is old`,
    );
  return word && h("span", { class: "chip " + word }, word);
}

function drawHeader() {
  const focused = document.activeElement?.id,
    header = document.getElementById("header");
  if (!state.run) {
    fill(
      header,
      h(
        "div",
        { class: "title" },
        h("h1", {}, shown(state.runs.folder)),
        stateChip(),
        h("span", { class: "quiet" }, counted(state.runs.runs.length, "run")),
        h("span", { class: "spacer" }),
        themeButton(),
      ),
      h("div", { class: "below" }),
    );
  } else {
    const { word, iterations, total } = state.run.state,
      current = place.read().view;
    fill(
      header,
      h(
        "div",
        { class: "title" },
        IN_FOLDER && h("a", { href: "../", class: "up" }, "← runs"),
        h("h1", {}, shown(state.run.name)),
        stateChip(word),
        h(
          "span",
          { class: "quiet" },
          `${iterations} ${total ? `of ${total} ` : ""}iterations done${iterations ? `: 0 to ${iterations - 1}` : ""}`,
        ),
        state.compare.length > 0 &&
          h(
            "span",
            { class: "quiet beside" },
            "beside ",
            shown(state.compare.map((run) => run.name).join(", ")),
          ),
        h("span", { class: "spacer" }),
        themeButton(),
      ),
      factLine(),
      h(
        "nav",
        { role: "tablist", "aria-label": "views" },
        VIEWS.map(([name, label], i) =>
          h(
            "button",
            {
              role: "tab",
              id: "tab-" + name,
              "aria-selected": String(name === current),
              "aria-controls": "main",
              tabindex: name === current ? 0 : -1,
              title: "key " + (i + 1),
              onclick: () => show(name),
            },
            label,
          ),
        ),
      ),
    );
    arrowKeys(document.querySelector("nav"), "button", false);
  }
  if (focused) document.getElementById(focused)?.focus();
}

let drawing = 0;
async function draw() {
  const current = place.read().view,
    mine = ++drawing;
  const view = state.run
    ? VIEWS.find(([name]) => name === current) || VIEWS[0]
    : ["runs", "Runs", runsView];
  const main = h("div");
  tip.hide();
  try {
    await view[2](main);
  } catch (error) {
    fill(main, h("div", { class: "panel empty" }, "This view could not be drawn: ", String(error)));
  }
  if (mine === drawing) {
    document.getElementById("main").replaceChildren(main);
    document.getElementById("main").dataset.view = view[0];
  }
}

/* Another view, or the same with other choices; what belongs to a view alone is forgotten. */
function show(view, changes = {}) {
  const before = place.read();
  const kept = view === before.view ? before : { i: before.i };
  history.pushState(null, "", location.pathname + location.search + "#" + view);
  place.write({ ...kept, ...changes, view });
  drawHeader();
  return draw();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(state.run || state.runs)) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName || "");
  if (event.key === "Escape" && typing) {
    document.activeElement.blur();
    return;
  }
  if (typing) return;
  if (/^[1-6]$/.test(event.key) && state.run) show(VIEWS[Number(event.key) - 1][0]);
  else if (event.key === "/") document.getElementById("search")?.focus();
  else if (event.key === "[" || event.key === "]")
    document.querySelector(`[data-step="${event.key === "[" ? -1 : 1}"]`)?.click();
  else if (event.key === "t") theme.next();
  else return;
  event.preventDefault();
});

/* New data is drawn where nobody is in the middle of something: typing, or reading a group. */
async function poll() {
  try {
    const news = await (state.run
      ? load("run?stamp=" + encodeURIComponent(state.run.stamp))
      : load("runs", true));
    if (state.lost) {
      state.lost = null;
      drawHeader();
    }
    if (news) await refresh(news);
  } catch {
    if (!state.lost) {
      state.lost = new Date().toLocaleTimeString();
      drawHeader();
    }
  }
  setTimeout(poll, state.run ? POLL_MS : POLL_TABLE_MS);
}

async function refresh(news) {
  if (state.run) state.run = news;
  else state.runs = news;
  drawHeader();
  const isRead =
    state.run && ["samples", "configuration", "evaluation"].includes(place.read().view);
  if (isRead || document.querySelector("#main :focus")) return;
  const top = scrollY;
  await draw();
  scrollTo(0, top);
}

async function begin() {
  theme.apply();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme.apply);
  state.run = await load("run", true);
  if (state.run) state.compare = (await load("compare", true)) || [];
  else state.runs = await load("runs", true);
  if (!state.run && !state.runs) {
    fill(
      document.getElementById("main"),
      h("div", { class: "panel empty" }, "This run is not there any more."),
    );
    return;
  }
  document.title = `${state.run ? state.run.name : state.runs.folder} – pa_npu`;
  addEventListener("popstate", () => {
    drawHeader();
    draw();
  });
  addEventListener("hashchange", () => {
    drawHeader();
    draw();
  });
  drawHeader();
  await draw();
  document.documentElement.dataset.ready = "yes";
  if (!EMBEDDED) setTimeout(poll, POLL_MS);
}

begin();
