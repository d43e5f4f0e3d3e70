"use strict";
const PERIOD_MS = 1000;
const STUCK_S = 5;   // older prefill calls are shown in red
const COLOURS = ["#3b82d0", "#d9812b", "#3f9d5a", "#b4559b", "#8a6bd1", "#a88a1f", "#2f9ea3", "#cf5560"];
const $ = id => document.getElementById(id);
const esc = value => String(value ?? "").replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const fixed = (value, digits = 1) => value == null ? "–" : value.toFixed(digits);
const quantity = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
const colour = position => position < COLOURS.length ? COLOURS[position] : `hsl(${position * 47 % 360} 50% 50%)`;
const policyText = policy => {
  const parameters = Object.entries(policy.parameters ?? {}).map(([k, v]) => `${k} ${JSON.stringify(v)}`);
  return policy.name + (parameters.length ? ` (${parameters.join(", ")})` : "");
};
const rows = table => table.rows.map(row => Object.fromEntries(table.columns.map((name, i) => [name, row[i]])));

let adminKey = "";   // in memory only: gone with the tab
let live = null;     // newest answer of GET live

// -- calls to the ingress ---------------------------------------------------------------------

async function send(method, path, body) {
  const key = adminKey;
  const headers = key ? {authorization: `Bearer ${key}`} : {};
  const response = await fetch(path, {method, body, headers, cache: "no-store"});
  const content = await response.json().catch(() => ({}));
  if (response.ok) return content;
  if ([401, 403].includes(response.status) && key === adminKey) askForKey();
  throw new Error(content.error?.message ?? `HTTP ${response.status}`);
}

// Show the form for the key; polling stops until there is one.
function askForKey() {
  adminKey = "";
  $("key").hidden = false;
  $("connection").textContent = "waiting for the admin key";
}

// Send a change and show its outcome; return whether it was accepted.
async function change(method, path, body, successText) {
  try {
    await send(method, path, body);
  } catch (error) {
    showMessage(error.message, true);
    return false;
  }
  showMessage(successText);
  await refresh();
  return true;
}

function showMessage(text, bad = false) {
  $("message").textContent = text;
  $("message").className = bad ? "bad" : "good";
}

async function refresh() {
  const key = adminKey;
  try {
    live = await send("GET", "live");
    if (live.live) draw();
    $("key").hidden = true;
    $("connection").textContent = live.router ? `router ${live.router}` : `read at ${new Date().toLocaleTimeString()}`;
    if ($("message").dataset.lost) { showMessage(""); delete $("message").dataset.lost; }
  } catch (error) {
    if (adminKey && key !== adminKey) return;  // the key has changed since this call
    if (adminKey) $("connection").textContent = "not connected";
    showMessage(error.message, true);
    $("message").dataset.lost = "yes";
  }
}

function readPolicy(form) {
  const text = form.elements.parameters.value.trim();
  try { return JSON.stringify({name: form.elements.name.value, parameters: text ? JSON.parse(text) : {}}); }
  catch { showMessage("The parameters are not a JSON object.", true); }
}

// -- drawing --------------------------------------------------------------------------------------

function draw() {
  document.querySelector("main").hidden = false;
  $("model").textContent = live.model;
  $("policy").textContent = policyText({name: live.policy, parameters: live.parameters});
  for (const id of ["shadow-name", "policy-name"]) options($(id), live.policies);
  drawSaving(live.comparison, live.step_cost);
  drawPath(live);
  drawWorkers(live);
  drawLatency("tpot");
  drawLatency("ttft");
  drawSpace(live.live.space);
  drawSettings(live);
}

function options(select, names) {
  if (select.options.length) return;
  for (const name of names) select.add(new Option(name, name));
  select.value = select.id === "policy-name" ? live.policy
    : live.comparison.now?.shadow.name ?? (live.policy === "shortest-queue" ? "marginal-cost" : "shortest-queue");
}

// Return whether the confidence interval excludes 0.
function isSignificant(comparison) { return comparison.low_pct != null && comparison.low_pct * comparison.high_pct > 0; }

function verdict(comparison) {
  if (comparison.tokens == null) return "No token has been priced yet.";
  const percent = `${fixed(Math.abs(comparison.change_pct))} %`;
  const ends = [comparison.low_pct, comparison.high_pct].map(end => comparison.change_pct <= 0 ? -end : end).sort((a, b) => a - b);
  const interval = comparison.low_pct == null ? "" : ` [${fixed(ends[0])}, ${fixed(ends[1])}]`;
  const changeText = `${percent} ${comparison.change_pct <= 0 ? "less" : "more"}${interval}`;
  if (comparison.low_pct == null) return `Too few tokens for an interval: ${changeText}`;
  if (!isSignificant(comparison)) return `No significant difference: ${changeText}`;
  return `${percent} ${comparison.change_pct <= 0 ? "less" : "more"} decode step time per token${interval}`;
}

