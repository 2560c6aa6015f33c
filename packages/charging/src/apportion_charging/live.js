"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const place = (id) => document.getElementById(id);
  const make = (parent, name, attributes = {}, text = "") => {
    const inside = parent.namespaceURI === SVG || name === "svg";
    const node = inside ? document.createElementNS(SVG, name) : document.createElement(name);
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
    node.textContent = text;
    parent.append(node);
    return node;
  };
  const known = (value) => value !== null && value !== undefined;
  const kw = (value) => (known(value) ? value.toFixed(1) : "–");
  const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

  const bar = (parent, part, marked, words) => {
    const box = make(parent, "div", {
      role: "img", "aria-label": words,
      style: "position:relative;height:1.1em;min-width:9rem;background:var(--grid);border-radius:.25rem;overflow:hidden",
    });
    const percent = (share) => `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(1)}%`;
    const colour = part > 1.0001 ? "--bad" : "--series-1";
    make(box, "div", { class: "filled", style: `height:100%;width:${percent(part)};background:var(${colour});opacity:.75` });
    if (known(marked)) {
      make(box, "div", { style: `position:absolute;top:0;height:100%;width:3px;left:calc(${percent(marked)} - 3px);background:var(--series-2)` });
    }
  };

  const table = (id, caption, heads) => {
    const scroll = make(place(id), "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption });
    const own = make(scroll, "table");
    make(own, "caption", {}, caption);
    const row = make(make(own, "thead"), "tr");
    heads.forEach((head) => make(row, "th", { scope: "col", ...(head.endsWith(" ") ? { class: "number" } : {}) }, head.trim()));
    return make(own, "tbody");
  };

  const cards = (state) => {
    const list = make(place("cards"), "ul", { class: "cards" });
    const card = (label, value, beside, note, kind = "plain") => {
      const item = make(list, "li", { class: `card ${kind}` });
      make(item, "h3", {}, label);
      const line = make(item, "p", { class: "value" });
      make(line, "strong", {}, value);
      make(line, "span", { class: "interval" }, beside);
      if (note) make(item, "p", { class: "note" }, note);
    };
    const cars = state.stations.filter((station) => station.plugged);
    const wait = cars.filter((car) => !car.offered_a && !car.full);
    const by = state.decided_by;
    card("Power offered", `${kw(state.offered_kw)} kW`, `of ${kw(state.capacity_kw)} kW`, "");
    card("Cars", String(cars.length), `of ${state.stations.length} stations`, wait.length ? `waiting: ${wait.map((car) => car.id).join(", ")}` : "nobody waits");
    card("Decided by", by || "nobody yet", "", known(state.decided) ? `at ${clock(state.decided)}` : "", by === "nobody" ? "fails" : "holds");
    card("Trust in the policy", `${Math.round(100 * state.trust)} %`, `the rest: ${state.baseline}`, state.why);
    if (state.ocpp) {
      const away = state.stations.filter((station) => !station.connected);
      card("Charge points", String(state.stations.length - away.length), "connected", away.length ? `away: ${away.map((station) => station.id).join(", ")}` : "", away.length ? "open" : "holds");
    }
  };

  const condition = (car) => {
    if (!car.offered_a) return car.full ? "full" : "waits";
    return known(car.drawn_kw) && car.drawn_kw < 0.1 ? "offered, draws nothing" : "charges";
  };
  const cars = (state) => {
    const heads = ["station", "", "of the cable", "A ", "kW offered ", "kW drawn ", "kWh so far ", "kWh asked for ", "since", "until"];
    const there = state.stations.filter((station) => station.plugged);
    const body = table("cars", "Cars that are plugged in", heads);
    there.forEach((car) => {
      const row = make(body, "tr");
      make(row, "td", {}, car.id);
      make(row, "td", {}, condition(car));
      const drawn = known(car.drawn_kw) ? car.drawn_kw / car.max_kw : null;
      bar(make(row, "td"), car.offered_a / car.max_a, drawn, `${car.offered_a} of ${car.max_a} A`);
      [String(car.offered_a), kw(car.offered_kw), kw(car.drawn_kw), kw(car.delivered_kwh), kw(car.requested_kwh)]
        .forEach((text) => make(row, "td", { class: "number" }, text));
      [car.arrival, car.stated_departure].forEach((time) => make(row, "td", {}, known(time) ? time.slice(0, 16) : "–"));
    });
    const free = state.stations.filter((station) => !station.plugged).map((station) => station.id);
    make(place("cars"), "p", { class: "note" }, free.length ? `Without a car: ${free.join(", ")}.` : "Every station has a car.");
  };

  const limits = (state) => {
    const body = table("limits", "Limits and what is offered below them", ["limit", "", "offered ", "at most "]);
    state.limits.forEach((limit) => {
      const row = make(body, "tr");
      make(row, "td", {}, limit.name);
      bar(make(row, "td"), limit.limit ? limit.used / limit.limit : limit.used && 2, null, `${limit.used} of ${limit.limit} ${limit.unit}`);
      [limit.used, limit.limit].forEach((value) => make(row, "td", { class: "number" }, `${kw(value)} ${limit.unit}`));
    });
  };

  const history = (state) => {
    const rows = state.history;
    const figure = make(place("history"), "figure", { class: "plot wide", style: "margin:0" });
    make(figure, "h3", {}, "Power offered, drawn, and the feeder's");
    const canvas = make(figure, "div", { class: "canvas", role: "img", "aria-label": "Power over the last decisions" });
    const [width, height] = [canvas.clientWidth || 900, canvas.clientHeight || 300];
    const svg = make(canvas, "svg", { viewBox: `0 0 ${width} ${height}` });
    const series = [["offered_kw", 1, "", "offered"], ["drawn_kw", 2, "", "drawn"], ["capacity_kw", 12, "7 4", "the feeder"]];
    if (rows.length > 1) {
      const most = Math.max(...rows.flatMap((row) => series.map(([name]) => row[name] || 0)), 0.1) * 1.05;
      const [from, to] = [rows[0].time, rows[rows.length - 1].time];
      const x = (time) => 46 + ((time - from) / (to - from || 1)) * (width - 60);
      const y = (value) => height - 28 - (value / most) * (height - 62);
      [0, most / 2, most].forEach((value) => {
        make(svg, "line", { class: "grid", x1: 46, x2: width - 14, y1: y(value), y2: y(value) });
        make(svg, "text", { x: 40, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(1));
      });
      [["start", from], ["end", to]].forEach(([anchor, time]) => make(svg, "text", { class: "axis", x: x(time), y: height - 8, "text-anchor": anchor }, clock(time)));
      make(svg, "text", { class: "axis", x: 2, y: 12 }, "power (kW)");
      series.forEach(([name, colour, dash]) => {
        const shown = rows.filter((row) => known(row[name]));
        const corners = shown.flatMap((row, i) => (i ? [[row.time, shown[i - 1][name]], [row.time, row[name]]] : [[row.time, row[name]]]));
        const path = corners.map(([time, value], i) => `${i ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("");
        make(svg, "path", { class: "line", d: path, style: `stroke:var(--series-${colour});stroke-width:2;stroke-dasharray:${dash || "none"}` });
      });
    }
    const legend = make(figure, "figcaption", { class: "legend" });
    series.forEach(([, colour, , name]) => {
      make(legend, "span", { style: "margin-right:1rem" });
      make(legend.lastChild, "i", { style: `background:var(--series-${colour})` });
      legend.lastChild.append(name);
    });
  };

  const warnings = (state) => {
    const list = make(place("warnings"), "ul");
    (state.warnings.length ? state.warnings : ["None."]).forEach((text) => make(list, "li", {}, text));
  };

  let shown = "";
  const follow = async () => {
    try {
      const answer = await fetch("state", { cache: "no-store" });
      const text = await answer.text();
      if (text !== shown) {
        const state = JSON.parse(text);
        ["cards", "cars", "limits", "history", "warnings"].forEach((id) => place(id).replaceChildren());
        [cards, cars, limits, history, warnings].forEach((draw) => draw(state));
        shown = text;
      }
      document.body.dataset.live = "yes";
    } catch (error) {
      if (document.body.dataset.live !== "no") {
        place("cards").prepend(Object.assign(document.createElement("p"), { className: "lead", textContent: "The controller does not answer; this is what it said last." }));
      }
      [document.body.dataset.live, shown] = ["no", ""];
    }
    setTimeout(follow, 2000);
  };
  follow();
})();
