/* One iteration as rows of bars on one clock, and who waited for whom. */

const KINDS = [
  ["generate", "generate"],
  ["train", "train"],
  ["step", "optimizer step"],
  ["reward", "reward"],
  ["publish", "publish weights"],
  ["evaluate", "evaluate"],
  ["checkpoint", "checkpoint"],
  ["wait", "wait"],
  ["other", "other"],
];
const PART_KIND = {
  train: "train",
  trains: "train",
  generate: "generate",
  decodes: "generate",
  evaluate: "evaluate",
  publish: "publish",
  checkpoint: "checkpoint",
  "wait for groups": "wait",
  "wait for engines": "wait",
};

function hatch() {
  return h(
    "defs",
    {},
    h(
      "pattern",
      {
        id: "hatch",
        width: 6,
        height: 6,
        patternUnits: "userSpaceOnUse",
        patternTransform: "rotate(45)",
      },
      h("rect", { class: "hatch-ground", width: 6, height: 6 }),
      h("line", { class: "hatch-line", x1: 0, x2: 0, y1: 0, y2: 6 }),
    ),
  );
}

/* The iterations that can be shown, with buttons, a slider and the keys [ and ]. */
function iterationPicker(available, chosen, choose) {
  const at = available.indexOf(chosen);
  const step = (by) => available[at + by] !== undefined && choose(available[at + by]);
  return [
    h(
      "button",
      {
        class: "plain",
        "data-step": "-1",
        disabled: at <= 0,
        onclick: () => step(-1),
        "aria-label": "earlier iteration",
        title: "earlier iteration: [",
      },
      "◀",
    ),
    h(
      "label",
      {},
      "iteration",
      h(
        "select",
        { id: "iteration", onchange: (event) => choose(Number(event.target.value)) },
        available.map((value) => h("option", { value, selected: value === chosen }, value)),
      ),
    ),
    h(
      "button",
      {
        class: "plain",
        "data-step": "1",
        disabled: at >= available.length - 1,
        onclick: () => step(1),
        "aria-label": "later iteration",
        title: "later iteration: ]",
      },
      "▶",
    ),
    available.length > 2 &&
      h("input", {
        type: "range",
        min: 0,
        max: available.length - 1,
        value: at,
        "aria-label": "iteration",
        onchange: (event) => choose(available[Number(event.target.value)]),
      }),
  ];
}

function chosenIteration(available) {
  const wanted = Number(place.read().i ?? NaN);
  if (available.includes(wanted)) return wanted;
  const before = available.filter((value) => value <= wanted);
  return before.length ? before[before.length - 1] : available[available.length - 1];
}

