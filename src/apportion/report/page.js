"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const specs = [...document.querySelectorAll("script[data-plot]")].map((element) => ({
    canvas: document.getElementById(element.dataset.plot),
    text: element.textContent,
  }));

  // Colours are names of the page's palette; only keys that hold a colour are ever looked up.
  const paint = (value, key, style) => {
    if (Array.isArray(value)) return value.map((item) => paint(item, key, style));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(
        Object.entries(value).map(([name, item]) => [name, paint(item, name, style)])
      );
    }
    const coloured = typeof value === "string" && value.startsWith("$") && /color/.test(key);
    return coloured ? style.getPropertyValue(`--${value.slice(1)}`).trim() : value;
  };

  const axis = (style, given) => ({
    gridcolor: style.getPropertyValue("--grid").trim(),
    linecolor: style.getPropertyValue("--line").trim(),
    zerolinecolor: style.getPropertyValue("--line").trim(),
    automargin: true,
    ...given,
  });

  const draw = ({ canvas, text }) => {
    const style = getComputedStyle(root);
    const spec = paint(JSON.parse(text), "", style);
    const ink = style.getPropertyValue("--ink").trim();
    const card = style.getPropertyValue("--card").trim();
    const { xaxis, yaxis, legend, ...rest } = spec.layout;
    const layout = {
      paper_bgcolor: card,
      plot_bgcolor: card,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink },
      margin: { l: 8, r: 12, t: 8, b: 8 },
      hoverlabel: { bgcolor: card, font: { color: ink } },
      xaxis: axis(style, xaxis),
      yaxis: axis(style, yaxis),
      legend: { orientation: "h", yref: "container", yanchor: "bottom", y: 0, x: 0, ...legend },
      ...rest,
    };
    if (narrow.matches) {
      layout.dragmode = false;
      layout.font.size = 11;
      if (layout.yaxis.type === "category") layout.yaxis.showticklabels = false;
    }
    // The legend takes rows below the plot; the plot itself keeps its height.
    const names = spec.data.filter((trace) => trace.name && trace.showlegend !== false);
    const width = names.reduce((sum, trace) => sum + 60 + 7 * trace.name.length, 0);
    const rows = names.length > 1 ? Math.ceil((1.25 * width) / canvas.clientWidth) : 0;
    layout.height = parseFloat(getComputedStyle(canvas).minHeight) + 22 * rows;
    // A sheet of A4 between its margins; the screen's width would be cut off.
    if (root.dataset.theme === "light") layout.width = 660;
    return Plotly.react(canvas, spec.data, layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: narrow.matches ? false : "hover",
      modeBarButtons: [["toImage", "resetScale2d"]],
    });
  };

  const drawAll = () => {
    if (window.Plotly) specs.forEach(draw);
  };
  drawAll();
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  // Paper is white: plots are drawn again in the light palette before printing.
  addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    document.querySelectorAll("details").forEach((element) => {
      element.dataset.was = element.open ? "open" : "";
      element.open = true;
    });
    drawAll();
  });
  addEventListener("afterprint", () => {
    delete root.dataset.theme;
    document.querySelectorAll("details").forEach((element) => {
      element.open = element.dataset.was === "open";
    });
    drawAll();
    specs.forEach(({ canvas }) => Plotly.Plots.resize(canvas));
  });
})();
