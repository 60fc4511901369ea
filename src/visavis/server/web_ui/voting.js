// Votes with undo, and short messages at the bottom of the page.

import { post } from "./api.js";
import { showVote } from "./results.js";

const byId = (id) => document.getElementById(id);
let last = null;
let timer = 0;

export function showMessage(text, canUndo) {
  byId("toast-text").textContent = text;
  byId("toast-undo").hidden = !canUndo;
  byId("toast").classList.add("up");
  clearTimeout(timer);
  timer = setTimeout(() => byId("toast").classList.remove("up"), canUndo ? 7000 : 4000);
}

const MESSAGES = new Map([[true, "Saved: relevant."], [false, "Saved: not relevant."], [null, "Vote withdrawn."]]);

async function save(entry, query, relevant) {
  const saved = await post("/api/votes", { query, index: entry.index, key: entry.hit.key, relevant });
  entry.hit.vote = saved.relevant;
  if (entry.tile) showVote(entry);
  document.dispatchEvent(new CustomEvent("voted", { detail: entry }));
}

// The same vote again withdraws it.
export async function vote(entry, query, relevant) {
  const before = entry.hit.vote;
  const after = before === relevant ? null : relevant;
  try {
    await save(entry, query, after);
    last = { entry, query, before };
    showMessage(MESSAGES.get(after), after !== null);
    return true;
  } catch (error) {
    showMessage(error.message);
    return false;
  }
}

export async function undo() {
  if (!last) return;
  const { entry, query, before } = last;
  last = null;
  try {
    await save(entry, query, before);
    showMessage(MESSAGES.get(null));
  } catch (error) {
    showMessage(error.message);
  }
}

byId("toast-undo").addEventListener("click", undo);
