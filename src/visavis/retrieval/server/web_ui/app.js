// Application: turns input into queries, and shows the results of the latest query.

import { NO_RESPONSE, get, imageUrl, post, scaleDown, searchByImage } from "./api.js";
import * as detail from "./detail.js";
import * as feedback from "./feedback.js";
import { formatNumber, quoteQuery } from "./format.js";
import { countFilters, fillFilters, filters, isEmpty, keepPreview, loadFromUrl, query, queryValues, savePosition, saveToUrl, setPreview, showChip } from "./query.js";
import { element, neighbor, tile } from "./results.js";
import { showMessage, undo, vote } from "./voting.js";

const PAGE_SIZE = 40;
// Largest page that the server returns.
const MAX_PAGE_SIZE = 100;
const WAIT_MS = 180;
const UPDATE_MS = 4000;
const byId = (id) => document.getElementById(id);
const text = byId("text");
let info = { indexes: [], blind: false, votes: false };
let entries = [];
let focused = null;
let searchNumber = 0;
let running = new AbortController();
let waiting = 0;
let response = null;
let loading = false;
let hasMore = false;
let moved = 0;
let restoring = false;
// Ranks that were requested. Fewer results are shown if files are missing.
let fetched = 0;
let numMissing = 0;
let isOutdated = false;

function setBusy(isBusy) {
  byId("results").setAttribute("aria-busy", String(isBusy));
  byId("progress").classList.toggle("on", isBusy);
}

function showNotice(text, retry) {
  byId("notice").hidden = !text;
  byId("notice").replaceChildren(element("p", "", text ?? ""));
  if (retry) {
    const button = element("button", "plain", "Try again");
    button.type = "button";
    button.addEventListener("click", retry);
    byId("notice").append(button);
  }
}

const canRetry = (error) => error.status === NO_RESPONSE || error.status === 429;

const countShown = () => Math.max(0, ...(response?.sides ?? []).map((side) => entries.filter((entry) => entry.side === side.side).length));

function remember() {
  clearTimeout(moved);
  const key = entries.find((entry) => entry.open === document.activeElement)?.hit.key;
  if (response && !restoring) savePosition({ count: fetched, top: scrollY, key });
}

// Loads as many results as were shown before, and scrolls to the same position.
async function restore({ count, top, key }) {
  const number = searchNumber;
  restoring = true;
  while (fetched < count && !byId("more").hidden && (await loadPage(Math.min(count - fetched, MAX_PAGE_SIZE))));
  if (number !== searchNumber) return;
  restoring = false;
  scrollTo({ top, behavior: "instant" });
  entries.find((entry) => entry.hit.key === key)?.open.focus({ preventScroll: true });
}

async function search({ push = false, position = null, changed = "" } = {}) {
  if (push) remember();
  byId("changed").textContent = changed;
  clearTimeout(waiting);
  clearTimeout(moved);
  restoring = false;
  const number = ++searchNumber;
  running.abort();
  running = new AbortController();
  saveToUrl(push);
  showChip(query.like ? imageUrl("thumbnail", query.index, { key: query.like }) : "");
  byId("filters-count").hidden = !countFilters();
  byId("filters-count").textContent = countFilters() || "";
  if (info.blind && isEmpty()) return welcome();
  setBusy(true);
  try {
    const values = { ...queryValues(), ...filters(), limit: PAGE_SIZE };
    const newest = query.file ? await searchByImage({ ...values, image: "" }, query.file, running.signal) : await get("api/search", values, running.signal);
    if (number !== searchNumber) return;
    if (query.file) {
      query.image = newest.query.image;
      query.file = null;
      keepPreview();
      saveToUrl(false);
    }
    show(newest);
    if (position) await restore(position);
  } catch (error) {
    if (number !== searchNumber || error.name === "AbortError") return;
    clear();
    byId("heading").textContent = error.status === 400 && query.text ? quoteQuery(query.text) : "Search failed";
    showNotice(error.message, canRetry(error) && (() => search()));
  } finally {
    if (number === searchNumber) setBusy(false);
  }
}

function clear() {
  [entries, focused, response] = [[], null, null];
  [fetched, numMissing] = [0, 0];
  byId("sides").replaceChildren();
  byId("summary").textContent = "";
  byId("more").hidden = true;
  byId("end").textContent = "";
  byId("remark").textContent = "";
  byId("preference").hidden = true;
  showNotice();
}

function welcome() {
  clear();
  setBusy(false);
  byId("heading").textContent = "Compare two models";
  const names = info.indexes.map((index) => index.name).join(" and ");
  showNotice(`Search to compare ${names}. Their sides are chosen at random for each query. Vote for the better side to see the names.`);
}

