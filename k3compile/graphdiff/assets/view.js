// The page: which stage and which node are looked at, and everything that follows from the two.
const started = performance.now();
const $ = (id) => document.getElementById(id);
const whole = JSON.parse($("data").textContent), graphs = whole.graphs || [whole];
let data = graphs[0];
const ROW = 24, OVERSCAN = 8, HUES = [212, 28, 142, 284, 52, 340, 178, 0, 248, 96];
const state = { stage: 0, row: null, kind: "all", opened: new Set(), shown: [], steps: [], theme: null };

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

function stepOf(index) {
  if (!state.steps[index]) {
    const stage = data.stages[index];
    const before = stage.delta ? data.snapshots[data.stages[index - 1].snapshot] : null;
    state.steps[index] = makeRows(before, data.snapshots[stage.snapshot], stage.delta);
  }
  return state.steps[index];
}

// ---- the strip of passes
function counts(stage) {
  const found = {};
  for (const change of stage.delta ? stage.delta.changes : []) if (change.before !== null || change.after !== null) found[kindOf(change)] = (found[kindOf(change)] || 0) + 1;
  return found;
}

function summary(stage) {
  if (!stage.delta) return [make("span", {}, `${data.snapshots[stage.snapshot].nodes.length} nodes`)];
  const found = counts(stage), parts = KINDS.filter((k) => found[k]);
  if (!parts.length) return [make("span", {}, "no change")];
  return parts.map((k) => make("span", { class: "t-" + k, title: k }, `${MARKS[k]}${found[k]} `));
}

function buildStrip() {
  data.stages.forEach((stage, i) => {
    const button = make("button", { type: "button", role: "tab", onclick: () => goto(i) }, make("b", {}, stage.name), make("span", { class: "what" }, ...summary(stage)));
    $("strip").append(button);
  });
  $("slider").max = data.stages.length - 1;
  $("passes").hidden = data.stages.length < 2;
}

function listenToStrip() {
  $("slider").addEventListener("input", () => goto(Number($("slider").value)));
  $("previous").addEventListener("click", () => goto(state.stage - 1));
  $("next").addEventListener("click", () => goto(state.stage + 1));
}

// ---- which of several graphs is looked at
function buildGraphs() {
  $("graphs").hidden = graphs.length < 2;
  graphs.forEach((one, i) => $("graphs").append(make("option", { value: i }, `${one.name}${one.layers > 1 ? ` ×${one.layers}` : ""}`)));
  $("graphs").addEventListener("change", () => open(Number($("graphs").value)));
}

function open(index) {
  data = graphs[index];
  Object.assign(state, { row: null, kind: "all", steps: [] });
  for (const symbol of Object.keys(sizes)) delete sizes[symbol];
  Object.assign(sizes, data.sizes || {});
  $("subtitle").textContent = data.subtitle;
  $("strip").replaceChildren(); $("search").value = "";
  buildStrip();
  const first = data.stages.findIndex((s) => s.delta && s.delta.changes.length);
  goto(first < 0 ? 0 : first);
}

function goto(index) {
  if (index < 0 || index >= data.stages.length) return;
  const name = state.row && (state.row.a || state.row.b).name;
  state.stage = index; state.opened.clear();
  const step = stepOf(index);
  state.row = name ? step.rows.find((r) => (r.a || r.b).name === name) || null : null;
  [...$("strip").children].forEach((b, i) => { b.setAttribute("aria-selected", i === index); b.tabIndex = i === index ? 0 : -1; });
  $("strip").children[index].scrollIntoView({ block: "nearest", inline: "nearest" });
  $("slider").value = index;
  $("slider").setAttribute("aria-valuetext", data.stages[index].name);
  $("previous").disabled = index === 0; $("next").disabled = index === data.stages.length - 1;
  if (!data.stages[index].delta) state.kind = "all";
  buildFilters(); refresh(); showPass(); showDetail();
  const changed = state.shown.findIndex((r) => r.fold === undefined && r.kind !== "same");
  if (state.row) reveal(state.row); else $("list").scrollTop = Math.max(0, (changed - 2) * ROW);
}

