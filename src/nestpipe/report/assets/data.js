// What a reader told of its data: a table of what each filter left, the lengths of histories, ties and notes.

function dataSection({ stages, lengths, histogram, ties, notes }) {
  const parts = [];
  if (stages.length) parts.push(filterTable(stages));
  if (histogram.length) parts.push(el("div", { class: "charts" }, barChart("users by length of history", histogram)));
  if (lengths.length) parts.push(facts(lengths.map(([name, value]) => [`length, ${name}`, value])));
  if (ties) {
    parts.push(el("p", { class: "note", id: "ties", text: tiesInWords(ties) }));
  }
  if (notes.length) parts.push(el("ul", { class: "notes below" }, ...notes.map((text) => el("li", { text }))));
  return section("Data", "What was read, and what each filter left.", ...parts);
}

function tiesInWords({ events, users, last, order }) {
  if (!events) return "No two events of a user have the same time.";
  const held = last === undefined ? "" : ` Of ${fixed(last, 0)} users the last event is one of them.`;
  const how = { file: "as in the files", random: "drawn from the seed", meta: "as Meta's research code has them" }[order];
  return `${fixed(events, 0)} events of ${fixed(users, 0)} users have the time of another event of the same user.${held}`
    + (how ? ` Their order: ${how}.` : "");
}

function filterTable(stages) {
  const names = ["users", "items", "events"];
  const first = stages[0].events;
  const cell = (value) => value === null ? el("td", { class: "none", text: "–" }) : el("td", { text: fixed(value, 0) });
  const share = (events) => events === null || !first ? el("td", { class: "none", text: "–" }) : el("td", { text: fixed(100 * events / first, 1) + " %" });
  const meter = (events) => el("td", { class: "meter" }, el("div", {}, el("i", { class: "is-compute", style: { width: `${events === null || !first ? 0 : Math.min(100, 100 * events / first)}%` } })));
  const body = stages.map((stage) => el("tr", {}, el("th", { scope: "row", text: stage.name }),
    ...names.map((name) => cell(stage[name])), share(stage.events), meter(stage.events)));
  const head = el("tr", {}, ...["filter", ...names, "of events"].map((text) => el("th", { scope: "col", text })), el("th", { scope: "col" }));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "filters" },
    el("table", { id: "filters" }, el("thead", {}, head), el("tbody", {}, ...body)));
}

// Bars side by side, as SVG with an axis; the pointer or the arrow keys read values off.
function barChart(title, bars) {
  const svg = svgEl("svg", { tabindex: "0", role: "img" });
  const readout = el("p", { class: "readout", role: "status" });
  const element = el("div", { class: "chart bars" }, el("h3", { text: title }), svg, readout);
  const all = bars.reduce((sum, bar) => sum + bar.users, 0);
  const tell = (bar) => `${bar.name}: ${fixed(bar.users, 0)} users, ${fixed(100 * bar.users / Math.max(1, all), 1)} %`;
  svg.setAttribute("aria-label", `${title}. ${bars.map(tell).join("; ")}`);
  const top = 8, bottom = CHART_HEIGHT - 36;
  let chosen = -1, left = 0, right = 0, rects = [];

  const draw = () => {
    const width = element.clientWidth;
    const most = Math.max(1, ...bars.map((bar) => bar.users));
    const step = Math.max(1, niceStep(most, 4));
    const high = Math.ceil(most / step - 1e-9) * step;
    const y = (value) => bottom - value / high * (bottom - top);
    left = 12 + 7 * fixed(high, 0).length;
    right = width - 14;
    svg.setAttribute("viewBox", `0 0 ${width} ${CHART_HEIGHT}`);
    svg.replaceChildren();
    for (let value = 0; value <= high; value += step) {
      svg.append(svgEl("path", { d: `M${left} ${y(value)}H${right}`, class: value ? "grid" : "axis" }));
      svg.append(svgEl("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, fixed(value, 0)));
    }
    const wide = (right - left) / bars.length;
    // As many labels as there is room for.
    const longest = Math.max(...bars.map((bar) => label(bar).length));
    const every = Math.ceil((7 * longest + 10) / wide);
    rects = bars.map((bar, i) => {
      const rect = svgEl("rect", { x: left + wide * (i + 0.08), y: y(bar.users), width: Math.max(0.5, wide * 0.84), height: bottom - y(bar.users), class: "bin" });
      svg.append(rect);
      if (i % every === 0) svg.append(svgEl("text", { x: left + wide * (i + 0.5), y: bottom + 18, "text-anchor": "middle" }, label(bar)));
      return rect;
    });
    svg.append(svgEl("text", { x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, "events of a user, at most"));
    mark();
  };
  const label = (bar) => bar.upper === null ? "more" : fixed(bar.upper, 0);
  const mark = () => {
    rects.forEach((rect, i) => rect.setAttribute("class", i === chosen ? "bin chosen" : "bin"));
    readout.textContent = chosen < 0 ? "" : tell(bars[chosen]);
  };
  const nearest = (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    chosen = Math.max(0, Math.min(bars.length - 1, Math.floor((at - left) / (right - left) * bars.length)));
    mark();
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", () => { chosen = -1; mark(); });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    chosen = Math.max(0, Math.min(bars.length - 1, chosen + by));
    mark();
  });
  drawn(element, draw);
  return element;
}
