"use strict";
(() => {
  const place = (id) => document.getElementById(id);
  const make = (parent, name, attributes = {}, text = "") => {
    const node = document.createElement(name);
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
    node.textContent = text;
    parent.append(node);
    return node;
  };
  const known = (value) => value !== null && value !== undefined;
  const kw = (value) => (known(value) ? value.toFixed(1) : "–");
  const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

  // A bar in a cell of a table, red above 1.
  const bar = (part, words) => (cell) =>
    make(cell, "meter", { value: part, title: words, ...(part > 1.0001 ? { low: 0.25, high: 0.5, optimum: 0 } : {}) });

  // A heading that ends with a space marks a column of numbers; a cell is text or a function.
  const table = (id, caption, heads, rows) => {
    const own = make(make(place(id), "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }), "table");
    make(own, "caption", {}, caption);
    const kinds = heads.map((head) => (head.endsWith(" ") ? { class: "number" } : {}));
    const [top, body] = [make(make(own, "thead"), "tr"), make(own, "tbody")];
    heads.forEach((head, i) => make(top, "th", { scope: "col", ...kinds[i] }, head.trim()));
    rows.forEach((cells) => {
      const row = make(body, "tr");
      cells.forEach((cell, i) => (typeof cell === "string" ? make(row, "td", kinds[i], cell) : cell(make(row, "td"))));
    });
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
    const names = (stations) => stations.map((station) => station.id).join(", ");
    const cars = state.stations.filter((station) => station.plugged);
    const wait = names(cars.filter((car) => !car.offered_a && !car.full));
    const by = state.decided_by;
    card("Power offered", `${kw(state.offered_kw)} kW`, `of ${kw(state.capacity_kw)} kW`, "");
    card("Cars", String(cars.length), `of ${state.stations.length} stations`, wait ? `waiting: ${wait}` : "no car waits");
    card("Decided by", by || "nothing yet", "", known(state.decided) ? `at ${clock(state.decided)}` : "", by === "none" ? "fails" : "holds");
    card("Trust in the policy", `${Math.round(100 * state.trust)} %`, `the rest: ${state.baseline}`, state.why);
    if (!state.ocpp) return;
    const away = state.stations.filter((station) => !station.connected);
    card("Charge points", String(state.stations.length - away.length), "connected", away.length ? `away: ${names(away)}` : "", away.length ? "open" : "holds");
  };

  const condition = (car) => {
    if (!car.offered_a) return car.full ? "full" : "waits";
    return known(car.drawn_kw) && car.drawn_kw < 0.1 ? "offered, draws nothing" : "charges";
  };
  const cars = (state) => {
    const heads = ["station", "", "of the cable", "A offered ", "A confirmed ", "kW offered ", "kW drawn ", "kWh so far ", "kWh asked for ", "since", "until"];
    const minutes = (time) => (known(time) ? time.slice(0, 16) : "–");
    const rows = state.stations.filter((station) => station.plugged).map((car) => [
      car.id, condition(car),
      bar(car.offered_a / car.max_a, `${car.offered_a} of ${car.max_a} A`),
      String(car.offered_a), known(car.confirmed_a) ? String(car.confirmed_a) : "–", kw(car.offered_kw), kw(car.drawn_kw), kw(car.delivered_kwh), kw(car.requested_kwh),
      minutes(car.arrival), minutes(car.stated_departure),
    ]);
    table("cars", "Cars that are plugged in", heads, rows);
    const free = state.stations.filter((station) => !station.plugged).map((station) => station.id);
    make(place("cars"), "p", { class: "note" }, free.length ? `Without a car: ${free.join(", ")}.` : "Every station has a car.");
  };

  const limits = (state) => {
    const rows = state.limits.map(({ name, used, limit, unit, source, age_s }) => {
      const part = limit ? used / limit : used && 2;
      const since = known(age_s) ? `${source}, ${Math.round(age_s)} s old` : source;
      return [name, bar(part, `${used} of ${limit} ${unit}`), `${kw(used)} ${unit}`, `${kw(limit)} ${unit}`, since];
    });
    const taken = state.ocpp ? "may flow " : "offered ";
    table("limits", "Limits and the power below them", ["limit", "", taken, "at most ", "by"], rows);
  };

  const warnings = (state) =>
    make(place("warnings"), "p", { style: "white-space:pre-line" }, state.warnings.join("\n") || "None.");

  let shown = "";
  const follow = async () => {
    try {
      const text = await (await fetch("state", { cache: "no-store" })).text();
      if (text !== shown) {
        const state = JSON.parse(text);
        ["cards", "cars", "limits", "warnings"].forEach((id) => place(id).replaceChildren());
        [cards, cars, limits, warnings].forEach((draw) => draw(state));
        shown = text;
      }
    } catch (error) {
      if (shown) make(place("cards"), "p", { class: "lead" }, "The controller does not answer; this is its last known state.");
      shown = "";
    }
    setTimeout(follow, 2000);
  };
  follow();
})();
