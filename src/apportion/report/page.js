"use strict";
// Style of every plot on the page; a plot itself has its traces and axes.
const AXIS = { automargin: true, gridcolor: "#e9ebe6", linecolor: "#dcdfd9", zeroline: false, exponentformat: "power" };
const STYLE = {
  font: { family: "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif", size: 12, color: "#1c2321" },
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  title: { x: 0, xanchor: "left", y: 1, yanchor: "top", pad: { t: 6 }, font: { size: 12, color: "#5d6965" } },
  margin: { l: 30, r: 24, t: 28, b: 40 },
  hovermode: "x unified",
  hoverlabel: { namelength: -1, bgcolor: "#ffffff", bordercolor: "#dcdfd9" },
  legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", maxheight: 0.3 },
  xaxis: AXIS,
  yaxis: AXIS,
};
const drawPlot = (place, data, layout) =>
  Plotly.react(place, data, { ...layout, template: { layout: STYLE } }, { responsive: true, displayModeBar: false });

const PLOTS = document.querySelectorAll("script[data-plot]");
PLOTS.forEach((script) => {
  const place = document.getElementById(script.dataset.plot);
  const { data, layout } = JSON.parse(script.textContent);
  place.hidden = !window.Plotly;
  if (window.Plotly) drawPlot(place, data, layout);
});
document.getElementById("no-plots").hidden = Boolean(window.Plotly) || !PLOTS.length;

// A printed page shows what is folded on the screen, and its plots are as wide as the paper.
let folded = [];
const resizePlots = (size) =>
  document.querySelectorAll(".js-plotly-plot").forEach((plot) => Plotly.relayout(plot, size));
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach((part) => (part.open = true));
  resizePlots({ width: 640 });
});
addEventListener("afterprint", () => {
  folded.forEach((part) => (part.open = false));
  resizePlots({ autosize: true });
});
