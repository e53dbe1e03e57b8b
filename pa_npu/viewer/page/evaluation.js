/* Evaluations by weight version: every set and number with its interval, and question by
   question what was gained and lost. */

/* A series is a set and one of its numbers: shares of questions, with an interval, or a loss over
   rows, without one. Older records have one accuracy, whose interval (Wilson's, 95 %) is made
   here. */
function evaluationSets(run) {
  const names = new Set();
  for (const record of run.evaluations) {
    if (!record.sets && typeof record.accuracy === "number") names.add("");
    for (const [set, summary] of Object.entries(record.sets || {})) {
      for (const metric of Object.keys(summary.metrics)) names.add(set + "/" + metric);
    }
  }
  return [...names];
}

function setOf(name) {
  return name.slice(0, Math.max(0, name.lastIndexOf("/")));
}
function metricOf(name) {
  return name.slice(name.lastIndexOf("/") + 1);
}
function setName(name) {
  return name || "evaluation";
}

function interval(share, n) {
  const z = 1.96,
    middle = (share + (z * z) / (2 * n)) / (1 + (z * z) / n);
  const half =
    (z / (1 + (z * z) / n)) * Math.sqrt((share * (1 - share)) / n + (z * z) / (4 * n * n));
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

/* The difference to another version over the same questions, which is far surer than that of two
   separate numbers. */
function paired(record, to, set, metric) {
  return record.differences?.[to]?.sets?.[set]?.[metric];
}
function signed(value, kind = "share") {
  return (value >= 0 ? "+" : "−") + format(Math.abs(value), kind);
}

/* Whether a number of an evaluation is a share of questions, which has an interval. */
function isShare(point) {
  return point.low !== null;
}

/* How it is written. */
function kindOf(point) {
  return isShare(point) ? "share" : "";
}
function change(estimate) {
  return estimate
    ? `${signed(estimate.value)} (${signed(estimate.low)} to ${signed(estimate.high)})`
    : "–";
}

function evaluationPoints(run, name) {
  const set = setOf(name),
    metric = metricOf(name);
  return run.evaluations.flatMap((record) => {
    const common = { version: record.version, seconds: record.seconds };
    if (record.sets) {
      const summary = record.sets[set],
        estimate = summary?.metrics[metric];
      if (!estimate) return [];
      return [
        {
          ...common,
          value: estimate.value,
          low: estimate.low,
          high: estimate.high,
          questions: estimate.questions ?? summary.rows,
          length: summary.length_mean,
          cut: summary.truncated_ratio,
          part: record.planned > record.questions,
          first: paired(record, "first", set, metric),
          before: paired(record, "before", set, metric),
        },
      ];
    }
    if (name || typeof record.accuracy !== "number") return [];
    const [low, high] = record.questions
      ? interval(record.accuracy, record.questions)
      : [record.accuracy, record.accuracy];
    return [
      {
        ...common,
        value: record.accuracy,
        low,
        high,
        questions: record.questions,
        length: null,
        cut: null,
        part: false,
      },
    ];
  });
}

/* A chart for the shares of each set, and one for each of its other numbers, whose units differ. */
function evaluationCurves(names) {
  const runs = [state.run, ...state.compare];
  const isOfShares = (name) => runs.some((run) => evaluationPoints(run, name).some(isShare));
  const sets = [...new Set(names.filter(isOfShares).map(setOf))];
  const ofShares = sets.map((set) =>
    evaluationCurve({
      names: names.filter((name) => setOf(name) === set && isOfShares(name)),
      title: set || "Greedy accuracy on held-out questions",
      unit: "share, with 95 % interval",
      kind: "share",
    }),
  );
  const others = names.filter((name) => !isOfShares(name));
  const ofOthers = others.map((name) =>
    evaluationCurve({
      names: [name],
      title: setOf(name),
      unit: metricOf(name) === "loss" ? "loss, nats per token" : metricOf(name),
      kind: "",
    }),
  );
  return [...ofShares, ...ofOthers];
}

function evaluationCurve({ names, title, unit, kind }) {
  const runs = [state.run, ...state.compare];
  const series = runs
    .flatMap((run, number) =>
      names.map((name, color) => {
        const points = evaluationPoints(run, name);
        const interval =
          kind === "share"
            ? { low: points.map((p) => p.low), high: points.map((p) => p.high) }
            : {};
        return {
          name: (metricOf(name) || "greedy") + (number ? ` (${run.name})` : ""),
          run: run.name,
          x: points.map((p) => p.version),
          values: points.map((p) => p.value),
          ...interval,
          points: true,
          color: state.compare.length ? number : color,
          other: number > 0,
        };
      }),
    )
    .filter((entry) => entry.x.length);
  return chart({ title, unit, kind, xUnit: "weight version", series });
}

function evaluationTable(name) {
  const points = evaluationPoints(state.run, name),
    first = points[0];
  const kind = first ? kindOf(first) : "share";
  const rows = points.map((point) => {
    const since =
      point === first
        ? ""
        : point.first
          ? change(point.first)
          : signed(point.value - first.value, kind);
    if (kind !== "share")
      return [
        point.version,
        format(point.value),
        since,
        point.questions ?? "–",
        format(point.seconds),
      ];
    return [
      point.version,
      format(point.value, "share"),
      `${format(point.low, "share")} to ${format(point.high, "share")}`,
      since,
      point === first ? "" : change(point.before),
      (point.questions ?? "–") + (point.part ? " (cut short)" : ""),
      format(point.length),
      point.cut === null ? "–" : format(point.cut, "share"),
      format(point.seconds),
    ];
  });
  const titles =
    kind === "share"
      ? [
          "version",
          metricOf(name) || "accuracy",
          "95 % interval",
          "since the first, question by question",
          "since the one before",
          "questions",
          "tokens",
          "cut",
          "seconds",
        ]
      : ["version", metricOf(name), "since the first", "rows", "seconds"];
  return h(
    "div",
    { class: "scroll", tabindex: 0, "aria-label": "evaluations" },
    h(
      "table",
      { class: "list" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          titles.map((title) => h("th", { class: "number" }, shown(title))),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((value) => h("td", { class: "number" }, value)),
          ),
        ),
      ),
    ),
  );
}

async function evaluationView(main) {
  cursor.begin();
  const names = evaluationSets(state.run);
  if (!names.length) {
    fill(
      main,
      h("div", { class: "panel empty" }, "No evaluation yet (data.test, schedule.evaluate_every)."),
    );
    return;
  }
  const wanted = place.read().set,
    chosen = names.includes(wanted) ? wanted : names[0];
  const picker =
    names.length > 1 &&
    h(
      "div",
      { class: "bar" },
      h(
        "label",
        {},
        "table of",
        h(
          "select",
          {
            "aria-label": "set and number",
            onchange: (event) => show("evaluation", { set: event.target.value }),
          },
          names.map((name) => h("option", { value: name, selected: name === chosen }, name)),
        ),
      ),
    );
  fill(
    main,
    h("div", { class: "charts" }, evaluationCurves(names)),
    h("section", { class: "panel" }, picker, evaluationTable(chosen)),
    evaluationPoints(state.run, chosen).some(isShare) && (await questionsPanel(setOf(chosen))),
  );
}
