// Data, units, colours, the small card with details.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const tick = data.tick_s;
const step = data.step_s === null ? 0 : data.step_s;

function decoded(shared, rest) {
  const names = new Array(rest.length);
  let before = "";
  for (let i = 0; i < rest.length; i++) {
    before = before.slice(0, shared[i]) + rest[i];
    names[i] = before;
  }
  return names;
}
const opNames = decoded(data.ops.shared, data.ops.rest);
const groupNames = decoded(data.groups.shared, data.groups.rest);
// Where all modules run on the same devices, as in a sharded plan, colours of devices say nothing: kinds of work have one each.
const byWork = new Set(data.groups.device).size < 2;

function digits(value) {
  return Math.abs(value) >= 999.95 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
}
function secondsText(value) {
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (Math.abs(value) >= scale) return `${digits(value / scale)} ${unit}`;
  }
  return Math.abs(value) > 1e-15 ? `${digits(value / 1e-9)} ns` : "0 s";
}
function bytesText(value) {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} bytes`;
}
const countText = (count, word, ending = "s") => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : ending}`;

// Colours of categories are those of the whole project; inks follow the theme.
// Those after the last one are lighter, and then darker.
const shades = new Map();
function category(index) {
  const colors = data.colors.category, color = colors[index % colors.length], turn = Math.floor(index / colors.length) % 3;
  if (turn === 0) return color;
  if (!shades.has(index)) shades.set(index, turn === 1 ? mixed(color, 0.5, "#ffffff") : mixed(color, 0.6, "#000000"));
  return shades.get(index);
}
let inks = {};
function readInks() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["page", "panel", "ink", "soft", "line", "faint", "accent", "bad", "mark"]) {
    inks[name] = style.getPropertyValue(`--${name}`).trim();
  }
  inks.font = style.getPropertyValue("--font").trim();
}
const luminance = new Map();
function inkOn(color) { // black or white, whichever is easier to read
  if (!luminance.has(color)) {
    const [r, g, b] = [1, 3, 5].map((at) => {
      const part = parseInt(color.slice(at, at + 2), 16) / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    luminance.set(color, 0.2126 * r + 0.7152 * g + 0.0722 * b);
  }
  return luminance.get(color) > 0.179 ? "#111111" : "#ffffff";
}
function mixed(color, share, under) { // a colour over a background, as #RRGGBB
  const part = (text, at) => parseInt(text.slice(at, at + 2), 16);
  return "#" + [1, 3, 5].map((at) => Math.round(part(color, at) * share + part(under, at) * (1 - share)).toString(16).padStart(2, "0")).join("");
}

// A canvas as sharp as the screen; returns its context in CSS pixels.
function sized(canvas, height) {
  if (height !== undefined) canvas.style.height = `${height}px`;
  const width = canvas.clientWidth, tall = canvas.clientHeight;
  // Browsers leave a canvas of more than 16,384 pixels a side, or 16.7 million in all, empty: hundreds of devices on a sharp screen.
  const ratio = Math.min(3, window.devicePixelRatio || 1, 16000 / Math.max(width, tall, 1), Math.sqrt(1.6e7 / Math.max(1, width * tall)));
  const pixels = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(tall * ratio))];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.font = `12px ${inks.font}`;
  context.textBaseline = "middle";
  return { context, width, height: tall };
}
const widths = new Map();
function fitted(context, text, room) { // the text, its end cut off where there is no room
  if (room < 14) return "";
  if (!widths.has(text)) {
    if (widths.size > 20000) widths.clear();
    widths.set(text, context.measureText(text).width);
  }
  if (widths.get(text) <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(text.slice(0, middle) + "…").width <= room) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? text.slice(0, low) + "…" : "";
}

// The card with details: a heading and lines of plain text.
const tip = $("tip");
function showTip(lines, x, y) {
  const parts = lines.map((line, i) => {
    const part = document.createElement(i ? "span" : "b");
    part.textContent = line;
    return part;
  });
  tip.replaceChildren(...parts);
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), space = 14;
  const left = Math.min(Math.max(8, x + space), window.innerWidth - box.width - 8);
  let top = y + space;
  if (top + box.height > window.innerHeight - 8) top = y - box.height - space;
  tip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
}
function hideTip() { tip.hidden = true; }

function legendItem(color, text) {
  const item = document.createElement("li"), swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = color;
  item.append(swatch, text);
  return item;
}

// One repaint a frame, however many things ask for it.
function painter(paint) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; paint(); });
  };
}
