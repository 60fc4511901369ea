// The query (text, image, item, filters), stored in the URL so that reload, links and the back button work.

import { params } from "./api.js";

const byId = (id) => document.getElementById(id);
const FIELDS = ["path", "kind", "since", "until"];

export const query = { text: "", like: "", index: 0, image: "", file: null, preview: "" };

// As many as the images that the server keeps.
const MAX_PREVIEWS = 48;
const previews = new Map();

export const queryValues = () => ({ text: query.text, like: query.like, image: query.image });

export const isEmpty = () => !query.text && !query.like && !query.image && !query.file;

export function filters() {
  const values = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value.trim()]));
  values.tag = [...byId("tags").querySelectorAll("select")].filter((select) => select.value).map((select) => `${select.name}=${select.value}`);
  return values;
}

export function countFilters() {
  const values = filters();
  return FIELDS.filter((name) => values[name]).length + values.tag.length;
}

// The number of results and the scroll position of this entry of the history, so that the back button returns to them.
export const savePosition = (position) => history.replaceState(position, "");

export function saveToUrl(push) {
  const { text, like, index, image } = query;
  const values = params({ q: text, like, index: like ? index : "", image, ...filters() }).toString();
  const url = location.pathname + (values ? `?${values}` : "");
  if (url === location.pathname + location.search) return;
  history[push ? "pushState" : "replaceState"](null, "", url);
}

// Keeps the preview of the image that the server now has, so that the back button shows it again.
export function keepPreview() {
  const former = previews.get(query.image);
  if (former && former !== query.preview) URL.revokeObjectURL(former);
  previews.delete(query.image);
  previews.set(query.image, query.preview);
  if (previews.size <= MAX_PREVIEWS) return;
  const [oldest, url] = previews.entries().next().value;
  URL.revokeObjectURL(url);
  previews.delete(oldest);
}

// Replaces the preview. The former one is released if its search failed.
export function setPreview(url) {
  if (query.preview && ![...previews.values()].includes(query.preview)) URL.revokeObjectURL(query.preview);
  query.preview = url;
}

export function loadFromUrl() {
  const values = new URLSearchParams(location.search);
  Object.assign(query, { text: values.get("q") ?? "", like: values.get("like") ?? "", index: Number(values.get("index") ?? 0), image: values.get("image") ?? "", file: null });
  setPreview(previews.get(query.image) ?? "");
  byId("text").value = query.text;
  for (const name of FIELDS) byId(name).value = values.get(name) ?? "";
  const tags = new Map(values.getAll("tag").map((tag) => tag.split(/=(.*)/s)));
  for (const select of byId("tags").querySelectorAll("select")) select.value = tags.get(select.name) ?? "";
}

// Shows the image or the item of the query in front of the text.
export function showChip(thumbnail) {
  const shown = Boolean(query.like || query.image || query.file);
  const source = query.like ? thumbnail : query.preview;
  byId("chip").hidden = !shown;
  byId("chip-image").hidden = !source;
  if (source) byId("chip-image").src = source;
  byId("chip-text").textContent = query.like ? "similar items" : "your image";
  byId("text").placeholder = shown ? "Add words" : "Describe an image";
}

// Chosen values stay chosen, also when the collection changes.
export function fillFilters(facets) {
  const chosen = new Map([...byId("tags").querySelectorAll("select")].map((select) => [select.name, select.value]));
  byId("folders").replaceChildren(...Object.keys(facets.folders).map((folder) => Object.assign(document.createElement("option"), { value: folder })));
  byId("tags").replaceChildren(
    ...Object.entries(facets.metadata).map(([name, values]) => {
      const label = document.createElement("label");
      const select = Object.assign(document.createElement("select"), { name });
      select.append(new Option("any", ""), ...Object.entries(values).map(([value, count]) => new Option(`${value} (${count})`, value)));
      select.value = chosen.get(name) ?? "";
      label.append(`${name[0].toUpperCase()}${name.slice(1)} `, select);
      return label;
    }),
  );
  for (const option of byId("kind").options) option.hidden = option.value !== "" && !facets.kinds[option.value];
}
