// Text for match probabilities, queries, numbers, times and dates.

export const formatNumber = (value) => value.toLocaleString("en");

// Without a probability, the bar shows the rank: a bare score has no unit that a user knows.
export function matchOf(hit, rank) {
  const probability = hit.match_probability;
  if (probability !== null) {
    const word = probability >= 0.8 ? "very likely" : probability >= 0.5 ? "likely" : probability >= 0.2 ? "possible" : "unlikely";
    return { share: probability, word, long: `${word[0].toUpperCase()}${word.slice(1)} match: probability ${Math.round(100 * probability)} %` };
  }
  if (hit.score !== null) {
    const score = hit.score.toFixed(2);
    return { share: 1 / Math.sqrt(rank), word: `rank ${rank}`, long: `Rank ${rank} by score ${score}, which is not a probability` };
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

export function day(iso) {
  return new Date(iso).toLocaleDateString(undefined, { year: "numeric", month: "long", day: "numeric" });
}

export const kinds = { image: "image", video: "video", moment: "moment of a video" };
