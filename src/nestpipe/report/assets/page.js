// Reads the data and puts the page together.

const data = JSON.parse(document.getElementById("data").textContent);
document.title = `${data.title} – NestPipe`;
const heading = el("div", {}, el("p", { class: "kicker" }, el("b", { text: "NestPipe" }), " " + data.subtitle),
  el("h1", { text: data.title, class: data.title.length > 60 ? "long" : null }));
const theme = themeButton(); // first: what is drawn takes its colours from it
document.getElementById("page").append(el("header", {}, heading, theme),
  el("main", {}, ...(data.kind === "bench" ? benchPage(data) : runPage(data))),
  el("footer", { text: `nestpipe report ${data.version}` }));
