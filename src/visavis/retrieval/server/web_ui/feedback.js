// Dialog that requests votes on the pairs of a query and an item whose votes are most informative.

import { get, imageUrl } from "./api.js";
import { quoteQuery } from "./format.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("feedback");
let pairs = [];
let position = 0;
let numVotes = 0;
let onVote = null;

export function connect(vote) {
  onVote = vote;
  byId("feedback-yes").addEventListener("click", () => submitVote(true));
  byId("feedback-no").addEventListener("click", () => submitVote(false));
  byId("feedback-skip").addEventListener("click", () => submitVote(null));
  byId("feedback-close").addEventListener("click", () => dialog.close());
  byId("feedback-image").addEventListener("error", () => submitVote(null));
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !pairs[position]) return;
    const relevant = { y: true, n: false, s: null }[event.key];
    if (relevant !== undefined) {
      event.preventDefault();
      event.stopPropagation();
      submitVote(relevant);
    }
  });
}

export async function open() {
  [pairs, position, numVotes] = [[], 0, 0];
  try {
    pairs = (await get("api/uncertain", { count: 10 })).pairs;
    show();
  } catch (error) {
    end(error.message);
  }
  if (!dialog.open) dialog.showModal();
}

async function submitVote(relevant) {
  const pair = pairs[position];
  if (!pair) return;
  if (relevant !== null) {
    const entry = { hit: { ...pair.hit, vote: null }, index: pair.index };
    if (!(await onVote(entry, pair.query, relevant))) return;
    numVotes += 1;
  }
  position += 1;
  show();
}

function show() {
  const pair = pairs[position];
  if (!pair) {
    end(pairs.length ? `Done: ${numVotes} of ${pairs.length} results voted on.` : "No results to vote on yet. Run a few searches first.");
    return;
  }
  byId("feedback-title").textContent = "Is this relevant?";
  for (const id of ["feedback-frame", "feedback-buttons", "feedback-query"]) byId(id).hidden = false;
  byId("feedback-query").textContent = quoteQuery(pair.query.text);
  byId("feedback-image").src = imageUrl("image", pair.index, pair.hit);
  byId("feedback-image").alt = pair.hit.name;
  byId("feedback-note").textContent = `${position + 1} of ${pairs.length}`;
  byId("feedback-yes").focus();
}

function end(text) {
  for (const id of ["feedback-frame", "feedback-buttons", "feedback-query"]) byId(id).hidden = true;
  byId("feedback-title").textContent = "Vote";
  byId("feedback-note").textContent = text;
  byId("feedback-close").focus();
}
