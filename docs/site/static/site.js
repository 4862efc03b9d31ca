// Pages that are opened from a disk cannot read each other, so their search results have no excerpts.
if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}
// On phones, the table of contents covers the page. Close it when an entry is selected.
document.addEventListener("click", (event) => {
  if (event.target.closest(".toc-tree a")) document.getElementById("__toc").checked = false;
});
