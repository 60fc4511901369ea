// Attributes that the theme leaves out: the name of the search dialog, and tables that are wider than the screen scroll by keyboard.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) frame.tabIndex = 0
})
