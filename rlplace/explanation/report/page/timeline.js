// Rows of devices and links; draws only what is in view.
const LEFT_WIDE = 132, LEFT_NARROW = 84, AXIS = 26, DEVICE_ROW = 30, LINK_ROW = 18, MAX_ARROWS = 240;
const view = { from: 0, to: step };
const left = () => (lanes.canvas.clientWidth < 560 ? LEFT_NARROW : LEFT_WIDE);

function readRows() { // one record of typed arrays a row
  let at = 0, moved = 0;
  return data.rows.map((row) => {
    const count = row.boxes;
    const one = { ...row, start: new Float64Array(count), end: new Float64Array(count), op: new Int32Array(count),
      microbatch: new Int32Array(count).fill(-1), moved: row.kind === "link" ? moved : -1 };
    let time = 0;
    for (let i = 0; i < count; i++, at++) {
      one.start[i] = (time += data.boxes.gap[at]) * tick;
      one.end[i] = (time += data.boxes.length[at]) * tick;
      one.op[i] = data.boxes.op[at];
      if (data.boxes.microbatch) one.microbatch[i] = data.boxes.microbatch[at];
    }
    if (row.kind === "link") moved += count;
    return one;
  });
}

const lanes = {
  canvas: $("lanes"), rows: [], tops: [], color: "module", links: true, matches: null, row: -1, box: -1, drawn: 0,

  shownRows() { return this.links ? this.rows : this.rows.filter((row) => row.kind === "device"); },

  boxColor(row, i) {
    const op = row.op[i];
    if (this.color === "phase" || row.kind !== "device") {
      if (row.kind === "link" && this.color === "phase") return data.colors.transfer;
      if (row.kind === "collective") return data.colors.collective;
      if (this.color === "phase") return data.colors.phase[data.ops.phase[op]];
    }
    if (this.color === "microbatch" && row.microbatch[i] >= 0) return category(row.microbatch[i]);
    if (this.color === "device") return category(row.device);
    const group = row.kind === "link" ? data.transfers.group[row.moved + i] : data.ops.group[op];
    return this.color === "module" && group >= 0 ? category(data.groups.block[group]) : data.colors.transfer;
  },

  boxName(row, i) {
    const op = row.op[i];
    if (op >= 0) return opNames[op];
    const group = data.transfers.group[row.moved + i];
    return group >= 0 ? groupNames[group] : "";
  },

  boxText(row, i) { // what stands in it
    const number = row.microbatch[i];
    return this.color === "microbatch" && number >= 0 ? String(number) : this.boxName(row, i);
  },

  paint() {
    const shown = this.shownRows();
    let y = AXIS;
    this.tops = shown.map((row, i) => {
      if (i > 0 && row.kind !== "device" && shown[i - 1].kind === "device") y += 10;
      const top = y;
      y += row.kind === "device" ? DEVICE_ROW : LINK_ROW;
      return top;
    });
    const { context, width, height } = sized(this.canvas, y + 8);
    const x0 = left(), plot = width - x0 - 8, scale = plot / (view.to - view.from);
    drawAxis(context, x0, width, height);
    this.drawn = 0;
    shown.forEach((row, number) => {
      const top = this.tops[number], tall = (row.kind === "device" ? DEVICE_ROW : LINK_ROW) - 4;
      context.globalAlpha = 1;
      context.font = `12px ${inks.font}`;
      if (number === this.row) {
        context.fillStyle = inks.faint;
        context.fillRect(1, top, width - 2, tall + 4);
      }
      context.fillStyle = row.kind === "device" ? inks.ink : inks.soft;
      if (row.kind !== "device") context.font = `10.5px ${inks.font}`;
      const label = rowLabel(context, row, x0 - 14);
      context.fillText(label, 10, top + 2 + tall / 2);
      context.font = `11px ${inks.font}`;
      context.save();
      context.beginPath();
      context.rect(x0, top, plot, tall + 4);
      context.clip();
      this.paintRow(context, row, number, top + 2, tall, x0, plot, scale);
      context.restore();
    });
    this.paintArrows(context, shown, x0, plot, scale);
    this.canvas.dataset.drawn = this.drawn;
    const share = step ? (100 * (view.to - view.from)) / step : 100;
    $("range").textContent = `${secondsText(view.from)} to ${secondsText(view.to)} of ${secondsText(step)}` + (share < 99.95 ? `, ${share < 0.1 ? share.toPrecision(1) : share.toFixed(1)} %` : "");
  },

  paintRow(context, row, number, top, tall, x0, plot, scale) {
    const { start, end } = row;
    let low = 0, high = start.length; // first box that ends in view
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] < view.from) low = middle + 1; else high = middle;
    }
    let edge = -1;
    for (let i = low; i < start.length && start[i] <= view.to; i++) {
      const a = Math.max(x0 - 4, x0 + (start[i] - view.from) * scale), b = Math.min(x0 + plot + 4, x0 + (end[i] - view.from) * scale);
      const chosen = number === this.row && i === this.box;
      const hit = !this.matches || (row.op[i] >= 0 && this.matches[row.op[i]] === 1);
      if (b - edge < 0.6 && !chosen && !(this.matches && hit)) continue; // no pixel of its own
      const color = this.boxColor(row, i), wide = Math.max(b - a, 0.8);
      context.globalAlpha = hit ? 1 : 0.13;
      context.fillStyle = color;
      if (wide > 3) context.fillRect(a, top, wide - 0.6, tall);
      else context.fillRect(Math.floor(a), top, Math.max(1, Math.ceil(b) - Math.floor(a)), tall); // whole pixels: dense rows stay solid
      if (this.color === "microbatch" && row.kind === "device" && data.ops.phase[row.op[i]] > 0) { // backward
        context.fillStyle = "#000";
        context.globalAlpha *= 0.3;
        context.fillRect(a, top + tall * 0.72, Math.max(wide - (wide > 3 ? 0.6 : 0), 1), tall * 0.28);
        context.globalAlpha = hit ? 1 : 0.13;
      }
      edge = Math.max(edge, a + wide);
      this.drawn++;
      if (wide > 22 && tall > 12 && hit) {
        context.fillStyle = inkOn(color);
        const name = this.boxText(row, i);
        const from = Math.max(a, x0), room = Math.min(b, x0 + plot) - from - 8;
        const whole = fitted(context, shortName(name, 2), room);
        context.fillText(whole.endsWith("…") ? fitted(context, shortName(name, 1), room) : whole, from + 4, top + tall / 2 + 0.5);
      }
      if (chosen) {
        context.globalAlpha = 1;
        context.strokeStyle = inks.ink;
        context.lineWidth = 2;
        context.strokeRect(a, top, Math.max(wide, 2), tall);
      }
    }
  },

  paintArrows(context, shown, x0, plot, scale) { // from who sends to who receives, while there are few enough to tell apart
    const sent = [];
    for (const row of shown) {
      if (row.kind !== "link") continue;
      for (let i = 0; i < row.start.length; i++) if (row.end[i] >= view.from && row.start[i] <= view.to) sent.push([row, i]);
    }
    this.canvas.dataset.arrows = sent.length <= MAX_ARROWS ? sent.length : 0;
    if (sent.length > MAX_ARROWS) return;
    context.save();
    context.beginPath();
    context.rect(x0, AXIS, plot, context.canvas.height);
    context.clip();
    context.globalAlpha = 0.75;
    context.strokeStyle = context.fillStyle = inks.ink;
    context.lineWidth = 1;
    for (const [row, i] of sent) {
      const down = row.to > row.device, top = (device) => this.tops[device] + 2;
      const x = x0 + (row.start[i] - view.from) * scale, to = x0 + (row.end[i] - view.from) * scale;
      const y = top(row.device) + (down ? DEVICE_ROW - 4 : 0), end = top(row.to) + (down ? 0 : DEVICE_ROW - 4), tip = down ? -4 : 4;
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(to, end);
      context.stroke();
      context.beginPath();
      context.moveTo(to, end);
      context.lineTo(to - 2.5, end + tip);
      context.lineTo(to + 2.5, end + tip);
      context.fill();
    }
    context.restore();
  },

  rowAt(y) {
    const shown = this.shownRows();
    for (let i = shown.length - 1; i >= 0; i--) {
      if (y >= this.tops[i]) return y < this.tops[i] + (shown[i].kind === "device" ? DEVICE_ROW : LINK_ROW) ? i : -1;
    }
    return -1;
  },

  boxAt(row, time, reach) { // the box under a time, or the nearest one within `reach` seconds
    let low = 0, high = row.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.start[middle] <= time) low = middle + 1; else high = middle;
    }
    let best = -1, nearest = reach;
    for (const i of [low - 1, low]) {
      if (i < 0 || i >= row.start.length) continue;
      const away = Math.max(row.start[i] - time, time - row.end[i], 0);
      if (away <= nearest) { best = i; nearest = away; }
    }
    return best;
  },

  details(number, i) {
    const row = this.shownRows()[number], op = row.op[i], lines = [this.boxName(row, i)];
    const moving = row.kind === "link";
    lines.push(`${moving ? "transfer" : row.kind === "collective" ? "collective" : data.phases[data.ops.phase[op]].replace("_", " ")}, ${row.name}` + (row.microbatch[i] >= 0 && data.microbatches > 1 ? `, micro-batch ${row.microbatch[i]}` : ""));
    if (moving) lines.push(bytesText(data.transfers.bytes[row.moved + i]));
    lines.push(`${secondsText(row.end[i] - row.start[i])}, from ${secondsText(row.start[i])} to ${secondsText(row.end[i])}`);
    if (!moving && data.ops.group[op] >= 0) lines.push(`in ${data.groups.block_names[data.groups.block[data.ops.group[op]]]}`);
    return lines;
  },
};