async function timelineView(main) {
  const available = state.run.timeline_iterations.filter(
    (value) => value < (state.run.state.total ?? Infinity) || value === 0,
  );
  if (!available.length) {
    fill(main, h("div", { class: "panel empty" }, "No timeline: no weights were published yet."));
    return;
  }
  const chosen = chosenIteration(available);
  const data = await load("timeline/" + chosen, chosen === available[available.length - 1]);
  const picker = h(
    "div",
    { class: "bar" },
    iterationPicker(available, chosen, (i) => show("timeline", { i })),
  );
  if (!data) {
    fill(
      main,
      picker,
      h("div", { class: "panel empty" }, "This iteration's timeline is not in the page."),
    );
    return;
  }
  const view = { from: 0, to: data.seconds };
  const svg = h("svg", { class: "gantt plot", tabindex: 0, role: "img" });
  const zoom = (factor, middle = (view.from + view.to) / 2) => {
    const span = Math.min(
      data.seconds,
      Math.max(data.seconds / 400, (view.to - view.from) * factor),
    );
    view.from = Math.max(
      0,
      Math.min(data.seconds - span, middle - ((middle - view.from) / (view.to - view.from)) * span),
    );
    view.to = view.from + span;
    draw();
  };
  const pan = (part) => {
    const span = view.to - view.from;
    view.from = Math.max(0, Math.min(data.seconds - span, view.from + part * span));
    view.to = view.from + span;
    draw();
  };
  add(picker, [
    h("span", { class: "spacer" }),
    h("span", { class: "quiet" }, duration(data.seconds), data.running ? " so far" : ""),
    h("button", { class: "plain", onclick: () => zoom(0.5), "aria-label": "zoom in" }, "+"),
    h("button", { class: "plain", onclick: () => zoom(2), "aria-label": "zoom out" }, "−"),
    h("button", { class: "plain", onclick: () => zoom(1e9) }, "all"),
  ]);

  function draw() {
    const width = Math.max(280, svg.clientWidth || 800),
      narrow = width < 620;
    const left = narrow ? 8 : 150,
      right = 10,
      label = narrow ? 17 : 0;
    const heights = data.rows.map((row) =>
      Math.max(row.tracks === 1 ? 20 : 24, Math.min(116, row.tracks * 9)),
    );
    const tops = [];
    let y = 22;
    heights.forEach((height) => {
      tops.push(y + label);
      y += height + label + 8;
    });
    svg.setAttribute("viewBox", `0 0 ${width} ${y + 6}`);
    svg.setAttribute("height", y + 6);
    const px = (time) =>
      left + ((time - view.from) / (view.to - view.from)) * (width - left - right);
    const marks = ticks(view.from, view.to, Math.max(3, Math.floor(width / 110)));
    fill(
      svg,
      hatch(),
      marks.map((time) => [
        h("line", { class: "grid", x1: px(time), x2: px(time), y1: 18, y2: y }),
        h(
          "text",
          { class: "axis", x: px(time), y: 12, "text-anchor": endAnchor(px(time), time, width) },
          `${numberFormat.format(time)} s`,
        ),
      ]),
      data.rows.map((row, number) => {
        const top = tops[number],
          height = heights[number],
          each = height / row.tracks;
        return h(
          "g",
          {},
          h("rect", {
            class: "row",
            x: left,
            y: top,
            width: Math.max(0, width - left - right),
            height,
            rx: 3,
            opacity: 0.6,
          }),
          h(
            "text",
            {
              x: narrow ? left : left - 8,
              y: narrow ? top - 4 : top + height / 2 + 4,
              "text-anchor": narrow ? "start" : "end",
            },
            shorten(row.name, narrow ? 44 : 22),
          ),
          row.bars.map(([track, start, length, kind, name]) => {
            if (start + length < view.from || start > view.to) return null;
            const x1 = Math.max(left, px(start)),
              x2 = Math.min(width - right, px(start + length));
            return h("rect", {
              class: "k-" + kind,
              x: x1.toFixed(2),
              y: (top + track * each).toFixed(2),
              width: Math.max(0.8, x2 - x1).toFixed(2),
              height: Math.max(1, each - (each > 4 ? 1 : 0.3)).toFixed(2),
              rx: each > 5 ? 1.5 : 0,
              "data-tip": `${row.name}: ${name}\n${kind}, ${duration(length)}, from ${duration(start)}`,
            });
          }),
        );
      }),
    );
  }
  svg.addEventListener("pointermove", (event) =>
    event.target.dataset?.tip
      ? tip.show(event.target.dataset.tip, event.clientX, event.clientY)
      : tip.hide(),
  );
  svg.addEventListener("pointerleave", tip.hide);
  svg.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = svg.getBoundingClientRect();
      zoom(
        event.deltaY > 0 ? 1.25 : 0.8,
        view.from + ((event.clientX - box.left) / box.width) * (view.to - view.from),
      );
    },
    { passive: false },
  );
  svg.addEventListener("keydown", (event) => {
    const action = {
      "+": () => zoom(0.5),
      "=": () => zoom(0.5),
      "-": () => zoom(2),
      ArrowLeft: () => pan(-0.25),
      ArrowRight: () => pan(0.25),
      0: () => zoom(1e9),
    }[event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  });
  svg.setAttribute(
    "aria-label",
    `Timeline of iteration ${chosen}, ${duration(data.seconds)}. Plus and minus zoom, arrows move.`,
  );
  const used = new Set(data.rows.flatMap((row) => row.bars.map((bar) => bar[3])));
  const legend = h(
    "div",
    { class: "legend" },
    KINDS.filter(([kind]) => used.has(kind)).map(([kind, name]) =>
      h(
        "span",
        {},
        h(
          "svg",
          { width: 14, height: 10, "aria-hidden": "true" },
          kind === "wait" ? hatch() : null,
          h("rect", { class: "k-" + kind, width: 14, height: 10, rx: 2 }),
        ),
        name,
      ),
    ),
  );
  const out =
    data.left_out.bars + data.left_out.rows
      ? h(
          "p",
          { class: "quiet small" },
          `Not drawn: ${data.left_out.rows} rows and ${data.left_out.bars} bars.`,
        )
      : null;
  fill(main, picker, h("section", { class: "panel" }, legend, svg, out), waitsPanel(data));
  new ResizeObserver(draw).observe(svg);
}

