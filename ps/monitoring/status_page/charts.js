// Draws the pictures of the status page: curves as SVG, the strip of weights on a canvas. Text goes in as text only.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;
const MUTED_BELOW = 0.1; // of a fair share, as the server has it
const TABLE_ROWS = 20;

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const whole = (value) => (value === null ? "–" : Math.round(value).toLocaleString("en"));

export function short(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return whole(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return size >= 1000 ? whole(value) : String(Number(value.toPrecision(4)));
}

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const size = [1, 2, 5, 10].map((part) => part * power).find((part) => span / part <= count) ?? power * 10;
  const made = [];
  for (let at = Math.ceil(low / size - 1e-9) * size; at <= high + size * 1e-9; at += size) made.push(Number(at.toPrecision(12)));
  return made;
}

// The vertical axis: logarithmic where values spread over two powers of ten and more, else linear.
function axisOf(values, fromZero) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === Infinity) return { low: 0, high: 1, place: (v) => v, marks: [0, 1], log: false };
  if (low > 0 && high / low > 100 && !fromZero) {
    const a = Math.log10(low), b = Math.log10(high);
    const marks = [];
    const every = Math.max(1, Math.ceil((b - a) / 5));
    for (let power = Math.ceil(a); power <= b; power += every) marks.push(10 ** power);
    if (marks.length < 2) marks.splice(0, 1, low, high);
    return { low, high, place: (v) => (Math.log10(v) - a) / (b - a), marks, log: true };
  }
  if (fromZero) low = Math.min(0, low);
  if (high === low) { const pad = Math.abs(high) * 0.1 || 0.5; high += pad; low -= fromZero && low === 0 ? 0 : pad; }
  const pad = (high - low) * 0.04;
  if (!(fromZero && low === 0)) low -= pad;
  high += pad;
  return { low, high, place: (v) => (v - low) / (high - low), marks: ticks(low, high, 5), log: false };
}

// One curve over the steps. `get` takes the value of a point (null: none); `dots` are [step, value] of single reports.
export class LineChart {
  constructor(figure, { title, kind, get, fromZero = false, dots = null, onCursor }) {
    Object.assign(this, { figure, title, kind, get, fromZero, dots, onCursor, points: [], cursor: null });
    this.output = element("output");
    this.svg = shape("svg", { class: "chart", role: "img", tabindex: "0", "aria-label": title });
    this.table = element("table");
    this.details = element("details", {}, element("summary", {}, `${title} as a table`), element("div", { class: "scroll" }, this.table));
    figure.append(element("figcaption", {}, element("span", {}, title), this.output), this.svg, this.details);
    this.details.addEventListener("toggle", () => this.fillTable());
    this.svg.addEventListener("pointermove", (event) => this.onCursor(this.nearest(event.clientX)));
    this.svg.addEventListener("pointerleave", () => this.onCursor(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.onCursor(null));
  }

  key(event) {
    if (event.key === "Escape") return this.onCursor(null);
    const last = this.points.length - 1;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -20, PageUp: 20, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || last < 0) return;
    event.preventDefault();
    const from = this.cursor === null ? last + (by < 0 ? 1 : 0) : this.points.findIndex((point) => point[0] === this.cursor);
    this.onCursor(this.points[Math.max(0, Math.min(last, from + by))][0]);
  }

