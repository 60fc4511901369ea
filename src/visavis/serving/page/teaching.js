// Asks about the pairs of a query and a picture whose answer would teach most.

import { get, pictureOf } from "./api.js";
import { spoken } from "./words.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("teach");
let pairs = [];
let asked = 0;
let answered = 0;
let onVote = null;

export function connect(given) {
  onVote = given;
  byId("teach-yes").addEventListener("click", () => answer(true));
  byId("teach-no").addEventListener("click", () => answer(false));
  byId("teach-skip").addEventListener("click", () => answer(null));
  byId("teach-close").addEventListener("click", () => dialog.close());
  byId("teach-picture").addEventListener("error", () => answer(null));
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !pairs[asked]) return;
    const value = { y: true, n: false, s: null }[event.key];
    if (value !== undefined) {
      event.preventDefault();
      event.stopPropagation();
      answer(value);
    }
  });
}

export async function teach() {
  [pairs, asked, answered] = [[], 0, 0];
  try {
    pairs = (await get("/api/ask", { count: 10 })).pairs;
    show();
  } catch (error) {
    end(error.message);
  }
  if (!dialog.open) dialog.showModal();
}

async function answer(fits) {
  const pair = pairs[asked];
  if (!pair) return;
  if (fits !== null) {
    const entry = { hit: { ...pair.hit, vote: null }, index: pair.index };
    if (!(await onVote(entry, pair.query, fits))) return;
    answered += 1;
  }
  asked += 1;
  show();
}

function show() {
  const pair = pairs[asked];
  if (!pair) {
    end(pairs.length ? `Thank you: ${answered} of ${pairs.length} answered.` : "There is nothing to ask yet: search for a few things first.");
    return;
  }
  byId("teach-title").textContent = "Does this fit?";
  for (const id of ["teach-frame", "teach-buttons", "teach-query"]) byId(id).hidden = false;
  byId("teach-query").textContent = spoken(pair.query.text);
  byId("teach-picture").src = pictureOf("picture", pair.index, pair.hit);
  byId("teach-picture").alt = pair.hit.name;
  byId("teach-note").textContent = `${asked + 1} of ${pairs.length}`;
  byId("teach-yes").focus();
}

function end(text) {
  for (const id of ["teach-frame", "teach-buttons", "teach-query"]) byId(id).hidden = true;
  byId("teach-title").textContent = "Teach";
  byId("teach-note").textContent = text;
  byId("teach-close").focus();
}
