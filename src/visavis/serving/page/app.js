// The page: what is typed, dropped or clicked becomes a query; answers become a grid, of the latest query alone.

import { LOST, get, pictureOf, post, send, smaller } from "./api.js";
import * as detail from "./detail.js";
import { asked, countFilters, fillFilters, filters, isEmpty, query, recall, remember, showChip } from "./query.js";
import * as teaching from "./teaching.js";
import { element, neighbor, tile } from "./tiles.js";
import { tell, undo, vote } from "./voting.js";
import { number, spoken } from "./words.js";

const PAGE = 40;
const WAIT_MS = 180;
const byId = (id) => document.getElementById(id);
const text = byId("text");
let about = { indexes: [], blind: false, votes: false };
let entries = [];
let focused = null;
let turn = 0;
let running = new AbortController();
let waiting = 0;
let answer = null;
let loading = false;

function busy(is) {
  byId("results").setAttribute("aria-busy", String(is));
  byId("progress").classList.toggle("on", is);
}

function notice(sentence, again) {
  byId("notice").hidden = !sentence;
  byId("notice").replaceChildren(element("p", "", sentence ?? ""));
  if (again) {
    const button = element("button", "plain", "Try again");
    button.type = "button";
    button.addEventListener("click", () => search({}));
    byId("notice").append(button);
  }
}

async function search({ push = false } = {}) {
  clearTimeout(waiting);
  const mine = ++turn;
  running.abort();
  running = new AbortController();
  remember(push);
  showChip(query.like ? pictureOf("thumbnail", query.index, { key: query.like }) : "");
  byId("filters-count").hidden = !countFilters();
  byId("filters-count").textContent = countFilters() || "";
  if (about.blind && isEmpty()) return welcome();
  busy(true);
  try {
    const values = { ...asked(), ...filters(), limit: PAGE };
    const found = query.file ? await send({ ...values, picture: "" }, query.file, running.signal) : await get("/api/search", values, running.signal);
    if (mine !== turn) return;
    if (query.file) {
      query.picture = found.query.picture;
      query.file = null;
      remember(false);
    }
    show(found);
  } catch (error) {
    if (mine !== turn || error.name === "AbortError") return;
    forget();
    byId("heading").textContent = error.status === 400 && query.text ? spoken(query.text) : "That did not work";
    notice(error.message, error.status === LOST || error.status === 429);
  } finally {
    if (mine === turn) busy(false);
  }
}

function forget() {
  [entries, focused, answer] = [[], null, null];
  byId("sides").replaceChildren();
  byId("summary").textContent = "";
  byId("more").hidden = true;
  byId("choice").hidden = true;
  notice();
}

function welcome() {
  forget();
  busy(false);
  byId("heading").textContent = "Two models, side by side";
  const names = about.indexes.map((index) => index.name).join(" and ");
  notice(`Ask for something: ${names} answer it, left and right by lot. Say which is better, and see which was which.`);
}

function show(found) {
  forget();
  answer = found;
  const empty = isEmpty();
  const like = query.like ? query.like.split("/").pop() : "";
  const parts = [query.picture && "Like your picture", like && `Like ${like}`, query.text && spoken(query.text)].filter(Boolean);
  byId("heading").textContent = empty ? "Newest first" : parts.join(", ");
  document.title = empty ? "visavis" : `${parts.join(", ")} · visavis`;
  byId("sides").classList.toggle("two", about.blind);
  byId("sides").replaceChildren(
    ...found.sides.map((side) => {
      const section = element("section", "side");
      section.dataset.side = side.side;
      const title = { only: "Results", left: "Left", right: "Right" }[side.side];
      section.setAttribute("aria-label", title);
      if (about.blind) section.append(element("h2", "", title));
      section.append(element("ul", "grid"));
      return section;
    }),
  );
  add(found);
  const total = about.indexes.reduce((most, index) => Math.max(most, index.count), 0);
  byId("summary").textContent = entries.length ? `${number(total)} items${empty ? "" : `, ${Math.round(found.milliseconds)} ms`}` : "";
  if (!entries.length) {
    notice(countFilters() ? "Nothing passes these filters." : total ? "Nothing was found." : "This index is empty.");
  } else if (found.sides.every((side) => side.nothing_fits)) {
    notice("Nothing here seems to fit. These come closest.");
  }
  byId("choice").hidden = !about.blind || !entries.length;
  byId("choice-text").textContent = "Which side answers better?";
  for (const button of byId("choice").querySelectorAll("button")) button.disabled = false;
}