  nearest(clientX) {
    if (!this.points.length) return null;
    const box = this.svg.getBoundingClientRect();
    const part = (clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - RIGHT);
    const step = this.from + part * (this.to - this.from);
    return this.points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best - step) ? point[0] : best), this.points[0][0]);
  }

  draw(points, dots, stride, end) {
    Object.assign(this, { points, stride, end });
    const width = Math.max(200, this.svg.clientWidth || 300);
    const known = points.filter((point) => this.get(point) !== null);
    const reports = (dots ?? []).filter((dot) => dot[1] !== null && points.length && dot[0] >= points[0][0]);
    this.from = points.length ? points[0][0] : 0;
    this.to = Math.max(this.from + 1, points.length ? points.at(-1)[0] : 1, ...reports.slice(-1).map((dot) => dot[0]));
    const axis = axisOf([...known.map(this.get), ...reports.map((dot) => dot[1])], this.fromZero);
    this.x = (step) => LEFT + ((step - this.from) / (this.to - this.from)) * (width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [];
    for (const mark of axis.marks) {
      const y = this.y(mark).toFixed(1);
      parts.push(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      parts.push(shape("text", { x: LEFT - 6, y: Number(y) + 4, "text-anchor": "end" }, short(mark)));
    }
    for (const mark of ticks(this.from, this.to, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger)) {
      parts.push(shape("text", { x: this.x(mark).toFixed(1), y: HEIGHT - 6, "text-anchor": "middle" }, whole(mark)));
    }
    parts.push(shape("path", { class: `curve ${this.kind}${known.length === 1 ? " lone" : ""}`, d: this.path() }));
    for (const [step, value] of reports) parts.push(shape("circle", { class: "test", r: 3, cx: this.x(step).toFixed(1), cy: this.y(value).toFixed(1) }));
    this.line = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg.replaceChildren(...parts, this.line);
    this.describe(known, axis.log);
    this.setCursor(this.cursor);
    this.fillTable();
  }

  path() {
    let path = "", pen = "M";
    for (const point of this.points) {
      const value = this.get(point);
      if (value === null) { pen = "M"; continue; }
      path += `${pen}${this.x(point[0]).toFixed(1)} ${this.y(value).toFixed(1)}`;
      if (pen === "M") path += "h.01"; // a point between two gaps is seen, too
      pen = "L";
    }
    return path;
  }

  describe(known, log) {
    const last = known.at(-1);
    const values = known.map(this.get);
    const range = values.length ? `from ${short(values.reduce((a, b) => Math.min(a, b)))} to ${short(values.reduce((a, b) => Math.max(a, b)))}, last ${short(this.get(last))} at step ${whole(last[0])}` : "no value yet";
    this.svg.setAttribute("aria-label", `${this.title} over steps${log ? ", logarithmic" : ""}: ${range}. Arrow keys read single points.`);
    this.svg.setAttribute("data-points", known.length);
    this.latest = last ? `${log ? "logarithmic · " : ""}last ${short(this.get(last))}` : "no value yet";
  }

  setCursor(step) {
    this.cursor = step;
    const point = step === null ? undefined : this.points.find((each) => each[0] === step);
    if (point === undefined || !this.line) { this.output.textContent = this.latest ?? ""; this.line?.setAttribute("visibility", "hidden"); return; }
    const x = this.x(step).toFixed(1);
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
    this.line.setAttribute("visibility", "visible");
    this.output.textContent = `step ${spanOf(step, this.stride, this.end)}: ${short(this.get(point))}`;
  }

  fillTable() {
    if (!this.details.open) return;
    const every = Math.max(1, Math.ceil(this.points.length / TABLE_ROWS));
    const shown = this.points.filter((_, index) => (this.points.length - 1 - index) % every === 0);
    fill(this.table, every === 1 ? "every point" : `every ${every}th point`, ["Steps", this.title], shown.map((point) => [spanOf(point[0], this.stride, this.end), short(this.get(point))]));
  }
}

// The steps of a point in words; the last point may not be full yet.
function spanOf(step, stride, end) {
  const to = Math.min(end, step + stride - 1);
  return to <= step ? whole(step) : `${whole(step)} to ${whole(to)}`;
}

function fill(table, caption, heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((text) => element("td", {}, String(text)))));
  table.replaceChildren(element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body));
}

