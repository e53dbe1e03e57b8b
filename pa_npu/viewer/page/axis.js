/* Axes of charts: round ticks, texts that tell them apart, and ends that are ticks. */

/* Round numbers between low and high, about `count` of them, and their distance. */
function ticks(low, high, count) {
  const step = niceStep((high - low) / Math.max(1, count));
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    values.push(i * step || 0); // no -0
  return values;
}

function niceStep(raw) {
  if (!(raw > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  return (
    [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999) || raw
  );
}

/* Texts of ticks with as many digits as tell them apart. */
function tickTexts(values, kind) {
  const unit = kind === "share" ? 100 : 1,
    suffix = kind === "share" ? " %" : "";
  const scaled = values.map((value) => value * unit);
  const step = scaled.length > 1 ? Math.abs(scaled[1] - scaled[0]) : Math.abs(scaled[0]) || 1;
  const largest = Math.max(...scaled.map(Math.abs));
  const places = (size) => Math.floor(Math.log10(size) + 1e-9);
  const isWhole =
    Math.abs(step / 10 ** places(step) - Math.round(step / 10 ** places(step))) < 1e-6;
  const last = places(step) - (isWhole ? 0 : 1);
  if (largest !== 0 && (largest >= 1e6 || largest < 1e-2)) {
    const digits = Math.min(12, Math.max(0, places(largest) - last));
    return scaled.map(
      (value) => (value === 0 ? "0" : value.toExponential(digits).replace("e+", "e")) + suffix,
    );
  }
  const digits = Math.min(12, Math.max(0, -last));
  const form = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return scaled.map(
    (value) => (Math.abs(value) < step * 1e-9 ? 0 : value).toLocaleString("en", form) + suffix,
  );
}

/* An axis whose first and last tick are its ends: { low, high, values, texts }. */
function axis(low, high, kind) {
  if (kind === "share" && low >= 0 && high <= 1 && high - low > 0.3) [low, high] = [0, 1];
  else if (low > 0 && low < 0.6 * high) low = 0;
  if (high - low < 1e-12 * Math.max(1e-12, Math.abs(high))) {
    const room = Math.abs(high) * 0.1 || 1;
    [low, high] = low === 0 ? [0, 1] : [low - room, high + room];
    if (kind === "share") high = Math.min(1, Math.max(high, low + 0.01));
  }
  const step = niceStep((high - low) / 4);
  const first = Math.floor(low / step + 1e-9),
    final = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  const values = Array.from({ length: final - first + 1 }, (_, i) => (first + i) * step || 0);
  return {
    low: values[0],
    high: values[values.length - 1],
    values,
    texts: tickTexts(values, kind),
  };
}

/* The same of a logarithmic scale; low and high are exponents. */
function logAxis(low, high) {
  const factors = high - low > 3 ? [1] : high - low > 1.2 ? [1, 3] : [1, 2, 5];
  const all = [];
  for (let power = Math.floor(low) - 1; power <= Math.ceil(high) + 1; power++) {
    for (const factor of factors) all.push(power + Math.log10(factor));
  }
  const first = all.filter((value) => value <= low + 1e-9).pop();
  const final = all.find((value) => value >= high - 1e-9 && value > first);
  let exponents = all.filter((value) => value >= first && value <= final);
  const step = Math.ceil(exponents.length / 6);
  exponents = exponents.filter((_, i) => i % step === 0 || i === exponents.length - 1);
  const values = exponents.map((exponent) => 10 ** exponent);
  const texts = values.map((value) =>
    value < 0.01 || value >= 1e5 ? value.toExponential(0).replace("e+", "e") : format(value),
  );
  return { low: first, high: final, values, texts };
}

const pen = document.createElement("canvas").getContext("2d");
function textWidth(text) {
  pen.font = "11px system-ui, sans-serif";
  return pen.measureText(text).width;
}
