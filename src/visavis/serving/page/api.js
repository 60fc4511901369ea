// Asking the service: every error is one sentence.

export class Trouble extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

export const LOST = 0;

async function ask(url, options) {
  let response;
  try {
    response = await fetch(url, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The service does not answer. Is it still running?", LOST);
  }
  if (response.status === 401) location.assign("/login");
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const said = body.error ?? `The service answered with ${response.status}.`;
  throw new Trouble(said[0].toUpperCase() + said.slice(1), response.status);
}

export function params(values) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) found.append(name, one);
    }
  }
  return found;
}

export const get = (path, values = {}, signal) => ask(`${path}?${params(values)}`, { signal });

export const post = (path, content) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });

export const send = (values, picture, signal) =>
  ask(`/api/search?${params(values)}`, { method: "POST", headers: { "Content-Type": picture.type || "image/jpeg" }, body: picture, signal });

export const pictureOf = (how, index, hit) => `/api/${how}?${params({ key: hit.key, index, version: hit.version ?? "" })}`;

// A photo of a telephone is scaled down before it is sent, which also leaves its place behind.
export async function smaller(file, side = 640) {
  try {
    const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
    const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.9));
    return blob ?? file;
  } catch {
    return file; // what the browser cannot read, the service may
  }
}
