// Lines over steps (or what `axis` says), as SVG with axes; the pointer or the arrow keys read values off.

const CHART_HEIGHT = 214;

function lineChart(chart) {
  const svg = svgEl("svg", { tabindex: "0", role: "img" });
  const readout = el("p", { class: "readout", role: "status" });
  const unit = chart.unit ? `, ${chart.unit}` : "";
  const legend = el("div", { class: "legend" }, ...chart.lines.map((line, i) => el("span", {}, el("i", { class: "l" + i % 4 }), line.name)));
  const element = el("div", { class: "chart" }, el("h3", { text: chart.title + unit }), legend, svg, readout);
  const axis = chart.axis || "step";
  const points = chart.lines.flatMap((line) => line.points);
  const steps = [...new Set(points.map((p) => p[0]))].sort((a, b) => a - b);
  const told = chart.lines.map((line) => {
    const [first, last] = [line.points[0], line.points[line.points.length - 1]];
    return `${line.name}: ${brief(first[1])} at ${axis} ${first[0]}, ${brief(last[1])} at ${axis} ${last[0]}`;
  }).join("; ");
  svg.setAttribute("aria-label", `${chart.title}. ${told}`);
  let chosen = -1, place = null;

  const draw = () => {
    place = axes(svg, element.clientWidth, points, chart.unit !== "", axis);
    chart.lines.forEach((line, i) => {
      const at = line.points.map(([x, y]) => `${place.x(x).toFixed(1)} ${place.y(y).toFixed(1)}`);
      if (at.length > 1) svg.append(svgEl("path", { d: "M" + at.join("L"), class: "l" + i % 4 }));
      if (at.length <= 40) for (const [x, y] of line.points) svg.append(svgEl("circle", { cx: place.x(x), cy: place.y(y), r: 2.6, class: "l" + i % 4 }));
    });
    if (chosen >= 0) mark();
  };
  const mark = () => {
    svg.querySelectorAll(".cursor").forEach((old) => old.remove());
    if (chosen < 0) { readout.textContent = ""; return; }
    const x = place.x(steps[chosen]);
    svg.append(svgEl("path", { d: `M${x} ${place.top}V${place.bottom}`, class: "cursor" }));
    const values = chart.lines.map((line) => [line.name, line.points.find((p) => p[0] === steps[chosen])]).filter(([, p]) => p);
    readout.textContent = `${axis} ${fixed(steps[chosen], 0)}: ` + values.map(([name, p]) => `${name} ${brief(p[1])}`).join(", ");
  };
  const nearest = (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(place.x(step) - at) < Math.abs(place.x(steps[best]) - at)) best = i; });
    chosen = best;
    mark();
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", () => { chosen = -1; mark(); });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    chosen = Math.max(0, Math.min(steps.length - 1, chosen + by));
    mark();
  });
  drawn(element, draw);
  return element;
}

// Draws grid and labels; returns where values go.
function axes(svg, width, points, fromZero, axis) {
  const top = 8, bottom = CHART_HEIGHT - 36;
  let low = Math.min(...points.map((p) => p[1])), high = Math.max(...points.map((p) => p[1]));
  if (fromZero) low = Math.min(0, low);
  if (low === high) { const some = Math.abs(low) * 0.05 || 1; low -= some; high += some; }
  const step = niceStep(high - low, 4);
  low = Math.floor(low / step + 1e-9) * step;
  high = Math.ceil(high / step - 1e-9) * step;
  let first = Math.min(...points.map((p) => p[0])), last = Math.max(...points.map((p) => p[0]));
  if (first === last) { first -= 1; last += 1; }
  const digits = Math.min(8, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
  const ticks = [];
  for (let i = 0; i <= Math.round((high - low) / step); i++) ticks.push(low + i * step);
  const texts = ticks.map((value) => fixed(value, digits));
  const left = 12 + 7 * Math.max(...texts.map((text) => text.length)), right = width - 14;
  const x = (value) => left + (value - first) / (last - first) * (right - left);
  const y = (value) => bottom - (value - low) / (high - low) * (bottom - top);
  svg.setAttribute("viewBox", `0 0 ${width} ${CHART_HEIGHT}`);
  svg.replaceChildren();
  ticks.forEach((value, i) => {
    svg.append(svgEl("path", { d: `M${left} ${y(value)}H${right}`, class: i ? "grid" : "axis" }));
    svg.append(svgEl("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, texts[i]));
  });
  const across = Math.max(1, niceStep(last - first, Math.max(2, (right - left) / 60)));
  for (let i = Math.ceil(first / across); i * across <= last; i++) {
    const at = x(i * across);
    svg.append(svgEl("path", { d: `M${at} ${bottom}v5`, class: "axis" }));
    svg.append(svgEl("text", { x: at, y: bottom + 18, "text-anchor": "middle" }, fixed(i * across, 0)));
  }
  svg.append(svgEl("text", { x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, axis));
  return { x, y, top, bottom };
}
