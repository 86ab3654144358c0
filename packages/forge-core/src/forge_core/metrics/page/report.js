"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const SVG = document.getElementById("seed").namespaceURI;
const FIRST = ["train/loss", "eval/loss", "train/lr", "train/grad_norm", "train/tokens_per_sec"];
const LEAST = 3; // metrics of one prefix that make a section of their own
const COLORS = 8;
const DASHES = ["", "7 4", "2 4", "9 3 2 3"];
const HEIGHT = 230, LEFT = 54, RIGHT = 14, TOP = 10, BOTTOM = 24;
const state = { smooth: 0, log: false, range: null, hidden: new Set(), filter: "" };
const charts = [];

// Small helpers ---------------------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function color(run) { return `var(--run${run % COLORS})`; }
function dash(run) { return DASHES[Math.floor(run / COLORS) % DASHES.length]; }
function swatch(run) { return el("span", { class: "swatch", style: `border-color:${color(run)};border-top-style:${dash(run) ? "dashed" : "solid"}` }); }

function digits(value, count) { return String(Number(value.toPrecision(count))); }

function format(value, count = 4) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e15) return value.toExponential(Math.max(0, count - 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  for (const [factor, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= factor * 10 || (factor > 1e3 && size >= factor)) return digits(value / factor, count) + unit;
  }
  return digits(value, size >= 1000 ? 4 : count);
}

// Number of points whose step is below `step`; steps grow.
function below(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low;
}

// Exponential mean without the pull of the start (as in Adam). It looks back over steps, not points: an evaluation
// every 100 steps is smoothed as far back as a loss of every step. Gaps neither count nor break it.
function smoothed({ steps, values }, weight, unit) {
  if (weight === 0) return values;
  let mean = 0, total = 0, before = steps[0] - unit;
  return values.map((value, i) => {
    if (value === null) return null;
    const keep = weight ** ((steps[i] - before) / unit);
    before = steps[i];
    mean = keep * mean + (1 - keep) * value;
    total = keep * total + (1 - keep);
    return mean / total;
  });
}

// Steps between the points of the densest curve of a run.
function spacing(run) {
  const gaps = Object.values(run.series).filter((d) => d.steps.length > 1).map((d) => (d.steps.at(-1) - d.steps[0]) / (d.steps.length - 1));
  return gaps.reduce((a, b) => Math.min(a, b), Infinity);
}
const UNITS = RUNS.map((run) => { const gap = spacing(run); return Number.isFinite(gap) ? gap : 1; });

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

function logTicks(low, high) {
  const decades = high - low;
  if (decades < 1) return ticks(10 ** low, 10 ** high, 4).filter((v) => v > 0);
  const stride = Math.max(1, Math.ceil(decades / 6)), found = [];
  for (let e = Math.floor(low); e <= high; e++) {
    for (const m of decades < 2.5 ? [1, 2, 5] : [1]) {
      const value = m * 10 ** e, place = Math.log10(value);
      if (e % stride === 0 && place >= low - 1e-9 && place <= high + 1e-9) found.push(value);
    }
  }
  return found;
}

// One range of steps for all charts, so that they can be compared by eye.
function extent() {
  let low = Infinity, high = -Infinity;
  RUNS.forEach((run, index) => {
    if (state.hidden.has(index) || run.last_step === null) return;
    low = Math.min(low, run.first_step); high = Math.max(high, run.last_step);
  });
  if (low > high) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

// Charts ----------------------------------------------------------------------------------------------------------

class Chart {
  constructor(name) {
    this.name = name;
    this.runs = RUNS.map((run, index) => ({ index, data: run.series[name] })).filter((r) => r.data);
    this.svg = shape("svg", { role: "img", "aria-label": `${name} over steps` });
    this.tip = el("div", { class: "tip", hidden: "" });
    this.stats = el("span", { class: "soft" });
    this.keys = el("div", { class: "keys" });
    this.node = el("article", { class: "chart", "data-metric": name }, el("h3", {}, el("span", {}, name), this.stats), this.keys, this.svg, this.tip);
    this.svg.addEventListener("pointermove", (e) => this.hover(e));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("pointerdown", (e) => this.grab(e));
    this.svg.addEventListener("pointerup", (e) => this.release(e));
    this.svg.addEventListener("pointercancel", () => this.leave());
    this.svg.addEventListener("dblclick", () => zoom(null));
    this.visible = true;
  }

  shown() { return this.runs.filter((r) => !state.hidden.has(r.index)); }

  // The points of each run in view, one more on either side so that lines leave the frame.
  prepare() {
    const [from, to] = this.xs = state.range || extent();
    this.lines = this.shown().map(({ index, data }) => {
      const begin = Math.max(0, below(data.steps, from) - 1), end = Math.min(data.steps.length, below(data.steps, to + 1) + 1);
      const soft = smoothed(data, state.smooth, UNITS[index]);
      return { index, steps: data.steps.slice(begin, end), values: data.values.slice(begin, end), soft: soft.slice(begin, end) };
    });
    let low = Infinity, high = -Infinity;
    for (const line of this.lines) {
      line.steps.forEach((step, i) => {
        const value = line.values[i];
        if (value === null || step < from || step > to || (state.log && value <= 0)) return;
        low = Math.min(low, value); high = Math.max(high, value);
      });
    }
    this.empty = low > high;
    if (this.empty) [low, high] = [0.1, 1];
    if (state.log) [low, high] = [Math.log10(low), Math.log10(high)];
    const pad = high > low ? (high - low) * 0.06 : (Math.abs(high) || 1) * 0.1;
    this.ys = [low - pad, high + pad];
  }

  x(step) { return LEFT + (step - this.xs[0]) / (this.xs[1] - this.xs[0]) * (this.width - LEFT - RIGHT); }
  y(value) {
    const place = state.log ? Math.log10(value) : value;
    return HEIGHT - BOTTOM - (place - this.ys[0]) / (this.ys[1] - this.ys[0]) * (HEIGHT - TOP - BOTTOM);
  }
  step(x) { return this.xs[0] + (x - LEFT) / (this.width - LEFT - RIGHT) * (this.xs[1] - this.xs[0]); }

  draw() {
    this.width = Math.max(240, this.svg.clientWidth || this.node.clientWidth || 430);
    this.prepare();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.axes();
    const clip = `clip-${charts.indexOf(this)}`;
    const frame = shape("clipPath", { id: clip });
    frame.append(shape("rect", { x: LEFT, y: 0, width: this.width - LEFT - RIGHT + 4, height: HEIGHT - BOTTOM + 1 }));
    this.svg.append(frame);
    this.plot = shape("g", { "clip-path": `url(#${clip})` });
    for (const line of this.lines) this.curve(line);
    this.over = shape("g", { "pointer-events": "none" });
    this.svg.append(this.plot, this.over);
    this.head();
  }

  head() {
    const one = this.lines.length === 1 && this.runs.length === 1;
    this.stats.textContent = one ? `last ${format(this.runs[0].data.values.at(-1))}` : "";
    this.keys.replaceChildren(...(RUNS.length > 1 ? this.shown() : []).map(({ index, data }) =>
      el("span", {}, swatch(index), `${RUNS[index].name} ${format(data.values.at(-1))}`)));
  }

  axes() {
    const bottom = HEIGHT - BOTTOM;
    const marks = state.log ? logTicks(...this.ys) : ticks(...this.ys, 6);
    for (const value of marks) {
      const y = this.y(value);
      if (y < TOP - 4 || y > bottom + 1) continue;
      this.svg.append(shape("line", { class: "grid-line", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      this.label(LEFT - 7, y + 4, "end", format(value));
    }
    this.svg.append(shape("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: bottom, y2: bottom }));
    for (const step of ticks(...this.xs, Math.max(2, Math.floor(this.width / 70)))) {
      const x = this.x(step);
      if (Number.isInteger(step)) this.label(x, HEIGHT - 7, x > this.width - RIGHT - 16 ? "end" : "middle", format(step));
    }
    if (this.empty) this.label(this.width / 2, HEIGHT / 2, "middle", state.log ? "no positive values" : "no values");
  }

  label(x, y, anchor, text) {
    const node = shape("text", { x, y, "text-anchor": anchor });
    node.textContent = text;
    this.svg.append(node);
  }

  curve(line) {
    const style = { stroke: color(line.index), "stroke-dasharray": dash(line.index) };
    if (state.smooth > 0) this.plot.append(shape("path", { class: "raw", d: this.path(line.steps, line.values), stroke: style.stroke }));
    this.plot.append(shape("path", { class: "curve", d: this.path(line.steps, line.soft), ...style }));
    const few = line.steps.length <= 40;
    let marked = -1;
    line.steps.forEach((step, i) => {
      if (line.values[i] === null) {
        if (Math.floor(this.x(step)) === marked) return;
        marked = Math.floor(this.x(step));
        this.plot.append(shape("line", { class: "gap", x1: this.x(step), x2: this.x(step), y1: HEIGHT - BOTTOM - 7, y2: HEIGHT - BOTTOM }));
      } else if (few && (!state.log || line.soft[i] > 0)) {
        this.plot.append(shape("circle", { cx: this.x(step), cy: this.y(line.soft[i]), r: 2.4, fill: style.stroke }));
      }
    });
  }

  // A column of pixels shows at most its first, lowest, highest and last point, so no extreme is lost.
  path(steps, values) {
    const parts = [];
    let pen = "M", column = null, held = [];
    const flush = () => {
      if (!held.length) return;
      let low = 0, high = 0;
      held.forEach(([, v], i) => { if (v < held[low][1]) low = i; if (v > held[high][1]) high = i; });
      for (const i of [...new Set([0, low, high, held.length - 1])].sort((a, b) => a - b)) {
        parts.push(`${pen}${held[i][0].toFixed(1)} ${this.y(held[i][1]).toFixed(1)}`);
        pen = "L";
      }
      held = [];
    };
    steps.forEach((step, i) => {
      const value = values[i];
      if (value === null || (state.log && value <= 0)) { flush(); pen = "M"; column = null; return; }
      const x = this.x(step);
      if (column !== Math.floor(x)) { flush(); column = Math.floor(x); }
      held.push([x, value]);
    });
    flush();
    return parts.join("");
  }

  place(event) {
    const box = this.svg.getBoundingClientRect();
    return Math.min(this.width - RIGHT, Math.max(LEFT, event.clientX - box.left));
  }

  hover(event) {
    const x = this.place(event);
    this.over.replaceChildren();
    if (this.start !== undefined) {
      this.over.append(shape("rect", { class: "zoom", x: Math.min(x, this.start), width: Math.abs(x - this.start), y: TOP, height: HEIGHT - TOP - BOTTOM }));
    }
    this.read(x, event);
  }

  read(x, event) {
    const aim = this.step(x);
    let nearest = null;
    const rows = this.lines.map((line) => {
      const after = below(line.steps, aim);
      const pick = [after - 1, after].filter((i) => i >= 0 && i < line.steps.length)
        .sort((a, b) => Math.abs(line.steps[a] - aim) - Math.abs(line.steps[b] - aim))[0];
      const step = line.steps[pick];
      if (step !== undefined && (nearest === null || Math.abs(step - aim) < Math.abs(nearest - aim))) nearest = step;
      return { line, pick, step };
    }).filter((row) => row.step !== undefined);
    if (nearest === null) { this.tip.hidden = true; return; }
    const cross = this.x(nearest), close = (row) => Math.abs(this.x(row.step) - cross) < 24;
    this.over.append(shape("line", { class: "cross", x1: cross, x2: cross, y1: TOP, y2: HEIGHT - BOTTOM }));
    this.tip.replaceChildren(el("div", { class: "soft" }, `step ${nearest}`));
    for (const { line, pick, step } of rows.filter(close)) {
      const value = line.values[pick], soft = line.soft[pick];
      if (soft !== null && (!state.log || soft > 0)) {
        this.over.append(shape("circle", { cx: this.x(step), cy: this.y(soft), r: 3.6, fill: color(line.index), stroke: "var(--card)", "stroke-width": 1.5 }));
      }
      const note = (step === nearest ? "" : ` at ${step}`) + (state.smooth > 0 && soft !== null ? ` (${format(soft)})` : "");
      this.tip.append(el("div", {}, swatch(line.index), RUNS.length > 1 ? RUNS[line.index].name : "", el("b", {}, format(value, 5) + note)));
    }
    this.tip.hidden = false;
    const frame = this.node.getBoundingClientRect(), left = this.svg.getBoundingClientRect().left - frame.left + cross;
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${left + wide + 24 > frame.width ? Math.max(4, left - wide - 14) : left + 14}px`;
    this.tip.style.top = `${Math.max(0, event.clientY - frame.top - 16)}px`;
  }

  grab(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.svg.setPointerCapture(event.pointerId);
    this.start = this.place(event);
  }

  release(event) {
    const start = this.start, end = this.place(event);
    this.start = undefined;
    if (start === undefined || Math.abs(end - start) < 6) return;
    const range = [this.step(Math.min(start, end)), this.step(Math.max(start, end))].map(Math.round);
    if (range[0] < range[1]) zoom(range);
  }

  leave() {
    this.start = undefined;
    this.tip.hidden = true;
    this.over.replaceChildren();
  }
}

// Only what is on the screen is drawn at once; the rest when it is scrolled to.
const watcher = "IntersectionObserver" in window ? new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.find((c) => c.node === entry.target);
    chart.near = entry.isIntersecting;
    if (chart.near && chart.stale) { chart.stale = false; chart.draw(); }
  }
}, { rootMargin: "400px" }) : null;

let pending = 0;
function redraw() {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => {
    for (const chart of charts) {
      if (chart.near || watcher === null) chart.draw(); else chart.stale = true;
    }
  });
}

function zoom(range) {
  state.range = range;
  document.getElementById("reset").hidden = range === null;
  redraw();
}

function buildCharts() {
  const names = DATA.metrics;
  const overview = FIRST.filter((n) => names.includes(n)), others = names.filter((n) => !FIRST.includes(n));
  const prefix = (name) => name.split("/")[0];
  const size = (name) => others.filter((n) => prefix(n) === prefix(name)).length;
  const groups = new Map([["Overview", overview], ["More", others.filter((n) => size(n) < LEAST)]]);
  for (const name of others.filter((n) => size(n) >= LEAST)) {
    groups.set(prefix(name), [...(groups.get(prefix(name)) || []), name]);
  }
  const root = document.getElementById("charts");
  for (const [group, members] of groups) {
    if (!members.length) continue;
    const grid = el("div", { class: "grid" });
    for (const name of members) {
      const chart = new Chart(name);
      charts.push(chart);
      grid.append(chart.node);
    }
    root.append(el("section", { class: "group" }, el("h2", {}, group), grid));
  }
  if (!names.length) root.append(el("p", { class: "none" }, "No metrics were recorded yet."));
  for (const chart of charts) { chart.draw(); chart.near = true; if (watcher) watcher.observe(chart.node); }
}

// Tables ----------------------------------------------------------------------------------------------------------

function status(run) {
  if (run.exit === null) return ["warm", "no exit status"];
  const code = run.exit.status, reason = run.exit.reason ? String(run.exit.reason) : code === 0 ? "done" : "failed";
  if (code === 0) return ["good", reason];
  return [code === 75 ? "warm" : "bad", `${reason} (status ${code})`];
}

function last(run, name) {
  const data = run.series[name];
  return data ? format(data.values.at(-1)) : "–";
}

function buildCards() {
  const cards = RUNS.map((run, index) => {
    const [tone, words] = status(run);
    const facts = [["step", run.last_step === null ? "–" : String(run.last_step)], ["train/loss", last(run, "train/loss")],
      ["eval/loss", last(run, "eval/loss")], ["tokens/s", last(run, "train/tokens_per_sec")]];
    return el("article", { class: "card", style: `border-top-color:${color(index)}` },
      el("h3", {}, el("span", {}, run.name), el("span", { class: `pill ${tone}` }, words)),
      el("dl", { class: "facts" }, ...facts.map(([k, v]) => el("div", { style: "display:contents" }, el("dt", {}, k), el("dd", {}, v)))));
  });
  document.getElementById("runs").append(el("div", { class: "cards" }, ...cards));
}

// Cells are made here, for a node can stand in one table only. The first column is a name; `text` columns read from the left.
function sheet(heads, rows, text = false) {
  const cell = (value, i) => el("td", i > 0 && text ? { class: "words" } : {}, i === 0 || text ? el("code", {}, value) : value);
  const body = rows.map(({ cells, differs }) => el("tr", differs ? { class: "differs" } : {}, ...cells.map(cell)));
  const head = el("tr", {}, ...heads.map((h) => el("th", text ? { class: "words" } : {}, h)));
  return el("div", { class: "sheet" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

function finite(data) { return data.values.filter((v) => v !== null); }

function buildFinals() {
  if (!DATA.metrics.length) return;
  const alone = RUNS.length === 1;
  const heads = alone ? ["metric", "last", "at step", "lowest", "highest"] : ["metric", ...RUNS.map((r) => r.name)];
  const rows = DATA.metrics.map((name) => {
    if (!alone) return { cells: [name, ...RUNS.map((run) => last(run, name))] };
    const data = RUNS[0].series[name], values = finite(data);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return { cells: [name, last(RUNS[0], name), String(data.steps.at(-1)), ...(values.length ? [format(low), format(high)] : ["–", "–"])] };
  });
  document.getElementById("finals").append(el("h2", {}, "Final values"), sheet(heads, rows));
}

function words(value) { return value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value); }

function buildDifferences() {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))].sort();
  const rows = keys.map((key) => {
    const cells = RUNS.map((run) => words(run.config[key]));
    return { cells: [key, ...cells], differs: new Set(cells).size > 1 };
  });
  const heads = ["setting", ...RUNS.map((run) => run.name)], section = document.getElementById("differences");
  section.append(el("h2", {}, "Configuration"));
  if (!keys.length) { section.append(el("p", { class: "sheet none" }, "No config.toml was found.")); return; }
  const differing = rows.filter((row) => row.differs);
  if (RUNS.length > 1) section.append(differing.length ? sheet(heads, differing.map((r) => ({ cells: r.cells })), true) : el("p", { class: "sheet none" }, "All settings are the same."));
  section.append(el("details", {}, el("summary", {}, `All ${keys.length} settings`), sheet(heads, rows, true)));
}

function buildIncidents() {
  const rows = RUNS.flatMap((run) => run.incidents.map((incident) => ({
    cells: [run.name, incident.name,
      Object.entries(incident.facts).map(([k, v]) => `${k} ${words(v)}`).join(" · ") || "–"],
  })));
  const section = document.getElementById("incidents");
  section.append(el("h2", {}, "Incidents"));
  section.append(rows.length ? sheet(["run", "incident", "facts"], rows, true) : el("p", { class: "sheet none" }, "No step was skipped with a record."));
}

// Controls --------------------------------------------------------------------------------------------------------

function buildControls() {
  const get = (id) => document.getElementById(id);
  RUNS.forEach((run, index) => {
    const chip = el("button", { type: "button", class: "chip", "aria-pressed": "true", title: "show or hide this run" }, swatch(index), run.name);
    chip.addEventListener("click", () => {
      if (state.hidden.delete(index)) chip.setAttribute("aria-pressed", "true");
      else { state.hidden.add(index); chip.setAttribute("aria-pressed", "false"); }
      redraw();
    });
    get("legend").append(chip);
  });
  get("smooth").addEventListener("input", (e) => {
    state.smooth = 1 - 10 ** (-3 * Number(e.target.value)); // even steps of the number of points averaged, 1 to 1000
    get("smooth-value").value = state.smooth.toFixed(3).replace(/0+$/, "").replace(/\.$/, "");
    redraw();
  });
  get("log").addEventListener("change", (e) => { state.log = e.target.checked; redraw(); });
  get("reset").addEventListener("click", () => zoom(null));
  get("filter").addEventListener("input", (e) => filter(e.target.value.trim().toLowerCase()));
  const theme = (name) => document.documentElement.setAttribute("data-theme", name);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", (e) => theme(e.matches ? "dark" : "light"));
  get("theme").addEventListener("click", () => theme(document.documentElement.getAttribute("data-theme") === "dark" ? "light" : "dark"));
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; redraw(); } });
}

function filter(text) {
  for (const chart of charts) chart.node.hidden = !chart.name.toLowerCase().includes(text);
  for (const group of document.querySelectorAll(".group")) {
    group.hidden = [...group.querySelectorAll(".chart")].every((node) => node.hidden);
  }
  redraw();
}

const about = document.getElementById("about");
about.textContent = `${RUNS.length === 1 ? "One run" : `${RUNS.length} runs`} · written ${DATA.written} by forge-core ${DATA.version}`;
document.title = `Forge report: ${RUNS.map((run) => run.name).join(", ")}`;
buildControls();
buildCards();
buildCharts();
buildFinals();
buildDifferences();
buildIncidents();
document.documentElement.setAttribute("data-ready", "yes");
