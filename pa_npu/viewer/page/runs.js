/* The table of a folder's runs: sorted by any column, searched, opened, compared. */

const STATE_ORDER = ["running", "failed", "stopped", "silent", "finished"];

/* name, title, what it is sorted by, what is shown, and whether that is a number. */
const RUN_COLUMNS = [
  { name: "name", title: "run", sort: (run) => run.name },
  { name: "state", title: "state", sort: (run) => STATE_ORDER.indexOf(run.state.word) },
  {
    name: "iterations",
    title: "iterations",
    isNumber: true,
    sort: (run) => run.state.iterations,
    text: (run) => run.state.iterations + (run.state.total ? ` / ${run.state.total}` : ""),
  },
  { name: "reward", title: "reward", isNumber: true, sort: (run) => run.numbers.reward_mean },
  {
    name: "evaluation",
    title: "evaluation",
    isNumber: true,
    kind: "share",
    sort: (run) => run.evaluation,
  },
  { name: "best", title: "best", isNumber: true, kind: "share", sort: (run) => run.best },
  {
    name: "length",
    title: "length",
    isNumber: true,
    sort: (run) => run.numbers.response_length_mean,
  },
  {
    name: "tpspd",
    title: "tokens/s",
    hint: "tokens per second and device",
    isNumber: true,
    kind: "count",
    sort: (run) => run.numbers.tpspd,
  },
  {
    name: "iteration_s",
    title: "s/iter.",
    hint: "seconds of an iteration",
    isNumber: true,
    sort: (run) => run.numbers.iteration_s,
  },
  {
    name: "started",
    title: "started",
    sort: (run) => run.state.started,
    text: (run) => shortMoment(run.state.started),
  },
  {
    name: "duration",
    title: "duration",
    isNumber: true,
    sort: (run) => runSeconds(run.state),
    text: (run) => duration(runSeconds(run.state)),
  },
  { name: "model", title: "model", sort: (run) => run.facts.model },
  { name: "algorithm", title: "algorithm", sort: (run) => run.facts.algorithm },
  { name: "data", title: "data", sort: (run) => run.facts.data },
  { name: "devices", title: "devices", sort: (run) => run.facts.devices },
];

function moment(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000),
    two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/* Without the year, if it is this one. */
function shortMoment(seconds) {
  return moment(seconds).replace(`${new Date().getFullYear()}-`, "");
}

function runSeconds(run) {
  if (!run.started) return null;
  return Math.max(0, (run.ended || run.last_write) - run.started);
}

/* Runs that have nothing in the column come last, whichever way it is sorted. */
function sortedRuns(runs, column, isDescending) {
  const isEmpty = (value) => value === null || value === undefined || value === "";
  return [...runs].sort((a, b) => {
    const [first, second] = [column.sort(a), column.sort(b)];
    if (isEmpty(first) || isEmpty(second)) return isEmpty(first) - isEmpty(second);
    const order =
      typeof first === "number"
        ? first - second
        : String(first).localeCompare(String(second), "en", { numeric: true });
    return isDescending ? -order : order;
  });
}

const chosenRuns = new Set();

function runsView(main) {
  const address = place.read(),
    { runs, left_out: leftOut } = state.runs;
  const column =
    RUN_COLUMNS.find((known) => known.name === address.sort) ||
    RUN_COLUMNS.find((known) => known.name === "started");
  const look = {
    wanted: address.q || "",
    isDescending: address.order ? address.order === "down" : !address.sort,
  };
  const body = h("tbody"),
    count = h("span", { class: "quiet" });
  const compare = h("button", { class: "plain", id: "compare", onclick: openChosen }, "compare");

  function openChosen() {
    const names = runs.map((run) => run.name).filter((name) => chosenRuns.has(name));
    const [first, ...others] = sortedRuns(runs, column, look.isDescending)
      .map((run) => run.name)
      .filter((name) => names.includes(name));
    location.href = runAddress(first, others);
  }
  function sortBy(chosen) {
    const order =
      chosen === column && !look.isDescending
        ? "down"
        : chosen === column
          ? "up"
          : chosen.isNumber
            ? "down"
            : "up";
    place.write({ sort: chosen.name, order });
    draw().then(() => document.getElementById("sort-" + chosen.name)?.focus());
  }
  const head = RUN_COLUMNS.map((known) =>
    h(
      "th",
      {
        class: known.isNumber ? "number" : null,
        title: known.hint || null,
        "aria-sort": known === column ? (look.isDescending ? "descending" : "ascending") : "none",
      },
      h(
        "button",
        { class: "sort", id: "sort-" + known.name, onclick: () => sortBy(known) },
        known.title,
        known === column ? (look.isDescending ? " ▼" : " ▲") : "",
      ),
    ),
  );

  function cell(known, run) {
    const text = known.text
      ? known.text(run)
      : known.isNumber
        ? format(known.sort(run), known.kind)
        : known.sort(run) || "–";
    return h(
      "td",
      { class: `${known.isNumber ? "number" : "wide"} ${known.name}`, "data-label": known.title },
      shown(text),
    );
  }
  function row(run) {
    const pick = h("input", {
      type: "checkbox",
      "aria-label": "compare " + run.name,
      checked: chosenRuns.has(run.name),
      onchange: (event) => {
        if (event.target.checked) chosenRuns.add(run.name);
        else chosenRuns.delete(run.name);
        update();
      },
    });
    const name = EMBEDDED
      ? shown(run.name)
      : h("a", { href: runAddress(run.name, []) }, shown(run.name));
    return h(
      "tr",
      {},
      h("td", {}, pick),
      h("td", { class: "wide name" }, name),
      h(
        "td",
        { "data-label": "state" },
        h("span", { class: "chip " + run.state.word }, run.state.word),
        run.state.cause && h("div", { class: "quiet small cause" }, shown(run.state.cause)),
      ),
      RUN_COLUMNS.slice(2).map((known) => cell(known, run)),
    );
  }
  function update() {
    const sought = look.wanted.toLowerCase();
    const words = (run) =>
      [run.name, run.state.word, run.state.cause, ...Object.values(run.facts)]
        .join(" ")
        .toLowerCase();
    const fitting = sortedRuns(
      runs.filter((run) => words(run).includes(sought)),
      column,
      look.isDescending,
    );
    place.write({ q: look.wanted });
    count.textContent =
      (fitting.length < runs.length ? `${fitting.length} of ${counted(runs.length, "run")} ` : "") +
      (leftOut ? `${leftOut} older ones are left out` : "");
    compare.disabled = chosenRuns.size < 2 || Boolean(EMBEDDED);
    compare.textContent = chosenRuns.size > 1 ? `compare ${chosenRuns.size} runs` : "compare";
    fill(body, fitting.map(row));
  }
  const search = h("input", {
    type: "search",
    id: "search",
    placeholder: "search runs ( / )",
    "aria-label": "search runs",
    value: look.wanted,
    oninput: (event) => {
      look.wanted = event.target.value;
      update();
    },
  });
  fill(
    main,
    h("div", { class: "bar" }, search, compare, count),
    h(
      "section",
      { class: "panel scroll", tabindex: 0, "aria-label": "runs" },
      h(
        "table",
        { class: "list stack runs" },
        h("thead", {}, h("tr", {}, h("th", {}, ""), head)),
        body,
      ),
    ),
  );
  update();
}

function runAddress(name, others) {
  const query = others.map((name) => "with=" + encodeURIComponent(name)).join("&");
  return encodeURIComponent(name) + "/" + (query ? "?" + query : "");
}