function measuredText({live_ms, measured_ms}) {
  if (measured_ms == null) return "";
  const off = 100 * (live_ms / measured_ms - 1);
  return `The engines measured ${fixed(measured_ms, 2)} ms for the live policy: the price is
    ${fixed(Math.abs(off))} % too ${off > 0 ? "high" : "low"}. `;
}

function drawSaving({now, failed, past}, cost) {
  let html = "<p>No policy is compared with the live one.</p>";
  if (failed) html = `<p class="bad">The shadow failed and is off: ${esc(failed)}</p>`;
  if (now) {
    const kind = !isSignificant(now) ? "" : now.change_pct < 0 ? "good" : "bad";
    html = `<p class="figure ${kind}">${verdict(now)}</p><p>Under <b>${esc(policyText(now.live))}</b>, which is live,
      against <b>${esc(policyText(now.shadow))}</b>, its shadow: the same requests, placed by both.</p>`;
    if (now.tokens != null) {
      const most = Math.max(now.live_ms, now.shadow_ms);
      const bar = (name, ms, fill) => `<span>${esc(name)}</span><div style="background:${fill};
        height:1em;width:${100 * ms / most}%"></div><span>${fixed(ms, 2)} ms</span>`;
      html += `<div class="scale">${bar(now.live.name, now.live_ms, "var(--accent)")}
        ${bar(now.shadow.name, now.shadow_ms, "var(--other)")}</div>
        <p class="faint">Priced over ${quantity(now.tokens, "token")} of the last hour by the step cost fitted to
        ${quantity(Math.round(cost.steps), "step")}${cost.relative_error == null ? ", too few yet, so the default cost is used"
          : `, relative error ${fixed(100 * cost.relative_error)} %`}. ${measuredText(now)}In brackets: the 95 % interval.
        The price does not include queueing, transport, prefill, or waits of engines for each other on shared cores.</p>`;
    }
  }
  $("saving-figures").innerHTML = html;
  $("swap").hidden = $("shadow-off").hidden = !now;
  $("saving-past").innerHTML = past.length ? `<h2>Before</h2><table>
    <tr><th>live</th><th>shadow</th><th>live against shadow</th><th>tokens</th></tr>${past.toReversed().map(comparison => `<tr>
    <td>${esc(policyText(comparison.live))}</td><td>${esc(policyText(comparison.shadow))}</td><td>${verdict(comparison)}</td>
    <td>${comparison.tokens}</td></tr>`).join("")}</table>` : "";
}

function drawPath({live: data, ingress, workers, decode_queue: queue}) {
  const requests = rows(data.requests);
  const dot = r => `<i title="${esc(`${r.id} ${r.domain ?? ""} ${r.generated} of ${r.max_new} tokens`)}"
    style="--done:${Math.min(100, 100 * r.generated / Math.max(1, r.max_new))}%"></i>`;
  const box = (title, count, inside = "", fill = "var(--accent)") => `<div class="box" style="--fill:${fill}">
    <b>${esc(title)}</b> <span>${count}</span><div>${inside}</div></div>`;
  const prefill = Object.entries(ingress.prefill_in_flight);
  const waiting = (count, oldest) => `<span class="${oldest > STUCK_S ? "bad" : ""}">${quantity(count, "request")}${
    count ? `, oldest ${fixed(oldest)} s` : ""}</span>`;
  $("path").innerHTML = `<div class="stage"><h3>ingress</h3>${box("requests here", ingress.in_flight)}</div>
    <div class="stage"><h3>prefill</h3>${prefill.map(([name, n]) => box(short(name),
      waiting(n, ingress.prefill_oldest_s[name] ?? 0))).join("")}</div>
    <div class="stage"><h3>router</h3>${box("decode queue", queue.size,
      requests.filter(r => r.position == null).map(dot).join(""), "var(--other)")}</div>
    <div class="stage grow"><h3>decode</h3>${workers.map(w => box(`worker ${w.position}`,
      `${quantity(w.in_flight, "request")}, ${quantity(w.kv_tokens, "KV token")}`,
      requests.filter(r => r.position === w.position).map(dot).join(""), colour(w.position))).join("")}</div>`;
}

