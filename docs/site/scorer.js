// Scores of search results, for Sphinx's searchtools.js. The first results are declarations whose name is the query:
// max_pool3d before adaptive_max_pool3d. The numbers are Sphinx's defaults.
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const query = (new URLSearchParams(window.location.search).get("q") || "").trim().toLowerCase();
    const name = title.toLowerCase();
    return name === query || name.endsWith("::" + query) ? score + 20 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
