// The timeline: lanes of every worker on a canvas, of which only what is visible is drawn.

const LANE = 27, BOX = 21, HEAD = 30, AXIS = 26, LEAST_RANGE = 2; // pixels; the last in microseconds

// The first index whose stop is after `at`: lanes are in order of time and do not overlap.
function firstAfter(stops, at) {
  let low = 0, high = stops.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (stops[middle] > at) high = middle; else low = middle + 1;
  }
  return low;
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.home = data.view;
    [this.from, this.to] = data.view;
    this.several = data.workers.some((w) => w.lanes.some((lane) => lane.micro.some((micro) => micro > 0)));
    this.shown = data.workers.length > 4 ? [0] : data.workers.map((_, i) => i);
    this.chosen = null; // { row, index, wait }: what the keyboard or a tap has chosen
    this.hovered = null;
    this.pointers = new Map();
    this.fills = data.stages.map((_, stage) => data.colours.map((colour) => tint(colour, data.white[stage] || 0)));
    this.inks = this.fills.map((row) => row.map(inkOn));
    this.element = this.build();
    drawn(this.element, () => this.redraw());
  }

  build() {
    const data = this.data;
    this.canvas = el("canvas", {
      tabindex: "0", role: "img", class: "lanes",
      "aria-label": `Timeline of ${data.workers.length} workers. Arrow keys left and right move, plus and minus zoom, 0 resets, `
        + "up and down choose a lane, comma and full stop an action of it.",
    });
    this.overview = el("canvas", { class: "overview", "aria-hidden": "true" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.readout = el("p", { class: "readout", role: "status", "aria-live": "polite" });
    this.range = el("span", { class: "range" });
    const button = (text, name, does) => el("button", { type: "button", text, "aria-label": name, title: name, onclick: does });
    const bar = el("div", { class: "bar-of-buttons", role: "toolbar", "aria-label": "timeline" },
      button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)),
      button("←", "earlier", () => this.pan(-0.25)), button("→", "later", () => this.pan(0.25)),
      button("All", "show all", () => this.look(data.begin, data.end)), button("Reset", "reset", () => this.reset()));
    if (data.workers.length > 1) bar.append(this.select());
    bar.append(this.range);
    this.listen();
    this.rows();
    return el("div", { class: "timeline" }, bar, this.overview, this.canvas, this.tip, this.readout, this.legend());
  }

  select() {
    const options = this.data.workers.map((worker, i) => el("option", { value: i, text: worker.name }));
    const select = el("select", { "aria-label": "workers shown", onchange: () => {
      this.shown = select.value === "all" ? this.data.workers.map((_, i) => i) : [Number(select.value)];
      this.chosen = this.hovered = null;
      this.rows();
      this.redraw();
    } }, el("option", { value: "all", text: "all workers" }), ...options);
    select.value = this.shown.length === this.data.workers.length ? "all" : String(this.shown[0]);
    return select;
  }

  legend() {
    const { stages, white } = this.data;
    const legend = el("div", { class: "legend" },
      el("span", {}, el("i", { class: "hatch" }), el("b", { text: "exposed: compute waits" })),
      el("span", {}, ...this.data.colours.map((colour) => el("i", { style: { background: colour } })), "a colour per batch, in turn"));
    const seen = new Set(this.data.workers.flatMap((w) => w.lanes.flatMap((lane) => lane.stage)));
    for (const lane of this.data.workers[0].lanes) {
      const mine = new Set(this.data.workers.flatMap((w) => w.lanes.filter((l) => l.name === lane.name).flatMap((l) => [...new Set(l.stage)])));
      if (mine.size < 2) continue;
      const tints = [...mine].filter((stage) => seen.has(stage)).sort((a, b) => a - b).map((stage) =>
        el("span", {}, el("i", { style: { background: tint("#57606a", white[stage] || 0) } }), stages[stage]));
      legend.append(el("span", {}, el("b", { text: lane.name }), ...tints));
    }
    return legend;
  }

  // Where each lane is drawn.
  rows() {
    this.table = [];
    this.heads = [];
    let y = AXIS;
    for (const number of this.shown) {
      const worker = this.data.workers[number];
      this.heads.push({ worker, y });
      y += HEAD;
      for (const lane of worker.lanes) {
        this.table.push({ worker, lane, y, waits: lane.name === "compute" ? worker.exposed : null });
        y += LANE;
      }
      y += 6;
    }
    this.height = y;
    this.canvas.dataset.workers = this.shown.length;
    this.canvas.dataset.lanes = this.table.length;
  }

  // ---- what is looked at

  look(from, to) {
    const { begin, end } = this.data;
    const range = Math.min(end - begin, Math.max(LEAST_RANGE, to - from));
    const start = Math.min(Math.max(begin, from), end - range);
    this.from = start;
    this.to = start + range;
    this.later();
  }
  zoom(factor, at) {
    const middle = at === undefined ? (this.from + this.to) / 2 : at;
    const range = Math.max(LEAST_RANGE, (this.to - this.from) * factor);
    const share = (middle - this.from) / (this.to - this.from);
    this.look(middle - range * share, middle + range * (1 - share));
  }
  pan(share) {
    const by = (this.to - this.from) * share;
    this.look(this.from + by, this.to + by);
  }
  reset() {
    this.chosen = null;
    this.say("");
    this.look(...this.home);
  }
  later() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  // ---- drawing

  redraw() {
    const first = this.width === undefined;
    this.width = this.element.clientWidth;
    const narrow = this.width < 560;
    this.gutter = narrow ? 74 : 86;
    if (first && narrow) { // as many pixels for an action as on a wide screen, or nearly
      const [from, to] = this.data.view;
      this.home = [this.from, this.to] = [from + (to - from) / 3, to - (to - from) / 3];
    }
    for (const [canvas, height] of [[this.canvas, this.height], [this.overview, 34]]) {
      const ratio = Math.min(window.devicePixelRatio || 1, 16000 / height);
      canvas.style.height = height + "px";
      canvas.width = Math.round((canvas === this.overview ? canvas.clientWidth : this.width) * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.paint = { ink: css("--ink"), quiet: css("--quiet"), line: css("--line"), band: css("--band"), paper: css("--paper"),
      exposed: css("--exposed"), soft: css("--exposed-soft"), hidden: css("--hidden"), focus: css("--focus") };
    this.font = getComputedStyle(document.body).fontFamily;
    this.hatch = this.hatching();
    this.drawWhole();
    this.draw();
  }

  hatching() {
    const tile = el("canvas");
    tile.width = tile.height = 6;
    const g = tile.getContext("2d");
    g.fillStyle = this.paint.soft;
    g.fillRect(0, 0, 6, 6);
    g.strokeStyle = this.paint.exposed;
    g.lineWidth = 1.3;
    g.beginPath();
    for (const shift of [-6, 0, 6]) { g.moveTo(shift, 6); g.lineTo(shift + 6, 0); }
    g.stroke();
    return this.canvas.getContext("2d").createPattern(tile, "repeat");
  }

  x(us) { return this.gutter + (us - this.from) * this.scale; }
  time(x) { return this.from + (x - this.gutter) / this.scale; }

  draw() {
    if (!this.paint) return;
    const g = this.canvas.getContext("2d");
    this.scale = (this.width - this.gutter - 2) / (this.to - this.from);
    g.clearRect(0, 0, this.width, this.height);
    this.bands(g);
    this.ruler(g);
    this.headings(g);
    g.save();
    g.beginPath();
    g.rect(this.gutter, AXIS, this.width - this.gutter, this.height);
    g.clip();
    let marked = 0;
    for (const row of this.table) {
      this.boxes(g, row);
      if (row.waits) marked += this.exposed(g, row);
    }
    for (const spot of [this.hovered, this.chosen]) if (spot) this.outline(g, spot);
    g.restore();
    this.drawOverview();
    const { begin } = this.data;
    this.range.textContent = `${inTime(this.from - begin)} to ${inTime(this.to - begin)} (${inTime(this.to - this.from)})`;
    Object.assign(this.canvas.dataset, { from: this.from, to: this.to, marked });
  }

  bands(g) {
    g.textBaseline = "middle";
    this.table.forEach((row, i) => {
      g.fillStyle = i % 2 ? this.paint.paper : this.paint.band;
      g.fillRect(0, row.y, this.width, LANE);
      g.fillStyle = row.lane.name === "compute" ? this.paint.ink : this.paint.quiet;
      g.font = `${row.lane.name === "compute" ? "600 " : ""}12.5px ${this.font}`;
      g.textAlign = "left";
      g.fillText(row.lane.name, 6, row.y + LANE / 2 + 0.5);
    });
  }

  headings(g) {
    for (const head of this.heads) {
      g.fillStyle = this.paint.paper;
      g.fillRect(0, head.y, this.width, HEAD);
      g.font = `600 13px ${this.font}`;
      g.fillStyle = this.paint.ink;
      g.fillText(head.worker.name, 6, head.y + HEAD / 2 + 3);
      const after = 6 + g.measureText(head.worker.name).width + 12;
      g.font = `12.5px ${this.font}`;
      g.fillStyle = this.paint.exposed;
      g.fillText(`${fixed(head.worker.exposed_ms, 1)} ms exposed a step`, after, head.y + HEAD / 2 + 3);
    }
  }

  ruler(g) {
    const step = niceStep(this.to - this.from, (this.width - this.gutter) / (this.width < 560 ? 66 : 105));
    const digits = Math.max(0, Math.ceil(-Math.log10(step / 1e3) - 1e-9));
    const { begin } = this.data;
    g.font = `12px ${this.font}`;
    for (let i = Math.ceil((this.from - begin) / step); i * step <= this.to - begin; i++) {
      const x = Math.round(this.x(begin + i * step)) + 0.5;
      g.strokeStyle = this.paint.line;
      g.beginPath();
      g.moveTo(x, AXIS - 5);
      g.lineTo(x, this.height);
      g.stroke();
      const text = fixed(i * step / 1e3, digits) + " ms";
      const half = g.measureText(text).width / 2;
      if (x + half > this.width) continue;
      g.fillStyle = this.paint.quiet;
      g.textAlign = "center";
      g.fillText(text, Math.max(x, half + 2), 11);
    }
    g.textAlign = "left";
  }

  boxes(g, row) {
    const { stage, batch, micro, start, stop } = row.lane;
    const { colours, stages } = this.data;
    const y = row.y + (LANE - BOX) / 2;
    let drawnTo = -1;
    g.font = `11.5px ${this.font}`;
    for (let i = firstAfter(stop, this.from); i < start.length && start[i] < this.to; i++) {
      const x = this.x(start[i]), wide = (stop[i] - start[i]) * this.scale;
      if (wide < 1 && x + 1 < drawnTo) continue; // within a pixel that is drawn already
      const turn = ((batch[i] % colours.length) + colours.length) % colours.length;
      const shown = Math.max(1, wide - (wide > 4 ? 1 : 0));
      g.fillStyle = this.fills[stage[i]][turn];
      g.fillRect(x, y, shown, BOX);
      if (wide > 5) {
        g.strokeStyle = colours[turn];
        g.strokeRect(x + 0.5, y + 0.5, shown - 1, BOX - 1);
      }
      drawnTo = x + shown;
      if (wide > 16) {
        const number = this.several && micro[i] >= 0 ? `${batch[i]}.${micro[i]}` : String(batch[i]);
        this.letters(g, [`${stages[stage[i]]} ${number}`, number, String(batch[i])], x, x + wide, y, this.inks[stage[i]][turn]);
      }
    }
  }

  // The longest of the texts that fits into the part of the box that can be seen.
  letters(g, texts, x0, x1, y, ink) {
    const left = Math.max(x0, this.gutter), right = Math.min(x1, this.width);
    const text = texts.find((t) => g.measureText(t).width + 8 <= right - left);
    if (!text) return;
    g.fillStyle = ink;
    g.textAlign = "center";
    g.fillText(text, (left + right) / 2, y + BOX / 2 + 0.5);
    g.textAlign = "left";
  }

  // Where compute waits: hatched, underlined, and named where there is room.  Returns how many pieces are visible.
  exposed(g, row) {
    const { stage, batch, micro, start, stop } = row.waits;
    const y = row.y + (LANE - BOX) / 2;
    let drawnTo = -1, visible = 0;
    for (let i = firstAfter(stop, this.from); i < start.length && start[i] < this.to; i++) {
      visible++;
      const x = this.x(start[i]), wide = Math.max(1, (stop[i] - start[i]) * this.scale);
      if (wide <= 1 && x + 1 < drawnTo) continue;
      g.fillStyle = wide > 3 ? this.hatch : this.paint.exposed;
      g.fillRect(x, y, wide, BOX);
      g.fillStyle = this.paint.exposed;
      g.fillRect(x, y + BOX - 2, wide, 2);
      if (i && start[i] === stop[i - 1] && wide > 3) g.fillRect(x, y, 1, BOX);
      drawnTo = x + wide;
      if (wide > 30) this.named(g, this.name(stage[i], batch[i], micro[i]), this.data.stages[stage[i]], x, x + wide, y);
    }
    return visible;
  }

  named(g, whole, stage, x0, x1, y) {
    const left = Math.max(x0, this.gutter), right = Math.min(x1, this.width);
    const text = [`waits for ${whole}`, whole, stage].find((t) => g.measureText(t).width + 12 <= right - left);
    if (!text) return;
    const wide = g.measureText(text).width + 8;
    g.fillStyle = this.paint.paper;
    g.fillRect((left + right - wide) / 2, y + 3, wide, BOX - 7);
    g.fillStyle = this.paint.exposed;
    g.textAlign = "center";
    g.fillText(text, (left + right) / 2, y + BOX / 2);
    g.textAlign = "left";
  }

  outline(g, spot) {
    const from = spot.wait ? spot.row.waits : spot.row.lane;
    const x0 = this.x(from.start[spot.index]), x1 = this.x(from.stop[spot.index]);
    g.strokeStyle = this.paint.ink;
    g.lineWidth = 2;
    g.strokeRect(x0 - 1, spot.row.y + (LANE - BOX) / 2 - 1, Math.max(3, x1 - x0) + 1, BOX + 2);
    g.lineWidth = 1;
    if (spot.wait) this.cause(g, spot);
  }

  // What the compute lane waited for, on its own lane.
  cause(g, spot) {
    const waits = spot.row.waits, i = spot.index;
    for (const row of this.table) {
      if (row.worker !== spot.row.worker) continue;
      const lane = row.lane;
      for (let k = firstAfter(lane.stop, waits.start[i]); k < lane.start.length && lane.start[k] < waits.stop[i]; k++) {
        if (lane.stage[k] === waits.stage[i] && lane.batch[k] === waits.batch[i] && lane.micro[k] === waits.micro[i]) {
          g.strokeStyle = this.paint.exposed;
          g.lineWidth = 2.5;
          const x0 = this.x(lane.start[k]);
          g.strokeRect(x0 - 1, row.y + (LANE - BOX) / 2 - 1, Math.max(3, (lane.stop[k] - lane.start[k]) * this.scale) + 1, BOX + 2);
          g.lineWidth = 1;
        }
      }
    }
  }

  // The whole of it: when the first shown worker computes and when it waits.  Drawn once, not with every frame.
  drawWhole() {
    this.whole = el("canvas");
    this.whole.width = this.overview.width;
    this.whole.height = this.overview.height;
    const g = this.whole.getContext("2d");
    g.setTransform(this.overview.getContext("2d").getTransform());
    const { begin, end } = this.data, scale = this.overview.clientWidth / (end - begin);
    const worker = this.heads[0].worker, lane = worker.lanes.find((l) => l.name === "compute");
    const draw = (columns, colour, y, height) => {
      g.fillStyle = colour;
      let drawnTo = -1;
      for (let i = 0; i < columns.start.length; i++) {
        const x = (columns.start[i] - begin) * scale, w = Math.max(0.7, (columns.stop[i] - columns.start[i]) * scale);
        if (w < 1 && x + 0.5 < drawnTo) continue;
        g.fillRect(x, y, w, height);
        drawnTo = x + w;
      }
    };
    if (lane) draw(lane, this.paint.hidden, 8, 16);
    draw(worker.exposed, this.paint.exposed, 8, 16);
  }

  // And where in it we are.
  drawOverview() {
    const g = this.overview.getContext("2d"), wide = this.overview.clientWidth, high = 32;
    const { begin, end } = this.data, scale = wide / (end - begin);
    g.clearRect(0, 0, wide, 34);
    g.save();
    g.resetTransform();
    g.drawImage(this.whole, 0, 0);
    g.restore();
    const x0 = (this.from - begin) * scale, x1 = (this.to - begin) * scale;
    g.globalAlpha = 0.62;
    g.fillStyle = this.paint.paper;
    g.fillRect(0, 0, x0, high);
    g.fillRect(x1, 0, wide - x1, high);
    g.globalAlpha = 1;
    g.strokeStyle = this.paint.focus;
    g.lineWidth = 2;
    g.strokeRect(Math.min(x0 + 1, wide - 4), 1, Math.max(3, x1 - x0 - 2), high - 2);
    g.lineWidth = 1;
  }

  // ---- what is under the pointer, and what it says

  name(stage, batch, micro) {
    const text = this.data.stages[stage];
    if (batch < 0) return text;
    return micro >= 0 ? `${text} ${batch}.${micro}` : `${text} ${batch}`;
  }

  at(x, y) {
    const row = this.table.find((r) => y >= r.y && y < r.y + LANE);
    if (!row || x < this.gutter) return null;
    const time = this.time(x), near = 3 / this.scale;
    for (const wait of [false, true]) {
      const from = wait ? row.waits : row.lane;
      if (!from) continue;
      for (const slack of [0, near]) {
        const index = firstAfter(from.stop, time - slack);
        if (index < from.start.length && from.start[index] <= time + slack && (!slack || wait || !row.waits)) return { row, index, wait };
      }
    }
    return null;
  }

  words({ row, index, wait }) {
    const from = wait ? row.waits : row.lane;
    const [stage, batch, micro] = [from.stage[index], from.batch[index], from.micro[index]];
    const took = inTime(from.stop[index] - from.start[index]);
    const part = micro < 0 ? "whole batch" : `${stage === this.data.buckets ? "bucket" : "micro-batch"} ${micro}`;
    const name = this.data.stages[stage];
    if (!wait) return [`${name}`, `batch ${batch}, ${part}`, `${took}, from ${inTime(from.start[index] - this.data.begin)}`];
    if (name === "between") return ["exposed: between stages", "compute waits; no stage runs that it waits for", took];
    if (name === "unknown") return ["exposed", "compute waits; this trace does not say for what", took];
    return [`exposed: waits for ${name}`, `batch ${batch}, ${part}`, took];
  }

  say(text) { this.readout.textContent = text; }

  point(spot, x, y) {
    this.hovered = spot;
    this.tip.hidden = !spot;
    this.later();
    if (!spot) return;
    const [title, ...lines] = this.words(spot);
    this.tip.replaceChildren(el("b", { text: title }), ...lines.map((text) => el("div", { text })));
    const left = Math.min(x + 14, this.element.clientWidth - this.tip.offsetWidth - 2);
    const top = this.canvas.offsetTop + y + 18;
    this.tip.style.left = Math.max(0, left) + "px";
    this.tip.style.top = top + "px";
  }

  choose(spot) {
    this.chosen = spot;
    this.say(spot ? `${spot.row.worker.name}, ${spot.row.lane.name}: ${this.words(spot).join("; ")}` : "");
    this.later();
  }

  // ---- hands

  listen() {
    const canvas = this.canvas;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("wheel", (event) => {
      const whole = this.to - this.from >= this.data.end - this.data.begin - 1e-6;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        event.preventDefault();
        this.pan((event.deltaX || event.deltaY) / this.width);
      } else if (event.deltaY < 0 || !whole || event.ctrlKey) { // all is shown: the page scrolls on
        event.preventDefault();
        this.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.0022), this.time(Math.max(this.gutter, place(event)[0])));
      }
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, place(event));
      this.moved = this.pointers.size > 1;
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event), before = this.pointers.get(event.pointerId);
      if (!before) {
        if (event.pointerType === "mouse") this.point(this.at(x, y), x, y);
        return;
      }
      if (this.pointers.size === 2) this.pinch(event.pointerId, x);
      else if (this.moved || Math.abs(x - before[0]) > 3) {
        this.moved = true;
        canvas.classList.add("dragging");
        this.point(null);
        const by = (before[0] - x) / this.scale;
        this.look(this.from + by, this.to + by);
      } else return;
      this.pointers.set(event.pointerId, [x, y]);
    });
    const up = (event) => {
      const [x, y] = place(event);
      if (this.pointers.delete(event.pointerId) && !this.moved && event.type === "pointerup") {
        const spot = this.at(x, y);
        this.choose(spot);
        this.point(spot, x, y);
      }
      if (!this.pointers.size) canvas.classList.remove("dragging");
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.point(null); });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.time(place(event)[0])));
    canvas.addEventListener("keydown", (event) => this.key(event));
    let held = false;
    const jump = (event) => {
      const box = this.overview.getBoundingClientRect();
      const at = this.data.begin + (event.clientX - box.left) / box.width * (this.data.end - this.data.begin);
      const half = (this.to - this.from) / 2;
      this.look(at - half, at + half);
    };
    this.overview.addEventListener("pointerdown", (event) => { held = true; this.overview.setPointerCapture(event.pointerId); jump(event); });
    this.overview.addEventListener("pointermove", (event) => { if (held) jump(event); });
    for (const end of ["pointerup", "pointercancel"]) this.overview.addEventListener(end, () => { held = false; });
  }

  pinch(moving, x) {
    const [still] = [...this.pointers].filter(([id]) => id !== moving).map(([, place]) => place[0]);
    const before = this.pointers.get(moving)[0];
    const apart = Math.max(8, Math.abs(before - still)), now = Math.max(8, Math.abs(x - still));
    this.moved = true;
    this.zoom(apart / now, this.time(still));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7),
      "-": () => this.zoom(1 / 0.7), "0": () => this.reset(), Home: () => this.look(this.data.begin, this.data.end),
      ArrowUp: () => this.walk(-1, 0), ArrowDown: () => this.walk(1, 0), ",": () => this.walk(0, -1), ".": () => this.walk(0, 1),
      Escape: () => { this.choose(null); this.point(null); },
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  // To another lane, or to the action before or after; the view follows.
  walk(lanes, actions) {
    let spot = this.chosen;
    const middle = (this.from + this.to) / 2;
    if (!spot || lanes) {
      const at = spot ? this.table.indexOf(spot.row) + lanes : 0;
      const row = this.table[Math.max(0, Math.min(this.table.length - 1, at))];
      const time = spot ? (spot.wait ? spot.row.waits : spot.row.lane).start[spot.index] : middle;
      spot = { row, index: Math.min(firstAfter(row.lane.stop, time), row.lane.start.length - 1), wait: false };
    } else {
      spot = this.beside(spot, actions);
    }
    const from = spot.wait ? spot.row.waits : spot.row.lane;
    const [start, stop] = [from.start[spot.index], from.stop[spot.index]];
    if (start < this.from || stop > this.to) {
      const half = Math.max(this.to - this.from, (stop - start) * 1.2) / 2, centre = (start + stop) / 2;
      this.look(centre - half, centre + half);
    }
    this.tip.hidden = true;
    this.hovered = null;
    this.choose(spot);
  }

  // On the compute lane waits are stepped through, too.
  beside(spot, by) {
    const both = [[spot.row.lane, false], ...(spot.row.waits ? [[spot.row.waits, true]] : [])];
    const now = (spot.wait ? spot.row.waits : spot.row.lane).start[spot.index];
    let best = null;
    for (const [columns, wait] of both) {
      let i = firstAfter(columns.start, now) - (by > 0 ? 0 : 1);
      while (by < 0 && i >= 0 && columns.start[i] >= now) i--;
      if (i < 0 || i >= columns.start.length) continue;
      if (!best || (columns.start[i] - best.start) * by < 0) best = { row: spot.row, index: i, wait, start: columns.start[i] };
    }
    return best || spot;
  }
}
