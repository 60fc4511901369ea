// Runs before the page is drawn: applies the chosen theme, else that of the system.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // without local storage, the theme of the system applies
}
