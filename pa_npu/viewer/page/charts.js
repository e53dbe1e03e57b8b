/* Line charts with axes, units and marks. The charts of a view share one cursor and one zoom. */

const COLOURS = ["blue", "orange", "green", "purple", "sky", "grey"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 4"];
const CHART_HEIGHT = 170;
const MARKS = {
  checkpoint: "checkpoint",
  resume: "resumed",
  restart: "restarted after a failure",
};

function smooth(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

/* What the charts of a view have in common: the place of the cursor, and who draws it. */
const cursor = {
  at: null,
  charts: new Set(),
  begin() {
    cursor.at = null;
    cursor.charts.clear();
  },
  move(at) {
    if (at === cursor.at) return;
    cursor.at = at;
    cancelAnimationFrame(cursor.frame);
    cursor.frame = requestAnimationFrame(() => cursor.charts.forEach((follow) => follow(at)));
  },
};

function nearest(sorted, x) {
  if (!sorted.length) return null;
  let low = 0,
    high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[low] - x) <= Math.abs(sorted[high] - x) ? sorted[low] : sorted[high];
}

/* spec: title, unit, kind (of numbers), log, smoothing (0 to 1), xKind, xUnit, range: [from, to] of x, marks: [{ kind, x, text }],
   series: [{ name, x, values, color, dash, other, points, low, high }], limit: { value, name }, open(x), zoom(from, to) */
function chart(spec) {
  const legend = h("div", { class: "legend" });
  const svg = h("svg", { class: "plot", tabindex: 0, role: "img", height: CHART_HEIGHT });
  const node = h(
    "section",
    { class: "chart", "data-topic": spec.topic || spec.title },
    h(
      "div",
      { class: "head" },
      h("h2", {}, shown(spec.title)),
      h("span", { class: "unit" }, spec.unit || ""),
    ),
    legend,
    svg,
  );
  const scale = (value) => (spec.log ? Math.log10(value) : value);
  const isUsable = (value) =>
    value !== null && value !== undefined && Number.isFinite(value) && (!spec.log || value > 0);
  const [from, to] = spec.range || [-Infinity, Infinity];
  const isInside = (x) => x !== null && x !== undefined && x >= from && x <= to;
  const usedXs = (series) => series.x.filter((x, i) => isInside(x) && isUsable(series.values[i]));
  const xs = [...new Set(spec.series.flatMap(usedXs))].sort((a, b) => a - b);
  const colour = (series, number) => COLOURS[(series.color ?? number) % 6];
  const dashes = (series, number) => DASHES[(series.dash ?? series.color ?? number) % 6];
  let at = null,
    geometry = null;

  function sample(color, dash, isPoint) {
    const mark = isPoint
      ? h("circle", { cx: 9, cy: 4, r: 3.2, class: "f-" + color })
      : h("line", {
          x1: 0,
          x2: 18,
          y1: 4,
          y2: 4,
          class: "series c-" + color,
          "stroke-dasharray": dash,
        });
    return h("svg", { width: 18, height: 8, "aria-hidden": "true" }, mark);
  }

  function valueAt(series) {
    if (at !== null) {
      const index = series.x.indexOf(at);
      return index >= 0 ? series.values[index] : null;
    }
    for (let index = series.values.length - 1; index >= 0; index--) {
      if (isInside(series.x[index]) && isUsable(series.values[index])) return series.values[index];
    }
    return null;
  }

  function describe() {
    const isCrowded = spec.series.filter((series) => !series.other).length > 2;
    const entries = spec.series.map((series, number) => {
      if (series.other && isCrowded) return null;
      const line = sample(colour(series, number), dashes(series, number), series.points);
      return h(
        "span",
        {},
        line,
        shown(series.name),
        " ",
        h("b", {}, format(valueAt(series), spec.kind)),
      );
    });
    const runs = isCrowded
      ? new Map(spec.series.filter((series) => series.other).map((series) => [series.run, series]))
      : new Map();
    const others = [...runs].map(([run, series]) =>
      h("span", {}, sample(colour(series, 0), ""), shown(run)),
    );
    const limit =
      spec.limit &&
      h(
        "span",
        {},
        h(
          "svg",
          { width: 18, height: 8, "aria-hidden": "true" },
          h("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: "limit" }),
        ),
        spec.limit.name,
        " ",
        h("b", {}, format(spec.limit.value, spec.kind)),
      );
    const marked = (spec.marks || []).filter((mark) => at !== null && mark.x === at);
    fill(
      legend,
      entries,
      limit,
      others,
      at !== null &&
        h("span", {}, spec.xUnit || "iteration", " ", h("b", {}, spec.xKind ? format(at) : at)),
      marked.map((mark) => h("span", { class: "marked" }, mark.text)),
    );
  }

  function yAxis() {
    const all = [];
    for (const series of spec.series) {
      series.x.forEach((x, i) => {
        if (!isInside(x)) return;
        for (const value of [series.values[i], series.low?.[i], series.high?.[i]])
          if (isUsable(value)) all.push(scale(value));
      });
    }
    if (!all.length) return null;
    let low = Infinity,
      high = -Infinity;
    for (const value of all) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (spec.limit && isUsable(spec.limit.value)) {
      const limit = scale(spec.limit.value);
      if (spec.log || limit < high * 3) {
        low = Math.min(low, limit);
        high = Math.max(high, limit);
      }
    }
    return spec.log ? logAxis(low, high) : axis(low, high, spec.kind);
  }

  function drawSeries(series, number, px, py) {
    const color = colour(series, number),
      dash = dashes(series, number);
    if (series.points) {
      return series.x.map(
        (x, i) =>
          isInside(x) &&
          isUsable(series.values[i]) && [
            series.low &&
              isUsable(series.low[i]) &&
              isUsable(series.high[i]) &&
              h("line", {
                x1: px(x),
                x2: px(x),
                y1: py(series.low[i]),
                y2: py(series.high[i]),
                class: "c-" + color,
                "stroke-width": 1.5,
              }),
            h("circle", {
              cx: px(x),
              cy: py(series.values[i]),
              r: series.other ? 2.5 : 3.6,
              class: "f-" + color,
              opacity: series.other ? 0.5 : 1,
            }),
          ],
      );
    }
    const path = (values) => {
      let text = "",
        isDown = false,
        count = 0,
        only = null;
      series.x.forEach((x, i) => {
        if (!isInside(x) || !isUsable(values[i])) {
          isDown = false;
          return;
        }
        only = [px(x), py(values[i])];
        text += `${isDown ? "L" : "M"}${only[0].toFixed(1)} ${only[1].toFixed(1)}`;
        isDown = true;
        count++;
      });
      return { text, only: count === 1 ? only : null };
    };
    const weight = spec.smoothing ?? (xs.length > 80 ? 0.9 : 0);
    const main = path(weight > 0 ? smooth(series.values, weight) : series.values);
    const otherClass = series.other ? " other" : "";
    return [
      weight > 0 && h("path", { d: path(series.values).text, class: `series raw c-${color}` }),
      h("path", { d: main.text, class: `series c-${color}${otherClass}`, "stroke-dasharray": dash }),
      main.only && h("circle", { cx: main.only[0], cy: main.only[1], r: 3, class: "f-" + color }),
    ];
  }

  function drawMark(mark, px, top, bottom) {
    const x = px(mark.x);
    if (mark.kind === "checkpoint")
      return h("path", { class: "mark-checkpoint", d: `M${x - 3.5} ${bottom}h7l-3.5 -6z` });
    return h("line", { class: "mark-" + mark.kind, x1: x, x2: x, y1: top, y2: bottom });
  }

  function draw() {
    const width = Math.max(220, svg.clientWidth || node.clientWidth || 360);
    svg.setAttribute("viewBox", `0 0 ${width} ${CHART_HEIGHT}`);
    const y = yAxis();
    geometry = null;
    if (!y || !xs.length) {
      fill(
        svg,
        h("text", { x: width / 2, y: CHART_HEIGHT / 2, "text-anchor": "middle" }, "no numbers yet"),
      );
      return;
    }
    const left = Math.ceil(Math.max(24, ...y.texts.map(textWidth)) + 10),
      right = 12,
      top = 8,
      bottom = CHART_HEIGHT - 30;
    const first = spec.range ? Math.max(from, xs[0]) : xs[0];
    const final = Math.max(xs[xs.length - 1], first + (spec.xKind ? 1e-9 : 1));
    const px = (x) => left + ((x - first) / (final - first)) * (width - left - right);
    const py = (value) => bottom - ((scale(value) - y.low) / (y.high - y.low)) * (bottom - top);
    const every = ticks(first, final, Math.max(2, Math.floor(width / 90))).filter(
      (x) => spec.xKind || Number.isInteger(x),
    );
    const xTexts = every.length ? tickTexts(every, "") : [];
    const anchor = (x, text) =>
      px(x) + textWidth(text) / 2 > width
        ? "end"
        : px(x) - textWidth(text) / 2 < 0
          ? "start"
          : "middle";
    const limitInside =
      spec.limit &&
      isUsable(spec.limit.value) &&
      scale(spec.limit.value) >= y.low &&
      scale(spec.limit.value) <= y.high;
    const cross = h("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
    const selection = h("rect", {
      class: "selection",
      y: top,
      height: bottom - top,
      width: 0,
      visibility: "hidden",
    });
    fill(
      svg,
      y.values.map((value, i) => [
        h("line", { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) }),
        h("text", { class: "y", x: left - 6, y: py(value) + 4, "text-anchor": "end" }, y.texts[i]),
      ]),
      every.map((x, i) =>
        h(
          "text",
          { class: "x", x: px(x), y: CHART_HEIGHT - 16, "text-anchor": anchor(x, xTexts[i]) },
          xTexts[i],
        ),
      ),
      h(
        "text",
        { x: width - right, y: CHART_HEIGHT - 4, "text-anchor": "end" },
        spec.xUnit || "iteration",
      ),
      (spec.marks || [])
        .filter((mark) => mark.x >= first && mark.x <= final)
        .map((mark) => drawMark(mark, px, top, bottom)),
      limitInside &&
        h("line", {
          class: "limit",
          x1: left,
          x2: width - right,
          y1: py(spec.limit.value),
          y2: py(spec.limit.value),
        }),
      spec.series.map((series, number) => drawSeries(series, number, px, py)),
      selection,
      cross,
    );
    const xOf = (clientX) => {
      const box = svg.getBoundingClientRect();
      return (
        first +
        ((((clientX - box.left) / box.width) * width - left) / (width - left - right)) *
          (final - first)
      );
    };
    geometry = { px, xOf, first, final, cross, selection };
    showCross();
  }

  function showCross() {
    if (!geometry) return;
    const isShown = at !== null && at >= geometry.first && at <= geometry.final;
    geometry.cross.setAttribute("visibility", isShown ? "visible" : "hidden");
    if (!isShown) return;
    geometry.cross.setAttribute("x1", geometry.px(at));
    geometry.cross.setAttribute("x2", geometry.px(at));
  }

  function follow(x) {
    const next = x === null ? null : nearest(xs, x);
    if (next === at) return;
    at = next;
    describe();
    showCross();
  }
  const move = (x) => {
    follow(x);
    cursor.move(x);
  };
  cursor.charts.add(follow);

  /* A drag over a stretch zooms to it; a press without a drag opens what is there. */
  let pressed = null,
    hasDragged = false;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !geometry) return;
    pressed = event.clientX;
    hasDragged = false;
  });
  svg.addEventListener("pointermove", (event) => {
    if (!geometry) return;
    move(nearest(xs, geometry.xOf(event.clientX)));
    if (pressed === null || !spec.zoom || Math.abs(event.clientX - pressed) < 8) return;
    if (!hasDragged) svg.setPointerCapture(event.pointerId);
    hasDragged = true;
    const ends = [pressed, event.clientX]
      .map((x) => geometry.px(geometry.xOf(x)))
      .sort((a, b) => a - b);
    geometry.selection.setAttribute("x", ends[0]);
    geometry.selection.setAttribute("width", ends[1] - ends[0]);
    geometry.selection.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerup", (event) => {
    if (pressed !== null && hasDragged && geometry) {
      const ends = [pressed, event.clientX]
        .map((x) => nearest(xs, geometry.xOf(x)))
        .sort((a, b) => a - b);
      if (ends[1] > ends[0]) spec.zoom(ends[0], ends[1]);
      else geometry.selection.setAttribute("visibility", "hidden");
    }
    pressed = null;
  });
  svg.addEventListener("pointercancel", () => {
    pressed = null;
    hasDragged = false;
  });
  svg.addEventListener(
    "pointerleave",
    () => document.activeElement !== svg && pressed === null && move(null),
  );
  svg.addEventListener("blur", () => move(null));
  svg.addEventListener("click", () => !hasDragged && at !== null && spec.open && spec.open(at));
  svg.addEventListener("dblclick", () => spec.zoom && spec.range && spec.zoom(null, null));

  function zoomAround(factor) {
    if (!spec.zoom || !geometry) return;
    const middle = at ?? (geometry.first + geometry.final) / 2,
      half = ((geometry.final - geometry.first) * factor) / 2;
    const ends = [nearest(xs, middle - half), nearest(xs, middle + half)];
    if (factor > 1) spec.zoom(middle - half, middle + half);
    else if (ends[1] > ends[0]) spec.zoom(...ends);
  }
  svg.addEventListener("keydown", (event) => {
    const index = xs.indexOf(at);
    const actions = {
      ArrowRight: () => move(xs[Math.min(xs.length - 1, index + 1)]),
      ArrowLeft: () => move(xs[index <= 0 ? 0 : index - 1]),
      Home: () => move(xs[0]),
      End: () => move(xs[xs.length - 1]),
      Enter: () => at !== null && spec.open && spec.open(at),
      "+": () => zoomAround(0.5),
      "=": () => zoomAround(0.5),
      "-": () => zoomAround(2),
      0: () => spec.zoom && spec.zoom(null, null),
    };
    if (!actions[event.key] || !xs.length) return;
    actions[event.key]();
    event.preventDefault();
  });
  const summaries = spec.series.map((series) => {
    const values = series.values.filter(isUsable);
    if (!values.length) return `${series.name}: none`;
    return `${series.name}: first ${format(values[0], spec.kind)}, last ${format(values[values.length - 1], spec.kind)}`;
  });
  svg.setAttribute(
    "aria-label",
    `${spec.title}${spec.unit ? " in " + spec.unit : ""}. ${summaries.join("; ")}. Arrow keys step through iterations.`,
  );
  describe();
  new ResizeObserver(draw).observe(svg);
  return node;
}

