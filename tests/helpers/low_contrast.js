/* Texts whose contrast with their own ground is below WCAG's 4.5 : 1 (3 : 1 for large ones), one line each. */
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (node) => { for (; node; node = node.parentElement) { const c = rgba(getComputedStyle(node).backgroundColor); if (c[3] > 250) return c; } return [255, 255, 255, 255]; };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.getClientRects().length || ["SCRIPT", "STYLE", "OPTION"].includes(node.tagName) || node.classList.contains("skip")) continue;
    const style = getComputedStyle(node), color = rgba(node instanceof SVGElement ? style.fill : style.color);
    const one = light(color), two = light(ground(node)), ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 18 ? 3 : 4.5)) found.push(`${node.tagName}.${node.getAttribute("class")} ${node.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()