function add(found) {
  const ways = { votes: about.votes, onOpen: detail.open, onLike: like, onVote: (entry, fits) => vote(entry, asked(), fits) };
  for (const side of found.sides) {
    const grid = byId("sides").querySelector(`[data-side="${side.side}"] .grid`);
    const fresh = side.hits.map((hit) => ({ hit, index: side.index, side: side.side }));
    grid.append(...fresh.map((entry) => tile(entry, ways)));
    for (const entry of fresh) entry.open.addEventListener("focus", () => focusable(entry));
    entries.push(...fresh);
  }
  if (!focused && entries.length) focusable(entries[0]);
  byId("more").hidden = !found.sides.some((side) => side.more);
}

async function more() {
  if (loading || !answer || byId("more").hidden) return;
  loading = true;
  const mine = turn;
  const offset = Math.max(...answer.sides.map((side) => entries.filter((entry) => entry.side === side.side).length));
  busy(true);
  try {
    const found = await get("/api/search", { ...asked(), ...filters(), offset, limit: PAGE }, running.signal);
    if (mine === turn) add(found);
  } catch (error) {
    if (mine === turn && error.name !== "AbortError") tell(error.message);
  } finally {
    loading = false;
    if (mine === turn) busy(false);
  }
}

function focusable(entry) {
  if (focused) focused.open.tabIndex = -1;
  focused = entry;
  entry.open.tabIndex = 0;
}

function like(entry) {
  Object.assign(query, { text: "", like: entry.hit.key, index: entry.index, picture: "", file: null });
  text.value = "";
  scrollTo({ top: 0 });
  search({ push: true });
}

async function byPicture(file) {
  if (!file) return;
  if (file.type && !file.type.startsWith("image/")) {
    tell("That is no picture: drop a JPEG, PNG or the like.");
    return;
  }
  if (query.preview) URL.revokeObjectURL(query.preview);
  const picture = await smaller(file);
  Object.assign(query, { file: picture, preview: URL.createObjectURL(picture), picture: "", like: "" });
  search({ push: true });
}

async function choose(prefers) {
  if (byId("choice").hidden || byId("choice").querySelector("button").disabled) return;
  try {
    const names = await post("/api/choices", { query: asked(), prefers });
    for (const button of byId("choice").querySelectorAll("button")) button.disabled = true;
    const said = { left: `You preferred ${names.left}.`, right: `You preferred ${names.right}.`, neither: "No difference." }[prefers];
    byId("choice-text").textContent = `${said} Left was ${names.left}, right was ${names.right}.`;
    for (const side of ["left", "right"]) byId("sides").querySelector(`[data-side=${side}] h2`).textContent = names[side];
  } catch (error) {
    tell(error.message);
  }
}

function toggleFilters() {
  const shown = byId("filters").hidden;
  byId("filters").hidden = !shown;
  byId("filters-button").setAttribute("aria-expanded", String(shown));
  if (shown) byId("path").focus();
}

const THEMES = { system: "light", light: "dark", dark: "system" };

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "system";
  byId("theme").setAttribute("aria-label", `Theme: ${theme === "system" ? "as the system" : theme}`);
}

function nextTheme() {
  const next = THEMES[document.documentElement.dataset.theme ?? "system"];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("theme", next);
  } catch {
    // it holds until the page is left
  }
  showTheme();
}

