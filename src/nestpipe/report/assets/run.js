// The page of a run, or of a trace on its own.

function runPage(data) {
  const parts = [];
  if (data.figures.length) parts.push(figures(data.figures));
  if (data.timeline) {
    const { spans, steps, workers } = data.timeline;
    const says = `The last ${fixed(steps, 0)} steps, ${fixed(spans, 0)} actions on ${workers.length} worker${workers.length > 1 ? "s" : ""}. `
      + "Hatched: the compute lane waits, and for what.";
    parts.push(section("Timeline", says, new Timeline(data.timeline).element, keysHelp()));
  } else {
    parts.push(el("p", { class: "note", id: "no-timeline", text: data.no_timeline }));
  }
  if (data.stages) parts.push(section("Stages", `Milliseconds a step (${data.stages.source}). Exposed is what the step had to wait for: the column adds up to the step.`, stageTable(data.stages)));
  if (data.charts.length) parts.push(section("Over the run", null, el("div", { class: "charts" }, ...data.charts.map(lineChart))));
  if (data.balance) parts.push(section("Load balance", data.balance.says, plainTable(data.balance.table)));
  if (data.data) parts.push(dataSection(data.data));
  if (data.notes.length) parts.push(section("Notes", null, el("ul", { class: "notes" }, ...data.notes.map((text) => el("li", { text })))));
  const summary = section("Summary", null, facts(data.facts));
  if (data.recipe !== null) summary.append(el("details", {}, el("summary", { text: "Recipe" }), el("pre", { tabindex: "0", text: data.recipe })));
  parts.push(summary);
  return parts;
}

function figures(list) {
  return el("div", { class: "figures" }, ...list.map((figure) => el("div", { class: "figure" },
    el("div", { class: "name", text: figure.name }),
    el("div", { class: "value" }, fixed(figure.value, figure.digits), figure.unit ? el("span", { class: "unit", text: " " + figure.unit }) : null),
    figure.hint ? el("div", { class: "hint", text: figure.hint }) : null)));
}

function keysHelp() {
  const help = el("p", { class: "quiet keys" });
  const say = (keys, does) => { for (const key of keys) help.append(el("kbd", { text: key }), " "); help.append(does + "   "); };
  help.append("Wheel or pinch zooms, dragging moves. With the timeline in focus: ");
  say(["←", "→"], "move,");
  say(["+", "−"], "zoom,");
  say(["0"], "reset,");
  say(["↑", "↓"], "lane,");
  say([",", "."], "action.");
  return help;
}

function stageTable({ rows, step_ms }) {
  const widest = Math.max(1e-9, ...rows.map((row) => Math.max(row.busy, (row.hidden || 0) + (row.exposed || 0))));
  const digits = step_ms < 20 ? 2 : 1;
  const cell = (value) => value === null ? el("td", { class: "none", text: "–" }) : el("td", { text: fixed(value, digits) });
  const body = rows.map((row) => {
    const told = row.exposed !== null;
    const bar = !told ? el("div", {}, el("i", { class: "is-busy", style: { width: `${100 * row.busy / widest}%` } })) : el("div", {},
      el("i", { class: row.computes ? "is-compute" : "is-exposed", style: { width: `${100 * row.exposed / widest}%` } }),
      el("i", { class: "is-hidden", style: { width: `${100 * row.hidden / widest}%` } }));
    return el("tr", { class: row.busy < 0.05 && (row.exposed || 0) < 0.05 ? "little" : null }, el("th", { scope: "row", text: row.stage }),
      cell(row.busy), cell(row.hidden), cell(row.exposed), el("td", { class: told ? null : "none", text: told ? fixed(100 * row.exposed / Math.max(step_ms, 1e-9), 0) + " %" : "–" }),
      el("td", { class: "meter" }, bar));
  });
  const total = el("tr", {}, el("th", { scope: "row", text: "step" }), el("td"), el("td"), el("td", { class: "best", text: fixed(step_ms, digits) }), el("td"), el("td"));
  const head = el("tr", {}, ...["stage", "busy", "hidden", "exposed", "of step"].map((text) => el("th", { scope: "col", text })), el("th", { scope: "col" }));
  const legend = el("div", { class: "legend" },
    el("span", {}, el("i", { class: "is-compute" }), "computing"), el("span", {}, el("i", { class: "is-exposed" }), "exposed"),
    el("span", {}, el("i", { class: "is-hidden" }), "hidden"));
  return el("div", {}, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "stages" },
    el("table", { id: "stages" }, el("thead", {}, head), el("tbody", {}, ...body, total))), legend);
}