function rowLabel(context, row, room) { // of a link both ends, each without its beginning where there is no room
  const ends = row.kind === "link" ? row.name.split(" → ") : [];
  const name = row.kind === "collective" && context.measureText(row.name).width > room ? row.name.replace("collective ", "") : row.name;
  if (ends.length !== 2 || context.measureText(name).width <= room) return fitted(context, name, room);
  const half = (room - context.measureText(" → ").width) / 2;
  return ends.map((end) => {
    let text = end;
    while (text.length > 2 && context.measureText(text).width > half) text = "…" + text.slice(text[0] === "…" ? 2 : 1);
    return text;
  }).join(" → ");
}
function shortName(name, parts) { // of a long path its last parts
  const slash = name.lastIndexOf("/"), path = slash < 0 ? name : name.slice(0, slash);
  return path.split(".").slice(-parts).join(".");
}

function drawAxis(context, x0, width, height) {
  const plot = width - x0 - 8, span = view.to - view.from, rough = span / Math.max(2, plot / (plot < 400 ? 72 : 110));
  const power = 10 ** Math.floor(Math.log10(rough)), unit = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  context.font = `11px ${inks.font}`;
  for (let n = Math.ceil(view.from / unit - 1e-9); n * unit <= view.to * (1 + 1e-12); n++) {
    const x = Math.round(x0 + ((n * unit - view.from) / span) * plot) + 0.5;
    context.fillStyle = inks.line;
    context.fillRect(x - 0.5, AXIS - 5, 1, height);
    context.fillStyle = inks.soft;
    const text = axisText(n * unit, unit), half = context.measureText(text).width / 2;
    if (x - half > x0 - 12 && x + half < width) context.fillText(text, x - half, 12);
  }
}
function axisText(value, unit) {
  const [name, scale] = view.to >= 1 ? ["s", 1] : view.to >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
  const places = Math.max(0, Math.min(9, -Math.floor(Math.log10(unit / scale) + 1e-9)));
  return `${(value / scale).toFixed(places)} ${name}`;
}

