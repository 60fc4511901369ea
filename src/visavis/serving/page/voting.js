// Votes, and taking them back; short messages at the foot of the page.

import { post } from "./api.js";
import { showVote } from "./tiles.js";

const byId = (id) => document.getElementById(id);
let last = null;
let timer = 0;

export function tell(text, undo) {
  byId("toast-text").textContent = text;
  byId("toast-undo").hidden = !undo;
  byId("toast").classList.add("up");
  clearTimeout(timer);
  timer = setTimeout(() => byId("toast").classList.remove("up"), undo ? 7000 : 4000);
}

const SAID = new Map([[true, "Noted: it fits."], [false, "Noted: it does not fit."], [null, "Taken back."]]);

// The same vote again takes it back.
export async function vote(entry, query, fits) {
  const before = entry.hit.vote;
  const now = before === fits ? null : fits;
  try {
    const kept = await post("/api/votes", { query, index: entry.index, key: entry.hit.key, fits: now });
    entry.hit.vote = kept.fits;
    last = { entry, query, before };
    if (entry.tile) showVote(entry);
    document.dispatchEvent(new CustomEvent("voted", { detail: entry }));
    tell(SAID.get(now), now !== null);
    return true;
  } catch (error) {
    tell(error.message);
    return false;
  }
}

export async function undo() {
  if (!last) return;
  const { entry, query, before } = last;
  last = null;
  try {
    entry.hit.vote = (await post("/api/votes", { query, index: entry.index, key: entry.hit.key, fits: before })).fits;
    if (entry.tile) showVote(entry);
    document.dispatchEvent(new CustomEvent("voted", { detail: entry }));
    tell("Taken back.");
  } catch (error) {
    tell(error.message);
  }
}

byId("toast-undo").addEventListener("click", undo);
