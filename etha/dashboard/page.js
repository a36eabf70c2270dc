// Draws what the server sends. Every text goes through textContent, so nothing in it can become markup or a script.

const byId = (id) => document.getElementById(id);

/** An element with a class and children: texts or elements; null is left out. */
function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children.filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return element;
}

const number = new Intl.NumberFormat("en-US");

function bytes(value) {
  if (value === null || value === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return unit ? `${value.toPrecision(3)} ${units[unit]}` : `${Math.round(value)} B`;
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value >= 119.5) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 9.995) return `${value.toFixed(0)} s`;
  if (value >= 0.9995) return `${value.toPrecision(3)} s`;
  if (value === 0) return "0 s";
  if (value >= 0.0009995) return `${(value * 1e3).toPrecision(3)} ms`;
  return `${Math.round(value * 1e6)} \u00b5s`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const time = (at) => make("time", "", clock.format(new Date(at * 1000)));

const SHADES = {
  formed: "good", registered: "good", idle: "good", open: "good", committed: "good", member: "good", self: "soft", closed: "soft", none: "soft",
  lost: "bad", refused: "bad", failed: "bad", missing: "bad", aborted: "bad", unknown: "bad", "agent silent": "bad", withdrawn: "bad",
  current: "good", open: "good", receiving: "good",
  forming: "warn", waiting: "warn", opening: "warn", changing: "warn", joins: "warn", behind: "warn", enrolling: "warn",
};
const state = (text) => make("span", SHADES[String(text).split(",")[0]] ?? "", text);

function list(items) {
  return items.length > 1 ? make("ul", "", ...items.map((item) => make("li", "", item))) : (items[0] ?? "");
}

const isEmpty = (cell) => cell === "" || cell === null || cell === undefined;

/** A table of rows of cells, or a line that says that there is nothing. A column is [title, class]; empty ones are left out. */
function table(allColumns, allRows, nothing) {
  if (!allRows.length) return make("p", "empty", nothing);
  const filled = allColumns.map((_, at) => allRows.some(({ cells }) => !isEmpty(cells[at])));
  const columns = allColumns.filter((_, at) => filled[at]);
  const rows = allRows.map(({ cells, name }) => ({ cells: cells.filter((_, at) => filled[at]), name }));
  const head = make("tr", "", ...columns.map(([title]) => make("th", "", title)));
  head.querySelectorAll("th").forEach((cell) => { cell.scope = "col"; });
  const body = rows.map(({ cells, name }) => make("tr", name ?? "", ...cells.map((cell, at) => {
    const empty = isEmpty(cell);
    const made = make("td", `${columns[at][1] ?? ""}${empty ? " none" : ""}`.trim(), empty ? "" : cell);
    made.dataset.label = columns[at][0];
    return made;
  })));
  return make("table", "stack", make("thead", "", head), make("tbody", "", ...body));
}

const fill = (id, ...children) => byId(id).querySelector(".body").replaceChildren(...children);
const plain = (cells) => ({ cells });

function tiles(page) {
  const formed = page.pairs.filter((one) => one.state === "formed").length;
  const shown = [
    [page.agents.length, page.agents.length === 1 ? "agent" : "agents", page.agents.length ? "" : "bad"],
    [`${formed}/${page.pairs.length}`, "pairs formed", ""],
    [page.batches.length, page.batches.length === 1 ? "batch here" : "batches here", ""],
    [page.groups.length, page.groups.length === 1 ? "elastic group" : "elastic groups", ""],
    [page.publications.length, page.publications.length === 1 ? "publication" : "publications", ""],
    [page.waiting.length, page.waiting.length === 1 ? "waits" : "wait", page.waiting.length ? "warn" : ""],
    [page.failures, page.failures === 1 ? "failure lately" : "failures lately", page.failures ? "bad" : ""],
  ];
  byId("tiles").replaceChildren(...shown.map(([value, text, name]) => make("li", name, make("b", "", value), make("span", "", text))));
}

