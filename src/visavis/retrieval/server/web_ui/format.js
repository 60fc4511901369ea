// Text for match probabilities, queries, numbers, times and dates.

export const formatNumber = (value) => value.toLocaleString("en");

// Without a probability there is no bar: neither a rank nor a score is evidence of a match.
export function matchOf(hit, rank) {
  const probability = hit.match_probability;
  if (probability !== null) {
    const word = probability >= 0.8 ? "very likely" : probability >= 0.5 ? "likely" : probability >= 0.2 ? "possible" : "unlikely";
    return { share: probability, word, long: `${word[0].toUpperCase()}${word.slice(1)} match: probability ${Math.round(100 * probability)} %` };
  }
  if (hit.score !== null) {
    const score = hit.score.toFixed(2);
    return { share: null, word: `rank ${rank}`, long: `Rank ${rank} by score ${score}, which is not a probability` };
  }
  return null;
}

const EXCLUDED = /(?:^|(?<=\s))-(?:"([^"]*)"|([^\s"-]\S*))/g;

export function quoteQuery(text) {
  const excluded = [...text.matchAll(EXCLUDED)].map((match) => (match[1] ?? match[2]).trim()).filter(Boolean);
  const included = text.replace(EXCLUDED, " ").split(/\s+/).filter(Boolean).join(" ");
  return [included && `“${included}”`, excluded.length && `without ${excluded.map((words) => `“${words}”`).join(" or ")}`].filter(Boolean).join(" ");
}

export function clock(seconds) {
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}

// A moment in the time zone of the browser, such as "June 10, 2024, 12:00".
export function moment(iso, timeZone) {
  const time = new Date(iso);
  const day = time.toLocaleDateString("en-US", { year: "numeric", month: "long", day: "numeric", timeZone });
  const clock = time.toLocaleTimeString("en-US", { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone });
  return `${day}, ${clock}`;
}

const TIME = /^(\d{4}-\d\d-\d\dT\d\d:\d\d)(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?$/;

// A value of the metadata. A capture time is shown as the clock of the camera showed it.
export function metadataValue(value) {
  const time = value.match(TIME);
  return time ? moment(`${time[1]}Z`, "UTC") : value;
}

export const kinds = { image: "image", video: "video", moment: "moment of a video" };