// A row for each worker, time from left to right, its weight as a colour; beside it who was muted when, in words.
export class Strip {
  constructor(figure, onCursor) {
    this.names = element("ol", { "aria-hidden": "true" });
    this.canvas = element("canvas", { role: "img", tabindex: "0", "aria-label": "Weights over steps" });
    this.axis = element("div", { class: "axis", "aria-hidden": "true" });
    this.output = element("output");
    this.table = element("table", { id: "muted-table" });
    this.details = element("details", { open: "" }, element("summary", {}, "Who was muted, as a table"), element("div", { class: "scroll" }, this.table));
    figure.append(element("figcaption", {}, this.output), element("div", { class: "strip" }, this.names, element("div", { class: "plot" }, this.canvas, this.axis)), this.details);
    Object.assign(this, { onCursor, points: [], rows: [], cursor: null });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.output.textContent = ""; onCursor(null); });
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const index = Math.min(this.points.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * this.points.length)));
    const row = this.rows[Math.min(this.rows.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * this.rows.length)))];
    if (!row || index < 0) return;
    const share = this.points[index][5][row.column] ?? null;
    this.output.textContent = `${row.name}, step ${spanOf(this.points[index][0], this.stride, this.end)}: ${share === null ? "absent" : `${short(share)} fair shares`}`;
    this.onCursor(this.points[index][0]);
  }

  // `rows`: {name, column, muted} from top to bottom.
  draw(points, rows, stride, end) {
    Object.assign(this, { points, rows, stride, end });
    const height = Math.max(12, Math.min(28, Math.floor(420 / Math.max(1, rows.length))));
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(this.canvas.clientWidth * scale));
    this.canvas.width = width;
    this.canvas.height = Math.max(1, Math.round(rows.length * height * scale));
    this.canvas.style.height = `${rows.length * height}px`;
    this.label(height);
    if (points.length && rows.length) this.paint(width, scale);
    this.axis.replaceChildren(...(points.length ? [points[0][0], end] : []).map((step) => element("span", {}, `step ${whole(step)}`)));
    this.tell();
  }

  label(height) {
    while (this.names.children.length > this.rows.length) this.names.lastChild.remove();
    this.rows.forEach((row, index) => {
      const item = this.names.children[index] ?? this.names.appendChild(element("li"));
      if (item.textContent !== row.name) { item.textContent = row.name; item.title = row.name; }
      item.className = row.muted ? "muted" : "";
      item.style.height = `${height}px`;
      item.style.fontSize = `${Math.min(13, height - 1)}px`;
    });
  }

  // One pixel a row and column, stretched downwards: 64 workers and 1000 points are painted in a few milliseconds.
  paint(width, scale) {
    const colours = palette();
    const image = new ImageData(width, this.rows.length);
    const pixels = new Uint32Array(image.data.buffer);
    const count = this.points.length;
    for (let x = 0; x < width; x += 1) {
      const from = Math.floor((x * count) / width), to = Math.max(from + 1, Math.floor(((x + 1) * count) / width));
      this.rows.forEach((row, y) => {
        let share = null; // the least of what the pixel covers: who is muted must not be lost between pixels
        for (let at = from; at < to; at += 1) {
          const each = this.points[at][5][row.column] ?? null;
          if (each !== null && (share === null || each < share)) share = each;
        }
        pixels[y * width + x] = share === null ? 0 : share < MUTED_BELOW ? colours.muted : colours.shades[Math.min(63, Math.floor(share * 32))];
      });
    }
    const small = element("canvas", { width, height: this.rows.length });
    small.getContext("2d").putImageData(image, 0, 0);
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, this.canvas.width, this.canvas.height);
    const gap = Math.max(1, Math.round(scale));
    for (let row = 1; row < this.rows.length; row += 1) context.clearRect(0, Math.round((row * this.canvas.height) / this.rows.length) - gap, width, gap);
  }

  tell() {
    const told = this.rows.map((row) => ({ row, spans: mutedSpans(this.points, row.column, this.stride, this.end) }));
    const some = told.filter((each) => each.spans.length);
    this.canvas.setAttribute("aria-label", some.length ? `Weights over steps. Muted at some time: ${some.map((each) => each.row.name).join(", ")}.` : "Weights over steps. Nobody was muted.");
    if (!this.details.open) return;
    if (!some.length) { fill(this.table, "nobody was muted", [], []); return; }
    const cells = some.map(({ row, spans }) => {
      const last = spans.slice(-6).map(([from, to]) => (from === to ? whole(from) : `${whole(from)} to ${whole(to)}`)).join(", ");
      return [row.name, row.muted ? "muted" : "trusted", spans.length > 6 ? `${spans.length - 6} times before, ${last}` : last];
    });
    fill(this.table, "steps in which a worker had under a tenth of a fair share", ["Worker", "Now", "Muted in steps"], cells);
  }
}

function mutedSpans(points, column, stride, end) {
  const spans = [];
  let open = null;
  for (const point of points) {
    const share = point[5][column] ?? null;
    if (share === null) continue; // absent says nothing
    if (share >= MUTED_BELOW) { open = null; continue; }
    if (open === null) { open = [point[0], 0]; spans.push(open); }
    open[1] = Math.min(end, point[0] + stride - 1);
  }
  return spans;
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => [1, 3, 5].map((at) => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16));
  const pack = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  const low = read("--low"), high = read("--high");
  const shades = Array.from({ length: 64 }, (_, at) => pack(low.map((from, each) => Math.round(from + ((high[each] - from) * at) / 63))));
  return { muted: pack(read("--muted")), shades };
}
