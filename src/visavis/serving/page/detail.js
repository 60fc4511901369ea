// One result, large, with what is known of it.

import { pictureOf } from "./api.js";
import { bar, element } from "./tiles.js";
import { clock, day, degree, kinds, number } from "./words.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("detail");
let shown = null;
let ways = null;

export const isOpen = () => dialog.open;
export const current = () => shown;

export function connect(given) {
  ways = given;
  byId("detail-like").addEventListener("click", () => like());
  byId("detail-fits").addEventListener("click", () => ways.onVote(shown, true));
  byId("detail-not").addEventListener("click", () => ways.onVote(shown, false));
  byId("detail-back").addEventListener("click", () => walk(-1));
  byId("detail-next").addEventListener("click", () => walk(1));
  byId("detail-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => {
    shown?.open?.focus();
    shown = null;
  });
  byId("detail-picture").addEventListener("error", () => lost(true));
  document.addEventListener("voted", (event) => event.detail === shown && pressed());
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { ArrowLeft: () => walk(-1), ArrowRight: () => walk(1), m: like, y: () => ways.onVote(shown, true), n: () => ways.onVote(shown, false), z: ways.onUndo }[event.key];
    if (act) {
      event.preventDefault();
      event.stopPropagation();
      act();
    }
  });
}

function like() {
  const entry = shown;
  dialog.close();
  ways.onLike(entry);
}

function walk(step) {
  const entries = ways.entries().filter((entry) => entry.side === shown.side);
  const next = entries[entries.indexOf(shown) + step];
  if (next) open(next);
  else if (step > 0) ways.onMore();
}

function lost(isLost) {
  byId("detail-lost").hidden = !isLost;
  byId("detail-picture").hidden = isLost;
}

function pressed() {
  byId("detail-fits").setAttribute("aria-pressed", String(shown.hit.vote === true));
  byId("detail-not").setAttribute("aria-pressed", String(shown.hit.vote === false));
}

export function open(entry) {
  shown = entry;
  const { hit, index } = entry;
  const found = degree(hit);
  lost(false);
  byId("detail-picture").alt = hit.metadata.caption ?? hit.name;
  byId("detail-picture").src = pictureOf("picture", index, hit);
  byId("detail-name").textContent = hit.name;
  byId("detail-degree").replaceChildren(...(found ? [bar(found.share), element("span", "", `${found.long}.`)] : []));
  const facts = [["Where", hit.path], ["What", kinds[hit.kind] + (hit.start === null ? "" : `, ${clock(hit.start)} to ${clock(hit.end)}`)], ["Changed", day(hit.changed)]];
  for (const [name, value] of Object.entries(hit.metadata)) facts.push([name[0].toUpperCase() + name.slice(1), value]);
  if (hit.duplicates.length) facts.push(["The same", hit.duplicates.length > 3 ? `${number(hit.duplicates.length)} others` : hit.duplicates.join(", ")]);
  byId("detail-facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
  for (const id of ["detail-fits", "detail-not"]) byId(id).hidden = !ways.votes() || !found;
  pressed();
  if (!dialog.open) {
    dialog.showModal();
    byId("detail-like").focus();
  }
}
