"use strict";
(() => {
  const root = document.documentElement;
  const DAY = 86400000;
  const DASHES = { solid: "", dash: "7 4", dot: "2 3", dashdot: "8 3 2 3" };
  const plots = [...document.querySelectorAll("script[data-plot]")].map((element) => ({
    canvas: document.getElementById(element.dataset.plot),
    ...JSON.parse(element.textContent),
    width: 0,
  }));

  const make = (parent, name, attributes = {}, text = "") => {
    const node = parent.namespaceURI.endsWith("svg")
      ? document.createElementNS(parent.namespaceURI, name)
      : document.createElement(name);
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
    node.textContent = text;
    parent.append(node);
    return node;
  };
  const ink = (number) => `var(--series-${number})`;
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const drawn = (plot) => plot.data.filter((series) => !series.hidden);

  // A number with so many digits that two steps apart it reads otherwise.
  const digits = (step) => Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const written = (value, step, kind) => {
    if (kind === "percent") return `${written(100 * value, 100 * step)}%`;
    const most = Math.max(Math.abs(value), step);
    if (step < 1e-5 || most >= 1e9) {
      const places = Math.floor(Math.log10(most)) - Math.floor(Math.log10(step) + 1e-9);
      return value.toExponential(Math.max(0, Math.min(8, places)));
    }
    const places = Math.min(digits(step), 12);
    const text = value.toLocaleString("en-US", {
      minimumFractionDigits: places,
      maximumFractionDigits: places,
    });
    return /^-0\.?0*$/.test(text) ? text.slice(1) : text;
  };
  const even = (low, high, count) => {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  };
  const linearTicks = (low, high, count, kind) => {
    const step = even(low, high, count);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      ticks.push([i * step, written(i * step, step, kind)]);
    }
    return ticks;
  };
  const logTicks = (low, high, count) => {
    if (high / low < 8) return linearTicks(low, high, count);
    const powers = Math.log10(high / low);
    const factors = powers < 3 ? [1, 2, 5] : [1];
    const ticks = [];
    const stride = Math.max(1, Math.ceil(powers / count));
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p += stride) {
      factors.map((factor) => factor * 10 ** p).forEach((value) => {
        if (value >= low && value <= high) ticks.push([value, String(Number(value.toPrecision(4)))]);
      });
    }
    return ticks;
  };
  const dateTicks = (low, high, count) => {
    const [first, days] = [new Date(low), (high - low) / DAY];
    const pick = (steps, needed) => steps.find((step) => step >= needed) || steps[steps.length - 1];
    const [year, month] = [first.getUTCFullYear(), first.getUTCMonth()];
    let [at, length] = [null, 10];
    if (days > 365 * 2.5) {
      const step = pick([1, 2, 5, 10, 20, 50], days / 365 / count);
      at = (i) => Date.UTC((Math.floor(year / step) + i) * step, 0);
      length = 4;
    } else if (days > 100) {
      const step = pick([1, 2, 3, 6, 12], days / 30 / count);
      at = (i) => Date.UTC(year, (Math.floor(month / step) + i) * step);
      length = 7;
    } else {
      const step = days > 3 ? DAY * pick([1, 2, 7, 14, 28], days / count) : 3600000 * pick([1, 2, 3, 6, 12, 24], (24 * days) / count);
      at = (i) => (Math.floor(low / step) + i) * step;
    }
    const label = (value) => {
      const text = new Date(value).toISOString();
      return days > 3 ? text.slice(0, length) : text.slice(11, 16);
    };
    const ticks = [];
    for (let i = 0; at(i) <= high; i++) if (at(i) >= low) ticks.push([at(i), label(at(i))]);
    return ticks;
  };

  const extent = (values) => {
    const known = values.filter((value) => value !== null && Number.isFinite(value));
    return known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  };
  const pad = ([low, high], part) => {
    const room = (high - low) * part || Math.abs(high) * 0.05 || 1;
    return [low - room, high + room];
  };

  // Places of every value on the page: x and y of each series, areas one upon the other.
  const measure = (plot) => {
    const { xaxis, yaxis } = plot.layout;
    const number = xaxis.kind === "date" ? Date.parse : Number;
    const stacked = [];
    const shown = drawn(plot).map((series) => {
      const x = (series.x || plot.layout.x).map(number);
      if (series.type !== "area") return { ...series, x, top: series.y };
      const base = stacked.length ? stacked[stacked.length - 1] : series.y.map(() => 0);
      const top = series.y.map((value, i) => base[i] + (value || 0));
      stacked.push(top);
      return { ...series, x, top, base };
    });
    const heights = shown.flatMap((s) => [...s.top, ...(s.low || []), ...(s.high || []), ...(s.base || [])]);
    let [low, high] = extent(yaxis.kind === "log" ? heights.filter((value) => value > 0) : heights);
    if (yaxis.kind === "log") {
      [low, high] = pad([Math.log(low), Math.log(high)], 0.04).map(Math.exp);
    } else if (!stacked.length) {
      [low, high] = pad([low, high], 0.05);
    } else {
      high *= 1.05;
    }
    return { shown, x: extent(shown.flatMap((series) => series.x)), y: [low, high] };
  };

  // The corners of a line that holds each value until the next.
  const corners = (points) => points.flatMap(([x, y], i) => (i ? [[x, points[i - 1][1]], [x, y]] : [[x, y]]));
  const path = (points) => {
    let [text, drawing] = ["", false];
    points.forEach(([x, y]) => {
      if (y !== null) text += `${drawing ? "L" : "M"}${x} ${y}`;
      drawing = y !== null;
    });
    return text;
  };

  const wide = (svg, text) => {
    const node = make(svg, "text", {}, text);
    const width = node.getComputedTextLength();
    node.remove();
    return width;
  };

  const frame = (plot, svg, x, y, xTicks, yTicks, most) => {
    const { width, height } = plot;
    const widest = Math.max(...yTicks.map(([, label]) => wide(svg, cut(label, most))), 12);
    const box = { left: 10 + widest, right: width - 14, top: 28, bottom: height - 44 };
    const log = plot.layout.yaxis.kind === "log";
    const unit = (value, [low, high]) => (high > low ? (value - low) / (high - low) : 0.5);
    const px = (value) => box.left + unit(value, x) * (box.right - box.left);
    const on = log ? (value) => unit(Math.log(value), y.map(Math.log)) : (value) => unit(value, y);
    const py = (value) => (value === null || (log && value <= 0) ? null : Number((box.bottom - on(value) * (box.bottom - box.top)).toFixed(1)));
    yTicks.forEach(([value, label]) => {
      make(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: py(value), y2: py(value) });
      make(svg, "text", { class: "tick y", x: box.left - 6, y: py(value) + 4, "text-anchor": "end" }, cut(label, most));
    });
    let free = -Infinity;
    xTicks.forEach(([value, label]) => {
      const [at, half] = [px(value), wide(svg, label) / 2];
      if (at - half < free || at + half > width) return;
      free = at + half + 8;
      make(svg, "text", { class: "tick x", x: at, y: box.bottom + 17, "text-anchor": "middle" }, label);
    });
    make(svg, "text", { class: "axis", x: (box.left + box.right) / 2, y: height - 8, "text-anchor": "middle" }, plot.layout.xaxis.title);
    make(svg, "text", { class: "axis", x: 2, y: 12 }, plot.layout.yaxis.title);
    return { px, py, box };
  };

  const drawLines = (plot, svg) => {
    const { xaxis, yaxis } = plot.layout;
    const { shown, x, y } = measure(plot);
    const ticks = { log: logTicks, date: dateTicks };
    const across = Math.max(2, plot.width / 85);
    const xTicks = (ticks[xaxis.kind] || linearTicks)(...x, across, xaxis.kind);
    const yTicks = (ticks[yaxis.kind] || linearTicks)(...y, 7, yaxis.kind);
    const { px, py, box } = frame(plot, svg, x, y, xTicks, yTicks, 14);
    if (plot.layout.trained) {
      const until = Math.min(px(Date.parse(plot.layout.trained)), box.right);
      make(svg, "rect", { class: "trained", x: box.left, y: box.top, width: Math.max(until - box.left, 0), height: box.bottom - box.top });
    }
    const at = (series, values) => series.x.map((value, i) => [Number(px(value).toFixed(1)), values[i] === null ? null : py(values[i])]);
    shown.forEach((series) => {
      const filled = series.type === "area" ? [series.base, series.top] : [series.low, series.high];
      if (filled[0]) {
        const [base, top] = filled.map((values) => {
          const points = at(series, values).filter(([, height]) => height !== null);
          return series.step ? corners(points) : points;
        });
        const kind = series.type === "area" ? "area" : "band";
        make(svg, "path", { class: kind, d: `${path([...top, ...base.reverse()])}Z`, style: `fill:${ink(series.color)}` });
      }
      if (series.type !== "area") {
        const look = `stroke:${ink(series.color)};stroke-width:${series.width};stroke-dasharray:${DASHES[series.dash] || "none"}`;
        make(svg, "path", { class: "line", d: path(at(series, series.y)), style: look });
      }
    });
    const step = even(...(yaxis.kind === "log" ? [y[0], y[0] * 1.05] : y), 5) / 100;
    return (across) => {
      const near = shown.map((series) => {
        const gaps = series.x.map((value) => Math.abs(px(value) - across));
        return { series, i: gaps.indexOf(Math.min(...gaps)) };
      });
      if (!near.length) return null;
      const value = near[0].series.x[near[0].i];
      const hours = xaxis.kind === "date" && x[1] - x[0] < 3 * DAY ? [11, 16] : [0, 10];
      const head = xaxis.kind === "date" ? new Date(value).toISOString().slice(...hours) : `${xaxis.title}: ${value}`;
      const rows = near
        .filter(({ series, i }) => series.y[i] !== null)
        .map(({ series, i }) => [ink(series.color), `${series.name || yaxis.title}: ${written(series.y[i], step, yaxis.kind)}`]);
      return { x: px(value), head, rows };
    };
  };

  const drawHeat = (plot, svg) => {
    const [{ x, names, z, middle }] = plot.data;
    const rows = names.length;
    const every = Math.ceil((15 * rows) / (plot.height - 76));
    const yTicks = names.map((name, i) => [i + 0.5, name]).filter((_, i) => i % every === 0);
    const ends = [x[0], x[x.length - 1]];
    const { px, py, box } = frame(plot, svg, [0, x.length], [0, rows], [], yTicks, plot.width < 500 ? 9 : 20);
    linearTicks(...ends, Math.max(2, plot.width / 85)).forEach(([value, label]) => {
      const place = px(0) + ((value - ends[0]) / (ends[1] - ends[0] || 1)) * (box.right - box.left);
      make(svg, "text", { class: "tick x", x: Math.min(place, box.right - 8), y: box.bottom + 17, "text-anchor": "middle" }, label);
    });
    const most = Math.max(...z.flat().map((value) => Math.abs(value - middle)), 1e-12);
    const [wide, high] = [px(1) - px(0) + 0.4, py(0) - py(1) + 0.4];
    z.forEach((row, i) => row.forEach((value, j) => {
      const side = value >= middle ? "above" : "below";
      const part = (100 * Math.abs(value - middle)) / most;
      make(svg, "rect", { class: "cell", x: px(j).toFixed(1), y: py(i + 1), width: wide.toFixed(1), height: high.toFixed(1), style: `fill:color-mix(in srgb, var(--heat-${side}) ${part.toFixed(0)}%, var(--heat-uniform))` });
    }));
    return (across, down) => {
      const [j, i] = [Math.floor((across - px(0)) / (px(1) - px(0))), Math.floor((py(0) - down) / (py(0) - py(1)))];
      if (!z[i] || z[i][j] === undefined) return null;
      return { x: px(j + 0.5), head: `${plot.layout.xaxis.title}: ${Math.round(x[j])}`, rows: [["var(--heat-above)", `${names[i]}: ${written(z[i][j], 0.0001, "percent")}`]] };
    };
  };

  const draw = (plot) => {
    const { canvas } = plot;
    const width = canvas.clientWidth;
    if (!width) return;
    plot.width = width;
    plot.height = canvas.clientHeight;
    const svg = canvas.querySelector("svg");
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${plot.height}`);
    plot.near = (plot.data[0].type === "heat" ? drawHeat : drawLines)(plot, svg);
    plot.pointer = make(svg, "line", { class: "pointer", y1: 28, y2: plot.height - 44, visibility: "hidden" });
  };

  const hover = (plot) => {
    const tip = plot.canvas.querySelector(".tip");
    const leave = () => {
      tip.hidden = true;
      plot.pointer.setAttribute("visibility", "hidden");
    };
    plot.canvas.addEventListener("pointerleave", leave);
    plot.canvas.addEventListener("pointermove", (event) => {
      const box = plot.canvas.getBoundingClientRect();
      const found = plot.near(event.clientX - box.left, event.clientY - box.top);
      if (!found) return leave();
      tip.replaceChildren();
      make(tip, "strong", {}, found.head);
      found.rows.forEach(([colour, text]) => make(make(tip, "div"), "i", { style: `background:${colour}` }).parentNode.append(text));
      tip.hidden = false;
      const left = found.x + 12 + tip.offsetWidth > box.width ? found.x - 12 - tip.offsetWidth : found.x + 12;
      tip.style.left = `${Math.max(0, left)}px`;
      ["x1", "x2"].forEach((name) => plot.pointer.setAttribute(name, found.x));
      plot.pointer.setAttribute("visibility", "visible");
    });
  };

  const legend = (plot) => {
    const named = plot.data.filter((series) => series.name);
    if (named.length < 2) return;
    const list = plot.canvas.parentNode.querySelector(".legend");
    named.forEach((series) => {
      const button = make(list, "button", { type: "button", "aria-pressed": String(!series.hidden) });
      make(button, "i", { style: `background:${ink(series.color)}` });
      button.append(series.name);
      button.addEventListener("click", () => {
        series.hidden = !series.hidden;
        button.setAttribute("aria-pressed", String(!series.hidden));
        draw(plot);
      });
    });
  };

  plots.forEach((plot) => {
    legend(plot);
    draw(plot);
    hover(plot);
    new ResizeObserver(() => {
      if (plot.canvas.clientWidth !== plot.width) draw(plot);
    }).observe(plot.canvas);
  });
  // Paper is white, and nothing on it can be unfolded.
  addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    document.querySelectorAll("details").forEach((element) => {
      element.dataset.was = element.open ? "open" : "";
      element.open = true;
    });
  });
  addEventListener("afterprint", () => {
    delete root.dataset.theme;
    document.querySelectorAll("details").forEach((element) => {
      element.open = element.dataset.was === "open";
    });
  });
})();
