/* Evaluations by weight version: accuracy with its interval, as a curve and a table. */

function evaluationSets(run) { return run.evaluations.length ? [""] : []; }
function setName(set) { return set || "evaluation"; }

/* 95% interval of a share (Wilson). */
function interval(share, n) {
  const z = 1.96, middle = (share + z * z / (2 * n)) / (1 + z * z / n), half = z / (1 + z * z / n) * Math.sqrt(share * (1 - share) / n + z * z / (4 * n * n));
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

function evaluationPoints(run, set) {
  return run.evaluations.filter((record) => typeof record.accuracy === "number").map((record) => {
    const [low, high] = record.questions ? interval(record.accuracy, record.questions) : [record.accuracy, record.accuracy];
    return { version: record.version, value: record.accuracy, low, high, questions: record.questions, seconds: record.seconds };
  });
}

function evaluationView(main) {
  if (!state.run.evaluations.length) { fill(main, h("div", { class: "panel empty" }, "No evaluation yet (data.test, schedule.evaluate_every).")); return; }
  const points = evaluationPoints(state.run, "");
  const all = [state.run, ...state.compare].map((run, number) => ({ run, number, points: evaluationPoints(run, "") })).filter((entry) => entry.points.length);
  const curve = chart({ title: "Greedy accuracy on held-out questions", unit: "share, with 95 % interval", kind: "share", xUnit: "weight version",
    series: all.map(({ run, number, points: own }) => ({ name: run.name, x: own.map((p) => p.version), values: own.map((p) => p.value), low: own.map((p) => p.low), high: own.map((p) => p.high), points: true, color: number, other: number > 0 })) });
  const first = points[0];
  fill(main, curve, h("section", { class: "panel" }, h("div", { class: "scroll" }, h("table", { class: "list" },
    h("thead", {}, h("tr", {}, ["version", "accuracy", "95 % interval", "since the first", "questions", "seconds"].map((name) => h("th", { class: "number" }, name)))),
    h("tbody", {}, points.map((point) => h("tr", {}, [point.version, format(point.value, "share"), `${format(point.low, "share")} to ${format(point.high, "share")}`, point === first ? "" : (point.value >= first.value ? "+" : "−") + format(Math.abs(point.value - first.value), "share"), point.questions, format(point.seconds)].map((value) => h("td", { class: "number" }, value)))))))));
}