/* The text of a tick stays inside of the picture. */
function endAnchor(x, time, width) {
  const half = textWidth(`${numberFormat.format(time)} s`) / 2;
  if (x + half > width) return "end";
  return x - half < 0 ? "start" : "middle";
}

function shorten(text, most) {
  const short = text.replace(/^https?:\/\//, "");
  return short.length > most ? "…" + short.slice(-(most - 1)) : short;
}

/* Sentences on who waited, with the idle shares of the iteration's record where it has ended. */
function waitLines(data) {
  const share = (seconds) => format(seconds / data.seconds, "share");
  const average = (role, value) => {
    const entries = data.waits.filter((entry) => entry.role === role);
    return entries.length ? mean(entries.map(value)) : null;
  };
  const place = column("iteration").indexOf(data.iteration);
  const idle = (name, role) => column(name)[place] ?? average(role, (entry) => entry.idle);
  const groups = average("trainer", (entry) => entry.parts["wait for groups"]);
  const border = average("trainer", (entry) => entry.parts["wait for engines"]);
  const held = average("engine", (entry) => entry.parts.evaluate);
  const lines = [];
  if (groups !== null) {
    lines.push(
      `Trainers were idle for ${format(idle("trainer_idle", "trainer"), "share")} of the iteration: they waited ${duration(groups)} (${share(groups)}) for groups from the engines ` +
        `and ${duration(border)} (${share(border)}) at the border for the coordinator and the engines.`,
    );
  }
  if (average("engine", (entry) => entry.idle) !== null) {
    lines.push(
      `Engines were idle for ${format(idle("engine_idle", "engine"), "share")}: they had no request, as all groups of the iteration were generated, or they loaded weights.`,
    );
  }
  if (held) lines.push(`Evaluation kept the engines for ${duration(held)} (${share(held)}).`);
  return lines;
}

function waitsPanel(data) {
  const share = (seconds) => format(seconds / data.seconds, "share");
  const row = (entry) => {
    let x = 0;
    const bars = Object.entries({
      ...entry.parts,
      other: entry.role === "engine" ? 0 : entry.other,
    })
      .filter(([, seconds]) => seconds > 0)
      .map(([part, seconds]) => {
        const bar = h("rect", {
          class: "k-" + (PART_KIND[part] || "other"),
          x: ((x / data.seconds) * 100).toFixed(3) + "%",
          width: ((seconds / data.seconds) * 100).toFixed(3) + "%",
          y: 0,
          height: 16,
          "data-tip": `${entry.name}: ${part}\n${duration(seconds)}, ${share(seconds)}`,
        });
        x += seconds;
        return bar;
      });
    const parts = Object.entries(entry.parts)
      .map(([part, seconds]) => `${part} ${share(seconds)}`)
      .join(", ");
    const svg = h("svg", { role: "img", height: 16, "aria-label": parts }, hatch(), bars);
    svg.addEventListener("pointermove", (event) =>
      event.target.dataset?.tip
        ? tip.show(event.target.dataset.tip, event.clientX, event.clientY)
        : tip.hide(),
    );
    svg.addEventListener("pointerleave", tip.hide);
    return h(
      "tr",
      {},
      h("td", { class: "mono" }, shown(shorten(entry.name, 26))),
      h("td", { width: "66%" }, svg),
      h("td", { class: "number" }, format(entry.idle, "share")),
    );
  };
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Who waited for whom"),
    waitLines(data).map((line) => h("p", {}, line)),
    h(
      "table",
      { class: "waits" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, "process"),
          h("th", {}, "share of the iteration"),
          h("th", { class: "number" }, "idle"),
        ),
      ),
      h("tbody", {}, data.waits.map(row)),
    ),
  );
}
