/* Evaluations by weight version: every set and number with its interval, as curves and a table. */

/* A series is a set and one of its numbers; older records have one accuracy, whose interval (Wilson's, 95 %) is made here. */
function evaluationSets(run) {
  const found = new Set();
  for (const record of run.evaluations) {
    if (record.sets) for (const [set, summary] of Object.entries(record.sets)) for (const metric of Object.keys(summary.metrics || {})) found.add(set + "/" + metric);
    else if (typeof record.accuracy === "number") found.add("");
  }
  return [...found];
}
function setName(set) { return set || "evaluation"; }

function interval(share, n) {
  const z = 1.96, middle = (share + z * z / (2 * n)) / (1 + z * z / n), half = z / (1 + z * z / n) * Math.sqrt(share * (1 - share) / n + z * z / (4 * n * n));
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

/* The difference to another version over the same questions, which is far surer than that of two separate numbers. */
function paired(record, to, name, metric) { return record.differences?.[to]?.sets?.[name]?.[metric]; }
function signed(value) { return (value >= 0 ? "+" : "−") + format(Math.abs(value), "share"); }
function change(found) { return found ? `${signed(found.value)} (${signed(found.low)} to ${signed(found.high)})` : "–"; }

function evaluationPoints(run, set) {
  const [name, metric] = set.split("/");
  return run.evaluations.flatMap((record) => {
    if (record.sets) {
      const found = record.sets[name]?.metrics?.[metric], summary = record.sets[name];
      return found ? [{ version: record.version, value: found.value, low: found.low, high: found.high, questions: found.questions, seconds: record.seconds, length: summary.length_mean, cut: summary.truncated_ratio, part: record.planned > record.questions, first: paired(record, "first", name, metric), before: paired(record, "before", name, metric) }] : [];
    }
    if (set || typeof record.accuracy !== "number") return [];
    const [low, high] = record.questions ? interval(record.accuracy, record.questions) : [record.accuracy, record.accuracy];
    return [{ version: record.version, value: record.accuracy, low, high, questions: record.questions, seconds: record.seconds, length: null, cut: null, part: false }];
  });
}

function evaluationView(main) {
  const names = evaluationSets(state.run);
  if (!names.length) { fill(main, h("div", { class: "panel empty" }, "No evaluation yet (data.test, schedule.evaluate_every).")); return; }
  const wanted = place.read().set, chosen = names.includes(wanted) ? wanted : names[0];
  const sets = [...new Set(names.map((name) => name.split("/")[0]))];
  const curves = sets.map((set) => {
    const own = names.filter((name) => name.split("/")[0] === set);
    const series = [state.run, ...state.compare].flatMap((run, number) => own.map((name, color) => {
      const points = evaluationPoints(run, name);
      return { name: (name.split("/")[1] || "greedy") + (number ? ` (${run.name})` : ""), run: run.name, x: points.map((p) => p.version), values: points.map((p) => p.value), low: points.map((p) => p.low), high: points.map((p) => p.high), points: true, color: state.compare.length ? number : color, other: number > 0 };
    })).filter((entry) => entry.x.length);
    return chart({ title: set || "Greedy accuracy on held-out questions", unit: "share, with 95 % interval", kind: "share", xUnit: "weight version", series });
  });
  const points = evaluationPoints(state.run, chosen), first = points[0];
  const picker = names.length > 1 && h("div", { class: "bar" }, h("label", {}, "table of", h("select", { "aria-label": "set and number", onchange: (event) => show("evaluation", { set: event.target.value }) }, names.map((name) => h("option", { value: name, selected: name === chosen }, shown(name))))));
  const rows = points.map((point) => [point.version, format(point.value, "share"), `${format(point.low, "share")} to ${format(point.high, "share")}`,
    point === first ? "" : point.first ? change(point.first) : signed(point.value - first.value), point === first ? "" : change(point.before),
    point.questions + (point.part ? " (cut short)" : ""), point.length === null ? "–" : format(point.length), point.cut === null ? "–" : format(point.cut, "share"), format(point.seconds)]);
  fill(main, h("div", { class: "charts" }, curves), h("section", { class: "panel" }, picker, h("div", { class: "scroll", tabindex: 0, "aria-label": "evaluations" }, h("table", { class: "list" },
    h("thead", {}, h("tr", {}, ["version", shown(chosen.split("/")[1] || "accuracy"), "95 % interval", "since the first, question by question", "since the one before", "questions", "tokens", "cut", "seconds"].map((name) => h("th", { class: "number" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => h("td", { class: "number" }, value)))))))));
}
