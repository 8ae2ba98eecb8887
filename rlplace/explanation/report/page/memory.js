// Memory in use, a row a device, on the time axis of the timeline.
const MEMORY_ROW = data.devices.length > 24 ? 38 : 54;

function readCurves() {
  return data.memory.map((curve) => {
    const count = curve.time.length, time = new Float64Array(count), size = new Float64Array(count);
    let t = 0, v = 0;
    for (let i = 0; i < count; i++) {
      time[i] = (t += curve.time[i]) * tick;
      size[i] = (v += curve.size[i]) * data.memory_unit_bytes;
    }
    return { time, size };
  });
}

const memory = {
  canvas: $("memory"), curves: [], top: 1,

  prepare() {
    this.curves = readCurves();
    const peak = Math.max(...data.devices.map((device) => device.peak_bytes), 1);
    // Limits far above everything would flatten the curves; they are then named, not drawn.
    const limits = data.devices.map((device) => device.memory_bytes).filter((limit) => limit !== null && limit <= 3 * peak);
    this.top = 1.06 * Math.max(peak, ...limits);
  },

  paint() {
    const { context, width, height } = sized(this.canvas, AXIS + MEMORY_ROW * this.curves.length + 6);
    const x0 = left(), plot = width - x0 - 8, scale = plot / (view.to - view.from);
    drawAxis(context, x0, width, height);
    this.curves.forEach((curve, index) => {
      const device = data.devices[index], top = AXIS + index * MEMORY_ROW, tall = MEMORY_ROW - 10, floor = top + tall;
      const at = (bytes) => floor - (bytes / this.top) * tall;
      context.font = `12px ${inks.font}`;
      context.fillStyle = inks.ink;
      context.fillText(fitted(context, device.name, x0 - 18), 10, top + 10);
      context.font = `11px ${inks.font}`;
      const over = device.memory_bytes !== null && device.peak_bytes > device.memory_bytes;
      context.fillStyle = over ? inks.bad : inks.soft;
      context.fillText(fitted(context, x0 > 100 ? `peak ${bytesText(device.peak_bytes)}` : bytesText(device.peak_bytes), x0 - 14), 10, top + 25);
      if (device.memory_bytes !== null && x0 > 100 && MEMORY_ROW > 40) {
        context.fillStyle = inks.soft;
        context.fillText(fitted(context, `of ${bytesText(device.memory_bytes)}`, x0 - 14), 10, top + 39);
      }
      context.save();
      context.beginPath();
      context.rect(x0, top - 2, plot, tall + 4);
      context.clip();
      this.paintCurve(context, curve, category(index), x0, plot, scale, at, floor);
      if (device.memory_bytes !== null && device.memory_bytes <= this.top) {
        const y = Math.round(at(device.memory_bytes)) + 0.5;
        context.strokeStyle = inks.bad;
        context.setLineDash([5, 4]);
        context.lineWidth = 1;
        context.beginPath();
        context.moveTo(x0, y);
        context.lineTo(x0 + plot, y);
        context.stroke();
        context.setLineDash([]);
      }
      context.restore();
      context.fillStyle = inks.line;
      context.fillRect(x0, floor, plot, 1);
    });
  },

  paintCurve(context, { time, size }, color, x0, plot, scale, at, floor) {
    let i = Math.max(0, this.before(time, view.from));
    const path = new Path2D(), area = new Path2D();
    let x = x0, y = at(size[i]);
    path.moveTo(x, y);
    area.moveTo(x, floor);
    area.lineTo(x, y);
    for (i += 1; i < time.length && time[i] <= view.to; i++) {
      x = x0 + (time[i] - view.from) * scale;
      for (const one of [path, area]) {
        one.lineTo(x, y);
        one.lineTo(x, at(size[i]));
      }
      y = at(size[i]);
    }
    for (const one of [path, area]) one.lineTo(x0 + plot, y);
    area.lineTo(x0 + plot, floor);
    context.globalAlpha = 0.3;
    context.fillStyle = color;
    context.fill(area);
    context.globalAlpha = 1;
    context.strokeStyle = mixed(color, 0.75, inks.ink);
    context.lineWidth = 1.2;
    context.stroke(path);
  },

  before(time, moment) { // the last point at or before a moment
    let low = 0, high = time.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (time[middle] <= moment) low = middle + 1; else high = middle;
    }
    return low - 1;
  },

  details({ y, time }) {
    const index = Math.floor((y - AXIS) / MEMORY_ROW);
    if (index < 0 || index >= this.curves.length || time < 0 || time > step) return null;
    const device = data.devices[index], curve = this.curves[index], limit = device.memory_bytes;
    const used = curve.size[Math.max(0, this.before(curve.time, time))];
    const lines = [`${device.name}: ${bytesText(used)}`, `at ${secondsText(time)}`, `peak ${bytesText(device.peak_bytes)}`];
    if (limit !== null) lines[2] += ` of ${bytesText(limit)}, ${((100 * device.peak_bytes) / limit).toFixed(1)} %`;
    return lines;
  },
};
