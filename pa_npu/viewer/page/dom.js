/* Elements from names, attributes and children. Texts become text nodes only: nothing a model
   wrote is ever parsed as markup. */

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set([
  "svg",
  "g",
  "path",
  "line",
  "rect",
  "circle",
  "text",
  "defs",
  "pattern",
  "title",
  "linearGradient",
  "stop",
]);

function h(tag, attributes = {}, ...children) {
  const node =
    SVG_TAGS.has(tag) && tag !== "title"
      ? document.createElementNS(SVG, tag)
      : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

function fill(node, ...children) {
  node.replaceChildren();
  return add(node, children);
}

/* Characters that have no picture or that turn the line around are shown by their names. */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/;

function controlName(character) {
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCharCode(0x2400 + code);
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

/* Text as nodes; with `wanted`, what it matches is marked. */
function shown(text, wanted = "") {
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (!plain) return;
    if (!wanted) nodes.push(document.createTextNode(plain));
    else {
      const lower = plain.toLowerCase(),
        sought = wanted.toLowerCase();
      let from = 0;
      for (let at = lower.indexOf(sought); at >= 0; at = lower.indexOf(sought, from)) {
        nodes.push(
          document.createTextNode(plain.slice(from, at)),
          h("mark", {}, plain.slice(at, at + sought.length)),
        );
        from = at + sought.length;
      }
      nodes.push(document.createTextNode(plain.slice(from)));
    }
    plain = "";
  };
  for (const character of String(text)) {
    if (HIDDEN.test(character)) {
      flush();
      nodes.push(h("span", { class: "control" }, controlName(character)));
    } else plain += character;
  }
  flush();
  return nodes;
}

const numberFormat = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

function format(value, kind = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (kind === "share") {
    const percent = 100 * value,
      near = Math.abs(percent) % 100 !== 0 && (Math.abs(percent) < 10 || Math.abs(percent) > 90);
    const text = percent.toFixed(near ? 1 : 0); // only all of it is 100 %, only nothing 0 %
    return (
      (percent < 100 && text === "100.0"
        ? "99.9"
        : percent > 0 && text === "0.0"
          ? "< 0.1"
          : text) + " %"
    );
  }
  if (kind === "seconds") return duration(value);
  if (kind === "count") return Math.round(value).toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return numberFormat.format(value);
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 10) return numberFormat.format(Math.round(seconds * 1000) / 1000) + " s";
  if (seconds < 90) return seconds.toFixed(1) + " s";
  if (seconds < 5400) return Math.floor(seconds / 60) + " min " + Math.round(seconds % 60) + " s";
  if (seconds < 172800)
    return Math.floor(seconds / 3600) + " h " + Math.round((seconds % 3600) / 60) + " min";
  return (seconds / 86400).toFixed(1) + " days";
}

/* A short text near the pointer or the focused thing. */
const tip = {
  show(text, x, y) {
    const node = document.getElementById("tip");
    fill(node, shown(text));
    node.hidden = false;
    const width = node.offsetWidth,
      height = node.offsetHeight;
    node.style.left = Math.max(6, Math.min(x + 12, innerWidth - width - 6)) + "px";
    node.style.top = (y + 16 + height > innerHeight ? Math.max(6, y - height - 10) : y + 16) + "px";
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

/* Moves focus among the buttons of a container by arrow keys, as users of lists expect. */
function arrowKeys(container, selector, vertical = true) {
  container.addEventListener("keydown", (event) => {
    const step = {
      [vertical ? "ArrowDown" : "ArrowRight"]: 1,
      [vertical ? "ArrowUp" : "ArrowLeft"]: -1,
    }[event.key];
    if (!step) return;
    const all = [...container.querySelectorAll(selector)],
      at = all.indexOf(document.activeElement);
    if (at < 0) return;
    event.preventDefault();
    all[(at + step + all.length) % all.length].focus();
    all[(at + step + all.length) % all.length].click();
  });
}
