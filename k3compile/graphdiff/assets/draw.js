// The neighbourhood of one node as a layered drawing: two levels of producers above it, two of consumers below.
const SVG = "http://www.w3.org/2000/svg";
const BOX = { width: 148, height: 38, gapX: 12, gapY: 34 };

function svg(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function levels(step, centre, room) {
  const placed = new Map([[centre, 0]]), found = { 0: [centre] }, more = {};
  for (const [sign, links] of [[-1, step.into], [1, step.out]]) {
    let edge = [centre];
    for (let depth = 1; depth <= 2; depth++) {
      const near = [...new Set(edge.flatMap((i) => [...links[i].keys()]))].filter((i) => !placed.has(i));
      near.sort((x, y) => (step.rows[x].kind === "same") - (step.rows[y].kind === "same") || x - y);
      edge = near.slice(0, room).sort((x, y) => x - y);
      for (const i of edge) placed.set(i, sign * depth);
      if (edge.length) found[sign * depth] = edge;
      if (near.length > room) more[sign * depth] = near.length - room;
      if (depth === 1 && near.length > 24) break;
    }
  }
  return { placed, found, more };
}

function draw(step, centre, holder, pick) {
  const width = Math.max(300, Math.floor(holder.clientWidth));
  const room = Math.max(2, Math.floor((width + BOX.gapX) / (BOX.width + BOX.gapX)));
  const { placed, found, more } = levels(step, centre, room);
  const depths = Object.keys(found).map(Number).sort((a, b) => a - b);
  const height = depths.length * (BOX.height + BOX.gapY) - BOX.gapY + 20;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group" });
  const place = new Map();
  depths.forEach((depth, line) => {
    const row = found[depth], span = row.length * (BOX.width + BOX.gapX) - BOX.gapX;
    row.forEach((i, column) => place.set(i, [Math.max(1, (width - span) / 2) + column * (BOX.width + BOX.gapX), 2 + line * (BOX.height + BOX.gapY)]));
    if (more[depth]) {
      const [, y] = place.get(row[row.length - 1]);
      svg("text", { class: "soft", x: width - 4, y: y + BOX.height + 13, "text-anchor": "end" }, picture).textContent = `and ${more[depth]} more`;
    }
  });
  for (const to of placed.keys()) for (const [from, how] of step.into[to]) {
    if (!place.has(from)) continue;
    const [x1, y1] = place.get(from), [x2, y2] = place.get(to);
    const a = x1 + BOX.width / 2, c = x2 + BOX.width / 2, b = y1 + BOX.height;
    const bend = BOX.gapY / 2, under = y2 + BOX.height;  // an edge that does not lead down arrives from below
    const d = y2 > b ? `M${a} ${b} C${a} ${b + bend} ${c} ${y2 - bend} ${c} ${y2}` : `M${a} ${b} C${a} ${b + bend} ${c} ${under + bend} ${c} ${under}`;
    svg("path", { class: how, d }, picture);
  }
  for (const [i, [x, y]] of place) box(step.rows[i], x, y, i === centre, picture, pick);
  holder.replaceChildren(picture);
}

function box(row, x, y, picked, picture, pick) {
  const node = row.a || row.b, name = (MARKS[row.kind] ? MARKS[row.kind] + " " : "") + node.name;
  const group = svg("g", { class: `box ${row.kind}${picked ? " picked" : ""}`, tabindex: 0, role: "button" }, picture);
  group.setAttribute("aria-label", `${row.kind} ${node.name} ${node.target}`);
  svg("rect", { x, y, width: BOX.width, height: BOX.height, rx: 3 }, group);
  svg("text", { x: x + 7, y: y + 15 }, group).textContent = cut(name);
  svg("text", { class: "soft", x: x + 7, y: y + 30 }, group).textContent = cut(node.op === "placeholder" ? row.shape || "input" : node.target);
  svg("title", {}, group).textContent = `${node.name}\n${node.target}\n${row.shape}`;
  group.addEventListener("click", () => pick(row));
  group.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); pick(row); } });
}

const cut = (words) => (words.length > 20 ? words.slice(0, 19) + "…" : words);
