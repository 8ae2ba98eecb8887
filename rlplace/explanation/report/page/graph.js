// Boxes within boxes, and arrows that add up what flows between the boxes that are shown.
const BOX = { wide: 148, tall: 42, gap: 18, rank: 30, pad: 12, head: 26 };

const graph = {
  canvas: $("modules"), boxes: new Map(), arrows: [], scale: 1, x: 0, y: 0, wide: 1, tall: 1, chosen: -1, between: false, arrowsDrawn: 0,

  // Where everything lies. Children are ranked by the longest chain of arrows that leads to them; ranks run down, in
  // columns when they are many, and open modules hold their children.
  arrange(kept = -1) { // the box of the node `kept` stays where it is on the screen
    const old = this.boxes.get(kept), at = old && [this.x + old.x * this.scale, this.y + old.y * this.scale];
    const shown = visibleNodes(), open = tree.open, slot = new Int32Array(tree.parent.length).fill(-1);
    for (const node of shown) slot[node] = node;
    const visible = (group) => { // the shown box that a group is in
      let node = data.groups.node[group], found = node;
      for (let at = node; at >= 0; at = tree.parent[at]) if (!open.has(at)) found = at;
      return slot[found] >= 0 ? found : -1;
    };
    const boxOf = data.groups.node.map((_, group) => visible(group));
    const sums = new Map(), edges = data.edges;
    for (let i = 0; i < edges.source.length; i++) {
      const a = boxOf[edges.source[i]], b = boxOf[edges.target[i]];
      if (a === b) continue;
      const key = a * tree.parent.length + b;
      let sum = sums.get(key);
      if (!sum) sums.set(key, (sum = { a, b, forward: 0, backward: 0, across: 0, count: 0 }));
      sum.forward += edges.forward_bytes[i];
      sum.backward += edges.backward_bytes[i];
      sum.count += 1;
      if (data.groups.device[edges.source[i]] !== data.groups.device[edges.target[i]]) sum.across += edges.forward_bytes[i] + edges.backward_bytes[i] + 1;
    }
    this.arrows = [...sums.values()];
    this.boxes = new Map();
    const size = this.place(0, this.siblings());
    this.shift(0, 0, 0);
    this.wide = size.wide;
    this.tall = size.tall;
    $("shown").textContent = `${countText(shown.filter((node) => !open.has(node)).length, "box", "es")}, ${countText(this.arrows.length, "arrow")}`;
    const { clientWidth: wide, clientHeight: tall } = this.canvas;
    if (!at || at[0] < -wide / 2 || at[1] < -tall / 2 || at[0] > wide || at[1] > tall) {
      this.fit(false);
      return;
    }
    this.x = at[0] - this.boxes.get(kept).x * this.scale;
    this.y = at[1] - this.boxes.get(kept).y * this.scale;
    this.repaint();
  },

  siblings() { // arrows between children of the same module, lifted from the boxes that are shown
    const found = new Map();
    for (const { a, b } of this.arrows) {
      let x = a, y = b;
      while (tree.depth[x] > tree.depth[y]) x = tree.parent[x];
      while (tree.depth[y] > tree.depth[x]) y = tree.parent[y];
      while (tree.parent[x] !== tree.parent[y]) { x = tree.parent[x]; y = tree.parent[y]; }
      if (x === y || tree.first[x] > tree.first[y]) continue; // back to an earlier module: no rank comes of it
      if (!found.has(y)) found.set(y, new Set());
      found.get(y).add(x);
    }
    return found;
  },

  place(node, before) { // sets the size of a box and where its children lie in it; returns the size
    if (!tree.open.has(node)) {
      const box = { x: 0, y: 0, wide: BOX.wide, tall: BOX.tall };
      this.boxes.set(node, box);
      return box;
    }
    const rank = new Map(), ranks = [];
    for (const child of tree.children[node]) {
      const above = [...(before.get(child) || [])].map((other) => rank.get(other)).filter((value) => value !== undefined);
      rank.set(child, above.length ? Math.max(...above) + 1 : 0);
      (ranks[rank.get(child)] ||= []).push(child);
    }
    const rows = []; // a rank, or a part of one that is too wide
    const order = new Map();
    for (const members of ranks) {
      const pull = (child) => { const from = [...(before.get(child) || [])].map((other) => order.get(other) ?? 0.5); return from.length ? from.reduce((a, b) => a + b) / from.length : 0.5; };
      members.sort((a, b) => pull(a) - pull(b) || tree.first[a] - tree.first[b]);
      members.forEach((child, i) => order.set(child, (i + 0.5) / members.length));
      const most = Math.max(4, Math.ceil(Math.sqrt(2 * members.length)));
      for (let i = 0; i < members.length; i += most) rows.push(members.slice(i, i + most));
    }
    const sizes = rows.map((members) => {
      const parts = members.map((child) => this.place(child, before));
      return { wide: parts.reduce((sum, part) => sum + part.wide + BOX.gap, -BOX.gap), tall: Math.max(...parts.map((part) => part.tall)) };
    });
    const total = sizes.reduce((sum, size) => sum + size.tall + BOX.rank, 0), widest = Math.max(...sizes.map((size) => size.wide));
    const shape = this.canvas.clientWidth / Math.max(1, this.canvas.clientHeight);
    const columns = Math.max(1, Math.min(rows.length, Math.round(Math.sqrt((total * shape) / (widest + BOX.gap * 2) / 1.3))));
    const height = Math.max(total / columns, ...sizes.map((size) => size.tall));
    let x = BOX.pad, y = BOX.head, bottom = 0, begin = 0;
    const finish = (end) => { // a column is as wide as its widest row, and rows are centred in it
      const wide = Math.max(...sizes.slice(begin, end).map((size) => size.wide));
      for (let i = begin; i < end; i++) {
        let at = x + (wide - sizes[i].wide) / 2;
        for (const child of rows[i]) { const box = this.boxes.get(child); box.x = at; at += box.wide + BOX.gap; }
      }
      x += wide + 2.6 * BOX.gap;
      begin = end;
    };
    rows.forEach((members, i) => {
      if (i > begin && y + sizes[i].tall - BOX.head > height * 1.02) { finish(i); y = BOX.head; }
      for (const child of members) this.boxes.get(child).y = y;
      y += sizes[i].tall + BOX.rank;
      bottom = Math.max(bottom, y - BOX.rank);
    });
    finish(rows.length);
    const box = { x: 0, y: 0, wide: Math.max(BOX.wide + 2 * BOX.pad, x - 2.6 * BOX.gap + BOX.pad), tall: bottom + BOX.pad };
    this.boxes.set(node, box);
    return box;
  },

  shift(node, x, y) { // from places within the parent to places in the picture
    const box = this.boxes.get(node);
    box.x += x;
    box.y += y;
    if (tree.open.has(node)) for (const child of tree.children[node]) this.shift(child, box.x, box.y);
  },

  fit(all) {
    const { clientWidth: wide, clientHeight: tall } = this.canvas;
    const whole = Math.min(wide / (this.wide + 16), tall / (this.tall + 16), 1.15);
    this.scale = all ? whole : Math.max(whole, Math.min(0.62, wide / (this.wide + 16)), 0.3);
    this.x = (wide - this.wide * this.scale) / 2;
    this.y = this.tall * this.scale < tall ? (tall - this.tall * this.scale) / 2 : 8;
    if (this.x < 0) this.x = 8;
    this.repaint();
  },

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const next = Math.min(4, Math.max(0.04, this.scale * factor)), by = next / this.scale;
    this.x = x - (x - this.x) * by;
    this.y = y - (y - this.y) * by;
    this.scale = next;
    this.repaint();
  },

  choose(node) {
    if (this.chosen === node) return;
    this.chosen = node;
    for (const line of $("tree").querySelectorAll(".on")) line.classList.remove("on");
    const line = $("tree").querySelector(`[data-node="${node}"]`);
    if (line) line.classList.add("on");
    this.repaint();
  },

  nodeAt(x, y) { // the innermost box
    const px = (x - this.x) / this.scale, py = (y - this.y) / this.scale;
    let node = 0, found = -1;
    while (node >= 0) {
      const box = this.boxes.get(node);
      if (px < box.x || py < box.y || px > box.x + box.wide || py > box.y + box.tall) break;
      found = node;
      node = tree.open.has(node) ? (tree.children[node].find((child) => { const b = this.boxes.get(child); return px >= b.x && py >= b.y && px <= b.x + b.wide && py <= b.y + b.tall; }) ?? -1) : -1;
    }
    return found;
  },

  paint() {
    const { context, width, height } = sized(this.canvas);
    context.save();
    context.translate(this.x, this.y);
    context.scale(this.scale, this.scale);
    const area = { left: -this.x / this.scale, top: -this.y / this.scale, right: (width - this.x) / this.scale, bottom: (height - this.y) / this.scale };
    const inView = (box) => box.x < area.right && box.y < area.bottom && box.x + box.wide > area.left && box.y + box.tall > area.top;
    const opened = [...this.boxes].filter(([node, box]) => tree.open.has(node) && inView(box)).sort(([a], [b]) => tree.depth[a] - tree.depth[b]);
    for (const [node, box] of opened) this.paintModule(context, node, box);
    this.paintArrows(context, area);
    for (const [node, box] of this.boxes) if (!tree.open.has(node) && inView(box)) this.paintBox(context, node, box);
    context.restore();
  },

  paintModule(context, node, box) {
    context.beginPath();
    context.roundRect(box.x, box.y, box.wide, box.tall, 8);
    context.fillStyle = tree.depth[node] % 2 ? inks.faint : inks.panel;
    context.fill();
    context.lineWidth = node === this.chosen ? 2 : 1;
    context.strokeStyle = node === this.chosen ? inks.ink : inks.line;
    context.stroke();
    context.fillStyle = inks.soft;
    context.font = `12px ${inks.font}`;
    context.fillText(fitted(context, (node ? "− " : "") + tree.label[node], box.wide - 2 * BOX.pad), box.x + BOX.pad, box.y + 14);
  },

  paintBox(context, node, box) {
    const most = byWork ? [] : shares(node), main = byWork ? inks.soft : most.length ? category(most[0].device) : inks.line;
    context.beginPath();
    context.roundRect(box.x, box.y, box.wide, box.tall, 5);
    context.save();
    context.clip();
    context.fillStyle = mixed(main, byWork ? 0.08 : 0.2, inks.panel);
    context.fillRect(box.x, box.y, box.wide, box.tall);
    let x = box.x;
    for (const { color, share } of stripes(node)) {
      context.fillStyle = color;
      context.fillRect(x, box.y + box.tall - 6, box.wide * share + 0.5, 6);
      x += box.wide * share;
    }
    context.restore();
    context.lineWidth = node === this.chosen ? 2.4 : 1;
    context.strokeStyle = node === this.chosen ? inks.ink : mixed(main, 0.75, inks.panel);
    context.stroke();
    if (this.scale < 0.28) return;
    context.font = `12px ${inks.font}`;
    context.fillStyle = inks.ink;
    context.fillText(fitted(context, (isModule(node) ? "+ " : "") + tree.label[node], box.wide - 14), box.x + 7, box.y + 12);
    context.font = `10.5px ${inks.font}`;
    context.fillStyle = inks.soft;
    const said = `${secondsText(tree.time[node])}` + (isModule(node) ? `, ${countText(tree.groups[node], "group")}` : `, ${bytesText(tree.bytes[node])}`);
    context.fillText(said, box.x + 7, box.y + 27);
  },

  paintArrows(context, area) {
    const largest = Math.max(1, ...this.arrows.map((arrow) => arrow.forward + arrow.backward));
    const inside = (node) => { for (let at = node; at >= 0; at = tree.parent[at]) if (at === this.chosen) return true; return false; };
    this.arrowsDrawn = 0;
    const later = [];
    for (const arrow of this.arrows) {
      if (this.between && !arrow.across) continue;
      if (this.chosen > 0 && inside(arrow.a) !== inside(arrow.b)) { later.push(arrow); continue; }
      this.paintArrow(context, area, arrow, largest, this.chosen > 0 ? 0.25 : 1);
    }
    for (const arrow of later) this.paintArrow(context, area, arrow, largest, 1);
    this.canvas.dataset.arrows = this.arrowsDrawn;
  },

  paintArrow(context, area, arrow, largest, strength) {
    const from = this.boxes.get(arrow.a), to = this.boxes.get(arrow.b);
    if (!from || !to) return;
    const down = to.y >= from.y + from.tall - 1;
    let x1, y1, x2, y2, c1, c2;
    if (down) { // bottom to top
      [x1, y1, x2, y2] = [from.x + from.wide / 2, from.y + from.tall, to.x + to.wide / 2, to.y];
      const bend = Math.max(10, Math.min(60, (y2 - y1) / 2));
      [c1, c2] = [[x1, y1 + bend], [x2, y2 - bend]];
    } else { // side to side, for the next column and for what goes back
      const right = to.x >= from.x;
      [x1, y1, x2, y2] = [right ? from.x + from.wide : from.x, from.y + from.tall / 2, right ? to.x : to.x + to.wide, to.y + to.tall / 2];
      const bend = (right ? 1 : -1) * Math.max(14, Math.abs(x2 - x1) / 2);
      [c1, c2] = [[x1 + bend, y1], [x2 - bend, y2]];
    }
    if (Math.max(x1, x2, c1[0], c2[0]) < area.left || Math.min(x1, x2, c1[0], c2[0]) > area.right || Math.max(y1, y2) < area.top || Math.min(y1, y2) > area.bottom) return;
    this.arrowsDrawn++;
    const weight = Math.log1p(arrow.forward + arrow.backward) / Math.log1p(largest);
    context.globalAlpha = strength * (arrow.across ? 0.85 : 0.55);
    context.strokeStyle = context.fillStyle = arrow.across ? inks.ink : inks.soft;
    context.lineWidth = 0.7 + 1.8 * weight * weight;
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(...c1, ...c2, x2, y2);
    context.stroke();
    const angle = Math.atan2(y2 - c2[1], x2 - c2[0]), reach = 5 + context.lineWidth;
    context.beginPath();
    context.moveTo(x2, y2);
    context.lineTo(x2 - reach * Math.cos(angle - 0.45), y2 - reach * Math.sin(angle - 0.45));
    context.lineTo(x2 - reach * Math.cos(angle + 0.45), y2 - reach * Math.sin(angle + 0.45));
    context.fill();
    context.globalAlpha = 1;
  },

  details(node) {
    const lines = nodeDetails(node);
    let inward = 0, outward = 0;
    const inside = (other) => { for (let at = other; at >= 0; at = tree.parent[at]) if (at === node) return true; return false; };
    for (const { a, b, forward } of this.arrows) {
      if (inside(a) === inside(b)) continue;
      if (inside(b)) inward += forward; else outward += forward;
    }
    if (node) lines.push(`reads ${bytesText(inward)}, hands on ${bytesText(outward)} a pass`);
    return lines;
  },
};

