// The modules as a tree: what is open, what it holds, and the list of it.
const tree = { children: [], depth: [], group: [], time: [], bytes: [], groups: [], ops: [], first: [], share: [], open: new Set(), spread: [] };

function readTree() {
  const { parent, label } = data.modules, count = parent.length, devices = data.devices.length;
  tree.children = Array.from({ length: count }, () => []);
  tree.depth = new Int32Array(count);
  tree.group = new Int32Array(count).fill(-1);
  tree.first = new Float64Array(count).fill(Infinity);
  for (const key of ["time", "bytes", "groups", "ops"]) tree[key] = new Float64Array(count);
  tree.share = Array.from({ length: count }, () => new Float64Array(devices));
  tree.spread = Array.from({ length: count }, () => new Int32Array(devices));
  parent.forEach((above, node) => {
    if (above < 0) return;
    tree.children[above].push(node);
    tree.depth[node] = tree.depth[above] + 1;
  });
  data.groups.node.forEach((node, group) => {
    tree.group[node] = group;
    for (let at = node; at >= 0; at = parent[at]) {
      tree.time[at] += data.groups.time_us[group] * 1e-6;
      tree.bytes[at] += data.groups.resident_bytes[group];
      tree.groups[at] += 1;
      tree.ops[at] += data.groups.ops[group];
      tree.share[at][data.groups.device[group]] += data.groups.time_us[group];
      tree.spread[at][data.groups.device[group]] += 1;
      tree.first[at] = Math.min(tree.first[at], data.groups.order[group]);
    }
  });
  tree.work = Array.from({ length: count }, () => new Float64Array(data.phases.length));
  for (const row of lanes.rows) {
    if (row.kind !== "device") continue;
    for (let i = 0; i < row.op.length; i++) {
      const phase = data.ops.phase[row.op[i]];
      for (let at = data.groups.node[data.ops.group[row.op[i]]]; at >= 0; at = parent[at]) tree.work[at][phase] += row.end[i] - row.start[i];
    }
  }
  for (const list of tree.children) list.sort((a, b) => tree.first[a] - tree.first[b]);
  tree.label = label;
  tree.parent = parent;
  closeAll();
  while (visibleNodes().length < 12 && openLevel(80, false)) { /* until there is something to see */ }
}

const isModule = (node) => tree.children[node].length > 0;
function shares(node) { // of every device that does some of the work, largest first
  const time = tree.share[node], total = time.reduce((a, b) => a + b, 0);
  const weight = total > 0 ? time : tree.spread[node], sum = weight.reduce((a, b) => a + b, 0) || 1;
  return Array.from(weight, (value, device) => ({ device, share: value / sum })).filter((part) => part.share > 0).sort((a, b) => b.share - a.share);
}

function stripes(node) { // what a module's stripe is made of: devices in their order, or kinds of work
  if (!byWork) return shares(node).sort((a, b) => a.device - b.device).map(({ device, share }) => ({ color: category(device), name: data.devices[device].name, share }));
  const work = tree.work[node], sum = work.reduce((a, b) => a + b, 0) || 1;
  const parts = Array.from(work, (value, phase) => ({ color: data.colors.phase[phase], name: phaseName(phase), share: value / sum }));
  return parts.filter((part) => part.share > 0);
}
const phaseName = (phase) => data.phases[phase].replace("_", " ");

function visibleNodes() { // from the top, each open module before its children
  const found = [], stack = [0];
  while (stack.length) {
    const node = stack.pop();
    found.push(node);
    if (tree.open.has(node)) stack.push(...tree.children[node].slice().reverse());
  }
  return found;
}
function openLevel(limit, own = true) { // opens the highest modules that are closed; false when there are none, or too many boxes come of it
  const kept = new Set(own ? [] : data.modules.own); // groups between modules stay together at first
  const closed = visibleNodes().filter((node) => isModule(node) && !tree.open.has(node) && !kept.has(node));
  if (!closed.length) return false;
  const least = Math.min(...closed.map((node) => tree.depth[node]));
  const next = closed.filter((node) => tree.depth[node] === least);
  const more = next.reduce((sum, node) => sum + tree.children[node].length, 0);
  if (visibleNodes().length + more > limit) return false;
  next.forEach((node) => tree.open.add(node));
  return true;
}
function closeAll() { // but for the top, and for what holds a single module
  tree.open = new Set([0]);
  for (let node = 0; tree.children[node].length === 1 && isModule(tree.children[node][0]);) tree.open.add((node = tree.children[node][0]));
}
function toggle(node) {
  if (!isModule(node) || node === 0) return;
  if (tree.open.has(node)) tree.open.delete(node); else tree.open.add(node);
  showTree(node);
  graph.arrange(node);
}

