// The data of the report as rows: one row a node, before and after side by side; no DOM in here.
const SHORT = { float32: "f32", float64: "f64", bfloat16: "bf16", float16: "f16", int64: "i64", int32: "i32", uint8: "u8", bool: "b8" };
const MARKS = { added: "+", removed: "−", rewritten: "~", moved: "↕", meta: "≈", same: "" };
const KINDS = ["added", "removed", "rewritten", "moved", "meta"];

function shapeText(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return "(" + value.map(shapeText).join(", ") + ")";
  if (typeof value !== "object") return String(value);
  if (!("shape" in value)) return String(Object.values(value)[0]);
  return (SHORT[value.dtype] || value.dtype) + "[" + value.shape.join(", ") + "]";
}

function firstTensor(value) {
  if (Array.isArray(value)) return value.map(firstTensor).find((v) => v) || null;
  return value && typeof value === "object" && "shape" in value ? value : null;
}

// A node that went or came in a rewrite of many is shown as gone or new; the rewrite's number says the rest.
const kindOf = (change) => (change.after === null ? "removed" : change.before === null ? "added" : change.kind);

// Rows of one stage against the one before: those of the new graph in its order, and each node that went
// away after the last of its elders that stayed.
function makeRows(before, after, delta) {
  const rowOf = new Map(), gone = new Map(), partner = new Map(), kinds = new Map();
  if (before) for (const [b, a] of delta.pairs) partner.set(a, b);
  const kept = new Map([...partner].map(([a, b]) => [b, a]));
  for (const change of before ? delta.changes : []) {
    if (change.before === null && change.after === null) continue;  // of the whole graph
    const key = change.after !== null ? "a" + change.after : "b" + change.before;
    const known = kinds.get(key);
    if (!known || KINDS.indexOf(kindOf(change)) < KINDS.indexOf(known.kind)) {
      const group = change.group === undefined || change.group === null ? null : change.group;
      kinds.set(key, { kind: kindOf(change), detail: known ? change.detail + "; " + known.detail : change.detail, group });
    } else known.detail += "; " + change.detail;
    if (change.kind === "rewritten" && change.before !== null && change.after !== null && !kept.has(change.before)) {
      partner.set(change.after, change.before); kept.set(change.before, change.after);
    }
  }
  const byId = new Map(before ? before.nodes.map((n) => [n.id, n]) : []);
  let anchor = null;
  for (const node of before ? before.nodes : []) {
    if (kept.has(node.id)) anchor = kept.get(node.id);
    else { if (!gone.has(anchor)) gone.set(anchor, []); gone.get(anchor).push(node); }
  }
  const rows = [];
  const put = (b, a) => {
    const found = kinds.get(a ? "a" + a.id : "b" + b.id) || (a ? null : kinds.get("b" + b.id));
    const missing = before ? (!a ? "removed" : !b ? "added" : "same") : "same";
    const row = { index: rows.length, b, a, kind: found ? found.kind : missing, detail: found ? found.detail : "", group: found ? found.group : null };
    const node = a || b;
    row.shape = shapeText(node.value);
    row.text = [node.name, node.target, node.input || "", row.shape, node.source || "", node.module || "", (node.from || []).join(" "), b && a ? b.name + " " + b.target : ""].join(" ").toLowerCase();
    if (b) rowOf.set("b" + b.id, row);
    if (a) rowOf.set("a" + a.id, row);
    rows.push(row);
  };
  for (const node of gone.get(null) || []) put(node, null);
  for (const node of after.nodes) {
    put(partner.has(node.id) ? byId.get(partner.get(node.id)) || null : null, node);
    for (const old of gone.get(node.id) || []) put(old, null);
  }
  return { rows, rowOf, families: families(rows), ...edges(before, after, rows, rowOf) };
}

// Producers and consumers of each row: [row index, "kept" | "old" | "new"].
function edges(before, after, rows, rowOf) {
  const into = rows.map(() => new Map()), out = rows.map(() => new Map());
  const link = (from, to, how) => {
    const known = into[to.index].get(from.index);
    const kind = known && known !== how ? "kept" : how;
    into[to.index].set(from.index, kind); out[from.index].set(to.index, kind);
  };
  if (before) for (const [s, t] of before.edges) link(rowOf.get("b" + s), rowOf.get("b" + t), "old");
  for (const [s, t] of after.edges) link(rowOf.get("a" + s), rowOf.get("a" + t), before ? "new" : "kept");
  return { into, out };
}

// Storage families: every storage that more than one row looks at.
function families(rows) {
  const found = new Map();
  for (const row of rows) {
    const tensor = firstTensor((row.a || row.b).value);
    row.storage = tensor && row.a ? tensor.storage : null;
    if (row.storage === null || row.storage === undefined) continue;
    if (!found.has(row.storage)) found.set(row.storage, []);
    found.get(row.storage).push(row);
  }
  for (const [key, members] of found) if (members.length < 2) found.delete(key);
  return found;
}

// Equal runs of rows: at each place the period whose repeats reach furthest; [start, length, times].
function repeats(rows) {
  const sign = rows.map((r) => r.kind + "|" + ((r.a || r.b).op === "placeholder" ? "in" : (r.a || r.b).target) + "|" + r.shape);
  const next = new Array(rows.length).fill(-1), last = new Map();
  for (let i = rows.length - 1; i >= 0; i--) { if (last.has(sign[i])) next[i] = last.get(sign[i]); last.set(sign[i], i); }
  const found = [];
  for (let i = 0; i < rows.length; ) {
    let best = null;
    for (let j = next[i], tries = 0; j > 0 && tries < 48; j = next[j], tries++) {
      const period = j - i;
      if (j + period > rows.length) break;
      if (period < 3) continue;
      let k = 0;
      while (j + k < rows.length && sign[i + k] === sign[j + k]) k++;
      const times = Math.floor(k / period) + 1;
      if (times > 1 && (!best || period * times > best[1] * best[2])) best = [i, period, times];
    }
    if (best) { found.push(best); i += best[1] * best[2]; } else i++;
  }
  return found;
}

// What the list shows: rows, and one line for each run of repeats that is folded away.
function listed(step, words, kind, fold, opened) {
  const tokens = words.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = step.rows.filter((r) => (kind === "all" || (kind === "changed" ? r.kind !== "same" : r.kind === kind || (kind === "rewritten" && r.group !== null))) && tokens.every((t) => r.text.includes(t)));
  if (!fold || tokens.length) return rows;
  const shown = [];
  let at = 0;
  for (const [start, length, times] of repeats(rows)) {
    while (at < start + length) shown.push(rows[at++]);
    const id = rows[start].index;
    const end = start + length * times;
    shown.push({ fold: id, length, times: times - 1, open: opened.has(id) });
    if (opened.has(id)) while (at < end) shown.push(rows[at++]);
    at = end;
  }
  while (at < rows.length) shown.push(rows[at++]);
  return shown;
}
