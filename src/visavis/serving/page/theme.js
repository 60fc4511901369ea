// Before anything is drawn: the theme that was chosen here, if one was; otherwise that of the system.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // a browser that keeps nothing has the system's theme
}
