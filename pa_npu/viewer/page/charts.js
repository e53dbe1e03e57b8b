/* Line charts with axes, units, a cross that follows pointer and arrow keys, and values in the legend. */

const COLOURS = ["blue", "orange", "green", "purple", "sky", "grey"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 4"];

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999) || raw;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

function logTicks(low, high) {
  const found = [], first = Math.ceil(low - 1e-9), final = Math.floor(high + 1e-9), step = Math.max(1, Math.ceil((final - first) / 4));
  for (let power = first; power <= final; power += step) found.push(power);
  return found;
}

function smooth(values, weight) {
  let mean = null;
  return values.map((value) => (value === null ? null : (mean = mean === null ? value : weight * mean + (1 - weight) * value)));
}

/* spec: title, unit, kind (of numbers), log, smoothing (0 to 1), xKind, series: [{ name, x, values, color, dash, other, points, low, high }], limit: { value, name } */
function chart(spec) {
  const legend = h("div", { class: "legend" });
  const svg = h("svg", { class: "plot", tabindex: 0, role: "img", height: 170 });
  const node = h("section", { class: "chart", "data-topic": spec.topic || spec.title },
    h("div", { class: "head" }, h("h2", {}, spec.title), h("span", { class: "unit" }, spec.unit || "")), legend, svg);
  let at = null;
  const scale = (value) => (spec.log ? Math.log10(value) : value);
  const usable = (value) => value !== null && value !== undefined && Number.isFinite(value) && (!spec.log || value > 0);
  const xs = [...new Set(spec.series.flatMap((series) => series.x.filter((_, i) => usable(series.values[i]))))].sort((a, b) => a - b);

  const colour = (series, number) => COLOURS[(series.color ?? number) % 6], dashes = (series, number) => DASHES[(series.dash ?? series.color ?? number) % 6];
  const xText = (x) => (spec.xKind ? format(x) : x);

  function sample(color, dash, point) {
    return h("svg", { width: 18, height: 8, "aria-hidden": "true" }, point ? h("circle", { cx: 9, cy: 4, r: 3.2, class: "f-" + color })
      : h("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: "series c-" + color, "stroke-dasharray": dash }));
  }

  function describe() {
    const crowded = spec.series.filter((series) => !series.other).length > 2;
    const others = crowded ? spec.series.filter((series, i, all) => series.other && all.findIndex((one) => one.run === series.run) === i) : [];
    fill(legend, spec.series.map((series, number) => {
      if (series.other && crowded) return null;
      let index = at === null ? -1 : series.x.indexOf(at);
      if (at === null) for (index = series.values.length - 1; index > 0 && !usable(series.values[index]); index--);
      const value = index >= 0 ? format(series.values[index], spec.kind) : "–";
      return h("span", {}, sample(colour(series, number), dashes(series, number), series.points), series.name, " ", h("b", {}, value));
    }), spec.limit ? h("span", {}, h("svg", { width: 18, height: 8, "aria-hidden": "true" }, h("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: "limit" })), spec.limit.name, " ", h("b", {}, format(spec.limit.value, spec.kind))) : null,
    others.map((series) => h("span", {}, sample(colour(series, 0), ""), shown(series.run))),
    at === null ? null : h("span", {}, spec.xUnit || "iteration", " ", h("b", {}, xText(at))));
  }

  function draw() {
    const width = Math.max(220, svg.clientWidth || node.clientWidth || 360), height = 170;
    const left = 52, right = 10, top = 8, bottom = 28;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const all = spec.series.flatMap((series) => [...series.values, ...(series.low || []), ...(series.high || [])]).filter(usable).map(scale);
    if (!all.length) { fill(svg, h("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no numbers yet")); return; }
    let low = Math.min(...all), high = Math.max(...all);
    if (spec.limit && usable(spec.limit.value) && (spec.log || scale(spec.limit.value) < high * 3)) { low = Math.min(low, scale(spec.limit.value)); high = Math.max(high, scale(spec.limit.value)); }
    if (spec.kind === "share" && low >= 0 && high <= 1 && high - low > 0.3) { low = 0; high = 1; }
    else if (!spec.log && low > 0 && low < 0.6 * high) low = 0;
    if (high - low < 1e-12) { const pad = spec.log ? 0.5 : Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
    const pad = (high - low) * 0.04;
    if (!(spec.kind === "share" && high === 1)) high += pad;
    if (low !== 0) low -= pad;
    const first = xs[0], final = Math.max(xs[xs.length - 1], first + (spec.xKind ? 1e-9 : 1));
    const px = (x) => left + ((x - first) / (final - first)) * (width - left - right);
    const py = (y) => top + (1 - (scale(y) - low) / (high - low)) * (height - top - bottom);
    const yTicks = spec.log ? logTicks(low, high).map((power) => 10 ** power) : ticks(low, high, 4);
    const xTicks = ticks(first, final, Math.max(2, Math.floor(width / 80))).filter((x) => spec.xKind || Number.isInteger(x));
    const line = (series, values) => {
      let path = "", pen = false;
      series.x.forEach((x, i) => {
        if (!usable(values[i])) { pen = false; return; }
        path += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(values[i]).toFixed(1)}`;
        pen = true;
      });
      return path;
    };
    const draws = spec.series.map((series, number) => {
      const color = colour(series, number), dash = dashes(series, number);
      if (series.points) return series.x.map((x, i) => usable(series.values[i]) && [
        series.low && h("line", { x1: px(x), x2: px(x), y1: py(series.low[i]), y2: py(series.high[i]), class: "c-" + color, "stroke-width": 1.5 }),
        h("circle", { cx: px(x), cy: py(series.values[i]), r: series.other ? 2.5 : 3.6, class: "f-" + color, opacity: series.other ? 0.5 : 1 })]);
      const weight = spec.smoothing ?? (series.x.length > 80 ? 0.9 : 0);
      return [weight > 0 && h("path", { d: line(series, series.values), class: `series raw c-${color}` }),
        h("path", { d: line(series, weight > 0 ? smooth(series.values, weight) : series.values), class: `series c-${color}${series.other ? " other" : ""}`, "stroke-dasharray": dash })];
    });
    fill(svg,
      yTicks.map((y) => [h("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }), h("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, format(y, spec.kind))]),
      xTicks.map((x) => h("text", { x: px(x), y: height - 14, "text-anchor": "middle" }, xText(x))),
      h("text", { x: width - right, y: height - 2, "text-anchor": "end" }, spec.xUnit || "iteration"),
      spec.limit && usable(spec.limit.value) && scale(spec.limit.value) >= low && scale(spec.limit.value) <= high && h("line", { class: "limit", x1: left, x2: width - right, y1: py(spec.limit.value), y2: py(spec.limit.value) }),
      draws,
      at !== null && h("line", { class: "cross", x1: px(at), x2: px(at), y1: top, y2: height - bottom }));
    svg.pointAt = (clientX) => {
      const box = svg.getBoundingClientRect(), x = first + ((clientX - box.left) / box.width * width - left) / (width - left - right) * (final - first);
      return xs.reduce((best, candidate) => (Math.abs(candidate - x) < Math.abs(best - x) ? candidate : best), xs[0]);
    };
  }

  const move = (x) => { if (x !== at) { at = x; describe(); draw(); } };
  svg.addEventListener("pointermove", (event) => xs.length && move(svg.pointAt(event.clientX)));
  svg.addEventListener("pointerleave", () => document.activeElement !== svg && move(null));
  svg.addEventListener("blur", () => move(null));
  svg.addEventListener("click", () => at !== null && spec.open && spec.open(at));
  svg.addEventListener("keydown", (event) => {
    const index = xs.indexOf(at);
    if (event.key === "ArrowRight") move(xs[Math.min(xs.length - 1, index + 1)]);
    else if (event.key === "ArrowLeft") move(xs[index <= 0 ? 0 : index - 1]);
    else if (event.key === "Home") move(xs[0]);
    else if (event.key === "End") move(xs[xs.length - 1]);
    else if (event.key === "Enter" && at !== null && spec.open) spec.open(at);
    else return;
    event.preventDefault();
  });
  svg.setAttribute("aria-label", `${spec.title}${spec.unit ? " in " + spec.unit : ""}. ` + spec.series.map((series) => {
    const values = series.values.filter(usable);
    return values.length ? `${series.name}: first ${format(values[0], spec.kind)}, last ${format(values[values.length - 1], spec.kind)}` : `${series.name}: none`;
  }).join("; ") + ". Arrow keys step through iterations.");
  describe();
  new ResizeObserver(draw).observe(svg);
  return node;
}
