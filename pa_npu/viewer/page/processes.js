/* Processes: what each did last, and the ends of their logs. */

function ago(time) {
  return time ? duration(Math.max(0, state.run.now - time)) + " before" : "–";
}

async function processesView(main) {
  const address = place.read(),
    processes = state.run.processes,
    run = state.run.state;
  const look = { wanted: address.q || "", level: address.level || "" };
  const chosen =
    processes.find((process) => process.name === address.p && process.log) ||
    processes.find((process) => process.name === "launcher" && process.log) ||
    processes.find((process) => process.log);
  const table = h(
    "section",
    { class: "panel scroll" },
    h(
      "table",
      { class: "list stack" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["process", "did last", "when", "started", "warnings", "last line of its log"].map(
            (name) => h("th", {}, name),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        processes.map((process) =>
          h(
            "tr",
            {
              class: process.log ? "pick" : "",
              "aria-selected": process === chosen ? "true" : null,
              onclick: () => process.log && show("processes", { p: process.name }),
            },
            h(
              "td",
              {},
              process.log
                ? h(
                    "a",
                    { href: "#processes?p=" + encodeURIComponent(process.name) },
                    shown(process.name),
                  )
                : shown(process.name),
            ),
            h("td", { "data-label": "did last" }, shown(process.last_event || "")),
            h("td", { "data-label": "when" }, process.last_time ? ago(process.last_time) : ""),
            h(
              "td",
              { "data-label": "started" },
              process.starts > 1 ? process.starts + " times" : process.starts ? "once" : "",
            ),
            h("td", { "data-label": "warnings" }, process.warnings || ""),
            h("td", { class: "mono wide quiet" }, shown((process.last_line || "").slice(0, 200))),
          ),
        ),
      ),
    ),
  );
  const words = {
    finished: "The run has finished.",
    running: "The run is at work.",
    failed: "The run has failed.",
    stopped: "The run was stopped.",
    silent: "Nothing was written for a while: the run hangs, or it ended without a record.",
  };
  fill(
    main,
    endPanel(),
    h(
      "p",
      {},
      words[run.word],
      run.last_write ? ` Last write ${ago(run.last_write)} now.` : "",
      run.attempts > 1 ? ` It was started ${run.attempts} times.` : "",
    ),
    table,
  );
  if (!chosen) return;
  const log = await load("log/" + chosen.log, true);
  const output = h("pre", { class: "log", tabindex: 0, "aria-label": "log of " + chosen.name }),
    count = h("span", { class: "quiet" });
  const lines = log ? log.text.split("\n") : [];
  const bad = /^\S+ \S+ E |\berror\b|Traceback/i,
    warn = /^\S+ \S+ W |warning/i;
  function update() {
    const sought = look.wanted.toLowerCase();
    const shownLines = lines.filter(
      (line) =>
        (!look.level || bad.test(line) || warn.test(line)) &&
        (!sought || line.toLowerCase().includes(sought)),
    );
    place.write({ q: look.wanted, level: look.level });
    count.textContent = `${shownLines.length} of ${lines.length} lines`;
    fill(
      output,
      shownLines
        .slice(-3000)
        .map((line) =>
          h(
            "span",
            { class: bad.test(line) ? "bad" : warn.test(line) ? "warn" : null },
            shown(line, look.wanted),
            "\n",
          ),
        ),
    );
    output.scrollTop = output.scrollHeight;
  }
  add(main, [
    h(
      "section",
      { class: "panel" },
      h(
        "div",
        { class: "bar" },
        h("h2", {}, shown(chosen.log)),
        h("input", {
          type: "search",
          id: "search",
          placeholder: "search the log ( / )",
          "aria-label": "search the log",
          value: look.wanted,
          oninput: (event) => {
            look.wanted = event.target.value;
            update();
          },
        }),
        h(
          "select",
          {
            "aria-label": "which lines",
            onchange: (event) => {
              look.level = event.target.value;
              update();
            },
          },
          [
            ["", "all lines"],
            ["warnings", "warnings and errors"],
          ].map(([value, name]) => h("option", { value, selected: value === look.level }, name)),
        ),
        count,
      ),
      output,
    ),
  ]);
  update();
}
