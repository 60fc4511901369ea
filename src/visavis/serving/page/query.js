// The query: words, a picture, an item, filters; kept in the address, so that a reload, a link and the way back work.

import { params } from "./api.js";

const byId = (id) => document.getElementById(id);
const FIELDS = ["path", "kind", "since", "until"];

export const query = { text: "", like: "", index: 0, picture: "", file: null, preview: "" };

export const asked = () => ({ text: query.text, like: query.like, picture: query.picture });

export const isEmpty = () => !query.text && !query.like && !query.picture && !query.file;

export function filters() {
  const values = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value.trim()]));
  values.tag = [...byId("tags").querySelectorAll("select")].filter((one) => one.value).map((one) => `${one.name}=${one.value}`);
  return values;
}

export function countFilters() {
  const values = filters();
  return FIELDS.filter((name) => values[name]).length + values.tag.length;
}

export function remember(push) {
  const { text, like, index, picture } = query;
  const values = params({ q: text, like, of: like ? index : "", picture, ...filters() }).toString();
  const address = values ? `/?${values}` : "/";
  if (address !== location.pathname + location.search) history[push ? "pushState" : "replaceState"](null, "", address);
}

export function recall() {
  const found = new URLSearchParams(location.search);
  Object.assign(query, { text: found.get("q") ?? "", like: found.get("like") ?? "", index: Number(found.get("of") ?? 0), picture: found.get("picture") ?? "", file: null });
  byId("text").value = query.text;
  for (const name of FIELDS) byId(name).value = found.get(name) ?? "";
  const tags = new Map(found.getAll("tag").map((tag) => tag.split(/=(.*)/s)));
  for (const select of byId("tags").querySelectorAll("select")) select.value = tags.get(select.name) ?? "";
}

// What stands before the words: a picture that was brought along, or an item to find more like.
export function showChip(thumbnail) {
  const shown = Boolean(query.like || query.picture || query.file);
  const source = query.like ? thumbnail : query.preview;
  byId("chip").hidden = !shown;
  byId("chip-picture").hidden = !source;
  if (source) byId("chip-picture").src = source;
  byId("chip-text").textContent = query.like ? "like this" : "your picture";
  byId("text").placeholder = shown ? "and with words?" : "Describe a picture";
}

export function fillFilters(facets) {
  byId("folders").replaceChildren(...Object.keys(facets.folders).map((folder) => Object.assign(document.createElement("option"), { value: folder })));
  byId("tags").replaceChildren(
    ...Object.entries(facets.metadata).map(([name, values]) => {
      const label = document.createElement("label");
      const select = Object.assign(document.createElement("select"), { name });
      select.append(new Option("any", ""), ...Object.entries(values).map(([value, count]) => new Option(`${value} (${count})`, value)));
      label.append(`${name[0].toUpperCase()}${name.slice(1)} `, select);
      return label;
    }),
  );
  for (const option of [...byId("kind").options]) {
    if (option.value && !facets.kinds[option.value]) option.remove();
  }
}