function short(name) { return name.length > 10 ? `…${name.slice(-6)}` : name; }

function drawWorkers({live: data, workers}) {
  const charts = [["batch", "requests per step", 1], ["active_experts", "active experts, mean over layers", 1],
    ["step_ms", "step time, ms", 2]];
  $("workers").innerHTML = workers.map(w => `<div class="worker"><h3 title="${esc(w.worker)}"><i style="background:
    ${colour(w.position)}"></i>worker ${w.position} <span class="faint">${esc(short(w.worker))} ${esc(w.cluster_domain)}
    </span></h3>${charts.map(([key, label]) => `<div><div class="faint">${label}</div><div data-chart="${key}"
    data-worker="${w.position}"></div></div>`).join("")}</div>`).join("");
  const steps = workers.map(w => data.steps[w.worker] ? rows(data.steps[w.worker]) : []);
  for (const [key, , digits] of charts) {
    const most = Math.max(1e-9, ...steps.flat().map(step => step[key] ?? 0));
    workers.forEach((w, i) => {
      const container = document.querySelector(`[data-chart=${key}][data-worker="${w.position}"]`);
      const points = steps[i].filter(s => s.ago_s < 120 && s[key] != null).map(s => [-s.ago_s, s[key]]);
      const newest = points.length ? points.at(-1)[1].toFixed(digits) : "–";
      container.innerHTML = `<b>${newest}</b>` + plot(container.clientWidth, 44, [{points, stroke: colour(w.position)}],
        {from: -120, most, idle: 10, bare: true});
    });
  }
}

function drawLatency(name) {
  const container = $(name);
  const answers = rows(live.live.latency);
  const line = q => answers.filter(a => a[`${name}_${q}_ms`] != null).map(a => [-a.ago_s, a[`${name}_${q}_ms`]]);
  const marks = live.live.changes.map(c => ({at: -c.ago_s, text: c.policy}));
  container.innerHTML = answers.length ? plot(container.clientWidth, 220, [
    {points: line("p99"), stroke: "var(--other)", dash: "4 3"},
    {points: line("p50"), stroke: "var(--accent)"},
  ], {from: -600, idle: 15, marks}) + `<p class="faint">Solid: p50, dashed: p99, of the streams that ended in each 5 s.</p>` : `<p class="faint">No stream has ended in the last ten minutes.</p>`;
}

function tickStep(most) {
  const rough = most / 4, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(n => n * power >= rough);
}

// Split a line where two points are more than `idle` seconds apart.
function splitAtGaps(points, idle) {
  const segments = [];
  for (const [i, point] of points.entries()) {
    if (i === 0 || point[0] - points[i - 1][0] > idle) segments.push([]);
    segments.at(-1).push(point);
  }
  return segments;
}

// Return an SVG of lines over the seconds before now; lines are interrupted by gaps of more than `idle` seconds.
function plot(width, height, lines, {from, most, idle, marks = [], bare = false}) {
  most ??= 1.05 * Math.max(1e-9, ...lines.flatMap(line => line.points.map(p => p[1])));
  const [left, bottom, top] = bare ? [0, 2, 2] : [42, 20, 18];
  const x = s => left + (width - left - 4) * (1 - s / from);
  const y = v => height - bottom - (height - bottom - top) * v / most;
  let inside = "";
  if (!bare) {
    for (let v = 0; v <= most; v += tickStep(most)) {
      inside += `<path class="axis" d="M${left} ${y(v)}H${width}"/><text x="${left - 5}" y="${y(v) + 4}"
        text-anchor="end">${+v.toPrecision(3)}</text>`;
    }
    for (let s = from; s <= 0; s += -from / 5) {
      inside += `<text x="${x(s)}" y="${height - 4}" text-anchor="${s ? "middle" : "end"}">${s ? `${s / 60} min` : "now"}</text>`;
    }
    let next = Infinity;  // omit names that would overlap a newer one
    for (const mark of marks.filter(m => m.at >= from).toReversed()) {
      inside += `<path class="axis" stroke-dasharray="2 3" d="M${x(mark.at)} ${top}V${height - bottom}"/>`;
      if (next - x(mark.at) < 8 * mark.text.length) continue;
      next = x(mark.at);
      inside += `<text class="strong" x="${next}" y="11" text-anchor="${next > width / 2 ? "end" : "start"}">${esc(mark.text)}</text>`;
    }
  }
  for (const {points: part, stroke, dash} of lines.flatMap(line => splitAtGaps(line.points, idle).map(points => ({...line, points})))) {
    const path = part.map(([s, v]) => `${x(s).toFixed(1)} ${y(v).toFixed(1)}`);
    if (path.length === 1) inside += `<circle cx="${path[0].split(" ")[0]}" cy="${path[0].split(" ")[1]}" r="2.5" fill="${stroke}"/>`;
    else inside += `<path d="M${path.join("L")}" fill="none" stroke="${stroke}" stroke-width="1.8"
      stroke-linejoin="round" ${dash ? `stroke-dasharray="${dash}"` : ""}/>`;
  }
  return `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">${inside}</svg>`;
}

