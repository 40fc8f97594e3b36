// Reads the data and puts the page together.

function themeButton() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = el("button", { type: "button", class: "theme" });
  let chosen = null;
  try { chosen = localStorage.getItem("nestpipe-theme"); } catch { /* not from a file, in some browsers */ }
  const show = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.replaceChildren(dark ? "☀" : "☾", el("span", { text: dark ? " Light" : " Dark" }));
    button.setAttribute("aria-label", `switch to ${dark ? "light" : "dark"} colours`);
    for (const draw of themed) draw();
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("nestpipe-theme", chosen); } catch { /* then not next time */ }
    show();
  });
  system.addEventListener("change", show);
  show();
  return button;
}

const data = JSON.parse(document.getElementById("data").textContent);
document.title = `${data.title} – NestPipe`;
const heading = el("div", {}, el("p", { class: "kicker" }, el("b", { text: "NestPipe" }), " " + data.subtitle),
  el("h1", { text: data.title, class: data.title.length > 60 ? "long" : null }));
const theme = themeButton(); // first: what is drawn takes its colours from it
document.getElementById("page").append(el("header", {}, heading, theme),
  el("main", {}, ...(data.kind === "bench" ? benchPage(data) : runPage(data))),
  el("footer", { text: `nestpipe report ${data.version}` }));
