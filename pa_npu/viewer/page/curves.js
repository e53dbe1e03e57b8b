/* The curves of the overview: which there are, over what they are drawn, and the part that is
   looked at. */

const CHARTS = [
  {
    topic: "reward_mean",
    title: "Reward",
    unit: "mean per response",
    keys: [["reward_mean", "total"]],
    prefix: "rewards.",
  },
  {
    topic: "accuracy",
    title: "Accuracy",
    unit: "share of responses",
    kind: "share",
    evaluations: true,
    keys: [
      ["accuracy", "trained"],
      ["accuracy_dispatched", "dispatched"],
    ],
  },
  { topic: "entropy", title: "Entropy", unit: "nats per token", keys: [["entropy", "policy"]] },
  {
    topic: "kl",
    title: "KL to the reference",
    unit: "nats per token",
    keys: [["kl", "KL"]],
    nonzero: true,
  },
  {
    topic: "loss",
    title: "Loss",
    unit: "",
    keys: [
      ["loss", "loss"],
      ["eval_loss", "held-out rows"],
    ],
  },
  {
    topic: "preference_margin",
    title: "Preferences",
    unit: "log-prob ratio x beta, mean over pairs",
    keys: [
      ["preference_margin", "margin"],
      ["preference_chosen_reward", "chosen"],
      ["preference_rejected_reward", "rejected"],
    ],
  },
  {
    topic: "preference_accuracy",
    title: "Preferred answers told apart",
    unit: "share of pairs",
    keys: [["preference_accuracy", "positive margin"]],
  },
  {
    topic: "grad_norm",
    title: "Gradient norm",
    unit: "before clipping",
    keys: [["grad_norm", "norm"]],
    limit: ["optimizer.clip_grad", "clipped at"],
  },
  {
    topic: "expert_imbalance",
    title: "Experts",
    unit: "tokens of the busiest over the mean",
    keys: [
      ["expert_imbalance", "mean over layers"],
      ["expert_imbalance_max", "worst layer"],
    ],
  },
  {
    topic: "expert_imbalance_layers",
    title: "Experts by layer",
    unit: "tokens of the busiest over the mean",
    keys: [],
    prefix: "expert_imbalance_layers.",
  },
  {
    topic: "replay_changed",
    title: "Router replay",
    unit: "share of replayed choices",
    kind: "share",
    keys: [["replay_changed", "not the trainer's own"]],
  },
  {
    topic: "routing_entropy",
    title: "Routing entropy",
    unit: "nats per token and layer",
    keys: [["routing_entropy", "routers"]],
  },
  {
    topic: "response_length_mean",
    title: "Response length",
    unit: "tokens, mean",
    keys: [["response_length_mean", "length"]],
    limit: ["rollout.max_response_tokens", "limit"],
  },
  {
    topic: "truncated_ratio",
    title: "Lost signal",
    unit: "share",
    kind: "share",
    keys: [
      ["truncated_ratio", "cut at the limit"],
      ["equal_reward_ratio", "groups with equal rewards"],
    ],
  },
  {
    topic: "unique_ratio",
    title: "Shared turns",
    unit: "share of tokens that are unique",
    kind: "share",
    keys: [["unique_ratio", "unique"]],
  },
  {
    topic: "trainer_idle",
    title: "Idle",
    unit: "share of the iteration",
    kind: "share",
    keys: [
      ["trainer_idle", "trainers"],
      ["engine_idle", "engines"],
      ["device_idle", "devices that do both"],
    ],
  },
  {
    topic: "tail_waste",
    title: "Tail of generation",
    unit: "share of places empty",
    kind: "share",
    keys: [["tail_waste", "waste"]],
  },
  {
    topic: "iteration_s",
    title: "Time",
    unit: "seconds",
    keys: [
      ["iteration_s", "iteration"],
      ["generate_s", "generation"],
      ["train_s", "training"],
      ["publish_s", "publish"],
      ["evaluation_s", "evaluation"],
      ["predicted_s", "predicted"],
    ],
  },
  {
    topic: "tpspd",
    title: "Throughput",
    unit: "tokens per second per device",
    keys: [
      ["tpspd", "prompt + response"],
      ["tpspd_response", "response"],
      ["tpspd_computed", "computed"],
    ],
  },
  {
    topic: "logprob_diff_mean",
    title: "Engine against trainer",
    unit: "log-prob difference, log scale",
    log: true,
    keys: [
      ["logprob_diff_mean", "mean"],
      ["logprob_k3", "K3"],
      ["logprob_diff_max", "largest"],
      ["probe_diff_max", "probe, largest"],
    ],
  },
  {
    topic: "logodds_diff_mean",
    title: "Agreement (I5)",
    unit: "log-odds difference, log scale",
    log: true,
    keys: [
      ["logodds_diff_mean", "mean"],
      ["logodds_slope", "slope"],
    ],
    lastLimit: ["logodds_diff_limit", "limit of the mean"],
  },
  {
    topic: "window",
    title: "Window",
    unit: "sequences in flight per engine",
    kind: "count",
    keys: [["window", "window"]],
  },
  { topic: "learning_rate", title: "Learning rate", unit: "", keys: [["learning_rate", "rate"]] },
  {
    topic: "memory",
    title: "Memory, host",
    unit: "GiB, most",
    scale: 1 / 2 ** 30,
    keys: [
      ["memory_trainer_host_bytes", "trainer"],
      ["memory_engine_host_bytes", "engine"],
      ["memory_coordinator_bytes", "coordinator"],
    ],
  },
  {
    topic: "memory_device",
    title: "Memory, device",
    unit: "GiB, most",
    scale: 1 / 2 ** 30,
    keys: [
      ["memory_trainer_device_bytes", "trainer"],
      ["memory_engine_device_bytes", "engine"],
    ],
  },
];