function drawSpace({axes, centroids, columns, points}) {
  const container = $("space"), width = container.clientWidth, height = 300;
  const requests = rows({columns, rows: points});
  if (!requests.length) {
    container.innerHTML = `<p class="faint">No signature to draw: the live policy reads none, or none has come.</p>`;
    return;
  }
  const range = (of, size) => {
    const low = Math.min(...of), span = Math.max(...of) - low || 1;
    return v => 14 + (size - 28) * (v - low) / span;
  };
  const x = range([...requests.map(p => p.x), ...centroids.map(c => c[0])], width);
  const y = range([...requests.map(p => p.y), ...centroids.map(c => c[1])], height);
  const newest = requests.at(-1).number;
  container.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">
    ${requests.map(p => {
      const age = newest - p.number;
      return `<circle cx="${x(p.x).toFixed(1)}" cy="${y(p.y).toFixed(1)}" r="${age < 8 ? 6 : 3.2}" fill="${colour(p.position)}"
        opacity="${age < 8 ? 1 : Math.max(.25, .75 - age / 500)}"><title>${esc(p.domain ?? "")} worker ${p.position}</title></circle>`;
    }).join("")}
    ${centroids.map((c, i) => `<g transform="translate(${x(c[0])} ${y(c[1])})"><path d="M-7 0H7M0-7V7" stroke="var(--ink)"
      stroke-width="2"/><text class="strong" x="8" y="-4">${i}</text></g>`).join("")}</svg>
    <p class="faint">${quantity(requests.length, "newest request")}, coloured by the worker that took them, the newest large;
    ${axes === "centroids" ? "crosses are the table's centroids, axes their principal components"
      : "axes: the principal components of the first signatures"}.</p>`;
}

function drawSettings({policy, parameters, table, workers, signatures}) {
  $("settings").innerHTML = `<p>Policy <b>${esc(policyText({name: policy, parameters}))}</b></p><p>${table === null
    ? "No routing table." : `Table version <b>${table.version}</b>, fitted for ${quantity(table.workers_fitted, "worker")}, band
    ${table.band}${table.refit_advised ? `; <span class="bad">${workers.length} workers serve, so a refit is advised</span>` : ""}`}</p>
    ${signatures ? `<p class="faint">Signature pool: ${esc(signatures.note)}${signatures.last_refusal
    ? `; last refusal: ${esc(signatures.last_refusal.why)}` : ""}.</p>` : ""}`;
}

// -- forms and buttons -------------------------------------------------------------------------

$("key").onsubmit = event => {
  event.preventDefault();
  adminKey = $("admin-key").value;
  $("admin-key").value = "";
  $("message").dataset.lost = "yes";
  refresh();
};
$("shadow-form").onsubmit = event => {
  event.preventDefault();
  const body = readPolicy(event.target);
  if (body) change("PUT", "shadow", body, "The comparison has started.");
};
$("shadow-off").onclick = () => change("DELETE", "shadow", undefined, "The comparison has stopped.");
$("swap").onclick = async () => {
  const {live: livePolicy, shadow} = live.comparison.now;
  if (!await change("PUT", "policy", JSON.stringify(shadow), `${shadow.name} is live.`)) return;
  await change("PUT", "shadow", JSON.stringify(livePolicy), `${shadow.name} is live, ${livePolicy.name} is its shadow.`);
};
$("policy-form").onsubmit = event => {
  event.preventDefault();
  const body = readPolicy(event.target);
  if (body) change("PUT", "policy", body, "The policy is changed.");
};
$("table-form").onsubmit = event => {
  event.preventDefault();
  const file = $("table-file").files[0];
  if (file) change("PUT", "table", file, "The table is swapped in.");
  else showMessage("Choose a table file first.", true);
};

askForKey();
(async function poll() {
  if (adminKey && (!document.hidden || !live)) await refresh();
  setTimeout(poll, PERIOD_MS);
})();
