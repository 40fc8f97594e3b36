// Light or dark, as the system says until somebody chooses.

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