function show(newest) {
  const hadFocus = byId("sides").contains(document.activeElement);
  clear();
  response = newest;
  const empty = isEmpty();
  const like = query.like ? query.like.split("/").pop() : "";
  const parts = [query.image && "Similar to your image", like && `Similar to ${like}`, query.text && quoteQuery(query.text)].filter(Boolean);
  byId("heading").textContent = empty ? "Newest first" : parts.join(", ");
  document.title = empty ? "visavis" : `${parts.join(", ")} · visavis`;
  byId("sides").classList.toggle("two", info.blind);
  byId("sides").replaceChildren(
    ...newest.sides.map((side) => {
      const section = element("section", "side");
      section.dataset.side = side.side;
      const title = { only: "Results", left: "Left", right: "Right" }[side.side];
      section.setAttribute("aria-label", title);
      if (info.blind) section.append(element("h2", "", title));
      if (side.named.length) section.append(...namedGroup(side));
      if (side.named.length && side.hits.length) section.append(element("h3", "", "Found by content"));
      section.append(element("ul", "grid"));
      return section;
    }),
  );
  add(newest);
  showSummary();
  // The result that had the focus was removed.
  if (hadFocus) entries[0]?.open.focus({ preventScroll: true });
  const hasNamed = newest.sides.some((side) => side.named.length);
  if (!entries.length && !hasNamed) {
    showNotice(emptyMessage());
  } else if (entries.length && newest.sides.every((side) => side.no_match)) {
    showNotice("Probably no match. These are the nearest results.");
  }
  byId("remark").textContent = entries.length || hasNamed ? remarks(newest) : "";
  byId("preference").hidden = !info.blind || !entries.length;
  byId("preference-text").textContent = "Which side is better?";
  for (const button of byId("preference").querySelectorAll("button")) button.disabled = false;
}

// What a user must know to judge the results of a text.
function remarks(newest) {
  const unknown = [...new Set(newest.sides.flatMap((side) => side.unknown_words))];
  const hasNoProbability = query.text && entries.length && entries.every((entry) => entry.hit.match_probability === null);
  return [
    unknown.length && `The model does not know: ${unknown.join(", ")}.`,
    hasNoProbability && "These are the nearest items. Some or all may be irrelevant, because this index has no match probabilities.",
  ].filter(Boolean).join(" ");
}

// The items whose file name or caption has the words of the query, with a heading. They have no rank.
function namedGroup(side) {
  const grid = element("ul", "grid named");
  for (const hit of side.named) {
    const entry = { hit, rank: null, index: side.index, side: side.side };
    grid.append(tile(entry, { votes: false, onOpen: detail.open, onLike: like }));
    entry.open.tabIndex = 0;
    entry.tile.querySelector(".match").textContent = hit.found_by;
    if (hit.found_by === "caption") entry.tile.querySelector(".name").textContent = hit.text;
  }
  return [element("h3", "", "Found by name or caption"), grid];
}

const countItems = () => Math.max(0, ...info.indexes.map((index) => index.count));
const isUnfinished = () => info.indexes.some((index) => index.unfinished);

function showSummary() {
  const missing = numMissing && `${formatNumber(numMissing)} moved or removed files are left out until visavis index runs again`;
  const time = !isEmpty() && `${Math.round(response.milliseconds)} ms`;
  const summary = [`${formatNumber(countItems())} items`, isUnfinished() && "the index is unfinished", time, missing];
  byId("summary").textContent = entries.length ? summary.filter(Boolean).join(", ") : "";
}

function emptyMessage() {
  const [total, unfinished] = [countItems(), isUnfinished()];
  if (numMissing) return "The files of these results were moved or removed. Run visavis index again.";
  if (total) return countFilters() ? "No items match these filters. Change or clear them." : "No results.";
  if (unfinished) return "This index is unfinished and has no items yet. Run visavis index again to complete it.";
  return "This index has no items. Add images to its source, and run visavis index again.";
}