function onKey(event) {
  const typing = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target === text) {
    if (event.key === "ArrowDown" && focused) {
      event.preventDefault();
      focused.open.focus();
    }
    return;
  }
  if (event.key === "Escape") text.focus();
  if (typing) return;
  const here = entries.find((entry) => entry.open === document.activeElement);
  if (here && event.key.startsWith("Arrow")) {
    const next = neighbor(entries, here, event.key);
    event.preventDefault();
    if (next) next.open.focus();
    else if (event.key === "ArrowUp") text.focus();
    return;
  }
  const act = {
    "/": () => text.focus(),
    f: toggleFilters,
    "?": () => byId("help").showModal(),
    z: undo,
    1: () => choose("left"),
    2: () => choose("right"),
    0: () => choose("neither"),
    m: here && (() => like(here)),
    y: here && about.votes && !isEmpty() && (() => vote(here, asked(), true)),
    n: here && about.votes && !isEmpty() && (() => vote(here, asked(), false)),
  }[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
}

function connect() {
  text.addEventListener("input", () => {
    query.text = text.value.trim();
    clearTimeout(waiting);
    waiting = setTimeout(() => search(), WAIT_MS);
  });
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    query.text = text.value.trim();
    search({ push: true });
  });
  byId("chip-remove").addEventListener("click", () => {
    Object.assign(query, { like: "", picture: "", file: null });
    text.focus();
    search({ push: true });
  });
  byId("choose").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", () => {
    byPicture(byId("file").files[0]);
    byId("file").value = "";
  });
  document.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
    if (file) byPicture(file);
  });
  let depth = 0;
  const dropping = (event) => event.dataTransfer?.types.includes("Files");
  const enter = (step) => (event) => dropping(event) && byId("drop").classList.toggle("on", (depth += step) > 0);
  document.addEventListener("dragenter", enter(1));
  document.addEventListener("dragleave", enter(-1));
  document.addEventListener("dragover", (event) => dropping(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!dropping(event)) return;
    event.preventDefault();
    depth = 0;
    byId("drop").classList.remove("on");
    byPicture(event.dataTransfer.files[0]);
  });
  byId("filter-form").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => search(), WAIT_MS);
  });
  byId("filter-form").addEventListener("submit", (event) => event.preventDefault());
  byId("filter-form").addEventListener("reset", () => setTimeout(() => search()));
  byId("filters-button").addEventListener("click", toggleFilters);
  byId("theme").addEventListener("click", nextTheme);
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("help-close").addEventListener("click", () => byId("help").close());
  byId("teach-button").addEventListener("click", teaching.teach);
  byId("choice").addEventListener("click", (event) => event.target.closest("button") && choose(event.target.closest("button").dataset.choice));
  byId("more").addEventListener("click", more);
  new IntersectionObserver((seen) => seen[0].isIntersecting && more(), { rootMargin: "600px" }).observe(byId("more"));
  addEventListener("popstate", () => {
    recall();
    search();
  });
  document.addEventListener("keydown", onKey);
  teaching.connect(vote);
  detail.connect({
    entries: () => entries,
    votes: () => about.votes,
    onLike: like,
    onVote: (entry, fits) => about.votes && !isEmpty() && vote(entry, asked(), fits),
    onUndo: undo,
    onMore: more,
  });
}

async function begin() {
  showTheme();
  connect();
  try {
    const facets = get("/api/facets");
    about = await get("/api/about");
    fillFilters(await facets);
  } catch (error) {
    byId("heading").textContent = "That did not work";
    notice(error.message, true);
    return;
  }
  document.body.classList.toggle("votes", about.votes);
  document.body.classList.toggle("two-indexes", about.blind);
  byId("teach-button").hidden = !about.votes;
  byId("help-about").textContent = `visavis ${about.version}. ${about.indexes.map((index) => `${index.name}: ${number(index.count)} items, by ${index.model.split("/").slice(-2).join("/")}`).join("; ")}.`;
  recall();
  if (countFilters()) toggleFilters();
  if (!location.search) text.focus();
  search();
}

begin();
