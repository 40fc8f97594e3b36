// Elements and numbers.  Text from files goes through here and is only ever text.

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") made.textContent = value;
    else if (key === "class") made.className = value;
    else if (key === "style") Object.assign(made.style, value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function svgEl(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function fixed(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// As many digits as tell something: 20,062 and 0.2635 and 1.5e-7.
function brief(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-4) return value.toPrecision(3);
  if (size >= 1000) return fixed(value, 0);
  return fixed(value, Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(size)))));
}

// A duration or a moment in microseconds, in the unit that suits it.
function inTime(us) {
  if (us >= 1e6) return fixed(us / 1e6, 3) + " s";
  if (us >= 100) return fixed(us / 1e3, us >= 1e5 ? 1 : 2) + " ms";
  return fixed(us, 1) + " µs";
}

// Round steps for an axis over `range` with about `wanted` of them.
function niceStep(range, wanted) {
  const rough = range / Math.max(1, wanted);
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  for (const factor of [1, 2, 5, 10]) if (factor * power >= rough * 0.999) return factor * power;
  return 10 * power;
}

function section(title, says, ...children) {
  return el("section", { "aria-label": title }, el("h2", { text: title }), says ? el("p", { class: "quiet", text: says }) : null, ...children);
}

function facts(pairs) {
  const list = el("dl");
  for (const [name, value] of pairs) {
    const shown = typeof value === "number" && name !== "seed" ? (Number.isInteger(value) ? fixed(value, 0) : String(value)) : String(value);
    list.append(el("div", { class: shown.length > 34 ? "wide" : null }, el("dt", { text: name }), el("dd", { text: shown })));
  }
  return list;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Black or white, whichever reads better on a colour "#rrggbb".
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => {
    const part = parseInt(colour.slice(i, i + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : Math.pow((part + 0.055) / 1.055, 2.4);
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.24 ? "#1b2129" : "#ffffff";
}

function tint(colour, white) {
  const part = (i) => Math.round(parseInt(colour.slice(i, i + 2), 16) * (1 - white) + 255 * white);
  return "#" + [1, 3, 5].map((i) => part(i).toString(16).padStart(2, "0")).join("");
}

// Calls `draw` whenever the element has got another width, and when the theme changes.
const themed = [];
function drawn(element, draw) {
  let width = -1;
  new ResizeObserver(() => {
    if (element.clientWidth !== width && element.clientWidth > 0) {
      width = element.clientWidth;
      draw();
    }
  }).observe(element);
  themed.push(() => { if (width > 0) draw(); });
}
