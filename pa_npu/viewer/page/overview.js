/* Overview: how the run stands, advice, the newest numbers, curves. */

/* Why a run is not at work any more, above everything else. */
function endPanel() {
  const { word, cause, process, lines, iterations, total, last_write: written } = state.run.state;
  const logOf = (name) => state.run.processes.find((known) => known.name === name && known.log);
  const log = logOf(process) || logOf("launcher");
  const link =
    log &&
    h(
      "a",
      { href: "#processes?p=" + encodeURIComponent(log.name) },
      "the log of ",
      shown(log.name),
    );
  const done = `${iterations} ${total ? `of ${total} ` : ""}iterations were done.`;
  if (word === "failed") {
    return h(
      "section",
      { class: "panel ended failed", role: "alert" },
      h("h2", {}, "The run has failed: ", shown(cause || "no cause was recorded")),
      h("p", {}, done, " ", link),
      lines.length > 0 && h("pre", { class: "log" }, shown(lines.join("\n"))),
    );
  }
  if (word === "stopped") {
    const name =
      {
        SIGINT: "Ctrl-C (SIGINT)",
        SIGTERM: "SIGTERM, as kill and schedulers send it",
        SIGHUP: "SIGHUP: its terminal was closed",
      }[cause] || cause;
    return h(
      "section",
      { class: "panel ended stopped" },
      h("h2", {}, "The run was stopped by ", shown(name)),
      h("p", {}, done, " checkpoint.resume=auto continues it from its newest checkpoint."),
    );
  }
  if (word === "silent") {
    return h(
      "section",
      { class: "panel ended silent", role: "alert" },
      h("h2", {}, "Nothing was written for ", duration(Math.max(0, state.run.now - written))),
      h("p", {}, "The run hangs, or it ended without a record. ", done, " ", link),
    );
  }
  return null;
}

function tiles() {
  const { left } = state.run.state,
    { idle } = state.run;
  const evaluated = evaluationSets(state.run)[0];
  const points = evaluated === undefined ? [] : evaluationPoints(state.run, evaluated);
  const shares =
    idle.device_idle !== null
      ? [["device_idle", "devices idle"]]
      : [
          ["trainer_idle", "trainers idle"],
          ["engine_idle", "engines idle"],
        ];
  const isRewarded = last("reward_mean") !== null;
  const kind = points.length ? kindOf(points[0]) : "share";
  const evaluation = kind === "share" ? "evaluation" : `held-out ${metricOf(evaluated)}`;
  const values = [
    isRewarded
      ? [format(last("reward_mean")), "reward"]
      : [format(last("loss")), "loss, nats per token"],
    isRewarded ? [format(last("accuracy"), "share"), "accuracy, trained"] : null,
    points.length
      ? [
          format(points[points.length - 1].value, kind),
          `${evaluation}, from ${format(points[0].value, kind)}`,
        ]
      : null,
    [format(last("entropy")), "entropy, nats"],
    [
      format(last("response_length_mean")),
      last("rows") === null ? "tokens per response" : "trained tokens per row",
    ],
    ...shares.filter(([key]) => idle[key] !== null).map(([key, name]) => [
      format(idle[key], "share"),
      name,
      "median of the last 8 iterations",
    ]),
    [duration(last("iteration_s")), "last iteration"],
    [format(last("tpspd"), "count"), "tokens/s per device"],
    left === null ? null : [duration(left), "left"],
  ];
  return h(
    "div",
    { class: "tiles" },
    values
      .filter(Boolean)
      .map(([value, name, title]) =>
        h("div", { class: "tile", title }, h("b", {}, value), h("span", {}, name)),
      ),
  );
}

function adviceList() {
  const words = { act: ["▲", "act"], look: ["●", "look"] };
  return h(
    "ul",
    { class: "advice", "aria-label": "Advice" },
    state.run.advice.map((advice) =>
      h(
        "li",
        { class: advice.level },
        h(
          "h3",
          {},
          h("span", { class: "mark" }, words[advice.level][0], " ", words[advice.level][1]),
          h("span", {}, shown(advice.title)),
        ),
        h("p", {}, shown(advice.text)),
      ),
    ),
  );
}

async function overviewView(main) {
  const chain = await load("chain", true);
  if (!column("iteration").length) {
    fill(
      main,
      endPanel(),
      adviceList(),
      chainPanel(chain),
      h(
        "div",
        { class: "panel empty" },
        "No iteration has ended yet. ",
        h("a", { href: "#processes" }, "What the processes do"),
      ),
    );
    return;
  }
  const columns = await columnsInView();
  cursor.begin();
  const drawn = new Set(CHARTS.flatMap((spec) => spec.keys.map(([key]) => key)));
  const isFurther = (name) =>
    !drawn.has(name) && !/^rewards\.|_limit$|^(iteration|time|tokens_total)$/.test(name);
  const rest = Object.keys(state.run.columns).filter(isFurther);
  const more = h("details", {}, h("summary", {}, `${rest.length} further numbers`));
  more.addEventListener(
    "toggle",
    () =>
      more.open &&
      more.childElementCount === 1 &&
      more.append(
        h(
          "div",
          { class: "charts" },
          rest.map((name) =>
            chartOf({ title: name, topic: name, keys: [[name, name.split(".").pop()]] }, columns),
          ),
        ),
      ),
  );
  const advice = state.run.advice.length
    ? adviceList()
    : h("p", { class: "quiet" }, "No advice: the numbers are as they should be.");
  fill(
    main,
    endPanel(),
    advice,
    tiles(),
    chainPanel(chain),
    chartOptions(),
    h(
      "div",
      { class: "charts" },
      CHARTS.map((spec) => chartOf(spec, columns)),
    ),
    more,
  );
}
