/* Overview: advice, the newest numbers, curves. */

const CHARTS = [
  { topic: "reward_mean", title: "Reward", unit: "mean per response", keys: [["reward_mean", "total"]], prefix: "rewards." },
  { topic: "accuracy", title: "Accuracy", unit: "share of responses", kind: "share", keys: [["accuracy", "trained"], ["accuracy_dispatched", "dispatched"]], evaluations: true },
  { topic: "entropy", title: "Entropy", unit: "nats per token", keys: [["entropy", "policy"]] },
  { topic: "kl", title: "KL to the reference", unit: "nats per token", keys: [["kl", "KL"]], nonzero: true },
  { topic: "loss", title: "Loss", unit: "", keys: [["loss", "loss"]] },
  { topic: "grad_norm", title: "Gradient norm", unit: "before clipping", keys: [["grad_norm", "norm"]], limit: ["optimizer.clip_grad", "clipped at"] },
  { topic: "expert_imbalance", title: "Experts", unit: "tokens of the busiest over the mean", keys: [["expert_imbalance", "mean over layers"], ["expert_imbalance_max", "worst layer"]] },
  { topic: "expert_imbalance_layers", title: "Experts by layer", unit: "tokens of the busiest over the mean", keys: [], prefix: "expert_imbalance_layers." },
  { topic: "replay_changed", title: "Router replay", unit: "share of replayed choices", kind: "share", keys: [["replay_changed", "not the trainer's own"]] },
  { topic: "routing_entropy", title: "Routing entropy", unit: "nats per token and layer", keys: [["routing_entropy", "routers"]] },
  { topic: "response_length_mean", title: "Response length", unit: "tokens, mean", keys: [["response_length_mean", "length"]], limit: ["rollout.max_response_tokens", "limit"] },
  { topic: "truncated_ratio", title: "Lost signal", unit: "share", kind: "share", keys: [["truncated_ratio", "cut at the limit"], ["equal_reward_ratio", "groups with equal rewards"]] },
  { topic: "unique_ratio", title: "Shared turns", unit: "share of tokens that are unique", kind: "share", keys: [["unique_ratio", "unique"]] },
  { topic: "trainer_idle", title: "Idle", unit: "share of the iteration", kind: "share", keys: [["trainer_idle", "trainers"], ["engine_idle", "engines"], ["device_idle", "devices that do both"], ["tail_waste", "tail of generation"]] },
  { topic: "iteration_s", title: "Time", unit: "seconds", keys: [["iteration_s", "iteration"], ["generate_s", "generation"], ["train_s", "training"], ["publish_s", "publish"], ["evaluation_s", "evaluation"], ["predicted_s", "predicted"]] },
  { topic: "tpspd", title: "Throughput", unit: "tokens per second per device", keys: [["tpspd", "prompt + response"], ["tpspd_response", "response"], ["tpspd_computed", "computed"]] },
  { topic: "logprob_diff_mean", title: "Engine against trainer", unit: "log-prob difference, log scale", log: true, keys: [["logprob_diff_mean", "mean"], ["logprob_k3", "K3"], ["logprob_diff_max", "largest"], ["probe_diff_max", "probe, largest"]], lastLimit: ["logprob_diff_limit", "limit of the mean"] },
  { topic: "window", title: "Window", unit: "sequences in flight per engine", kind: "count", keys: [["window", "window"]] },
  { topic: "learning_rate", title: "Learning rate", unit: "", keys: [["learning_rate", "rate"]] },
  { topic: "memory", title: "Memory, host", unit: "GiB, most", scale: 1 / 2 ** 30, keys: [["memory_trainer_host_bytes", "trainer"], ["memory_engine_host_bytes", "engine"], ["memory_coordinator_bytes", "coordinator"]] },
  { topic: "memory_device", title: "Memory, device", unit: "GiB, most", scale: 1 / 2 ** 30, keys: [["memory_trainer_device_bytes", "trainer"], ["memory_engine_device_bytes", "engine"]] },
];

/* What curves are drawn over: x of each iteration of a run, in the address as ?x=. */
const X_AXES = { "": ["iteration", (run) => column("iteration", run)],
  time: ["hours since the first iteration", (run) => { const times = column("time", run), began = times.find((time) => time !== null); return times.map((time) => time === null ? null : (time - began) / 3600); }],
  tokens: ["million tokens trained", (run) => { let sum = 0; const prompt = column("tokens_prompt", run); return column("tokens_response", run).map((value, i) => (sum += ((value || 0) + (prompt[i] || 0)) / 1e6)); }] };
const SMOOTHING = { "": "as many points need", 0: "off", 0.6: "some", 0.9: "much", 0.97: "most" };

function chartOptions() {
  const { x = "", smoothing = "" } = place.read();
  const choice = (name, id, chosen, words) => h("label", {}, name, h("select", { id, onchange: (event) => show("overview", { [id]: event.target.value }) }, Object.entries(words).map(([value, text]) => h("option", { value, selected: value === chosen }, text))));
  return h("div", { class: "bar" }, choice("over", "x", x, Object.fromEntries(Object.entries(X_AXES).map(([key, [name]]) => [key, name]))), choice("smoothing", "smoothing", smoothing, SMOOTHING));
}

