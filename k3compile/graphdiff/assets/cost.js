// What a stage costs: symbolic sums, and their values at sizes that the reader may set.
const sizes = {};

// Sums as sympy prints them: + - * / ** // %, names, numbers, calls of FUNCTIONS. Returns null for anything else.
const FUNCTIONS = {
  Min: Math.min, Max: Math.max, floor: Math.floor, ceiling: Math.ceil, Mod: (a, b) => ((a % b) + b) % b,
  FloorDiv: (a, b) => Math.floor(a / b), CleanDiv: (a, b) => a / b, CeilDiv: (a, b) => Math.ceil(a / b), Abs: Math.abs,
};

function evaluate(words, values) {
  if (typeof words === "number") return words;
  const tokens = String(words).match(/\d+(?:\.\d+)?|[A-Za-z_]\w*|\*\*|\/\/|[-+*/%(),]|\S/g) || [];
  let at = 0;
  const take = (...wanted) => (wanted.includes(tokens[at]) ? tokens[at++] : null);
  const fail = () => { throw new SyntaxError(words); };
  const sum = () => {
    let value = product();
    for (let sign = take("+", "-"); sign; sign = take("+", "-")) value = sign === "+" ? value + product() : value - product();
    return value;
  };
  const product = () => {
    let value = signed();
    for (let sign = take("*", "/", "//", "%"); sign; sign = take("*", "/", "//", "%")) {
      const by = signed();
      value = sign === "*" ? value * by : sign === "/" ? value / by : sign === "//" ? Math.floor(value / by) : FUNCTIONS.Mod(value, by);
    }
    return value;
  };
  const signed = () => (take("-") ? -signed() : take("+") ? signed() : power());
  const power = () => { const base = atom(); return take("**") ? base ** signed() : base; };
  const atom = () => {
    const token = tokens[at++];
    if (token === "(") { const value = sum(); return take(")") ? value : fail(); }
    if (/^\d/.test(token || "")) return Number(token);
    if (take("(")) {
      const given = [sum()];
      while (take(",")) given.push(sum());
      return take(")") && Object.hasOwn(FUNCTIONS, token) ? FUNCTIONS[token](...given) : fail();
    }
    return Object.hasOwn(values, token || "") ? values[token] : fail();
  };
  try {
    const value = sum();
    return at === tokens.length && Number.isFinite(value) ? value : null;
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

function amount(value, key) {
  if (value === null) return "";
  const units = key.includes("bytes") ? ["B", "kB", "MB", "GB", "TB"] : key === "flops" ? ["", "k", "M", "G", "T"] : null;
  if (!units || Math.abs(value) < 1e4) return value.toLocaleString("en") + (units && units[0] ? "\u00a0" + units[0] : "");
  const step = Math.min(units.length - 1, Math.floor(Math.log10(Math.abs(value)) / 3));
  return (value / 1e3 ** step).toPrecision(3) + "\u00a0" + units[step];
}

function change(b, a, key) {
  if (b === null || a === null) return "";
  if (a === b) return "0";
  const percent = Math.abs((100 * (a - b)) / b), sign = a > b ? "+" : "−";
  const share = b ? ` (${percent < 1 ? "<1" : sign + percent.toFixed(0)}\u00a0%)` : "";
  return sign + amount(Math.abs(a - b), key) + share;
}

function costPart(before, after, symbols, again) {
  const quantities = Object.keys({ ...(before || {}), ...after }).filter((k) => typeof (k in after ? after : before)[k] !== "object");
  const formulas = quantities.filter((k) => typeof after[k] === "string" || (before && typeof before[k] === "string"));
  const used = Object.keys(symbols).filter((s) => formulas.some((k) => new RegExp(`\\b${s}\\b`).test(`${after[k]} ${before ? before[k] : ""}`)));
  for (const s of used) if (!(s in sizes)) sizes[s] = Math.max(symbols[s].min || 0, 64);
  const parts = [make("h3", {}, "cost, estimated before fusion")];
  const last = data.stages[data.stages.length - 1];
  if (used.length) parts.push(make("div", { id: "sizes" }, "at ", ...used.map((s) => sizeField(s, (after.symbols || {})[s], again))));
  const table = make("table", { id: "cost" }, make("tr", {}, make("th", {}, ""), ...(before ? [make("th", { class: "number" }, "before")] : []), make("th", { class: "number" }, before ? "after" : ""), ...(before ? [make("th", { class: "number" }, "change")] : [])));
  for (const key of quantities) {
    const b = before && key in before ? evaluate(before[key], sizes) : null, a = key in after ? evaluate(after[key], sizes) : null;
    const cells = before ? [amount(b, key), amount(a, key), change(b, a, key)] : [amount(a, key)];
    table.append(make("tr", {}, make("th", {}, key.replaceAll("_", " ")), ...cells.map((c) => make("td", { class: "number" }, c))));
  }
  parts.push(table);
  if (data.generated && after === last.cost) parts.push(...codePart(data.generated));
  if (formulas.length) parts.push(make("details", {}, make("summary", {}, "formulas"), ...formulas.map((k) => formula(k, before && String(before[k]), String(after[k])))));
  return parts;
}

// What the inner compiler's code really launches and allocates: of the whole graph, so beside its last stage.
function codePart(generated) {
  const after = generated.after || {}, before = generated.before || null, number = { class: "number" };
  const head = make("tr", {}, make("th", {}, ""), ...(before ? [make("th", number, "no passes")] : []), make("th", number, before ? "all passes" : ""), ...(before ? [make("th", number, "change")] : []));
  const rows = Object.keys(after).map((key) => {
    const cells = before ? [amount(before[key], key), amount(after[key], key), change(before[key], after[key], key)] : [amount(after[key], key)];
    return make("tr", {}, make("th", {}, key), ...cells.map((c) => make("td", number, c)));
  });
  return [make("h3", {}, "counted in the generated code"), make("table", { id: "code" }, head, ...rows)];
}

function sizeField(symbol, meaning, again) {
  const input = make("input", { type: "number", min: "0", value: sizes[symbol], "aria-label": `${symbol}${meaning ? ", " + meaning : ""}` });
  input.addEventListener("change", () => { sizes[symbol] = Math.max(0, Math.floor(Number(input.value) || 0)); again(symbol); });
  input.dataset.symbol = symbol;
  return make("label", {}, make("code", {}, symbol), meaning ? make("span", { class: "soft" }, ` ${meaning}`) : "", input);
}

const formula = (key, before, after) => make("p", {}, make("b", {}, key.replaceAll("_", " ") + " "), make("code", {}, before === null || before === after ? after : `${before}  →  ${after}`));
