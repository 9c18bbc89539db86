// Asks the server once a second for what is new and shows it. Whatever comes from the server goes in as text only.

import { LineChart, Strip, element, short, whole } from "./charts.js";

const SCHEMA = 1;
const POLL_MS = 1000, TIMEOUT_MS = 5000, MOST_WAIT_MS = 30000;
const WORTH_SAYING_S = 1; // every round waits for somebody for a moment

const known = { epoch: "", generation: -1, points: [], tag: "", failures: 0, answeredAt: null, document: null };
const at = (id) => document.getElementById(id);
let timer = 0, asking = false;

// ---- asking ----------------------------------------------------------------------------------------------

async function ask() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  let wait = POLL_MS;
  const began = performance.now();
  try {
    const since = known.points.at(-1)?.[0] ?? 0;
    const headers = known.tag ? { "If-None-Match": known.tag } : {};
    const answer = await fetch(`/status.json?since=${since}`, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.status !== 304) {
      if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 200).trim()}`);
      const fresh = await answer.json();
      known.tag = answer.headers.get("ETag") ?? "";
      if (take(fresh, since)) show(); else wait = 0;
    }
    known.failures = 0;
    known.answeredAt = new Date();
    banner(isOurSchema() ? "" : "The server has another version than this page: reload it.");
  } catch (error) {
    known.failures += 1;
    wait = Math.min(MOST_WAIT_MS, POLL_MS * 2 ** known.failures);
    banner(gone(error, wait));
  } finally {
    asking = false;
  }
  timer = setTimeout(ask, Math.max(0, wait - (known.failures ? 0 : performance.now() - began)));
}

const isOurSchema = () => known.document === null || known.document.schema === SCHEMA;

// Keep what is new; false: earlier points have become others, and all must be asked for anew.
function take(fresh, since) {
  const { epoch, history } = fresh;
  const same = epoch === known.epoch && history.generation === known.generation;
  if (!same && since > 0) {
    Object.assign(known, { points: [], tag: "" });
    return false;
  }
  Object.assign(known, { epoch, generation: history.generation, document: fresh });
  const first = history.points[0]?.[0] ?? Infinity;
  known.points = since > 0 ? [...known.points.filter((point) => point[0] < first), ...history.points] : history.points;
  return true;
}

function gone(error, wait) {
  const next = `Next try in ${Math.round(wait / 1000)} s.`;
  if (known.answeredAt === null) return `The server does not answer (${error.message}). ${next}`;
  const run = known.document?.run;
  const ended = run && run.step >= run.steps ? " The run was at its last step: the server has ended with it." : "";
  return `The server does not answer since ${known.answeredAt.toLocaleTimeString()}; what is shown is from then.${ended} ${next}`;
}

function banner(text) {
  at("banner").hidden = !text;
  if (at("banner-text").textContent !== text) at("banner-text").textContent = text;
  document.body.dataset.connection = text ? "gone" : "live";
}

// ---- showing ---------------------------------------------------------------------------------------------

const cursor = (step) => charts.forEach((chart) => chart.setCursor(step));
const charts = [
  new LineChart(at("loss-chart"), { title: "Loss", kind: "loss", get: (point) => point[2], onCursor: cursor }),
  new LineChart(at("accuracy-chart"), { title: "Accuracy (dots: on test data)", kind: "accuracy", get: (point) => point[3], onCursor: cursor }),
  new LineChart(at("rate-chart"), { title: "Examples per second", kind: "rate", get: (point) => point[4], fromZero: true, onCursor: cursor }),
];
const strip = new Strip(at("strip"), cursor);

function show() {
  const status = known.document;
  const { run, figures } = status;
  put("phase", run.outcome ?? run.phase);
  put("facts", `${run.mode} · ${run.consistency} · rule ${run.aggregation} · ${run.optimizer}, learning rate ${short(run.learning_rate)}`);
  put("step", whole(run.step));
  put("steps", whole(run.steps));
  at("progress").max = Math.max(1, run.steps);
  at("progress").value = run.step;
  put("loss", short(figures.loss));
  put("accuracy", short(figures.accuracy));
  put("test-accuracy", figures.test_accuracy === null ? "–" : `${short(figures.test_accuracy)} at ${whole(figures.test_step)}`);
  put("examples-per-s", whole(figures.examples_per_s));
  put("seconds", duration(run.seconds));
  put("seconds-left", run.seconds_left === null ? "–" : duration(run.seconds_left));
  put("waiting", waiting(status));
  put("time", new Date(status.time * 1000).toLocaleString());
  document.title = `${run.step >= run.steps ? "done" : `${Math.floor((100 * run.step) / Math.max(1, run.steps))} %`} · Weighmaster`;
  drawAll();
  showWorkers(status);
  showRun(status);
  showRefusals(status.refusals);
}

function waiting({ run, waiting: whom }) {
  if (whom.sentence && (whom.seconds >= WORTH_SAYING_S || run.phase !== "running")) return sentence(whom.sentence);
  return run.phase === "running" ? `Round ${whole(run.step)} is open; nobody is waited for.` : `The run is ${run.phase}.`;
}

function drawAll() {
  const { history, workers, run } = known.document;
  const end = run.step - 1;
  const { stride, names, tests } = history;
  charts[0].draw(known.points, null, stride, end);
  charts[1].draw(known.points, tests.map(([step, , accuracy]) => [step, accuracy]), stride, end);
  charts[2].draw(known.points, null, stride, end);
  const by = new Map(workers.filter((worker) => worker.name).map((worker) => [worker.name, worker]));
  const rows = names.map((name, column) => ({ name, column, muted: by.get(name)?.muted ?? false, rank: by.get(name)?.rank ?? Infinity }));
  strip.draw(known.points, rows.sort((one, other) => one.rank - other.rank || one.column - other.column), stride, end);
  put("thinning", stride === 1 ? "" : `Each point is the mean over ${whole(stride)} steps.`);
}

const STATES = { here: ["here", "good"], late: ["late", "warn"], probation: ["on probation", "warn"], lost: ["lost", "bad"], left: ["left", ""], awaited: ["awaited", "warn"] };

function stateOf({ state, seconds, muted }) {
  const [word, kind] = STATES[state] ?? [state, ""];
  const since = seconds !== null && (state === "lost" || state === "left") ? `, ${duration(seconds)} ago` : "";
  return [`${word}${since}${muted ? ", muted" : ""}`, muted ? "bad" : kind];
}

function showWorkers({ workers, validators, evaluators, run }) {
  at("workers").className = run.consistency === "sync" ? "" : "at-own-pace";
  rows(at("workers").tBodies[0], workers, (worker) => {
    const [state, kind] = stateOf(worker);
    const number = (value, warn = false) => [whole(value), `number${warn && value ? " warn" : ""}`];
    return [
      number(worker.rank), [worker.name || "–", "name"], [worker.host || "–", "name"], [state, kind],
      [short(worker.weight), "number"], [short(worker.share), "number"], number(worker.muted_rounds, true), number(worker.pushes),
      number(worker.rejected, true), number(worker.stale, true), number(worker.late, true), number(worker.duplicates),
      [whole(worker.staleness), "number own-pace"], [whole(worker.clock), "number own-pace"],
      [worker.state === "lost" ? worker.lost_reason : worker.last_reason, "text"],
    ];
  });
  const present = workers.filter((worker) => ["here", "late", "probation"].includes(worker.state)).length;
  put("worker-count", `${present} of ${workers.length} connected`);
  const judges = validators.map((judge) => `validator ${judge.name} on ${judge.host}: ${judge.connected ? "here" : "away"}, ${whole(judge.pushes)} references`);
  put("others", [...judges, ...(evaluators ? [`evaluators: ${evaluators}`] : [])].join(" · "));
}

function showRun({ run, checkpoints }) {
  const kept = !checkpoints.kept ? "none are kept" : checkpoints.last_step === null ? `every ${whole(checkpoints.every)} steps, none yet` : `last at step ${whole(checkpoints.last_step)}, every ${whole(checkpoints.every)} steps`;
  const facts = [
    ["Checkpoints", kept], ["Checkpoints that failed", whole(checkpoints.failures)],
    ["Void rounds", whole(run.void_rounds)], ["Short rounds", whole(run.short_rounds)],
    ["Rounds without a worker", whole(run.left_out_rounds)], ["Rounds without their validator", whole(run.predicted_rounds)],
    ["Goes on from a checkpoint", run.resumed ? "yes" : "no"],
    ["Deterministic", run.deterministic ? "yes" : `no: ${run.deterministic_reason ?? ""}`],
  ];
  const list = at("run");
  facts.forEach(([name, value], index) => {
    if (!list.children[2 * index]) list.append(element("dt", {}, name), element("dd"));
    const where = list.children[2 * index + 1];
    if (where.textContent !== value) where.textContent = value;
  });
}

function showRefusals(refusals) {
  at("no-refusals").hidden = refusals.length > 0;
  at("refusals").hidden = refusals.length === 0;
  rows(at("refusals").tBodies[0], [...refusals].reverse(), (each) => [
    [whole(each.step), "number"], [each.name, "name"], [each.kind, ""], [whole(each.count), "number"], [each.reason || "not known", "text"],
  ]);
}

// ---- tools -----------------------------------------------------------------------------------------------

function put(id, text) {
  const where = at(id);
  if (where.textContent !== text) where.textContent = text;
}

// Rows are changed in place: a selection, and where a screen reader is, stay as they are.
function rows(body, items, cellsOf) {
  while (body.rows.length > items.length) body.deleteRow(-1);
  items.forEach((item, index) => {
    const row = body.rows[index] ?? body.insertRow();
    cellsOf(item).forEach(([text, kind], column) => {
      const cell = row.cells[column] ?? row.insertCell();
      if (cell.textContent !== text) cell.textContent = text;
      if (cell.className !== kind) cell.className = kind;
    });
  });
}

function duration(seconds) {
  const all = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${rest} s` : `${rest} s`;
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

let drawing = 0;
function redraw() {
  cancelAnimationFrame(drawing);
  drawing = requestAnimationFrame(() => known.document && drawAll());
}

at("retry").addEventListener("click", ask);
document.addEventListener("visibilitychange", ask);
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
ask();
