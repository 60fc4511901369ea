// The routes of openapi.json with their parameters and fields.

import { get } from "./api.js";
import { element } from "./results.js";

const schema = await get("openapi.json");

function resolve(part) {
  const name = part?.$ref?.split("/").pop();
  return name ? schema.components.schemas[name] : part;
}

// A type on one line, such as "text or null", "list of Hit" or "left | right".
function typeName(part) {
  if (part.$ref) return part.$ref.split("/").pop();
  if (part.const !== undefined) return JSON.stringify(part.const);
  if (part.enum) return part.enum.map((value) => JSON.stringify(value)).join(" | ");
  const options = part.anyOf ?? part.oneOf;
  if (options) return [...new Set(options.map(typeName))].join(" or ");
  if (part.type === "array") return `list of ${typeName(part.items ?? {})}`;
  return { string: part.format ?? "text", null: "null" }[part.type] ?? part.type ?? "any value";
}

// Descriptions mark code with backticks.
const plain = (text) => (text ?? "").replaceAll("`", "");

function describe(name, isRequired, part, text) {
  const fallback = part.default === undefined || part.default === "" ? "" : `Default: ${JSON.stringify(part.default)}.`;
  const words = [typeName(part), plain(text).replace(/\.$/, "")].filter(Boolean).join(". ");
  const term = element("dt");
  term.append(element("code", "", name + (isRequired ? " *" : "")));
  return [term, element("dd", "", [`${words}.`, fallback].filter(Boolean).join(" "))];
}

function fields(part) {
  const { properties = {}, required = [] } = resolve(part) ?? {};
  return Object.entries(properties).flatMap(([name, field]) => describe(name, required.includes(name), field, field.description));
}

function list(title, rows) {
  if (!rows.length) return [];
  const shown = element("dl");
  shown.append(...rows);
  return [element("p", "", title), shown];
}

for (const [path, methods] of Object.entries(schema.paths)) {
  for (const [method, route] of Object.entries(methods)) {
    const section = element("section");
    const heading = element("h2");
    heading.append(element("span", "method", method.toUpperCase()), element("code", "", path));
    const body = route.requestBody?.content ?? {};
    const [answer = {}] = Object.values(route.responses["200"]?.content ?? {});
    const parameters = (route.parameters ?? []).flatMap((each) => describe(each.name, each.required, each.schema, each.description ?? each.schema.description));
    section.append(
      heading,
      element("p", "", plain(route.description)),
      ...list("Parameters", parameters),
      ...list("Request", fields(body["application/json"]?.schema)),
      ...(body["image/*"] ? [element("p", "", "Request: the content of an image file.")] : []),
      ...list("Response", fields(answer.schema)),
    );
    document.getElementById("routes").append(section);
  }
}

for (const [name, part] of Object.entries(schema.components.schemas)) {
  const section = element("section");
  section.append(element("h2", "", name), ...list(plain(part.description).split("\n\n")[0], fields(part)));
  document.getElementById("objects").append(section);
}
