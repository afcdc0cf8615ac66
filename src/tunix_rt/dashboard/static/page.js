/* Parts of a page that are fetched again, charts under the pointer and the keys, and buttons that act.
   Links and forms reach everything without this script. Every figure is made by the server. */
const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex]";
const CHART = "svg[data-points]";
const SLOWEST = 30000;
const [stale, acted] = [0, 1].map(() => {
  const notice = document.createElement("p");
  notice.className = "notice warn";
  notice.setAttribute("aria-live", "polite");
  document.querySelector("main")?.prepend(notice);
  return (text) => { if (notice.textContent !== text) notice.textContent = text; };
});

// --- parts -----------------------------------------------------------------------------------------------------------
const parts = [];
let drag = null;

class Part {
  constructor(element) {
    const every = Number(element.dataset.every) || 0;
    Object.assign(this, { element, name: element.dataset.part, every, wait: every, etag: "", asked: 0, timer: 0 });
    if (element.dataset.from) this.fetch(); // it takes longer than its page
    else this.later();
  }
  later() {
    clearTimeout(this.timer);
    if (this.every && !document.hidden) this.timer = setTimeout(() => this.fetch(), this.wait);
  }
  async fetch(moved = false) {
    clearTimeout(this.timer);
    if (moved) this.etag = "";
    const number = ++this.asked;
    try {
      const headers = { Part: this.name, ...(this.etag && { "If-None-Match": this.etag }) };
      const answer = await fetch(this.element.dataset.from ?? location.href, { headers, cache: "no-store" });
      const html = answer.ok ? await answer.text() : "";
      if (number !== this.asked) return; // another was sent since
      if (!answer.ok && answer.status !== 304) throw new Error(`the server answers ${answer.status}`);
      if (answer.ok && (moved || !this.isHeld())) {
        this.etag = answer.headers.get("etag") || "";
        swap(this.element, html);
        this.every = Number(this.element.querySelector("[data-next]")?.dataset.next ?? this.every);
      }
      this.wait = this.every;
      stale("");
    } catch (error) {
      if (number !== this.asked) return;
      this.wait = Math.min(SLOWEST, 2 * (this.wait || 1000));
      stale(`Not up to date: ${error.message}.`);
    }
    this.later();
  }
  isHeld() { // something in it is being dragged or selected
    const chosen = getSelection();
    return drag !== null || Boolean(chosen && !chosen.isCollapsed && this.element.contains(chosen.anchorNode));
  }
}

const keyOf = (one, place) => one.id || (one.name && `${one.name}=${one.value}`) || one.getAttribute("href") || String(place);
const keyed = (element, what) => [...element.querySelectorAll(what)].map((one, place) => [keyOf(one, place), one]);

// A form of the part stays as it is, so that a list that is open does not close.
function replace(element, html) {
  const made = document.createElement("template");
  made.innerHTML = html; // by this server, which escapes whatever comes from a file
  const [old, form] = [element, made.content].map((all) => [...all.children].find((one) => one.matches("form[data-view]")));
  if (!old || !form) return element.replaceChildren(made.content);
  for (const one of [...element.childNodes]) if (one !== old) one.remove();
  while (made.content.firstChild !== form) old.before(made.content.firstChild);
  form.remove();
  old.after(made.content);
}

function swap(element, html) {
  const kept = [["details", "open"], ["input[type=checkbox]", "checked"], [".scroll, pre", "scrollLeft"], [".scroll, pre", "scrollTop"]]
    .map(([what, name]) => [what, name, new Map(keyed(element, what).map(([key, one]) => [key, one[name]]))]);
  const focused = keyed(element, FOCUSABLE).find(([, one]) => one === document.activeElement)?.[0];
  replace(element, html);
  prepare(element);
  for (const [what, name, values] of kept) {
    for (const [key, one] of keyed(element, what)) if (values.has(key)) one[name] = values.get(key);
  }
  const again = focused !== undefined && keyed(element, FOCUSABLE).find(([key]) => key === focused)?.[1];
  if (!again) return;
  again.focus({ preventScroll: true });
  if (again.matches(CHART) && at.has(again.id)) point(again, at.get(again.id));
}

const prepare = (element) => element.querySelectorAll(CHART).forEach((chart) => chart.setAttribute("tabindex", "0"));
const fetchAll = () => parts.forEach((one) => one.fetch(true));

function go(changes) { // the address is the whole state of a page
  const address = new URL(location.href);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) address.searchParams.delete(name);
    else address.searchParams.set(name, value);
  }
  history.pushState(null, "", address);
  fetchAll();
}

// --- charts ----------------------------------------------------------------------------------------------------------
const at = new Map(); // id of a chart -> where its crosshair stands, in pixels of the drawing

function seriesOf(chart) {
  return chart.dataset.points.split("\n").map((line) => {
    const [name, ...rows] = line.split("|");
    return { name, rows: rows.map((row) => row.split(";")).map(([x, where, value]) => ({ x: Number(x), where, value })) };
  }).filter((one) => one.rows.length);
}

const nearest = (rows, x) => rows.reduce((best, row) => (Math.abs(row.x - x) < Math.abs(best.x - x) ? row : best));

function across(chart, event) {
  const box = chart.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
  return Math.min(Number(chart.dataset.right), Math.max(Number(chart.dataset.left), x));
}

function shape(chart, kind, x, width) {
  const one = chart.querySelector(`.${kind}`) ?? chart.appendChild(document.createElementNS(chart.namespaceURI, "rect"));
  for (const [name, value] of Object.entries({ class: kind, x, width, y: 8, height: 188 })) one.setAttribute(name, value);
}

