// Draws the charts in the colours of the reader's theme, and redraws them when it changes.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;

  /** `value` with each CSS variable replaced by the colour that it has now. */
  function coloured(value, style) {
    if (typeof value === "string") {
      const variable = /^var\((--[\w-]+)\)$/.exec(value);
      return variable ? style.getPropertyValue(variable[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
  }

  const base = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "var(--ink)" },
    hoverlabel: { bgcolor: "var(--paper)", bordercolor: "var(--muted)", font: { color: "var(--ink)" } },
    showlegend: false,
    // A finger that moves over a chart scrolls the page.
    dragmode: coarse ? false : "zoom",
  };
  const config = { displayModeBar: false, doubleClick: "reset" };

  /** A space between a tick's number and its unit, which Plotly leaves out: 300 MB. */
  function space(place) {
    for (const tick of place.querySelectorAll(".xtick text, .ytick text")) {
      const parts = /^([\d.,]+)([kMGTm\u00b5]?B)$/.exec(tick.textContent);
      if (parts) tick.textContent = `${parts[1]}\u00a0${parts[2]}`;
    }
  }

  function draw(chart) {
    const place = document.getElementById(chart.id);
    const style = getComputedStyle(root);
    const size = { width: place.clientWidth, height: place.clientHeight };
    const layout = { ...base, ...chart.layout, ...size };
    const done = Plotly.react(place, coloured(chart.data, style), coloured(layout, style), config);
    if (!place.dataset.spaced) place.on("plotly_afterplot", () => space(place));
    place.dataset.spaced = "yes";
    return done;
  }
  const redraw = () => charts.forEach(draw);

  // One chart after the other, so that the page can be read meanwhile.
  async function drawAll() {
    for (const chart of charts) {
      await draw(chart);
      await new Promise((resolve) => setTimeout(resolve));
    }
    root.dataset.drawn = charts.length;
  }
  const drawn = drawAll();

  // A name in a legend hides what it names, in all charts of its figure.
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", shown);
      const places = button.closest("figure").querySelectorAll(".chart");
      for (const chart of charts.filter((chart) => [...places].some((place) => place.id === chart.id))) {
        for (const trace of chart.data) if (trace.name === button.dataset.name) trace.visible = shown;
        draw(chart);
      }
    });
  }

  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  function themed() {
    theme.textContent = isDark() ? "Light" : "Dark";
    drawn.then(redraw);
  }
  theme.hidden = false;
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    themed();
  });
  dark.addEventListener("change", themed);

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) drawn.then(redraw); // on a phone the height changes at each scroll
    width = innerWidth;
  });

  // Paper is light, and narrower than most screens.
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    redraw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    redraw();
  });
})();