function nodePath(node) {
  const parts = [];
  for (let at = node; at > 0; at = tree.parent[at]) parts.unshift(tree.label[at]);
  return parts.join(" › ") || tree.label[0] || "model";
}
function nodeDetails(node) {
  const group = tree.group[node], lines = [group >= 0 ? groupNames[group] : nodePath(node)];
  if (group >= 0) lines.push(`${countText(tree.ops[node], "op")} in one group`);
  else lines.push(`${countText(tree.groups[node], "group")}, ${countText(tree.ops[node], "op")}`);
  lines.push(`${secondsText(tree.time[node])} of work a step, ${bytesText(tree.bytes[node])} resident`);
  if (byWork) for (const { name, share } of stripes(node)) lines.push(`${name}: ${(100 * share).toFixed(0)} % of it`);
  else for (const { device, share } of shares(node).slice(0, 8)) {
    lines.push(group >= 0 ? `on ${data.devices[device].name}` : `${data.devices[device].name}: ${(100 * share).toFixed(0)} % of it`);
  }
  return lines;
}

function showTree(focus = -1) {
  const list = $("tree"), nodes = visibleNodes().slice(tree.label[0] ? 0 : 1);
  list.replaceChildren(...nodes.map((node) => {
    const line = document.createElement("div"), name = document.createElement("span"), time = document.createElement("span"), stripe = document.createElement("span");
    line.setAttribute("role", "treeitem");
    line.setAttribute("aria-level", tree.depth[node] + 1);
    if (isModule(node)) line.setAttribute("aria-expanded", tree.open.has(node));
    line.tabIndex = node === (focus < 0 ? nodes[0] : focus) ? 0 : -1;
    line.dataset.node = node;
    name.className = "name";
    name.textContent = tree.label[node];
    name.style.paddingLeft = `${Math.min(tree.depth[node], 12) * 12}px`;
    time.className = "time";
    time.textContent = secondsText(tree.time[node]);
    stripe.className = "stripe";
    const parts = stripes(node);
    const most = parts.slice().sort((a, b) => b.share - a.share).slice(0, 4);
    stripe.setAttribute("aria-label", most.map(({ name, share }) => `${name} ${(100 * share).toFixed(0)} %`).join(", "));
    stripe.append(...parts.map(({ color, share }) => {
      const part = document.createElement("i");
      part.style.width = `${100 * share}%`;
      part.style.background = color;
      return part;
    }));
    line.append(name, time, stripe);
    return line;
  }));
  if (focus >= 0 && list.contains(document.activeElement) === false && showTree.keyed) focusLine(focus);
}
function focusLine(node) {
  const line = $("tree").querySelector(`[data-node="${node}"]`);
  if (line) line.focus();
}

function watchTree() {
  const list = $("tree");
  const nodeOf = (event) => { const line = event.target.closest("[data-node]"); return line ? Number(line.dataset.node) : -1; };
  list.addEventListener("click", (event) => { const node = nodeOf(event); if (node >= 0) { toggle(node); graph.choose(node); } });
  list.addEventListener("pointerover", (event) => { const node = nodeOf(event); if (node >= 0 && event.pointerType === "mouse") graph.choose(node); });
  list.addEventListener("keydown", (event) => {
    const node = nodeOf(event), nodes = visibleNodes(), at = nodes.indexOf(node);
    const go = (next) => { if (next !== undefined) { focusLine(next); graph.choose(next); } };
    const flip = () => { showTree.keyed = true; toggle(node); showTree.keyed = false; };
    const act = {
      ArrowDown: () => go(nodes[at + 1]), ArrowUp: () => go(nodes[at - 1]), Home: () => go(nodes[0]), End: () => go(nodes[nodes.length - 1]),
      ArrowRight: () => (isModule(node) && !tree.open.has(node) ? flip() : go(nodes[at + 1])),
      ArrowLeft: () => (tree.open.has(node) && node ? flip() : go(tree.parent[node] >= 0 ? tree.parent[node] : undefined)),
      Enter: flip, " ": flip,
    }[event.key];
    if (act && node >= 0) { event.preventDefault(); act(); }
  });
}