function point(chart, x) {
  const found = seriesOf(chart).map((one) => ({ name: one.name, ...nearest(one.rows, x) }));
  if (!found.length) return;
  at.set(chart.id, x);
  shape(chart, "cross", found[0].x, 1);
  const text = found.map((one) => `${one.name} at ${one.where}: ${one.value}`).join("; ");
  chart.closest("figure").querySelector("output").textContent = text;
}

function zoom(chart, one, other) {
  const [left, right, low, high] = ["left", "right", "low", "high"].map((name) => Number(chart.dataset[name]));
  const value = (x) => (low + ((x - left) / (right - left)) * (high - low)).toFixed(high - low > 200 ? 0 : 3);
  go({ from: value(Math.min(one, other)), to: value(Math.max(one, other)) });
}
const zoomOut = () => go({ from: null, to: null });

document.addEventListener("pointerdown", (event) => {
  const chart = event.target.closest?.(CHART);
  if (!chart || event.button !== 0) return;
  drag = { chart, start: across(chart, event) };
  chart.setPointerCapture(event.pointerId);
});
document.addEventListener("pointermove", (event) => {
  const chart = drag?.chart ?? event.target.closest?.(CHART);
  if (!chart) return;
  const x = across(chart, event);
  point(chart, x);
  if (drag) shape(chart, "drag", Math.min(drag.start, x), Math.abs(x - drag.start));
});
for (const kind of ["pointerup", "pointercancel"]) {
  document.addEventListener(kind, (event) => {
    if (!drag) return;
    const { chart, start } = drag;
    drag = null;
    chart.querySelector(".drag")?.remove();
    const end = across(chart, event);
    if (kind === "pointerup" && Math.abs(end - start) > 6) zoom(chart, start, end);
  });
}
document.addEventListener("dblclick", (event) => { if (event.target.closest?.(CHART)) zoomOut(); });
document.addEventListener("keydown", (event) => {
  const chart = event.target.closest?.(CHART);
  const rows = chart && seriesOf(chart)[0]?.rows;
  if (!rows) return;
  if (event.key === "Escape") zoomOut();
  const place = rows.indexOf(nearest(rows, at.get(chart.id) ?? rows[0].x));
  const places = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: rows.length - 1 };
  if (!(event.key in places)) return;
  event.preventDefault();
  point(chart, rows[Math.min(rows.length - 1, Math.max(0, places[event.key]))].x);
});

// --- links, forms, actions -------------------------------------------------------------------------------------------
function choose(event) {
  const form = event.target.closest("form[data-view]");
  if (!form) return;
  event.preventDefault();
  go(Object.fromEntries([...form.querySelectorAll("select")].map((one) => [one.name, one.value])));
}
document.addEventListener("change", choose);
document.addEventListener("submit", choose);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-view]");
  if (link && !event.metaKey && !event.ctrlKey && !event.shiftKey) {
    event.preventDefault();
    history.pushState(null, "", link.href);
    fetchAll();
  }
  const button = event.target.closest("button[data-action]");
  if (button && button.getAttribute("aria-busy") !== "true") act(button);
});
addEventListener("popstate", () => {
  const chosen = new URL(location.href).searchParams;
  for (const one of document.querySelectorAll("form[data-view] select")) one.value = chosen.get(one.name) ?? one.options[0].value;
  fetchAll();
});

async function post(address, body) {
  const headers = { "content-type": "application/json", "x-tunix-rt": "1" };
  const answer = await fetch(address, { method: "POST", headers, body: JSON.stringify(body) });
  const isJson = answer.headers.get("content-type")?.startsWith("application/json");
  const value = isJson ? await answer.json() : {};
  const { problem = `the server answers ${answer.status}`, fix = "" } = value;
  if (!answer.ok) throw new Error(`${problem}. ${fix}`);
  return value;
}

async function act(button) {
  const name = button.textContent.trim();
  button.setAttribute("aria-busy", "true");
  acted(`${name}: under way.`);
  try {
    await post(button.dataset.action, {});
    if (button.dataset.then === "reload") location.reload();
    else fetchAll();
    acted("");
  } catch (error) {
    acted(`${name} failed: ${error.message}`);
  }
  button.removeAttribute("aria-busy");
}

// --- a question to both models ---------------------------------------------------------------------------------------
function made(kind, text, ...inside) {
  const one = document.createElement(kind);
  if (text) one.append(text);
  one.append(...inside);
  one.dir = "auto";
  return one;
}
function answered({ model, text, reasoning, answer, tokens, ended }) {
  const said = answer === null ? made("pre", text) : made("p", answer);
  const why = reasoning ? [made("details", "", made("summary", "Reasoning"), made("pre", reasoning))] : [];
  return made("section", "", made("h2", model), ...why, said, made("small", `${tokens} tokens, ended by ${ended}`));
}
document.addEventListener("submit", async (event) => {
  const form = event.target.closest("form[data-ask]");
  if (!form) return;
  event.preventDefault();
  const [button, status] = [form.querySelector("button"), document.getElementById("asking")];
  if (button.disabled) return;
  button.disabled = true;
  status.textContent = "Both models are answering; the first question also loads them.";
  try {
    const { answers } = await post(form.dataset.ask, { question: form.elements.question.value });
    document.getElementById("answers").replaceChildren(...answers.map(answered));
    status.textContent = "";
  } catch (error) {
    status.textContent = error.message;
  }
  button.disabled = false;
});

document.addEventListener("visibilitychange", () => {
  for (const one of parts) {
    if (document.hidden) clearTimeout(one.timer);
    else if (one.every) one.fetch();
  }
});
prepare(document);
for (const element of document.querySelectorAll("[data-part]")) parts.push(new Part(element));
