// What is said in words: degrees of match, queries, numbers, days.

export const number = (value) => value.toLocaleString("en");

export function degree(hit) {
  if (hit.match !== null) {
    const word = hit.match >= 0.8 ? "very likely" : hit.match >= 0.5 ? "likely" : hit.match >= 0.2 ? "perhaps" : "unlikely";
    return { share: hit.match, word, long: `${word[0].toUpperCase()}${word.slice(1)} a match: ${Math.round(100 * hit.match)} in 100 like it are` };
  }
  if (hit.score !== null) {
    const score = hit.score.toFixed(2);
    return { share: Math.min(Math.max(hit.score, 0), 1), word: score, long: `Score ${score}; how likely that is a match is not known here` };
  }
  return null;
}

const MINUS = /(?:^|(?<=\s))-(?:"([^"]*)"|([^\s"-]\S*))/g;

export function spoken(text) {
  const without = [...text.matchAll(MINUS)].map((found) => (found[1] ?? found[2]).trim()).filter(Boolean);
  const wanted = text.replace(MINUS, " ").split(/\s+/).filter(Boolean).join(" ");
  return [wanted && `“${wanted}”`, without.length && `without ${without.map((words) => `“${words}”`).join(" or ")}`].filter(Boolean).join(" ");
}

export function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

export function day(iso) {
  return new Date(iso).toLocaleDateString(undefined, { year: "numeric", month: "long", day: "numeric" });
}

export const kinds = { image: "picture", video: "clip", moment: "moment of a clip" };
