// Dialog that shows one result in large, with its metadata.

import { imageUrl, videoUrl } from "./api.js";
import { clock, formatNumber, kinds, matchOf, metadataValue, moment } from "./format.js";
import { bar, element } from "./results.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("detail");
let shown = null;
let actions = null;

export function connect(callbacks) {
  actions = callbacks;
  byId("detail-like").addEventListener("click", () => like());
  byId("detail-relevant").addEventListener("click", () => actions.onVote(shown, true));
  byId("detail-irrelevant").addEventListener("click", () => actions.onVote(shown, false));
  byId("detail-previous").addEventListener("click", () => step(-1));
  byId("detail-next").addEventListener("click", () => step(1));
  byId("detail-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => {
    showVideo("");
    shown?.open?.focus();
    shown = null;
  });
  byId("detail-image").addEventListener("error", () => showMissing(true));
  // The browser may not have the codec. The first frame stays.
  byId("detail-video").addEventListener("error", () => shown && showVideo(""));
  document.addEventListener("voted", (event) => event.detail === shown && showVote());
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("video")) return;
    const action = {
      ArrowLeft: () => step(-1),
      ArrowRight: () => step(1),
      m: like,
      y: () => actions.onVote(shown, true),
      n: () => actions.onVote(shown, false),
      z: actions.onUndo,
    }[event.key];
    if (action) {
      event.preventDefault();
      event.stopPropagation();
      action();
    }
  });
}

function like() {
  const entry = shown;
  dialog.close();
  actions.onLike(entry);
}

function step(offset) {
  const entries = actions.entries().filter((entry) => entry.side === shown.side);
  const next = entries[entries.indexOf(shown) + offset];
  if (next) open(next);
  else if (offset > 0) actions.onMore();
}

function showMissing(isMissing) {
  byId("detail-missing").hidden = !isMissing;
  byId("detail-image").hidden = isMissing;
}

function showVideo(url) {
  const video = byId("detail-video");
  if (!url && video.hidden) return;
  video.hidden = !url;
  byId("detail-image").hidden = Boolean(url);
  if (url) video.src = url;
  else video.removeAttribute("src");
  video.load();
}

function showVote() {
  byId("detail-relevant").setAttribute("aria-pressed", String(shown.hit.vote === true));
  byId("detail-irrelevant").setAttribute("aria-pressed", String(shown.hit.vote === false));
}

export function open(entry) {
  shown = entry;
  const { hit, index } = entry;
  const match = matchOf(hit, entry.rank);
  showVideo("");
  showMissing(false);
  byId("detail-image").alt = hit.metadata.caption ?? hit.name;
  byId("detail-image").src = imageUrl("image", index, hit);
  if (hit.kind !== "image" && actions.videos()) {
    byId("detail-video").poster = imageUrl("image", index, hit);
    showVideo(videoUrl(index, hit));
  }
  byId("detail-name").textContent = hit.name;
  byId("detail-match").replaceChildren(...(match ? [bar(match.share), element("span", "", `${match.long}.`)] : []));
  const kind = kinds[hit.kind] + (hit.start === null ? "" : `, ${clock(hit.start)} to ${clock(hit.end)}`);
  const rows = [["Path", hit.path], ["Kind", kind], ["Modified", moment(hit.modified)]];
  for (const [name, value] of Object.entries(hit.metadata)) rows.push([name[0].toUpperCase() + name.slice(1).replaceAll("_", " "), metadataValue(value)]);
  if (hit.duplicates.length) {
    rows.push(["Duplicates", hit.duplicates.length > 3 ? `${formatNumber(hit.duplicates.length)} others` : hit.duplicates.join(", ")]);
  }
  byId("detail-properties").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
  for (const id of ["detail-relevant", "detail-irrelevant"]) byId(id).hidden = !actions.votes() || !match;
  showVote();
  if (!dialog.open) {
    dialog.showModal();
    byId("detail-like").focus();
  }
}