/* What curves are drawn over: x of each iteration of a run, in the address as ?x=. */
const X_AXES = {
  "": ["iteration", (columns) => columns.iteration],
  time: [
    "hours since the first iteration",
    (columns, run) => {
      const began = column("time", run).find((time) => time !== null);
      return columns.time.map((time) => (time === null ? null : (time - began) / 3600));
    },
  ],
  tokens: [
    "million tokens trained",
    (columns) => columns.tokens_total.map((tokens) => tokens / 1e6),
  ],
};
const SMOOTHING = { "": "as many points need", 0: "off", 0.6: "some", 0.9: "much", 0.97: "most" };

/* The part of the x axis that is looked at; null where it is all of it. */
function zoomRange() {
  const { from, to } = place.read(),
    ends = [Number(from), Number(to)];
  return from !== undefined && to !== undefined && ends.every(Number.isFinite) && ends[0] < ends[1]
    ? ends
    : null;
}

function zoomTo(from, to) {
  const xs = X_AXES[place.read().x || ""]
    [1](state.run.columns, state.run)
    .filter((x) => x !== null);
  const isAll = from === null || (from <= xs[0] && to >= xs[xs.length - 1]);
  const digits = (x) => Number(x.toPrecision(8));
  return show(
    "overview",
    isAll ? { from: null, to: null } : { from: digits(from), to: digits(to) },
  );
}

function zoomBy(factor) {
  const xs = X_AXES[place.read().x || ""]
    [1](state.run.columns, state.run)
    .filter((x) => x !== null);
  const [from, to] = zoomRange() || [xs[0], xs[xs.length - 1]];
  const middle =
    cursor.at !== null && cursor.at >= from && cursor.at <= to ? cursor.at : (from + to) / 2;
  const half = ((to - from) * factor) / 2;
  zoomTo(Math.max(xs[0], middle - half), Math.min(xs[xs.length - 1], middle + half));
}

/* The columns of what is looked at: of a long run the server has more points of a part than of
   the whole. */
async function columnsInView() {
  const range = zoomRange(),
    columns = state.run.columns,
    done = columns.iteration;
  if (!range || EMBEDDED || done.length >= state.run.state.iterations) return columns;
  const xs = X_AXES[place.read().x || ""][1](columns, state.run);
  const inside = done.filter((_, i) => xs[i] >= range[0] && xs[i] <= range[1]);
  if (!inside.length) return columns;
  const at = (iteration) => done.indexOf(iteration);
  const first = done[Math.max(0, at(inside[0]) - 1)],
    final = done[Math.min(done.length - 1, at(inside[inside.length - 1]) + 1)];
  return (await load(`columns/${first}/${final}`)) || columns;
}