function waiting(lines) {
  byId("waiting").hidden = !lines.length;
  byId("waiting").querySelector("ul").replaceChildren(...lines.map((line) => make(
    "li", "", make("b", "", line.where), `: ${line.what} `, make("b", "", line.whom.join(", ")),
    `, for ${seconds(line.seconds)} so far`, line.hint ? make("span", "soft", `. ${line.hint}`) : null,
  )));
}

function bar(transfer) {
  const drawn = make("div", "bar");
  drawn.role = "img";
  const named = transfer.phases.map((value, at) => [value, at]).filter(([value]) => value > 0);
  drawn.ariaLabel = drawn.title = named.map(([value, at]) => `${latest.phases[at]} ${seconds(value)}`).join(", ") || "no phase";
  for (const [value, at] of named) {
    const part = make("span", `p${at}`);
    part.style.flexGrow = String(value / transfer.seconds);
    drawn.append(part);
  }
  return drawn;
}

function transfers(page) {
  byId("legend").replaceChildren(...page.phases.map((name, at) => make("span", "", make("i", `p${at}`), name)));
  fill("transfers", table(
    [["time", "short"], ["batch"], ["number", "short"], ["version"], ["from, to"], ["outcome", "short"], ["bytes", "short"], ["took", "short"], ["phases"], ["what happened", "text"]],
    page.transfers.map((one) => ({
      name: one.failed ? "failed" : "",
      cells: [time(one.at), one.where, one.seq, one.version, one.way, state(one.outcome), bytes(one.bytes), seconds(one.seconds), bar(one), one.failed ? one.text : ""],
    })),
    "No transfer is recorded.",
  ));
}

function links({ columns, rows }) {
  if (!rows.length) { fill("links", make("p", "empty", "No agent of this host answers.")); return; }
  const cell = (one) => {
    const made = make("td", one.broken ? "bad" : "", state(one.state));
    if (one.trip) made.append(` ${seconds(one.trip)}`);
    if (one.sent || one.received) made.append(make("div", "soft", `\u2191 ${bytes(one.sent)} \u2193 ${bytes(one.received)}`));
    if (one.state !== "self" && one.pairs.length) made.append(make("div", "soft", one.pairs.join(", ")));
    if (one.trouble) made.append(make("div", "", one.trouble));
    return made;
  };
  const head = make("tr", "", make("th", "", ""), ...columns.map((name) => make("th", "", name)));
  const body = rows.map((row) => make("tr", "", make("th", "", row.agent), ...row.cells.map(cell)));
  fill("links", make("table", "matrix", make("thead", "", head), make("tbody", "", ...body)));
}

function groups(lines) {
  if (!lines.length) { fill("groups", make("p", "empty", "There is none.")); return; }
  fill("groups", ...lines.flatMap((group) => [
    make("h3", "", group.group, " ", state(group.state), make("span", "soft", ` epoch ${group.epoch}, step ${number.format(group.step)}`)),
    group.waits_for.length ? make("p", "hint", `The next epoch waits ${group.waits_for.join(", ")}.`) : "",
    table(
      [["rank", "short"], ["replica"], ["state", "short"], ["step", "short"], ["processes"]],
      group.replicas.map((one) => plain([one.rank ?? "\u2013", one.replica, state(one.state), number.format(one.step), list(one.where)])),
      "Nobody has joined.",
    ),
  ]));
}

function publications(lines) {
  if (!lines.length) { fill("publications", make("p", "empty", "There is none.")); return; }
  fill("publications", ...lines.flatMap((one) => {
    const newest = one.seq ? `newest version ${one.version ?? one.seq}, number ${number.format(one.seq)}` : "no version yet";
    const age = one.age === null ? "" : `, ${seconds(one.age)} old`;
    const kept = one.kept.length ? `; the publisher keeps ${one.kept.join(", ")} and feeds ${one.places}` : "";
    return [
      make("h3", "", one.publication, " ", state(one.state), make("span", "soft", ` by ${one.publisher || "nobody"}: ${newest}${age}${kept}`)),
      table(
        [["subscriber"], ["state", "short"], ["holds"], ["behind", "short"], ["fed by"], ["last took", "short"], ["feeds"], ["processes"], ["last error", "text"]],
        one.subscribers.map((each) => plain([
          each.subscriber, state(each.state), each.version || "\u2013",
          each.lag ? `${number.format(each.lag)}, for ${seconds(each.lag_seconds)}` : "",
          each.source, each.seconds === null ? "" : seconds(each.seconds), list(each.feeds), list(each.where), each.error,
        ])),
        "Nobody has subscribed.",
      ),
    ];
  }));
}

