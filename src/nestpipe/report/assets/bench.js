// The page of a bench: rungs as bars, ratios as a table, stages as piles.

function benchPage(data) {
  const parts = [];
  if (data.rungs.length) {
    parts.push(section("Step time", "Milliseconds a step of the slowest worker: the bar is the median of the rounds, the line goes from the least to the most, a dot is a round.", rungBars(data)));
    parts.push(section("Ratios", "How many times faster than the rung above the column: the median over rounds, and below it the quartiles. Of step times the least and the most.", ratioTable(data),
      ...data.hidden.map((text) => el("p", { class: "note", text }))));
  }
  if (data.rungs.some((rung) => Object.keys(rung.stages).length)) {
    parts.push(section("Stages", "Busy: all that ran, lanes side by side, so it may be more than the step. Exposed: what the step had to wait for.", piles(data)));
  }
  if (data.table) parts.push(section("Figures", null, plainTable(data.table)));
  parts.push(section("Bench", null, facts(data.facts)));
  return parts;
}

function axisUnder(most) {
  const step = niceStep(most, 5), axis = el("div", { class: "axis" });
  for (let i = 0; i * step <= most * 1.0001; i++) {
    if (i * step / most > 0.97) break;
    axis.append(el("span", { text: fixed(i * step, step < 1 ? 2 : 0) + (i ? "" : " ms"), style: { left: `${100 * i * step / most}%` } }));
  }
  return axis;
}

function rungBars({ rungs, limit }) {
  const most = 1.03 * Math.max(limit ? limit.ms : 0, ...rungs.map((rung) => rung.most), 1e-9);
  const at = (ms) => `${100 * ms / most}%`;
  const grid = el("div", { class: "rungs" });
  if (limit) {
    const name = `limit ${limit.about ? "about " : ""}${fixed(limit.ms, 0)} ms`;
    grid.append(el("div"), el("div", { class: "over" }, el("span", { text: name, class: limit.ms / most > 0.75 ? "right" : null, style: { left: at(limit.ms) } })), el("div"));
  }
  for (const rung of rungs) {
    const track = el("div", { class: "track" }, el("div", { class: rung.peer ? "bar peer" : "bar", style: { width: at(rung.median) } }));
    if (rung.all.length > 1) track.append(el("div", { class: "spread", style: { left: at(rung.least), width: at(rung.most - rung.least) } }));
    for (const ms of rung.all.slice(0, 200)) track.append(el("div", { class: "dot", style: { left: at(ms) } }));
    if (limit) track.append(el("div", { class: "limit", style: { left: at(limit.ms) } }));
    grid.append(el("div", { class: "label", text: rung.name }), track,
      el("div", { class: "value" }, fixed(rung.median, 1) + " ms", el("small", { text: `${fixed(rung.least, 1)} to ${fixed(rung.most, 1)}` })));
  }
  grid.append(el("div"), axisUnder(most), el("div"));
  const legend = el("div", { class: "legend" });
  if (rungs.some((rung) => rung.peer)) legend.append(el("span", {}, el("i", { class: "is-compute" }), "ours"), el("span", {}, el("i", { class: "is-hidden" }), "peer"));
  if (limit) {
    const of = limit.rungs.length ? `in each round the slower of ${limit.rungs.join(" and ")}` : "what no schedule can beat";
    legend.append(el("span", { style: { whiteSpace: "normal" } }, el("i", { class: "is-exposed", style: { width: "3px" } }), `limit: ${of}`));
  }
  return el("div", {}, grid, legend);
}

