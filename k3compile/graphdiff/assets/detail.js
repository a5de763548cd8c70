// The right-hand side: what is known of the picked node, its neighbourhood, and what the pass said and cost.
function link(id, side, step) {
  const row = step.rowOf.get(side + id), node = row && (side === "a" ? row.a : row.b);
  if (!row) return make("span", {}, "%" + id);
  return make("a", { class: "node", href: "#", onclick: (e) => { e.preventDefault(); select(row); $("detail").scrollIntoView({ block: "nearest" }); } }, "%" + node.name);
}

// An encoded argument as text, nodes as links.
function spelled(value, side, step) {
  const many = (items) => items.flatMap((v, i) => (i ? [", ", ...spelled(v, side, step)] : spelled(v, side, step)));
  if (Array.isArray(value)) return ["[", ...many(value), "]"];
  if (value === null) return ["None"];
  if (typeof value === "boolean") return [value ? "True" : "False"];
  if (typeof value !== "object") return [typeof value === "string" ? JSON.stringify(value) : String(value)];
  const entries = Object.entries(value);
  if (entries.length === 1) {
    const [kind, inner] = entries[0];
    if (kind === "node") return [link(inner, side, step)];
    if (["sym", "op", "torch", "float", "type"].includes(kind)) return [String(inner)];
    if (kind === "slice") return ["slice(", ...many(inner), ")"];
  }
  return ["{", ...entries.flatMap(([k, v], i) => [i ? ", " : "", k + ": ", ...spelled(v, side, step)]), "}"];
}

function listed_args(node, side, step) {
  if (node.op === "placeholder") return [node.input ? `the input ${node.input}` : "an input of the graph"];
  const parts = [...node.args.map((v) => spelled(v, side, step)), ...Object.entries(node.kwargs).map(([k, v]) => [k + "=", ...spelled(v, side, step)])];
  return parts.length ? parts.flatMap((p, i) => (i ? [", ", ...p] : p)) : ["none"];
}

function facts(node, side, step) {
  const tensor = firstTensor(node.value), row = step.rowOf.get(side + node.id);
  const family = side === "a" && step.families.get(row.storage);
  const users = [...step.out[row.index].entries()].map(([i]) => step.rows[i]).filter((r) => (side === "a" ? r.a : r.b));
  const names = (rows) => rows.slice(0, 12).flatMap((r, i) => [i ? ", " : "", link((side === "a" ? r.a : r.b).id, side, step)]).concat(rows.length > 12 ? [` and ${rows.length - 12} more`] : []);
  const found = { op: [node.op === "placeholder" ? "input" : node.target], args: listed_args(node, side, step), shape: [shapeText(node.value) || "no value"] };
  if (tensor) {
    found.stride = [`[${tensor.stride.join(", ")}]` + (tensor.offset ? ` from ${tensor.offset}` : "")];
    found.device = [tensor.device];
    found.storage = ["s" + tensor.storage + (family ? " shared with " : " of its own"), ...(family ? names(family.filter((r) => r !== row)) : [])];
  }
  found.users = users.length ? names(users) : ["none"];
  if (node.module) found.module = [node.module];
  if (node.source) found.source = [node.source];
  if (node.from && node.from.length) found.from = [node.from.join(" → ")];
  return found;
}

const plain = (parts) => (parts || []).map((p) => (typeof p === "string" ? p : p.textContent)).join("");

function showDetail() {
  const detail = $("detail"), row = state.row, step = stepOf(state.stage);
  $("around").hidden = !row;
  if (!row) return detail.replaceChildren();
  const node = row.a || row.b, title = [make("span", { class: "mono" }, node.name)];
  if (row.kind !== "same") title.push(make("span", { class: "t-" + row.kind }, `  ${MARKS[row.kind]} ${row.kind}`));
  const after = row.a && facts(row.a, "a", step), before = row.b && facts(row.b, "b", step);
  const both = before && after && Object.keys(after).some((k) => plain(after[k]) !== plain(before[k])) && row.kind !== "same";
  const left = both ? before : after || before, table = make("table");
  if (both) table.append(make("tr", {}, make("th", { scope: "row" }), make("th", {}, "before"), make("th", {}, "after")));
  for (const key of Object.keys({ ...left, ...(both ? after : {}) })) {
    const differs = both && plain(before[key]) !== plain(after[key]) ? "differs" : "";
    const cells = both ? [before[key] || [], after[key] || []] : [left[key]];
    table.append(make("tr", {}, make("th", { scope: "row" }, key), ...cells.map((c) => make("td", { class: differs }, ...c))));
  }
  const parts = [make("h2", {}, ...title)];
  if (row.detail) parts.push(make("p", {}, row.detail));
  const others = row.group === null ? [] : step.rows.filter((r) => r.group === row.group && r !== row);
  if (others.length) parts.push(make("p", {}, "one rewrite with ", ...others.slice(0, 24).flatMap((r, i) => [i ? ", " : "", make("span", { class: "whole" }, make("span", { class: "t-" + r.kind }, MARKS[r.kind]), link((r.a || r.b).id, r.a ? "a" : "b", step))]), others.length > 24 ? ` and ${others.length - 24} more` : ""));
  const names = new Set([row.a && row.a.name, row.b && row.b.name]);
  const said = remarksHere().filter((r) => names.has(r.node));
  detail.replaceChildren(...parts, table, ...said.map((r) => remark(r, 1, true)));
  document.querySelector("#around figcaption").textContent = "what it reads and what reads it";
  draw(step, row.index, $("drawing"), select);
}