/* What the marks of a view's charts mean. */
function markLegend(marks) {
  const kinds = Object.keys(MARKS).filter((kind) => marks.some((mark) => mark.kind === kind));
  if (!kinds.length) return null;
  return h(
    "div",
    { class: "legend marks" },
    kinds.map((kind) =>
      h(
        "span",
        {},
        h(
          "svg",
          { width: 14, height: 12, "aria-hidden": "true" },
          kind === "checkpoint"
            ? h("path", { class: "mark-checkpoint", d: "M3 10h8l-4 -7z" })
            : h("line", { class: "mark-" + kind, x1: 7, x2: 7, y1: 0, y2: 12 }),
        ),
        MARKS[kind],
      ),
    ),
  );
}

/* bars: [{ text, count, open, on }]; a button each, as high as its count. */
function histogram(title, bars) {
  const largest = Math.max(1, ...bars.map((bar) => bar.count));
  return h(
    "div",
    { class: "histogram", role: "group", "aria-label": title },
    bars.map((bar) => {
      const height = bar.count ? Math.max(3, Math.round((52 * bar.count) / largest)) : 0;
      return h(
        "button",
        {
          "aria-pressed": String(bar.on),
          "aria-label": `${bar.tip || bar.text}: ${bar.count}`,
          title: `${bar.tip || bar.text}: ${bar.count}`,
          onclick: bar.open,
        },
        h("span", { class: "count" }, bar.count || ""),
        h(
          "svg",
          { height: 52, "aria-hidden": "true" },
          h("rect", { class: "f-blue", x: 0, y: 52 - height, width: "100%", height }),
        ),
        h("span", { class: "value" }, bar.text),
      );
    }),
  );
}