function events(page) {
  const only = byId("failed").checked;
  const lines = page.events.filter((one) => one.failed || !only);
  fill("events", table(
    [["time", "short"], ["told by", "short"], ["about"], ["event", "text"]],
    lines.map((one) => ({ name: one.failed ? "failed" : "", cells: [time(one.at), one.place, one.where, one.text] })),
    only ? "Nothing has failed." : "Nothing is recorded.",
  ));
}

function draw(page) {
  byId("where").textContent = `namespace ${page.namespace}`;
  document.title = page.waiting.length ? `(${page.waiting.length} wait) Etha ${page.namespace}` : `Etha ${page.namespace}`;
  byId("notes").replaceChildren(...page.notes.map((note) => make("p", "", note)));
  tiles(page);
  waiting(page.waiting);
  fill("pairs", table(
    [["pair"], ["state", "short"], ["epoch", "short"], ["ranks that joined"], ["error, or who is missing", "text"]],
    page.pairs.map((one) => plain([one.pair, state(one.state), one.epoch, list(one.sides), one.error])),
    "No pair is known.",
  ));
  fill("batches", table(
    [["pair"], ["batch", "short"], ["state", "short"], ["transfers", "short"], ["version"], ["bytes", "short"], ["last took", "short"], ["rate", "short"], ["way"], ["waits for"], ["last error"]],
    page.batches.map((one) => plain([
      one.pair, one.batch, state(one.state), one.seq, one.version, bytes(one.bytes), seconds(one.seconds),
      one.rate === null ? "" : `${bytes(one.rate)}/s`, one.transport, list(one.waiting_for), one.error,
    ])),
    "No agent of this host has a batch.",
  ));
  groups(page.groups);
  publications(page.publications);
  byId("more").replaceChildren(...Object.entries(page.more).map(([name, { columns, rows }]) => make(
    "section", "", make("h2", "", name[0].toUpperCase() + name.slice(1)),
    make("div", "body", table(columns.map((column) => [column.replaceAll("_", " ")]), rows.map(plain), "")),
  )));
  transfers(page);
  links(page.links);
  fill("agents", table(
    [["agent"], ["pid", "short"], ["version"], ["lease renewed", "short"], ["workers", "short"], ["running", "short"], ["staging"], ["address"], ["metrics"]],
    page.agents.map((one) => plain([
      one.here ? `${one.agent} (here)` : one.agent, one.pid, one.version,
      one.lease === null ? make("span", "bad", "not in Redis") : `${seconds(one.lease)} ago`,
      one.workers, one.running, one.staging, one.address, one.metrics,
    ])),
    "Redis knows none, or no agent of this host answers.",
  ));
  events(page);
}

let latest = null;
let since = Date.now();
byId("failed").addEventListener("change", () => { if (latest) events(latest); });

function live() {
  const age = (Date.now() - since) / 1000;
  const on = latest !== null && age < 8;
  byId("live").className = on ? "on" : latest === null && age < 8 ? "" : "off";
  byId("live").textContent = on ? "live" : latest === null && age < 8 ? "connecting" : `nothing new for ${seconds(Math.round(age))}`;
}
setInterval(live, 1000);

new EventSource("stream").addEventListener("message", (message) => {
  latest = JSON.parse(message.data);
  since = Date.now();
  if (window.getSelection().isCollapsed) draw(latest);  // else it would take away what is being copied
  live();
});
