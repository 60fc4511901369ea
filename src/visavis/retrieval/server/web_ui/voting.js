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

function update(entry, relevant) {
  entry.hit.vote = relevant;
  if (entry.tile) showVote(entry);
  document.dispatchEvent(new CustomEvent("voted", { detail: entry }));
}

// The same vote again withdraws it.
export async function vote(entry, query, relevant) {
  const after = entry.hit.vote === relevant ? null : relevant;
  try {
    const saved = await post("api/votes", { query, index: entry.index, key: entry.hit.key, relevant: after });
    update(entry, saved.relevant);
    last = { entry, vote: saved.vote };
    showMessage(MESSAGES.get(after), after !== null);
    return true;
  } catch (error) {
    showMessage(error.message);
    return false;
  }
}

export async function undo() {
  if (!last) return;
  const { entry, vote } = last;
  last = null;
  try {
    // Others may have voted on the same item, so the judgment afterwards is the server's.
    const { relevant } = await post("api/votes/undo", { vote });
    update(entry, relevant);
    showMessage(relevant === null ? "Vote undone." : `Vote undone. Another vote applies: ${relevant ? "relevant" : "not relevant"}.`);
  } catch (error) {
    showMessage(error.message);
  }
}

byId("toast-undo").addEventListener("click", undo);
