/* The run's chain: whether it is whole, its newest line, and since when other runs differ. */

const VERDICTS = {
  equal: ["✓", "equal"],
  rounding: ["≈", "within rounding, as far as chains tell"],
  undecided: ["?", "undecided"],
  different: ["▲", "different"],
};

/* null: the run has no chain, as those of older releases, and there is nothing to compare. */
function chainPanel(chain) {
  if (!chain || (chain.last === null && !chain.problem && !chain.differences.length)) return null;
  return h(
    "section",
    { class: "panel chain", "aria-label": "Chain" },
    chainItself(chain),
    chain.differences.length > 0 && h("ul", {}, chain.differences.map(differenceItem)),
  );
}

function chainItself(chain) {
  const { first, last: newest, problem } = chain;
  const lines =
    newest !== null &&
    h(
      "p",
      {},
      first === newest ? `Iteration ${newest}. ` : `Iterations ${first} to ${newest}. `,
      problem ? "The digest of the last of these lines is " : "The newest line's digest is ",
      h("span", { class: "mono" }, shown(chain.newest)),
      ".",
    );
  if (problem) {
    return [
      h(
        "h2",
        { class: "broken", role: "alert" },
        h("span", { class: "mark" }, "▲"),
        " The chain is not whole: ",
        shown(problem),
      ),
      lines && h("p", { class: "quiet" }, "Until there it is whole:"),
      lines,
      h(
        "p",
        { class: "quiet small" },
        "A line was changed, removed or added after the run wrote it. pa-npu verify RUN names it too.",
      ),
    ];
  }
  if (newest === null) return h("h2", {}, "The run has no chain yet");
  return [
    h("h2", { class: "whole" }, h("span", { class: "mark" }, "✓"), " The chain is whole"),
    lines,
    h(
      "p",
      { class: "quiet small" },
      "pa-npu verify RUN compares it with the run's files; with --replay A:B it repeats iterations.",
    ),
  ];
}

/* One other run: the verdict, and the sentences that pa-npu diff prints. */
function differenceItem(difference) {
  const [mark, words] = VERDICTS[difference.verdict] || ["–", "not compared"];
  const { since, group } = difference;
  const samples = since !== null && state.run.sample_iterations.includes(since);
  return h(
    "li",
    { class: difference.verdict || "unknown", "data-run": difference.name },
    h(
      "h3",
      {},
      h("span", { class: "mark" }, mark, " ", words),
      h("span", {}, "beside ", shown(difference.name)),
      h("span", { class: "quiet" }, difference.iterations),
    ),
    difference.sentences.map((sentence) => h("p", {}, shown(sentence))),
    difference.problem && h("p", {}, shown(difference.problem)),
    samples &&
      h(
        "p",
        {},
        h(
          "a",
          { href: `#samples?i=${since}` + (group === null ? "" : `&g=${group}`) },
          group === null ? `samples of iteration ${since}` : `group ${group} of iteration ${since}`,
        ),
      ),
  );
}