const remarksHere = () => data.stages[state.stage].remarks || [];

function remark(r, times, open) {
  const proofs = (r.proofs || []).map((p) => make("li", {}, `${p.obligation}: `, make("code", {}, p.expression), ` by ${p.how}`));
  const where = r.source ? ` at ${r.source.split("/").slice(-2).join("/")}` : "";
  const element = make("div", { class: `remark ${r.kind}` }, make("p", {}, make("b", {}, r.kind + (times > 1 ? ` ×${times}` : "")), " ", make("code", {}, r.op), where, ": ", r.reason + (r.detail ? ` (${r.detail})` : "")));
  const title = proofs.length === 1 ? "1 proof" : `${proofs.length} proofs`;
  if (proofs.length) element.append(make("details", open ? { open: "" } : {}, make("summary", {}, title), make("ul", {}, ...proofs)));
  if (r.fix_it) element.append(make("p", { class: "fix" }, r.fix_it));
  return element;
}

function remarkWithSites(group) {
  const step = stepOf(state.stage), element = remark(group[0], group.length, false);
  const rows = group.map((r) => step.rows.find((row) => (row.b && row.b.name === r.node) || (row.a && row.a.name === r.node))).filter(Boolean);
  if (rows.length) element.append(make("p", {}, ...rows.slice(0, 8).flatMap((row, i) => [i ? ", " : "", link((row.b || row.a).id, row.b ? "b" : "a", step)]), rows.length > 8 ? ` and ${rows.length - 8} more` : ""));
  return element;
}

function symbolTable(snapshot, meanings) {
  const entries = Object.entries(snapshot.symbols || {});
  if (!entries.length) return [];
  const range = (name, r) => `${r.min === null ? "" : r.min + " ≤ "}${name}${r.max === null ? "" : " ≤ " + r.max}`;
  const table = make("table", {}, ...entries.map(([name, r]) => make("tr", {}, make("td", {}, range(name, r)), make("td", {}, meanings[name] || ""))));
  return [make("h3", {}, "symbols"), table];
}

function showPass() {
  const stage = data.stages[state.stage], before = data.stages[state.stage - 1], parts = [make("h2", {}, make("span", { class: "mono" }, stage.name))];
  const nodes = data.snapshots[stage.snapshot].nodes.length, seconds = stage.seconds ? `, ${(stage.seconds * 1e3).toFixed(1)} ms` : "";
  parts.push(make("p", {}, stage.delta ? `${data.snapshots[before.snapshot].nodes.length} → ${nodes} nodes${seconds}` : `${nodes} nodes${seconds}`));
  for (const c of stage.delta ? stage.delta.changes : []) if (c.before === null && c.after === null) parts.push(make("p", {}, `${MARKS.meta} the whole graph: ${c.detail}`));
  if (stage.cost) parts.push(...costPart((stage.delta && before.cost) || null, stage.cost, data.snapshots[stage.snapshot].symbols, (symbol) => {
    showPass();
    document.querySelector(`#sizes [data-symbol="${CSS.escape(symbol)}"]`).focus();
  }));
  parts.push(...symbolTable(data.snapshots[stage.snapshot], (stage.cost && stage.cost.symbols) || {}));
  const groups = new Map();
  for (const r of remarksHere()) {
    const key = JSON.stringify([r.kind, r.op, r.source, r.reason, r.detail, r.fix_it, r.proofs]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(r);
  }
  if (groups.size) parts.push(make("h3", {}, "what the pass said"), ...[...groups.values()].map(remarkWithSites));
  $("pass").replaceChildren(...parts);
}