function buildFilters() {
  const stage = data.stages[state.stage], rows = stepOf(state.stage).rows;
  const kinds = stage.delta ? ["all", "changed", ...KINDS.filter((k) => rows.some((r) => r.kind === k))] : [];
  if (!kinds.includes(state.kind)) state.kind = "all";
  $("filters").replaceChildren(...kinds.map((k) => {
    const mark = MARKS[k] ? make("span", { class: "t-" + k }, MARKS[k] + " ") : null;
    return make("button", { type: "button", "aria-pressed": k === state.kind, onclick: () => { state.kind = k; buildFilters(); refresh(); } }, mark, k);
  }));
}

// ---- the list, of which only the rows in view exist
function refresh() {
  const step = stepOf(state.stage);
  state.shown = listed(step, $("search").value, state.kind, $("fold").checked, state.opened);
  state.at = new Map(state.shown.map((r, i) => [r.fold === undefined ? r.index : "f" + r.fold, i]));
  const lines = state.shown.filter((r) => r.fold === undefined).length, hidden = state.shown.reduce((n, r) => n + (r.fold !== undefined && !r.open ? r.length * r.times : 0), 0);
  $("count").textContent = `${lines.toLocaleString("en")} of ${step.rows.length.toLocaleString("en")} nodes` + (hidden ? `, ${hidden.toLocaleString("en")} folded as repeats` : "");
  $("sizer").style.height = Math.max(1, state.shown.length) * ROW + "px";
  paint();
}

function paint() {
  const list = $("list"), from = Math.max(0, Math.floor(list.scrollTop / ROW) - OVERSCAN);
  const to = Math.min(state.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + OVERSCAN);
  const lines = [];
  for (let i = from; i < to; i++) lines.push(line(state.shown[i], i));
  if (!state.shown.length) lines.push(make("div", { class: "row fold" }, "nothing matches"));
  $("sizer").replaceChildren(...lines);
}

function line(row, at) {
  if (row.fold !== undefined) {
    const words = `${row.open ? "▾" : "▸"} ${row.times} more like the ${row.length} rows above (×${row.times + 1} in all)`;
    const toggle = () => { row.open ? state.opened.delete(row.fold) : state.opened.add(row.fold); refresh(); };
    const folded = make("div", { class: "row fold", role: "option", "aria-expanded": row.open, onclick: toggle }, words);
    folded.style.top = at * ROW + "px";
    return folded;
  }
  const node = row.a || row.b, picked = row === state.row;
  const dots = make("span", { class: "dots" }, row.storage === null || row.storage === undefined ? "" : "s" + row.storage);
  if (stepOf(state.stage).families.has(row.storage)) dots.style.borderLeftColor = hue(row.storage);
  const target = node.op === "placeholder" ? node.input || "input" : node.op === "output" ? "return" : node.target;
  const element = make("div", { class: `row ${row.kind}`, role: "option", id: "row" + row.index, "aria-selected": picked, "aria-label": `${row.kind === "same" ? "" : row.kind + " "}${node.name} ${target} ${row.shape}`, onclick: () => select(row) },
    make("span", { class: "mark", title: row.kind === "same" ? "" : row.kind }, MARKS[row.kind]), make("span", { class: "name", title: node.name }, node.name), make("span", { class: "op", title: target }, target),
    make("span", { class: "soft shape", title: row.shape }, row.shape), dots, make("span", { class: "soft source", title: node.source || "" }, (node.source || "").split("/").pop()));
  element.style.top = at * ROW + "px";
  return element;
}

const hue = (storage) => `hsl(${HUES[storage % HUES.length]} 55% ${document.documentElement.dataset.theme === "dark" ? 62 : 44}%)`;

