// The grid: a tile for each result, and the way from one to the next by arrow keys.

import { pictureOf } from "./api.js";
import { clock, degree } from "./words.js";

const ICONS = {
  like: "M8.5 8.5h11v11h-11zM5 15.5V5h10.5",
  fits: "m5 12.5 4.5 4.5L19 7.5",
  not: "m7 7 10 10M17 7 7 17",
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
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function bar(share) {
  const meter = element("span", "meter");
  meter.setAttribute("aria-hidden", "true");
  const fill = element("span");
  fill.style.setProperty("--share", share.toFixed(3));
  meter.append(fill);
  return meter;
}

export function tile(entry, { votes, onOpen, onLike, onVote }) {
  const { hit, index } = entry;
  const found = degree(hit);
  const item = element("li", "tile");
  const open = element("button", "open");
  open.type = "button";
  open.tabIndex = -1;
  const picture = element("img");
  picture.loading = "lazy";
  picture.decoding = "async";
  picture.alt = "";
  picture.addEventListener("load", () => item.classList.add("shown"));
  picture.addEventListener("error", () => {
    item.classList.add("lost");
    picture.remove();
    open.prepend(element("span", "lost-text", "cannot be shown"));
  });
  picture.src = pictureOf("thumbnail", index, hit);
  open.append(picture, element("span", "mark-of-vote"));
  if (hit.kind !== "image") open.append(element("span", "time", hit.start === null ? "clip" : clock(hit.start)));
  if (hit.duplicates.length) open.append(element("span", "copies", `+${hit.duplicates.length}`));
  open.setAttribute("aria-label", [hit.metadata.caption ?? hit.name, found?.long].filter(Boolean).join(". "));
  open.title = hit.path;
  open.addEventListener("click", () => onOpen(entry));

  const under = element("div", "under");
  const said = element("span", "said");
  if (found) said.append(bar(found.share), element("span", "word", found.word));
  else said.append(element("span", "word", hit.name));
  said.title = found?.long ?? hit.path;
  const actions = element("span", "actions");
  const action = (name, label, act) => {
    const button = element("button", `act ${name}`);
    button.type = "button";
    button.tabIndex = -1;
    button.title = label;
    button.setAttribute("aria-label", `${label}: ${hit.name}`);
    button.append(icon(ICONS[name]));
    button.addEventListener("click", act);
    actions.append(button);
  };
  action("like", "More like this", () => onLike(entry));
  if (votes && found) {
    action("fits", "Fits", () => onVote(entry, true));
    action("not", "Does not fit", () => onVote(entry, false));
  }
  under.append(said, actions);
  item.append(open, under);
  entry.tile = item;
  entry.open = open;
  showVote(entry);
  return item;
}

export function showVote(entry) {
  const vote = entry.hit.vote;
  entry.tile.dataset.vote = vote === null ? "" : vote ? "fits" : "not";
  entry.tile.querySelector(".mark-of-vote").textContent = vote === null ? "" : vote ? "fits" : "does not fit";
  for (const [name, value] of [["fits", true], ["not", false]]) {
    entry.tile.querySelector(`.act.${name}`)?.setAttribute("aria-pressed", String(vote === value));
  }
}

// The nearest tile in a direction, by where tiles are drawn; works in one grid and across two.
export function neighbor(entries, current, key) {
  const here = current.open.getBoundingClientRect();
  const [x, y] = [here.left + here.width / 2, here.top + here.height / 2];
  let best = null;
  let least = Infinity;
  for (const entry of entries) {
    if (entry === current) continue;
    const there = entry.open.getBoundingClientRect();
    const [dx, dy] = [there.left + there.width / 2 - x, there.top + there.height / 2 - y];
    const sideways = key === "ArrowLeft" || key === "ArrowRight";
    const ahead = sideways ? (key === "ArrowRight" ? dx : -dx) : key === "ArrowDown" ? dy : -dy;
    const aside = Math.abs(sideways ? dy : dx);
    if (ahead < 4 || (sideways && aside > here.height / 2)) continue;
    const distance = sideways ? ahead : ahead * 4 + aside;
    if (distance < least) [best, least] = [entry, distance];
  }
  return best;
}