function ratioTable({ rungs, against }) {
  const ways = ["wire", "engine", "counted"].filter((way) => rungs.some((rung) => rung.mb_between[way] !== null));
  const wired = rungs.some((rung) => rung.mb_sent !== null), limited = rungs.some((rung) => rung.of_limit);
  const heads = ["rung", "ms/step", "CPU ms", "samples/s", ...(wired ? ["MB sent"] : []), ...ways.map((way) => "MB between hosts: " + way), ...against.map((name) => "× " + name), ...(limited ? ["of the limit"] : [])];
  const plain = (value, digits) => value === null || value === undefined ? el("td", { class: "none", text: "–" }) : el("td", { text: fixed(value, digits) });
  const spread = (value) => !value ? el("td", { class: "none", text: "–" })
    : el("td", {}, el("b", { text: fixed(value.median, 2) }), el("small", { text: `${fixed(value.low, 2)} to ${fixed(value.high, 2)}` }));
  const rows = rungs.map((rung) => el("tr", {}, el("th", { scope: "row", text: rung.name }),
    el("td", {}, el("b", { text: fixed(rung.median, 1) }), el("small", { text: `${fixed(rung.least, 1)} to ${fixed(rung.most, 1)}` })), plain(rung.cpu, 1), plain(rung.samples_per_s, 0),
    ...(wired ? [plain(rung.mb_sent, 2)] : []), ...ways.map((way) => plain(rung.mb_between[way], 2)), ...against.map((name) => spread(Object.hasOwn(rung.ratios, name) ? rung.ratios[name] : null)),
    ...(limited ? [spread(rung.of_limit)] : [])));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "ratios" },
    el("table", { id: "ratios" }, el("thead", {}, el("tr", {}, ...heads.map((text, i) => el("th", { scope: "col", text, class: i > 3 ? "wrap" : null })))), el("tbody", {}, ...rows)));
}

function piles({ rungs, stages }) {
  const shown = rungs.filter((rung) => Object.keys(rung.stages).length);
  const sum = (rung, kind) => stages.reduce((total, stage) => total + (Object.hasOwn(rung.stages, stage.name) ? rung.stages[stage.name][kind] : 0), 0);
  const most = Math.max(1e-9, ...shown.flatMap((rung) => [sum(rung, "busy"), sum(rung, "exposed")]));
  const seen = stages.filter((stage) => shown.some((rung) => Object.hasOwn(rung.stages, stage.name) && rung.stages[stage.name].busy >= most / 400));
  const grid = el("div", { class: "stack" });
  for (const rung of shown) {
    grid.append(el("div", { class: "label", text: rung.name }));
    for (const kind of ["busy", "exposed"]) {
      const pile = el("div", { class: kind === "busy" ? "pile" : "pile second", role: "img" });
      const told = [];
      for (const stage of seen) {
        const ms = Object.hasOwn(rung.stages, stage.name) ? rung.stages[stage.name][kind] : 0;
        const share = 100 * ms / most;
        if (share < 0.05) continue;
        told.push(`${stage.name} ${fixed(ms, 1)}`);
        const wide = share > 1.1 * stage.name.length;
        pile.append(el("i", { class: share < 3.4 * stage.name.length ? "narrow" : null, title: `${stage.name}: ${fixed(ms, 1)} ms ${kind}`,
          text: wide ? stage.name : "", style: { width: `${share}%`, background: stage.colour, color: inkOn(stage.colour) } }));
      }
      pile.setAttribute("aria-label", `${rung.name}, ${kind}, ms: ${told.join(", ")}`);
      grid.append(el("div", { class: kind === "busy" ? "what" : "what second", text: `${kind} ${fixed(sum(rung, kind), 0)} ms` }), pile);
    }
  }
  grid.append(el("div"), el("div"), axisUnder(most));
  const legend = el("div", { class: "legend" }, ...seen.map((stage) => el("span", {}, el("i", { style: { background: stage.colour } }), stage.name)));
  const head = el("tr", {}, el("th", { scope: "col", text: "rung" }), ...seen.map((stage) => el("th", { scope: "col", text: stage.name })));
  const rows = shown.map((rung) => el("tr", {}, el("th", { scope: "row", text: rung.name }), ...seen.map((stage) => {
    const ms = Object.hasOwn(rung.stages, stage.name) ? rung.stages[stage.name] : { busy: 0, exposed: 0 };
    return el("td", {}, fixed(ms.busy, 1), el("small", { text: fixed(ms.exposed, 1) }));
  })));
  const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "stages in figures" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
  return el("div", {}, grid, legend, el("details", {}, el("summary", { text: "In figures: busy ms a step, and below it what was exposed" }), table));
}

function plainTable({ columns, rows }) {
  const cell = (value, i) => el(i ? "td" : "th", { scope: i ? null : "row", text: typeof value === "number" ? brief(value) : value === null ? "–" : value });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "figures" }, el("table", {},
    el("thead", {}, el("tr", {}, ...columns.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell))))));
}
