// Draws a report's figures from the numbers in the page, and again whenever something is switched, hidden or zoomed; a live
// page also asks for newer numbers. Names and texts are only ever set as text, never as HTML.
"use strict";
(() => {
  const COLOURS = 7;
  const DASHES = ["", "", "", "", "7 4", "2 3", "9 3 2 3"]; // as the fifth line may lie on the fourth
  const LAPS = ["", "1 5", "16 5"]; // the dashes of the next seven groups, which have the same colours, and of those after them
  const state = { cost: "trips", metric: "", hidden: new Set(), zoom: {}, cursor: null, dragging: false };
  let figures = null;

  // ── elements ──────────────────────────────────────────────────────────────────────────────────────────────────────

  function element(name, attributes = {}, ...children) {
    const made = name.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
      : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (typeof value === "function") made.addEventListener(key, value);
      else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }
  const slot = (name) => document.querySelector(`[data-figure="${name}"]`);
  const lap = (group) => Math.floor(group / COLOURS);
  const chip = (group) => element("span", { class: "chip", "data-group": group % COLOURS, "data-lap": lap(group) });
  const shown = () => figures.groups.map((_, i) => i).filter((i) => !state.hidden.has(figures.groups[i].name));

  // ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  function plain(value, digits = 4) {
    const [short, size] = [Number(value.toPrecision(digits)), Math.abs(value)];
    return size && (size < 1e-6 || size >= 1e12) ? short.toExponential() : short.toLocaleString("en", { maximumFractionDigits: 8 });
  }
  const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
  function onAxis(value, more = 0) {
    if (Math.abs(value) >= 1e12) return plain(value);
    for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= size * (size === 1e3 ? 10 : 1)) return plain(value / size, 4 + more) + letter;
    return plain(value, 4 + more);
  }
  function ticks(low, high, about) {
    const raw = (high - low) / Math.max(about, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10].map((factor) => factor * power);
    let at = steps.findIndex((s) => s >= raw * 0.999);
    const count = (s) => Math.floor(high / s + 1e-9) - Math.ceil(low / s - 1e-9) + 1;
    while (at > 0 && count(steps[at]) < 2) at--;  // a single tick says nothing of an axis
    const [step, found] = [steps[at], []];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  // [value, text] of ticks, with as few digits as tell them apart; no text twice, where even the most don't
  function labelled(values, write) {
    let texts = [];
    for (let digits = 0; digits <= 4; digits++) {
      texts = values.map((value) => write(value, digits));
      if (new Set(texts).size === texts.length) break;
    }
    return values.map((value, i) => [value, texts[i]]).filter(([, text], i) => texts.indexOf(text) === i);
  }

  // ── a chart: axes, a cursor that reads values, and zoom ───────────────────────────────────────────────────────────

  // name, label    its key, and what a screen reader says
  // x, y           the whole range, and a function from the visible range of x to that of y
  // draw, read     marks in a layer; what stands at an x: {at, title, rows: [{group, text, y}]}
  // zoom           charts of one name are zoomed together; null: not at all
  function chart(spec) {
    const box = element("div", { class: "chart", "data-chart": spec.name, tabindex: 0, role: "group", "aria-label": spec.label });
    const tip = element("div", { class: "tip", role: "status", hidden: true });
    const width = Math.max(spec.width, 200);
    const [top, right, bottom, left] = [10, spec.names ? 28 : 12, spec.xTitle ? 42 : spec.bare ? 8 : 24, 56];
    const [x0, x1] = (spec.zoom && state.zoom[spec.zoom]) || spec.x;
    const [y0, y1] = spec.y(x0, x1);
    const inner = { left, right: width - right, top, bottom: spec.height - bottom };
    const X = (value) => inner.left + ((value - x0) / (x1 - x0 || 1)) * (inner.right - inner.left);
    const Y = (value) => inner.bottom - ((value - y0) / (y1 - y0 || 1)) * (inner.bottom - inner.top);
    const back = (pixel) => x0 + (clamp((pixel - inner.left) / (inner.right - inner.left), 0, 1)) * (x1 - x0);

    const svg = element("svg:svg", { viewBox: `0 0 ${width} ${spec.height}`, "aria-hidden": "true", focusable: "false" });
    const clip = `clip-${spec.name.replace(/[^a-z0-9]/gi, "-")}`;
    svg.append(
      element("svg:clipPath", { id: clip },
        element("svg:rect", { x: left, y: 0, width: inner.right - left, height: inner.bottom + 1 })));
    for (const [value, text] of labelled(ticks(y0, y1, Math.max(2, Math.round((inner.bottom - top) / 55))), spec.yText)) {
      svg.append(element("svg:line", { class: "grid", x1: left, x2: inner.right, y1: Y(value), y2: Y(value) }),
        element("svg:text", { x: left - 8, y: Y(value) + 4, "text-anchor": "end" }, text));
    }
    if (!spec.bare || spec.xTitle)
      for (const [value, text] of labelled(ticks(x0, x1, Math.max(4, Math.round(width / 110))).filter((v) => !spec.whole || Number.isInteger(v)), onAxis))
        svg.append(element("svg:text", { x: X(value), y: inner.bottom + 17, "text-anchor": "middle" }, text));
    svg.append(element("svg:line", { class: "base", x1: left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
    if (spec.xTitle) svg.append(element("svg:text", { x: inner.right, y: spec.height - 4, "text-anchor": "end" }, spec.xTitle));
    const layer = element("svg:g", { "clip-path": `url(#${clip})` });
    const above = element("svg:g");
    svg.append(layer, above);
    spec.draw({ layer, above, X, Y, x0, x1, inner, width });
    const pointer = element("svg:g");
    svg.append(pointer);
    box.append(svg, tip);

    function read(x) {
      const found = spec.read(x, x0, x1);
      pointer.replaceChildren();
      if (!found) return hide();
      state.cursor = { chart: spec.name, x };
      pointer.append(element("svg:line", { class: "cursor", x1: X(found.at), x2: X(found.at), y1: top, y2: inner.bottom }));
      for (const row of found.rows)
        if (row.y !== undefined && row.y >= y0 && row.y <= y1)
          pointer.append(element("svg:circle", { class: "dot", "data-group": row.group % COLOURS, cx: X(found.at), cy: Y(row.y), r: 4 }));
      tip.replaceChildren(element("b", {}, found.title),
        ...found.rows.map((row) => element("div", {}, row.bare ? null : chip(row.group),
          element("span", {}, row.name === undefined ? null : element("bdi", { dir: "ltr" }, row.name), row.text))));
      tip.hidden = false;
      const scale = box.clientWidth / width || 1;
      const at = X(found.at) * scale;
      const beside = at + 14 + tip.offsetWidth <= box.clientWidth ? at + 14 : at - 14 - tip.offsetWidth;
      const across = clamp(beside, 0, Math.max(0, box.clientWidth - tip.offsetWidth));
      const down = found.rows.length > 1 && box.clientWidth < 560 ? svg.clientHeight : top; // on a phone it would hide the curves
      tip.style.transform = `translate(${Math.round(across)}px, ${Math.round(down)}px)`;
    }
    function hide() {
      tip.hidden = true;
      pointer.replaceChildren();
      if (state.cursor && state.cursor.chart === spec.name) state.cursor = null;
    }
    function zoomTo(range) {
      const span = spec.x[1] - spec.x[0];
      let [low, high] = range || spec.x;
      [low, high] = [clamp(low, ...spec.x), clamp(high, ...spec.x)];
      if (high - low < span * 1e-4) return render(); // as far as it goes
      if (high - low > span * 0.999) delete state.zoom[spec.zoom];
      else state.zoom[spec.zoom] = [low, high];
      render();
    }

    let from = null;
    const at = (event) => {
      const bounds = svg.getBoundingClientRect();
      return ((event.clientX - bounds.left) / (bounds.width || 1)) * width;
    };
    const zooming = (event) => spec.zoom && from !== null && Math.abs(at(event) - from) > 6;
    box.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      from = at(event);
      state.dragging = true;
      if (event.pointerType !== "touch") svg.setPointerCapture(event.pointerId);
      read(back(from));
    });
    box.addEventListener("pointermove", (event) => {
      if (!zooming(event)) return read(back(at(event)));
      hide();
      const [low, high] = [back(Math.min(from, at(event))), back(Math.max(from, at(event)))];
      pointer.replaceChildren(
        element("svg:rect", { class: "selection", x: X(low), y: top, width: X(high) - X(low), height: inner.bottom - top }));
    });
    box.addEventListener("pointerup", (event) => {
      const range = zooming(event) ? [back(from), back(at(event))].sort((a, b) => a - b) : null;
      from = null;
      state.dragging = false;
      if (range) zoomTo(range);
    });
    box.addEventListener("pointercancel", () => { from = null; state.dragging = false; hide(); });
    box.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
    box.addEventListener("blur", hide);
    if (spec.zoom) box.addEventListener("dblclick", () => zoomTo(null));
    box.addEventListener("keydown", (event) => {
      const here = state.cursor && state.cursor.chart === spec.name ? state.cursor.x : (x0 + x1) / 2;
      const step = spec.step || (x1 - x0) / 50;
      const keys = {
        ArrowLeft: () => read(clamp(here - step, x0, x1)), ArrowRight: () => read(clamp(here + step, x0, x1)),
        Home: () => read(x0), End: () => read(x1),
        "+": () => spec.zoom && zoomTo([here - (x1 - x0) / 4, here + (x1 - x0) / 4]),
        "-": () => spec.zoom && zoomTo([here - (x1 - x0), here + (x1 - x0)]),
        Escape: () => { hide(); if (spec.zoom) zoomTo(null); },
      };
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    box.again = () => { if (state.cursor && state.cursor.chart === spec.name && !spec.gone) read(state.cursor.x); };
    return box;
  }

  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  function resetButton(zoom) {
    return element("button", { type: "button", "data-reset": zoom, hidden: !state.zoom[zoom], click: () => { delete state.zoom[zoom]; render(); } },
      "Reset zoom");
  }

  // ── learning curves ───────────────────────────────────────────────────────────────────────────────────────────────

  function valueAt(line, x) {
    const { xs, ys } = line;
    let [low, high] = [0, xs.length - 1];
    if (x <= xs[low]) return ys[low];
    if (x >= xs[high]) return ys[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low] || 1);
  }

  // Mean, lowest and highest over the runs of a group; a run that has stopped keeps its last value.
  function overSeeds(runs, cost, metric) {
    const lines = runs.map((run) => {
      const rows = (run[metric] || []).map((value, i) => [run[cost][i], value]).filter(([, value]) => value !== null);
      return { xs: rows.map(([x]) => x), ys: rows.map(([, y]) => y) };
    }).filter((line) => line.xs.length);
    const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
    const ys = xs.map((x) => lines.map((line) => valueAt(line, x)));
    return {
      seeds: lines.length, xs, end: Math.max(0, ...runs.map((run) => run[cost][run[cost].length - 1] || 0)), // finite or not
      mean: ys.map((values) => values.reduce((a, b) => a + b, 0) / values.length),
      low: ys.map((values) => Math.min(...values)), high: ys.map((values) => Math.max(...values)),
    };
  }

  function drawCurves() {
    const into = slot("curves");
    if (!into || !figures.metrics.length) return;
    if (!figures.metrics.includes(state.metric)) state.metric = figures.metrics[0];
    const { cost, metric } = state;
    const groups = shown().map((group) => ({ group, ...overSeeds(figures.curves[group], cost, metric) })).filter((g) => g.xs.length);
    const share = metric.endsWith(" accuracy");
    const written = (value) => (share ? percent(value) : plain(value));
    const targets = figures.targets.filter((target) => target.metric === metric).map((target) => target.value);
    const end = Math.max(0, ...groups.map((g) => g.end)) || 1;

    function range(x0, x1) {
      const seen = [];
      for (const g of groups) {
        g.xs.forEach((x, i) => { if (x >= x0 && x <= x1) seen.push(g.low[i], g.high[i]); });
        for (const x of [x0, x1])
          if (x >= g.xs[0] && x <= g.xs[g.xs.length - 1]) seen.push(valueAt({ xs: g.xs, ys: g.mean }, x));
      }
      if (!state.zoom.curves || !seen.length) seen.push(...targets);
      const low = seen.reduce((a, b) => Math.min(a, b), Infinity);
      const high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!Number.isFinite(low)) return [0, 1];
      const pad = (high - low || Math.abs(high) || 1) * 0.06;
      return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + 2 * pad];
    }

    function draw({ layer, above, X, Y, x0, x1, inner, width }) {
      for (const target of targets) {
        layer.append(element("svg:line", { class: "target", x1: inner.left, x2: inner.right, y1: Y(target), y2: Y(target) }));
        if (Y(target) > inner.top && Y(target) < inner.bottom)
          above.append(element("svg:text", { x: inner.left + 6, y: Y(target) - 6 }, `target ${+(100 * target).toFixed(2)} %`));
      }
      for (const g of groups) {
        const mine = { "data-group": g.group % COLOURS, "data-name": figures.groups[g.group].name };
        if (g.seeds > 1) {
          const edge = [...g.xs.map((x, i) => [X(x), Y(g.high[i])]), ...g.xs.map((x, i) => [X(x), Y(g.low[i])]).reverse()];
          layer.append(element("svg:path", { class: "band", ...mine, d: path(edge) + "Z" }));
        }
      }
      for (const g of groups)
        layer.append(element("svg:path", {
          class: "line", "data-group": g.group % COLOURS, "data-name": figures.groups[g.group].name,
          "stroke-dasharray": LAPS[lap(g.group) % LAPS.length] || DASHES[g.group % COLOURS] || null, d: path(g.xs.map((x, i) => [X(x), Y(g.mean[i])])),
        }));
      for (const g of groups) // a line through one point is not to be seen
        if (g.xs.length === 1 && g.xs[0] >= x0 && g.xs[0] <= x1)
          above.append(element("svg:circle", { class: "dot", "data-group": g.group % COLOURS, cx: X(g.xs[0]), cy: Y(g.mean[0]), r: 4 }));
      const placed = [];
      for (const g of width < 560 || groups.length < 2 ? [] : groups) { // a name beside the end of each line, where there is room
        const last = g.xs.reduce((found, x, i) => (x >= x0 && x <= x1 ? i : found), -1);
        if (last < 0) continue;
        const name = figures.groups[g.group].name;
        const text = name.length > 24 ? name.slice(0, 23) + "…" : name;
        const [long, px, py] = [text.length * 7.2, X(g.xs[last]), Y(g.mean[last])];
        above.append(element("svg:circle", { class: "dot", "data-group": g.group % COLOURS, cx: px, cy: py, r: 3.5 }));
        const places = [-10, 18, -26, 34, -42, 50].flatMap((dy) => [[px - long / 2, py + dy], [px + 8, py + dy], [px - long - 8, py + dy]]);
        const free = places.find(([x, y]) => x > inner.left && x + long < width - 2 && y > 12 && y < inner.bottom - 4
          && placed.every((p) => x + long < p.x || x > p.x + p.long || Math.abs(y - p.y) > 14));
        if (!free) continue;
        placed.push({ x: free[0], y: free[1], long });
        above.append(element("svg:text", { class: "name", x: free[0], y: free[1] }, text));
      }
    }

    function read(x, x0, x1) {
      let at = null;
      for (const g of groups)
        for (const candidate of g.xs)
          if (candidate >= x0 && candidate <= x1 && (at === null || Math.abs(candidate - x) < Math.abs(at - x))) at = candidate;
      if (at === null) return null;
      const rows = groups.filter((g) => at >= g.xs[0] && at <= g.xs[g.xs.length - 1]).map((g) => {
        const [mean, low, high] = ["mean", "low", "high"].map((name) => valueAt({ xs: g.xs, ys: g[name] }, at));
        const spread = g.seeds > 1 ? ` (${written(low)} to ${written(high)})` : "";
        return { group: g.group, y: mean, name: figures.groups[g.group].name, text: `: ${written(mean)}${spread}` };
      });
      return { at, title: `${plain(at, 6)} ${figures.costs[cost]}`, rows };
    }

    const controls = element("div", { class: "controls" },
      choice("against", "against", Object.entries(figures.costs), cost, (value) => { state.cost = value; delete state.zoom.curves; }),
      figures.metrics.length > 1 ? choice("metric", "metric", figures.metrics.map((m) => [m, m]), metric, (value) => { state.metric = value; }) : null,
      resetButton("curves"));
    const drawn = chart({
      name: "curves", zoom: "curves", names: true, width: into.clientWidth, height: clamp(into.clientWidth * 0.5, 260, 460),
      label: `${metric} against ${figures.costs[cost]}; arrow keys read values, plus and minus zoom, escape resets`,
      x: [0, end * 1.015], y: range, xTitle: figures.costs[cost], yText: (v, digits) => (share ? percent(v, digits) : onAxis(v, digits)), draw, read,
    });
    const several = groups.some((g) => g.seeds > 1);
    const said = `${metric}${several ? ": mean over seeds, with the lowest and highest as a band; a run that has stopped keeps its last value" : ""}.`;
    into.replaceChildren(controls, element("figure", {}, drawn,
      element("figcaption", {}, said), element("p", { class: "hint" }, "Point to read values, drag to zoom, double-click to see all again.")));
    drawn.again();
  }

  function choice(name, legend, options, chosen, choose) {
    const set = element("fieldset", { class: "switch" }, element("legend", {}, legend));
    for (const [value, text] of options) {
      const id = `${name}-${value.replace(/[^a-z0-9]/gi, "-")}`;
      set.append(
        element("input", { type: "radio", name, id, value, checked: value === chosen, change: () => { choose(value); render(); } }),
        element("label", { for: id }, text));
    }
    return set;
  }

  // ── active trips ──────────────────────────────────────────────────────────────────────────────────────────────────

  function drawActive() {
    const into = slot("active");
    if (!into) return;
    const groups = shown().filter((group) => figures.active[group].mean.length);
    const end = Math.max(1e-9, ...groups.map((group) => figures.active[group].until));
    const most = Math.max(1, ...groups.flatMap((group) => figures.active[group].high));
    const strips = groups.map((group, place) => {
      const { until, mean, low, high } = figures.active[group];
      const { name, seeds } = figures.groups[group];
      const edge = (i) => (until * i) / mean.length;
      const drawn = chart({
        name: `active ${group}`, zoom: "active", width: into.clientWidth, height: place === groups.length - 1 ? 124 : 90,
        label: `${name}: active trips over virtual time`, bare: true, xTitle: place === groups.length - 1 ? "virtual time" : "",
        x: [0, end * 1.015], y: () => [0, most * 1.08], yText: onAxis,
        draw: ({ layer, X, Y }) => {
          const steps = (values) => values.flatMap((value, i) => [[X(edge(i)), Y(value)], [X(edge(i + 1)), Y(value)]]);
          layer.append(
            element("svg:path", { class: "band", "data-group": group % COLOURS, d: path([...steps(high), [X(until), Y(0)], [X(0), Y(0)]]) + "Z" }),
            element("svg:path", { class: "area", "data-group": group % COLOURS, d: path([...steps(high), ...steps(low).reverse()]) + "Z" }),
            element("svg:path", { class: "line", "data-group": group % COLOURS, "data-name": name, d: path(steps(mean)) }));
        },
        read: (x) => {
          if (x > until) return null;
          const i = clamp(Math.floor((x / until) * mean.length), 0, mean.length - 1);
          const spread = high[i] > low[i] ? ` (${plain(low[i])} to ${plain(high[i])})` : "";
          return { at: (edge(i) + edge(i + 1)) / 2, title: `virtual time ${plain(edge(i))} to ${plain(edge(i + 1))}`,
            rows: [{ group, y: mean[i], text: `${plain(mean[i])} active${spread}` }] };
        },
      });
      const average = mean.reduce((a, b) => a + b, 0) / mean.length;
      const seed = seeds.length > 1 ? `, seed ${seeds[0]}` : "";
      return element("div", { class: "strip" },
        element("h3", {}, element("span", {}, chip(group), name), element("small", {}, `${plain(average, 3)} on average${seed}`)), drawn);
    });
    into.replaceChildren(element("div", { class: "controls" }, resetButton("active")), ...strips);
    strips.forEach((strip) => strip.lastChild.again());
  }

  // ── histograms ────────────────────────────────────────────────────────────────────────────────────────────────────

  function histogram(kind, group, width, words) {
    const h = figures[kind][group];
    const { name } = figures.groups[group];
    if (!h) return `no ${words.of}`;
    if (h.low === h.high && !h.behind) return `${words.title} ${plain(h.low)} for all ${plain(h.total, 9)} ${words.of}`;
    const half = h.whole && h.step === 1 ? 0.5 : 0;
    const edge = (i) => h.first + h.step * i - half;
    const shares = (counts) => { const total = counts.reduce((a, b) => a + b, 0); return counts.map((count) => count / total); };
    const [own, behind] = [shares(h.counts), h.behind ? shares(h.behind) : null];
    const most = Math.max(...own, ...(behind || [0]));
    const span = (i) => {
      const [low, high] = [h.first + h.step * i, h.first + h.step * (i + 1) - (h.whole ? 1 : 0)];
      return low === high ? plain(low) : `${plain(low)} to ${plain(high)}`;
    };
    const drawn = chart({
      name: `${kind} ${group}`, zoom: null, width, height: 150, step: h.step, whole: h.whole,
      label: `${name}: ${words.title}, mean ${plain(h.mean)}; arrow keys read values`,
      x: [edge(0), edge(own.length)], y: () => [0, most * 1.08], xTitle: words.axis, yText: percent,
      draw: ({ layer, X, Y }) => {
        own.forEach((share, i) => layer.append(element("svg:rect", {
          class: "bin", "data-group": group % COLOURS, x: X(edge(i)) + 0.5, width: Math.max(0.5, X(edge(i + 1)) - X(edge(i)) - 1), y: Y(share), height: Y(0) - Y(share),
        })));
        if (behind)
          layer.append(element("svg:path", { class: "behind", d: path(behind.flatMap((share, i) => [[X(edge(i)), Y(share)], [X(edge(i + 1)), Y(share)]])) }));
      },
      read: (x) => {
        const i = clamp(Math.floor((x + half - h.first) / h.step), 0, own.length - 1);
        const rows = [{ group, text: `${plain(h.counts[i], 9)} ${words.of}, ${percent(own[i])}` }];
        if (behind) rows.push({ bare: true, text: `of all trips ${percent(behind[i])}` });
        return { at: (edge(i) + edge(i + 1)) / 2, title: `${words.title} ${span(i)}`, rows };
      },
    });
    return element("figure", {}, drawn,
      element("figcaption", {}, `mean ${plain(h.mean, 3)}, at most ${plain(h.high)}${behind ? "; dashed: all trips that ended" : ""}`));
  }

  function drawPairs(into, first, second) {
    if (!into) return;
    const pairs = shown().map((group) => {
      const pair = element("div", { class: "pair" }, element("h3", {}, element("span", {}, chip(group), figures.groups[group].name)));
      pair.group = group;
      return pair;
    });
    into.replaceChildren(element("div", { class: "pairs" }, ...pairs));
    for (const pair of pairs) {
      const columns = getComputedStyle(pair).gridTemplateColumns.split(" ").length;
      const width = columns > 1 ? (into.clientWidth - 32) / 2 : into.clientWidth;
      const made = [first, second].map((words) => histogram(words.kind, pair.group, width, words));
      const said = made.filter((part) => typeof part === "string"); // too little for a figure
      pair.append(...made.filter((part) => typeof part !== "string"));
      if (said.length) pair.firstChild.append(element("small", {}, said.join(", ")));
      pair.querySelectorAll(".chart").forEach((drawn) => drawn.again());
    }
  }

  // ── everything ────────────────────────────────────────────────────────────────────────────────────────────────────

  function drawLegend() {
    const old = document.getElementById("legend");
    const names = figures.groups.map((group) => group.name);
    for (const name of state.hidden) if (!names.includes(name)) state.hidden.delete(name);
    if (names.length < 2) return old && old.remove();
    const legend = element("div", { id: "legend", role: "group", "aria-label": "shown in the figures" });
    names.forEach((name, group) => legend.append(element("button", {
      type: "button", "data-name": name, "aria-pressed": String(!state.hidden.has(name)), title: "show or hide",
      click: () => { if (!state.hidden.delete(name)) state.hidden.add(name); render(); },
    }, chip(group), name)));
    if (old) old.replaceWith(legend);
    else document.getElementById("curves").before(legend);
  }

  function focused() { // what to give the focus back to when everything has been drawn anew
    const { activeElement: now } = document;
    if (!now || now === document.body) return null;
    if (now.dataset.chart) return `[data-chart="${now.dataset.chart}"]`;
    if (now.closest("#legend")) return `#legend button:nth-child(${[...now.parentNode.children].indexOf(now) + 1})`;
    return now.dataset.reset ? `[data-chart^="${now.dataset.reset}"]` : now.id ? `#${now.id}` : null;
  }

  function render() {
    const back = focused();
    drawLegend();
    drawCurves();
    drawActive();
    drawPairs(slot("staleness"),
      { kind: "staleness", title: "staleness", axis: "staleness in server steps", of: "updates" },
      { kind: "weight", title: "weight", axis: "weight s(τ)", of: "updates" });
    drawPairs(slot("participation"),
      { kind: "examples", title: "examples held", axis: "examples held by the clients of used updates", of: "updates" },
      { kind: "participations", title: "updates used per client", axis: "updates used per client", of: "clients" });
    const again = back && document.querySelector(back);
    if (again && again !== document.activeElement) again.focus({ preventScroll: true });
  }

  // ── live ──────────────────────────────────────────────────────────────────────────────────────────────────────────

  function follow(said) {
    let number = 0;
    let over = false;
    async function ask() {
      if (over) return;
      if (!document.hidden && !state.dragging) {
        try {
          const answer = await fetch(`data.json?seen=${number}`, { cache: "no-store" });
          if (answer.status === 200) show(await answer.json());
        } catch {
          said.dataset.state = "lost";
          said.textContent = "no answer from the run: it has ended, or can’t be reached";
        }
      }
      setTimeout(ask, 1000);
    }
    function show(news) {
      number = news.number;
      over = news.state !== "running";
      said.dataset.state = news.state;
      said.textContent = news.text;
      document.querySelector(".lead").textContent = news.lead;
      for (const [name, html] of Object.entries(news.tables)) { // made by our own server, and escaped there
        const place = document.querySelector(`[data-slot="${name}"]`);
        if (place && name !== "settings") place.innerHTML = html;
      }
      figures = news.figures;
      render();
    }
    ask();
  }

  const numbers = document.getElementById("figures");
  if (!numbers) return; // a page of tables and pictures
  figures = JSON.parse(numbers.textContent);
  render();
  let width = document.body.clientWidth;
  addEventListener("resize", () => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; render(); }
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
  const said = document.getElementById("live");
  if (said) follow(said);
})();