function add(page) {
  const actions = { votes: info.votes, onOpen: detail.open, onLike: like, onVote: (entry, relevant) => vote(entry, queryValues(), relevant) };
  for (const side of page.sides) {
    const grid = byId("sides").querySelector(`[data-side="${side.side}"] .grid:not(.named)`);
    const before = entries.filter((entry) => entry.side === side.side).length;
    const added = side.hits.map((hit, number) => ({ hit, rank: before + number + 1, index: side.index, side: side.side }));
    for (const entry of added) {
      const isWeak = entry.hit.irrelevant_share >= info.max_irrelevant;
      // If even the first result is weak, there is no line, so that something is shown.
      if (isWeak && grid.lastElementChild && !grid.lastElementChild.classList.contains("weaker")) grid.append(weakerLine(grid));
      grid.append(tile(entry, actions));
      entry.tile.classList.toggle("weaker", isWeak);
    }
    for (const entry of added) entry.open.addEventListener("focus", () => setFocusable(entry));
    entries.push(...added);
  }
  fetched += Math.max(0, ...page.sides.map((side) => side.hits.length + side.missing));
  numMissing += Math.max(0, ...page.sides.map((side) => side.missing));
  if (!focused && entries.length) setFocusable(entries[0]);
  hasMore = page.sides.some((side) => side.has_more);
  showMore();
  if (page.sides.some((side) => side.is_cut)) {
    byId("end").textContent = `These are the first ${formatNumber(countShown())} results. Add words or filters to find others.`;
  }
  // On a large screen the button may still be visible. The observer reports only changes, so observe it again.
  observer.unobserve(byId("more"));
  observer.observe(byId("more"));
}

const observer = new IntersectionObserver((changes) => changes.at(-1).isIntersecting && more(), { rootMargin: "600px" });

const more = () => loading || !response || byId("more").hidden || loadPage(PAGE_SIZE);

// Adds a page of results. Returns whether the query is still the same and the page was added.
async function loadPage(limit) {
  loading = true;
  const number = searchNumber;
  setBusy(true);
  try {
    const page = await get("api/search", { ...queryValues(), ...filters(), offset: fetched, limit }, running.signal);
    if (number === searchNumber) {
      add(page);
      showSummary();
    }
    return number === searchNumber;
  } catch (error) {
    if (number === searchNumber && error.name !== "AbortError") showMessage(error.message);
    return false;
  } finally {
    loading = false;
    if (number === searchNumber) setBusy(false);
  }
}

function showMore() {
  const grids = [...byId("sides").querySelectorAll(".grid:not(.named)")];
  byId("more").hidden = !hasMore || grids.every((grid) => grid.classList.contains("cut"));
}

// The line above the weaker results of a grid, which are hidden until its button is pressed.
function weakerLine(grid) {
  const line = element("li", "line");
  const button = element("button", "plain");
  button.type = "button";
  const setCut = (isCut) => {
    grid.classList.toggle("cut", isCut);
    button.textContent = isCut ? "Show weaker results" : "Hide weaker results";
    button.setAttribute("aria-expanded", String(!isCut));
  };
  button.addEventListener("click", () => {
    setCut(!grid.classList.contains("cut"));
    showMore();
  });
  setCut(true);
  const share = `${formatNumber(Math.round(100 * info.max_irrelevant))} %`;
  line.append(element("span", "", `With the results below, at least ${share} are probably irrelevant.`), button);
  return line;
}

function setFocusable(entry) {
  if (focused) focused.open.tabIndex = -1;
  focused = entry;
  entry.open.tabIndex = 0;
}

function like(entry) {
  Object.assign(query, { text: "", like: entry.hit.key, index: entry.index, image: "", file: null });
  text.value = "";
  search({ push: true }); // remembers the position before its first request
  scrollTo({ top: 0 });
}

async function searchWithFile(file) {
  if (!file) return;
  if (file.type && !file.type.startsWith("image/")) {
    showMessage("This file is not an image. Drop a JPEG, PNG or similar file.");
    return;
  }
  const image = await scaleDown(file);
  setPreview(URL.createObjectURL(image));
  Object.assign(query, { file: image, image: "", like: "" });
  search({ push: true });
}

async function prefer(preferred) {
  if (byId("preference").hidden || byId("preference").querySelector("button").disabled) return;
  try {
    const names = await post("api/preferences", { query: queryValues(), preferred });
    for (const button of byId("preference").querySelectorAll("button")) button.disabled = true;
    const message = { left: `You preferred ${names.left}.`, right: `You preferred ${names.right}.`, neither: "No difference." }[preferred];
    byId("preference-text").textContent = `${message} Left was ${names.left}, right was ${names.right}.`;
    for (const side of ["left", "right"]) byId("sides").querySelector(`[data-side=${side}] h2`).textContent = names[side];
  } catch (error) {
    showMessage(error.message);
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
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
}

function nextTheme() {
  const next = THEMES[document.documentElement.dataset.theme ?? "system"];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("theme", next);
  } catch {
    // without local storage, the theme lasts until the page is closed
  }
  showTheme();
}

