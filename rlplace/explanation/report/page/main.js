// Puts everything together.
const MAX_BOXES = 1500;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

const paintTime = painter(() => { if (step) { lanes.paint(); memory.paint(); } });
repaintTime = paintTime;
graph.repaint = painter(() => graph.paint());

function paintAll() {
  readInks();
  showLegends();
  paintTime();
  graph.repaint();
}
function paintNow() { // for printing, which does not wait for the next frame
  readInks();
  if (step) { lanes.paint(); memory.paint(); }
  graph.paint();
}

function showLegends() {
  const items = [];
  if (lanes.color === "phase") {
    items.push(...phasesDone().map((phase) => legendItem(data.colors.phase[phase], phaseName(phase))));
    if (data.rows.some((row) => row.kind === "link")) items.push(legendItem(data.colors.transfer, "transfer"));
  } else if (lanes.color === "microbatch") {
    for (let m = 0; m < Math.min(data.microbatches, 24); m++) items.push(legendItem(category(m), String(m)));
    items.push(legendItem("linear-gradient(#8c8c8c 72%, #444 72%)", "backward"));
    if (data.microbatches > 24) items.push(legendItem("transparent", `and ${data.microbatches - 24} more`));
  } else if (lanes.color === "module") {
    const names = data.groups.block_names;
    const most = window.innerWidth < 600 ? 10 : 24;
    names.slice(0, most).forEach((name, i) => items.push(legendItem(category(i), name)));
    if (names.length > most) items.push(legendItem("transparent", `and ${names.length - most} more`));
  } else {
    data.devices.slice(0, 24).forEach((device, i) => items.push(legendItem(category(i), device.name)));
  }
  if (data.rows.some((row) => row.kind === "collective")) items.push(legendItem(data.colors.collective, "collective"));
  $("legend").replaceChildren(...items);
  if (byWork) {
    $("device-legend").setAttribute("aria-label", "Kinds of work");
    $("device-legend").replaceChildren(...phasesDone().map((phase) => legendItem(data.colors.phase[phase], phaseName(phase))));
    return;
  }
  const devices = data.devices.slice(0, 32).map((device, i) => legendItem(category(i), device.name));
  if (data.devices.length > 32) devices.push(legendItem("transparent", `and ${data.devices.length - 32} more`));
  $("device-legend").replaceChildren(...devices);
}

const phasesDone = () => data.phases.map((_, phase) => phase).filter((phase) => tree.work[0][phase] > 0);

function watchTools() {
  const choices = [["module", "Module"], ["phase", "Kind of work"], ["device", "Device"]];
  if (data.microbatches > 1) choices.splice(2, 0, ["microbatch", "Micro-batch"]);
  $("color").replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  if (byWork) $("color").value = lanes.color = "phase";
  else if (data.microbatches > 1) $("color").value = lanes.color = "microbatch";
  $("color").addEventListener("change", () => { lanes.color = $("color").value; showLegends(); paintTime(); });
  $("in").addEventListener("click", () => zoom(0.5));
  $("out").addEventListener("click", () => zoom(2));
  $("fit").addEventListener("click", () => setView(0, step));
  $("links").addEventListener("change", () => { lanes.links = $("links").checked; lanes.row = lanes.box = -1; paintTime(); });
  $("links").parentElement.hidden = !data.rows.some((row) => row.kind !== "device");
  const shownLinks = data.rows.filter((row) => row.kind !== "device").length;
  if (shownLinks < data.links) $("links").parentElement.append(` (${shownLinks} busiest of ${data.links})`);
  $("find").addEventListener("input", () => {
    const text = $("find").value.trim().toLowerCase();
    let count = 0;
    lanes.matches = text ? Uint8Array.from(opNames, (name) => { const hit = name.toLowerCase().includes(text) ? 1 : 0; count += hit; return hit; }) : null;
    $("found").textContent = text ? countText(count, "op") : "";
    paintTime();
  });
  $("find").addEventListener("keydown", (event) => { if (event.key === "Enter") nextMatch(); });
  $("more").addEventListener("click", () => {
    const opened = openLevel(MAX_BOXES);
    showTree();
    graph.arrange();
    if (!opened && visibleNodes().some((node) => isModule(node) && !tree.open.has(node))) {
      $("shown").textContent += `; the next level has more than ${MAX_BOXES}, open single modules`;
    }
  });
  $("less").addEventListener("click", () => { closeAll(); showTree(); graph.arrange(); });
  $("between").parentElement.hidden = byWork;
  $("between").addEventListener("change", () => { graph.between = $("between").checked; graph.repaint(); });
  $("graph-in").addEventListener("click", () => graph.zoom(1.4));
  $("graph-out").addEventListener("click", () => graph.zoom(1 / 1.4));
  $("graph-fit").addEventListener("click", () => graph.fit(true));
}

function nextMatch() { // goes to the first box after the middle of the view whose op was searched for
  if (!lanes.matches) return;
  const span = view.to - view.from, middle = view.from + span / 2 + step * 1e-9;
  let best = null;
  for (const again of [middle, -1]) {
    lanes.shownRows().forEach((row, number) => {
      for (let i = 0; i < row.start.length; i++) {
        const time = (row.start[i] + row.end[i]) / 2;
        if (time > again && row.op[i] >= 0 && lanes.matches[row.op[i]] && (!best || time < best.time)) best = { number, i, time, row };
      }
    });
    if (best) break;
  }
  if (!best) return;
  [lanes.row, lanes.box] = [best.number, best.i];
  const next = Math.min(span, Math.max(12 * (best.row.end[best.i] - best.row.start[best.i]), step * 1e-5));
  setView(best.time - next / 2, best.time + next / 2);
}

function start() {
  readInks();
  const theme = $("theme");
  theme.hidden = false;
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); paintAll(); });
  dark.addEventListener("change", () => { nameTheme(); paintAll(); });
  nameTheme();
  lanes.rows = readRows();
  readTree();
  watchTools();
  watchGraph();
  watchTree();
  if (step) {
    memory.prepare();
    watchTime(lanes.canvas, ({ y, time }, event) => {
      const number = lanes.rowAt(y);
      if (number < 0) return null;
      const row = lanes.shownRows()[number], reach = ((event.pointerType === "mouse" ? 3 : 10) * (view.to - view.from)) / lanes.canvas.clientWidth;
      const box = lanes.boxAt(row, time, reach);
      return box < 0 ? null : lanes.details(number, box);
    });
    watchTime(memory.canvas, (place) => memory.details(place));
    lanes.canvas.addEventListener("keydown", stepThrough);
  } else {
    $("nothing").hidden = false;
    $("chart").hidden = true;
    $("range").hidden = true;
  }
  showLegends();
  showTree();
  graph.arrange();
  paintNow();
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    const first = width === 0;
    width = document.body.clientWidth;
    if (first) return;
    paintTime();
    graph.arrange();
  }).observe(document.body);
  let before = null;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme ?? ""; root.dataset.theme = "light"; paintNow(); });
  window.addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; paintNow(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  document.addEventListener("scroll", hideTip, { passive: true });
  root.dataset.ready = "yes";
}
start();