// The part of the step that both canvases show.
let repaintTime = () => {};
function setView(from, to) {
  const least = Math.max(step * 1e-6, tick * 20), span = Math.min(step, Math.max(to - from, least));
  view.from = Math.min(Math.max(0, from + (to - from - span) / 2), step - span);
  view.to = view.from + span;
  repaintTime();
}
function zoom(factor, at = 0.5) {
  const span = view.to - view.from, here = view.from + span * at, next = Math.min(step, span * factor);
  setView(here - next * at, here - next * at + next);
}
const pan = (share) => { const by = share * (view.to - view.from); setView(view.from + by, view.to + by); };

function watchTime(canvas, describe) { // pointer, wheel, pinch and keys on a canvas with the time axis
  const pointers = new Map();
  let last = null, moved = 0;
  const share = (x) => { const box = canvas.getBoundingClientRect(); return (x - box.left - left()) / (box.width - left() - 8); };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top, time: view.from + share(event.clientX) * (view.to - view.from) };
  };
  const show = (event) => {
    const lines = describe(place(event), event);
    if (lines) showTip(lines, event.clientX, event.clientY); else hideTip();
    crosshair(event.clientX - canvas.getBoundingClientRect().left);
  };
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    moved = 0;
    last = null;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) { show(event); return; }
    const before = pointers.get(event.pointerId);
    pointers.set(event.pointerId, event);
    if (pointers.size === 1) {
      moved += Math.abs(event.clientX - before.clientX);
      if (moved > 3) { hideTip(); pan(-(share(event.clientX) - share(before.clientX))); }
      return;
    }
    moved = 99;
    const [a, b] = [...pointers.values()].map((p) => share(p.clientX));
    if (last && Math.abs(a - b) > 0.01) zoom(Math.abs(last[0] - last[1]) / Math.abs(a - b), (a + b) / 2);
    last = [a, b];
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      last = null;
      if (name === "pointerup" && moved <= 3 && event.pointerType !== "mouse") show(event);
    });
  }
  canvas.addEventListener("pointerleave", () => { hideTip(); crosshair(-1); });
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!event.ctrlKey && !event.metaKey && !sideways && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    if (sideways) pan((event.deltaX || event.deltaY) / 900);
    else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 110), Math.min(1, Math.max(0, share(event.clientX))));
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, Math.min(1, Math.max(0, share(event.clientX)))));
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => setView(0, step), Home: () => setView(0, step),
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2) }[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  });
}
function crosshair(x) {
  for (const line of document.querySelectorAll(".cross")) {
    line.hidden = x < left();
    line.style.transform = `translateX(${x}px)`;
  }
}

function stepThrough(event) { // rows and boxes by keys, for those who use no pointer
  const shown = lanes.shownRows();
  const by = { ArrowUp: -1, ArrowDown: 1, ",": -1, ".": 1 }[event.key];
  if (by === undefined || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  if (event.key.startsWith("Arrow")) {
    lanes.row = Math.min(shown.length - 1, Math.max(0, lanes.row + by));
    lanes.box = lanes.boxAt(shown[lanes.row], view.from, Infinity);
  } else {
    lanes.row = Math.max(0, lanes.row);
    lanes.box = Math.min(shown[lanes.row].start.length - 1, Math.max(0, lanes.box + by));
  }
  const row = shown[lanes.row];
  if (lanes.box < 0) { repaintTime(); return; }
  const middle = (row.start[lanes.box] + row.end[lanes.box]) / 2, span = view.to - view.from;
  if (middle < view.from || middle > view.to) setView(middle - span / 2, middle + span / 2); else repaintTime();
  const box = lanes.canvas.getBoundingClientRect();
  showTip(lanes.details(lanes.row, lanes.box), box.left + left() + ((middle - view.from) / (view.to - view.from)) * (box.width - left() - 8), box.top + lanes.tops[lanes.row] + DEVICE_ROW);
}
