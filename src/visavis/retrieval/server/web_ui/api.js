// Requests to the server. Every error has one message. URLs are relative, so that a proxy can serve the page below any path.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Status of an error without a response.
export const NO_RESPONSE = 0;

async function request(url, options) {
  let response;
  try {
    response = await fetch(url, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not respond. Check that it is running.", NO_RESPONSE);
  }
  if (response.status === 401) location.assign("login");
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  throw new ServerError(body.error ?? `The server returned status ${response.status}.`, response.status);
}

export function params(values) {
  const result = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== "" && item !== null && item !== undefined) result.append(name, item);
    }
  }
  return result;
}

export const get = (path, values = {}, signal) => request(`${path}?${params(values)}`, { signal });

export const post = (path, content) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });

export const searchByImage = (values, image, signal) =>
  request(`api/search?${params(values)}`, { method: "POST", headers: { "Content-Type": image.type || "image/jpeg" }, body: image, signal });

export const imageUrl = (size, index, hit) => `api/${size}?${params({ key: hit.key, index, content_version: hit.content_version ?? "" })}`;

// Whether the file of an image was moved or removed. The event of a failed image has no status.
export const isGone = (url) => fetch(url, { credentials: "same-origin" }).then((answer) => answer.status === 410, () => false);

// A moment begins at its first second.
export const videoUrl = (index, hit) => `api/video?${params({ key: hit.key, index, content_version: hit.content_version ?? "" })}${hit.start === null ? "" : `#t=${hit.start}`}`;

// Scales an image down before it is sent, which also removes its metadata, such as the location.
export async function scaleDown(file, side = 640) {
  try {
    const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
    const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
    return blob ?? file;
  } catch {
    return file; // the server may read formats that the browser cannot
  }
}