function reveal(row) {
  let at = state.at.get(row.index);
  if (at === undefined) {
    $("search").value = ""; state.kind = "all";
    for (const line of state.shown) if (line.fold !== undefined) state.opened.add(line.fold);
    buildFilters(); refresh();
    for (const line of state.shown) if (line.fold !== undefined) state.opened.add(line.fold);
    refresh();
    at = state.at.get(row.index);
  }
  const list = $("list"), top = at * ROW;
  if (top < list.scrollTop + ROW || top > list.scrollTop + list.clientHeight - 2 * ROW) list.scrollTop = Math.max(0, top - list.clientHeight / 3);
  paint();
}

function select(row) {
  state.row = row;
  $("side").scrollTop = 0;
  if (row) { reveal(row); $("list").setAttribute("aria-activedescendant", "row" + row.index); } else { $("list").removeAttribute("aria-activedescendant"); paint(); }
  showDetail();
}

function move(by, wanted = () => true) {
  const shown = state.shown;
  let at = state.row && state.at.has(state.row.index) ? state.at.get(state.row.index) : by > 0 ? -1 : shown.length;
  for (at += by; at >= 0 && at < shown.length; at += by) if (shown[at].fold === undefined && wanted(shown[at])) return select(shown[at]);
}

// ---- the page as a whole
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "light" : "dark";
}

function keys(event) {
  const typing = event.target === $("search"), slider = event.target === $("slider");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const does = {
    ArrowLeft: () => !typing && !slider && (goto(state.stage - 1), true), ArrowRight: () => !typing && !slider && (goto(state.stage + 1), true),
    ArrowUp: () => !slider && (move(-1), true), ArrowDown: () => !slider && (move(1), true),
    "/": () => !typing && ($("search").focus(), $("search").select(), true),
    n: () => !typing && (move(1, (r) => r.kind !== "same"), true), p: () => !typing && (move(-1, (r) => r.kind !== "same"), true),
    Escape: () => { if (typing && $("search").value) { $("search").value = ""; refresh(); } else { $("search").blur(); select(null); } return true; },
    Home: () => !typing && ($("list").scrollTop = 0, true), End: () => !typing && ($("list").scrollTop = $("sizer").offsetHeight, true),
  }[event.key];
  if (does && does()) {
    event.preventDefault();
    if (event.target.closest && event.target.closest("#strip") && event.key.startsWith("Arrow")) $("strip").children[state.stage].focus();
  }
}

function printable() {
  const step = stepOf(state.stage), rows = data.stages[state.stage].delta ? step.rows.filter((r) => r.kind !== "same") : step.rows;
  $("print").replaceChildren(...rows.slice(0, 3000).map((r) => make("p", {}, [MARKS[r.kind] || " ", (r.a || r.b).name, (r.a || r.b).target, r.shape, (r.a || r.b).source || "", r.detail].join("  "))));
}

function start() {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  setTheme(scheme.matches);
  scheme.addEventListener("change", (e) => { if (state.theme === null) { setTheme(e.matches); paint(); } });
  $("theme").addEventListener("click", () => { state.theme = document.documentElement.dataset.theme !== "dark"; setTheme(state.theme); paint(); });
  buildGraphs(); listenToStrip();
  $("search").addEventListener("input", () => { const t = performance.now(); $("list").scrollTop = 0; refresh(); document.documentElement.dataset.searched = (performance.now() - t).toFixed(2); });
  $("fold").addEventListener("change", refresh);
  $("alias").addEventListener("change", () => $("list").classList.toggle("alias", $("alias").checked));
  $("list").addEventListener("scroll", paint, { passive: true });
  document.addEventListener("keydown", keys);
  addEventListener("resize", () => { paint(); showDetail(); });
  addEventListener("beforeprint", printable);
  open(0);
  document.documentElement.dataset.ready = (performance.now() - started).toFixed(1);
}
start();