function watchGraph() {
  const canvas = graph.canvas, pointers = new Map();
  let moved = 0, apart = 0;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    moved = pointers.size > 1 ? 99 : 0;
    apart = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) {
      const node = graph.nodeAt(...place(event));
      graph.choose(node);
      if (node > 0) showTip(graph.details(node), event.clientX, event.clientY); else hideTip();
      return;
    }
    const before = pointers.get(event.pointerId);
    pointers.set(event.pointerId, event);
    if (pointers.size === 1) {
      moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
      if (moved > 4) { hideTip(); graph.x += event.clientX - before.clientX; graph.y += event.clientY - before.clientY; graph.repaint(); }
      return;
    }
    const [a, b] = [...pointers.values()].map(place), now = Math.hypot(a[0] - b[0], a[1] - b[1]);
    if (apart > 0) graph.zoom(now / apart, (a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
    apart = now;
  });
  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    if (moved > 4) return;
    const node = graph.nodeAt(...place(event));
    graph.choose(node);
    if (node > 0 && isModule(node)) { hideTip(); toggle(node); } else if (node > 0) showTip(graph.details(node), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => { hideTip(); graph.choose(-1); });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    graph.zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) / 120), ...place(event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    const act = { "+": () => graph.zoom(1.3), "=": () => graph.zoom(1.3), "-": () => graph.zoom(1 / 1.3), "0": () => graph.fit(true) }[event.key];
    if (event.ctrlKey || event.metaKey || !(by || act)) return;
    event.preventDefault();
    if (act) act(); else { graph.x += by[0]; graph.y += by[1]; graph.repaint(); }
  });
}
