// The live page: asks the instance every second and draws what it says.  Everything from outside is only ever text.

const given = JSON.parse(document.getElementById("data").textContent);
document.title = `${given.title} – NestPipe`;
const switcher = themeButton();
const status = el("p", { class: "quiet", role: "status", text: "asking the instance ..." });
const figuresBox = el("div", { class: "figures" });
const notesBox = el("div");
const chartsBox = el("div", { class: "charts" });
const slowBox = el("div", { class: "scroll" });
document.getElementById("page").append(
  el("header", {}, el("div", {}, el("p", { class: "kicker" }, el("b", { text: "NestPipe" }), " " + given.subtitle),
    el("h1", { text: given.title }), status), switcher),
  el("main", {}, figuresBox, notesBox,
    section("The last five minutes", "A point for each second with requests.", chartsBox),
    section("Slow requests", "The newest first. Waited: before the first step. Steps: what compute it took.", slowBox)),
  el("footer", { text: `nestpipe serve ${given.version}` }));

const PATHS = ["hit", "takeover", "dram", "miss", "rejected"];

function figure(name, value, unit, hint) {
  return el("div", { class: "figure" }, el("div", { class: "name", text: name }),
    el("div", { class: "value" }, value, unit ? el("span", { class: "unit", text: " " + unit }) : null),
    el("div", { class: "hint", text: hint || "" }));
}

function size(bytes) {
  for (const [unit, least] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (bytes >= least) return `${fixed(bytes / least, 1)} ${unit}`;
  return `${bytes} B`;
}

function showFigures(data) {
  const now = data.now, counts = now.counts;
  const done = PATHS.reduce((sum, path) => sum + (counts["path_" + path] || 0), 0);
  const reused = done - (counts.path_miss || 0) - (counts.path_rejected || 0);
  const last = data.seconds.filter((second) => second.count).slice(-1)[0];
  const percent = (part, whole) => (whole ? fixed(100 * part / whole, 0) : "0");
  figuresBox.replaceChildren(
    figure("version", now.version.length > 12 ? now.version.slice(0, 12) + "…" : now.version, "", now.versions.length > 1 ? "beside " + now.versions.slice(1).join(", ") : "serves"),
    figure("ranked", fixed(done, 0), "", `${fixed(counts.full || 0, 0)} full, ${fixed(counts.expired || 0, 0)} too late, ${fixed(counts.errors || 0, 0)} errors`),
    figure("prefix reused", percent(reused, done), "%", "hit, takeover or DRAM"),
    figure("P99, last second", last ? brief(last.p99) : "–", "ms", last ? `P50 ${brief(last.p50)} ms, ${last.count} requests` : "no request yet"),
    figure("arena", percent(now.arena_bytes, now.arena_limit), "%", `${size(now.arena_bytes)} of ${size(now.arena_limit)}, ${now.pins} pins`),
    figure("DRAM", percent(now.dram_bytes, now.dram_limit), "%", `${size(now.dram_bytes)} of ${size(now.dram_limit)}`));
  notesBox.replaceChildren(...(data.trouble ? [el("p", { class: "note", text: data.trouble })] : []));
}

function showCharts(seconds) {
  if (!seconds.length) { chartsBox.replaceChildren(el("p", { class: "quiet", text: "No request yet." })); return; }
  const end = seconds[seconds.length - 1].second;
  const line = (name, value) => ({ name, points: seconds.filter((s) => value(s) !== null).map((s) => [s.second - end, value(s)]) });
  const used = PATHS.filter((path) => seconds.some((s) => s.paths[path]));
  const charts = [
    { title: "latency", unit: "ms", lines: [line("P50", (s) => s.p50), line("P99", (s) => s.p99)] },
    { title: "requests by path", unit: "a second", lines: [...used.slice(0, 4).map((path) => line(path, (s) => s.paths[path] || 0)),
      ...(seconds.some((s) => s.refused) && used.length < 4 ? [line("refused", (s) => s.refused)] : [])] },
    { title: "memory", unit: "MB", lines: [line("arena", (s) => s.arena_bytes / 1e6), line("DRAM", (s) => s.dram_bytes / 1e6)] },
    { title: "rankings that wait", unit: "in the queue", lines: [line("queue", (s) => s.queue)] },
  ].filter((chart) => chart.lines.some((one) => one.points.length));
  themed.length = 0; // the charts of before are gone
  chartsBox.replaceChildren(...charts.map((chart) => lineChart({ ...chart, axis: "seconds, 0 is now", lines: chart.lines.filter((one) => one.points.length) })));
}

function showSlow(slow) {
  if (!slow.length) { slowBox.replaceChildren(el("p", { class: "quiet", text: "None so far." })); return; }
  const head = ["when", "user", "path", "ms", "waited", "steps", "events", "candidates", "trace"];
  const cells = (one) => [one.at.slice(11, 23), one.user || "–", one.path + (one.outcome === "done" ? "" : ", " + one.outcome), brief(one.ms), brief(one.waited_ms),
    Object.entries(one.steps_ms).map(([what, ms]) => `${what} ${brief(ms)}`).join(", ") || "–", fixed(one.events, 0), fixed(one.candidates, 0), one.trace.slice(0, 8)];
  slowBox.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { text })))),
    el("tbody", {}, ...slow.map((one) => el("tr", {}, ...cells(one).map((text) => el("td", { text })))))));
}

async function ask() {
  try {
    const data = await (await fetch("/debug/page", { cache: "no-store" })).json();
    status.textContent = data.ready ? `${data.instance}, ready` : data.instance ? `${data.instance}, shutting down` : "the model is not warm yet";
    if (data.now) { showFigures(data); showCharts(data.seconds); showSlow(data.slow); }
    document.body.dataset.drawn = "yes";
  } catch {
    status.textContent = "the instance does not answer";
  }
  setTimeout(ask, 1000);
}
ask();