function onKey(event) {
  const typing = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target === text) {
    // Chromium clears a search field on Escape.
    if (event.key === "Escape") event.preventDefault();
    // The field has the focus at the start. No query begins with these keys.
    if (!text.value && event.key === "/") event.preventDefault();
    if (!text.value && event.key === "?") {
      event.preventDefault();
      byId("help").showModal();
    }
    if (event.key === "ArrowDown" && focused) {
      event.preventDefault();
      focused.open.focus();
    }
    return;
  }
  if (event.key === "Escape") text.focus();
  if (typing) return;
  const current = entries.find((entry) => entry.open === document.activeElement);
  if (current && event.key.startsWith("Arrow")) {
    const next = neighbor(entries, current, event.key);
    event.preventDefault();
    if (next) next.open.focus();
    else if (event.key === "ArrowUp") text.focus();
    return;
  }
  const action = {
    "/": () => text.focus(),
    f: toggleFilters,
    "?": () => byId("help").showModal(),
    z: undo,
    1: () => prefer("left"),
    2: () => prefer("right"),
    0: () => prefer("neither"),
    m: current && (() => like(current)),
    y: current && info.votes && !isEmpty() && (() => vote(current, queryValues(), true)),
    n: current && info.votes && !isEmpty() && (() => vote(current, queryValues(), false)),
  }[event.key];
  if (action) {
    event.preventDefault();
    action();
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
  byId("chip-image").addEventListener("error", () => (byId("chip-image").hidden = true));
  byId("chip-remove").addEventListener("click", () => {
    Object.assign(query, { like: "", image: "", file: null });
    text.focus();
    search({ push: true });
  });
  byId("choose").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", () => {
    searchWithFile(byId("file").files[0]);
    byId("file").value = "";
  });
  document.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((pasted) => pasted.type.startsWith("image/"));
    if (file) searchWithFile(file);
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
    searchWithFile(event.dataTransfer.files[0]);
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
  byId("feedback-button").addEventListener("click", feedback.open);
  byId("preference").addEventListener("click", (event) => event.target.closest("button") && prefer(event.target.closest("button").dataset.preferred));
  byId("more").addEventListener("click", more);
  history.scrollRestoration = "manual";
  addEventListener("popstate", (event) => {
    loadFromUrl();
    search({ position: event.state });
  });
  addEventListener("scroll", () => {
    clearTimeout(moved);
    moved = setTimeout(remember, WAIT_MS);
  });
  document.addEventListener("keydown", onKey);
  document.addEventListener("gone", (event) => leaveOut(event.detail));
  setInterval(followUpdates, UPDATE_MS);
  feedback.connect(vote);
  detail.connect({
    entries: () => entries,
    votes: () => info.votes,
    videos: () => info.videos,
    onLike: like,
    onVote: (entry, relevant) => info.votes && !isEmpty() && vote(entry, queryValues(), relevant),
    onUndo: undo,
    onMore: more,
  });
}

// Leaves out a result whose file was moved or removed, as the server does in later searches.
function leaveOut(entry) {
  if (!entries.includes(entry)) return;
  entries = entries.filter((other) => other !== entry);
  entry.tile.remove();
  numMissing += 1;
  if (focused === entry) {
    focused = null;
    if (entries.length) setFocusable(entries[0]);
  }
  showSummary();
  if (!entries.length) showNotice(emptyMessage());
}

// Searches again where the collection changed, at the same position of the list.
async function followUpdates() {
  if (document.hidden || !info.indexes.length) return;
  try {
    const newest = await get("api/info");
    const versions = (each) => each.indexes.map((index) => index.version).join();
    if (versions(newest) !== versions(info)) {
      info = newest;
      isOutdated = true;
      fillFilters(await get("api/facets"));
    }
  } catch {
    return; // the next search reports it
  }
  if (!isOutdated || document.querySelector("dialog[open]")) return;
  isOutdated = false;
  const key = entries.find((entry) => entry.open === document.activeElement)?.hit.key;
  search({ position: { count: fetched, top: scrollY, key }, changed: `The collection changed and has ${formatNumber(countItems())} items now.` });
}

async function start() {
  setBusy(true);
  try {
    const [facets, newest] = await Promise.all([get("api/facets"), get("api/info")]);
    info = newest;
    fillFilters(facets);
  } catch (error) {
    setBusy(false);
    byId("heading").textContent = "Search failed";
    showNotice(error.message, start);
    return;
  }
  document.body.classList.toggle("votes", info.votes);
  document.body.classList.toggle("two-indexes", info.blind);
  byId("feedback-button").hidden = !info.votes;
  byId("help-about").textContent = `visavis ${info.version}. ${info.indexes.map((index) => `${index.name}: ${formatNumber(index.count)} items, by ${index.model.split("/").slice(-2).join("/")}`).join(", ")}.`;
  loadFromUrl();
  if (countFilters()) toggleFilters();
  if (!location.search) text.focus();
  search({ position: history.state });
}

showTheme();
connect();
start();