function chartOptions() {
  const { x = "", smoothing = "" } = place.read(),
    range = zoomRange();
  const choice = (name, id, chosen, words, changes) =>
    h(
      "label",
      {},
      name,
      h(
        "select",
        { id, onchange: (event) => show("overview", { [id]: event.target.value, ...changes }) },
        Object.entries(words).map(([value, text]) =>
          h("option", { value, selected: value === chosen }, text),
        ),
      ),
    );
  const axes = Object.fromEntries(Object.entries(X_AXES).map(([key, [name]]) => [key, name]));
  const button = (text, label, action, isOff) =>
    h(
      "button",
      { class: "plain", "aria-label": label, title: label, disabled: isOff, onclick: action },
      text,
    );
  return h(
    "div",
    { class: "bar options" },
    choice("over", "x", x, axes, { from: null, to: null }),
    choice("smoothing", "smoothing", smoothing, SMOOTHING, {}),
    button("+", "zoom in", () => zoomBy(0.5)),
    button("−", "zoom out", () => zoomBy(2), !range),
    button("whole run", "show the whole run", () => zoomTo(null, null), !range),
    h(
      "span",
      { class: "quiet small beside" },
      "drag over a curve to zoom in, click it for that iteration's samples",
    ),
    h("span", { class: "spacer" }),
    markLegend(state.run.marks),
  );
}

/* Marks of the run on the x axis of its curves. A checkpoint of version v lies behind iteration
   v - 1. */
function marksInView(columns, xs) {
  const iterations = columns.iteration;
  return state.run.marks.flatMap((mark) => {
    const iteration = mark.kind === "checkpoint" ? mark.iteration - 1 : mark.iteration;
    const index = iterations.findIndex((known) => known >= iteration);
    return index < 0 || xs[index] === null
      ? []
      : [{ kind: mark.kind, text: mark.text, x: xs[index] }];
  });
}

function chartOf(spec, columns) {
  const series = [],
    { x = "", smoothing = "" } = place.read(),
    [xUnit, xOf] = X_AXES[x] || X_AXES[""];
  const addSeries = (run, number) => {
    const data = number ? run.columns : columns,
      xs = xOf(data, run),
      isOther = number > 0;
    const values = (name) => data[name] || [];
    const named = (name) => (isOther ? `${name} (${run.name})` : name);
    let keys = spec.keys;
    if (spec.prefix) {
      const functions = Object.keys(data).filter((name) => name.startsWith(spec.prefix));
      if (functions.length > 1)
        keys = [...keys, ...functions.map((name) => [name, name.slice(spec.prefix.length)])];
    }
    keys.forEach(([key, name], dash) => {
      const column = values(key);
      if (
        !column.some((value) => value !== null) ||
        (spec.nonzero && column.every((value) => !value))
      )
        return;
      if (
        key === "accuracy_dispatched" &&
        column.every((value, i) => Math.abs(value - values("accuracy")[i]) < 1e-9)
      )
        return;
      series.push({
        name: named(name),
        run: run.name,
        x: xs,
        color: state.compare.length ? number : dash,
        dash,
        other: isOther,
        values: spec.scale ? column.map((value) => value && value * spec.scale) : column,
      });
    });
    if (spec.evaluations) addEvaluations(series, run, number, data.iteration, xs, x);
  };
  [state.run, ...state.compare].forEach(addSeries);
  if (!series.length) return null;
  const xs = xOf(columns, state.run);
  return chart({
    ...spec,
    series,
    xUnit,
    xKind: x,
    limit: limitOf(spec),
    range: zoomRange(),
    zoom: zoomTo,
    marks: marksInView(columns, xs),
    smoothing: smoothing === "" ? undefined : Number(smoothing),
    open: (at) => {
      const iteration = columns.iteration[xs.indexOf(at)];
      if (iteration !== undefined) show("samples", { i: iteration });
    },
  });
}

function addEvaluations(series, run, number, iterations, xs, x) {
  const shares = evaluationSets(run).filter((set) => evaluationPoints(run, set).some(isShare));
  for (const set of shares.slice(0, 3)) {
    const at = (version) =>
      x ? xs[iterations.indexOf(Math.max(version - 1, iterations[0]))] : version;
    const points = evaluationPoints(run, set).filter(
      (point) => typeof at(point.version) === "number",
    );
    const name = number ? `${setName(set)} (${run.name})` : setName(set);
    series.push({
      name,
      run: run.name,
      x: points.map((p) => at(p.version)),
      values: points.map((p) => p.value),
      low: points.map((p) => p.low),
      high: points.map((p) => p.high),
      points: true,
      other: number > 0,
      color: state.compare.length ? number : 2 + series.filter((known) => known.points).length,
    });
  }
}

function limitOf(spec) {
  const limit = spec.limit && state.run.config[spec.limit[0]];
  if (typeof limit === "number" && limit > 0) return { value: limit, name: spec.limit[1] };
  const value = spec.lastLimit ? last(spec.lastLimit[0]) : null;
  return value === null ? null : { value, name: spec.lastLimit[1] };
}
