// The grid of results, and navigation between them with the arrow keys.

import { imageUrl, isGone } from "./api.js";
import { clock, matchOf } from "./format.js";

const ICONS = {
  like: "M8.5 8.5h11v11h-11zM5 15.5V5h10.5",
  relevant: "m5 12.5 4.5 4.5L19 7.5",
  irrelevant: "m7 7 10 10M17 7 7 17",
};

function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

export function element(tag, className, text) {
  const created = document.createElement(tag);
  if (className) created.className = className;
  if (text !== undefined) created.textContent = text;
  return created;
}

// The bar of a match probability, and nothing without one.
export function bar(share) {
  if (share === null) return "";
  const meter = element("span", "meter");
  meter.setAttribute("aria-hidden", "true");
  const fill = element("span");
  fill.style.setProperty("--share", share.toFixed(3));
  meter.append(fill);
  return meter;
}

export function tile(entry, { votes, onOpen, onLike, onVote }) {
  const { hit, index } = entry;
  const match = matchOf(hit, entry.rank);
  const item = element("li", "tile");
  const open = element("button", "open");
  open.type = "button";
  open.tabIndex = -1;
  const image = element("img");
  image.loading = "lazy";
  image.decoding = "async";
  image.alt = "";
  image.addEventListener("load", () => item.classList.add("shown"));
  image.addEventListener("error", async () => {
    if (await isGone(image.src)) {
      document.dispatchEvent(new CustomEvent("gone", { detail: entry }));
      return;
    }
    item.classList.add("missing");
    image.remove();
    open.prepend(element("span", "missing-text", "not available"));
  });
  image.src = imageUrl("thumbnail", index, hit);
  open.append(image, element("span", "vote-mark"));
  if (hit.kind !== "image") open.append(element("span", "time", hit.start === null ? "video" : clock(hit.start)));
  if (hit.duplicates.length) open.append(element("span", "copies", `+${hit.duplicates.length}`));
  open.setAttribute("aria-label", [hit.metadata.caption ?? hit.name, match?.long].filter(Boolean).join(". "));
  open.title = hit.path;
  open.addEventListener("click", () => onOpen(entry));

  const under = element("div", "under");
  const label = element("span", "match");
  if (match) label.append(bar(match.share), element("span", "word", match.word));
  const name = element("div", "name", hit.name);
  name.title = hit.path;
  label.title = match?.long ?? hit.path;
  const actions = element("span", "actions");
  const addAction = (name, text, act) => {
    const button = element("button", `act ${name}`);
    button.type = "button";
    button.tabIndex = -1;
    button.title = text;
    button.setAttribute("aria-label", `${text}: ${hit.name}`);
    button.append(icon(ICONS[name]));
    button.addEventListener("click", act);
    actions.append(button);
  };
  addAction("like", "More like this", () => onLike(entry));
  if (votes && match) {
    addAction("relevant", "Relevant", () => onVote(entry, true));
    addAction("irrelevant", "Not relevant", () => onVote(entry, false));
  }
  under.append(label, actions);
  item.append(open, name, under);
  entry.tile = item;
  entry.open = open;
  showVote(entry);
  return item;
}

export function showVote(entry) {
  const vote = entry.hit.vote;
  entry.tile.dataset.vote = vote === null ? "" : vote ? "relevant" : "irrelevant";
  entry.tile.querySelector(".vote-mark").textContent = vote === null ? "" : vote ? "relevant" : "not relevant";
  for (const [name, value] of [["relevant", true], ["irrelevant", false]]) {
    entry.tile.querySelector(`.act.${name}`)?.setAttribute("aria-pressed", String(vote === value));
  }
}

// The nearest tile in a direction by position on the page, in one grid or across two.
export function neighbor(entries, current, key) {
  const box = current.open.getBoundingClientRect();
  const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
  let nearest = null;
  let minDistance = Infinity;
  for (const entry of entries) {
    if (entry === current || !entry.open.offsetParent) continue;
    const other = entry.open.getBoundingClientRect();
    const [dx, dy] = [other.left + other.width / 2 - x, other.top + other.height / 2 - y];
    const sideways = key === "ArrowLeft" || key === "ArrowRight";
    const ahead = sideways ? (key === "ArrowRight" ? dx : -dx) : key === "ArrowDown" ? dy : -dy;
    const aside = Math.abs(sideways ? dy : dx);
    if (ahead < 4 || (sideways && aside > box.height / 2)) continue;
    const distance = sideways ? ahead : ahead * 4 + aside;
    if (distance < minDistance) [nearest, minDistance] = [entry, distance];
  }
  return nearest;
}