function chartOf(spec) {
  const series = [], { x = "", smoothing = "" } = place.read(), [xUnit, xOf] = X_AXES[x] || X_AXES[""];
  const addSeries = (run, number) => {
    const other = number > 0, xs = xOf(run), iterations = column("iteration", run);
    let keys = spec.keys;
    if (spec.prefix) {
      const functions = Object.keys(run.columns).filter((name) => name.startsWith(spec.prefix));
      if (functions.length > 1) keys = [...keys, ...functions.map((name) => [name, name.slice(spec.prefix.length)])];
    }
    keys.forEach(([key, name], dash) => {
      const values = column(key, run);
      if (!values.some((value) => value !== null) || (spec.nonzero && values.every((value) => !value))) return;
      if (key === "accuracy_dispatched" && values.every((value, i) => Math.abs(value - column("accuracy", run)[i]) < 1e-9)) return;
      series.push({ name: other ? `${name} (${run.name})` : name, run: run.name, x: xs, color: state.compare.length ? number : dash, dash, other, values: spec.scale ? values.map((value) => value && value * spec.scale) : values });
    });
    if (spec.evaluations) for (const set of evaluationSets(run).slice(0, 3)) {
      const at = (version) => (x ? xs[iterations.indexOf(Math.max(version - 1, iterations[0]))] : version); // version v is what iteration v - 1 has made
      const points = evaluationPoints(run, set).filter((point) => typeof at(point.version) === "number");
      series.push({ name: other ? `${setName(set)} (${run.name})` : setName(set), x: points.map((p) => at(p.version)), values: points.map((p) => p.value), low: points.map((p) => p.low), high: points.map((p) => p.high), points: true, run: run.name, color: state.compare.length ? number : 2 + series.filter((one) => one.points).length, other });
    }
  };
  [state.run, ...state.compare].forEach(addSeries);
  if (!series.length) return null;
  const given = spec.limit && state.run.config[spec.limit[0]];
  const limit = typeof given === "number" && given > 0 ? { value: given, name: spec.limit[1] }
    : spec.lastLimit && last(spec.lastLimit[0]) !== null ? { value: last(spec.lastLimit[0]), name: spec.lastLimit[1] } : null;
  const shownX = xOf(state.run);
  return chart({ ...spec, series, limit, xUnit, xKind: x, smoothing: smoothing === "" ? undefined : Number(smoothing),
    open: (at) => { const iteration = column("iteration")[shownX.indexOf(at)]; if (iteration !== undefined) show("samples", { i: iteration }); } });
}

function tiles() {
  const recent = column("iteration_s").slice(-8).filter((value) => value !== null).sort((a, b) => a - b);
  const { iterations, total, word } = state.run.state;
  const left = total && recent.length && word !== "finished" ? (total - iterations) * recent[Math.floor(recent.length / 2)] : null;
  const evaluated = evaluationSets(state.run)[0];
  const points = evaluated === undefined ? [] : evaluationPoints(state.run, evaluated);
  const values = [
    [format(last("reward_mean")), "reward"],
    [format(last("accuracy"), "share"), "accuracy, trained"],
    points.length ? [format(points[points.length - 1].value, "share"), `evaluation, from ${format(points[0].value, "share")}`] : null,
    [format(last("entropy")), "entropy, nats"],
    [format(last("response_length_mean")), "tokens per response"],
    ...(typeof last("device_idle") === "number" ? [["device_idle", "devices idle"]] : [["trainer_idle", "trainers idle"], ["engine_idle", "engines idle"]]).map(([key, name]) => [format(last(key), "share"), name]),
    [duration(last("iteration_s")), "last iteration"],
    [format(last("tpspd"), "count"), "tokens/s per device"],
    left === null ? null : [duration(left), "left"],
  ];
  return h("div", { class: "tiles" }, values.filter(Boolean).map(([value, name]) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, name))));
}

function adviceList() {
  const words = { act: ["▲", "act"], look: ["●", "look"] };
  return h("ul", { class: "advice", "aria-label": "Advice" }, state.run.advice.map((advice) => h("li", { class: advice.level },
    h("h3", {}, h("span", { class: "mark" }, words[advice.level][0], " ", words[advice.level][1]), h("span", {}, shown(advice.title))), h("p", {}, shown(advice.text)))));
}

function overviewView(main) {
  if (!column("iteration").length) {
    fill(main, adviceList(), h("div", { class: "panel empty" }, "No iteration has ended yet. ", h("a", { href: "#processes" }, "What the processes do")));
    return;
  }
  const drawn = new Set(CHARTS.flatMap((spec) => spec.keys.map(([key]) => key)));
  const rest = Object.keys(state.run.columns).filter((name) => !drawn.has(name) && !name.startsWith("rewards.") && !["iteration", "time"].includes(name) && !name.endsWith("_limit"));
  const more = h("details", {}, h("summary", {}, `${rest.length} further numbers`));
  more.addEventListener("toggle", () => more.open && more.childElementCount === 1 && more.append(
    h("div", { class: "charts" }, rest.map((name) => chartOf({ title: name, topic: name, keys: [[name, name.split(".").pop()]] })))));
  fill(main, state.run.advice.length ? adviceList() : h("p", { class: "quiet" }, "No advice: the numbers are as they should be."), tiles(), chartOptions(), h("div", { class: "charts" }, CHARTS.map(chartOf)), more);
}
