/* Two versions of an evaluation question by question: what was gained and lost, and the answers. */

const CHANGES = [
  ["changed", "gained or lost"],
  ["gained", "gained"],
  ["lost", "lost"],
  ["right", "right both times"],
  ["wrong", "wrong both times"],
  ["", "all questions"],
];
const MAX_QUESTIONS = 300;

function outcome(before, now) {
  if (before === null) return "new";
  if (now > before) return "gained";
  if (now < before) return "lost";
  return now >= 0.5 ? "right" : "wrong";
}

/* Two versions question by question: what was gained, what was lost, and the answers of both. */
async function questionsPanel(set) {
  const versions = state.run.question_versions,
    address = place.read();
  if (!versions.length)
    return h(
      "section",
      { class: "panel" },
      h("h2", {}, "Question by question"),
      h("p", { class: "quiet" }, "No results per question are kept here (RUN/evaluations)."),
    );
  const pick = (name, fallback) =>
    versions.includes(Number(address[name] ?? NaN)) ? Number(address[name]) : fallback;
  const now = pick("now", versions[versions.length - 1]),
    before = pick("before", versions[0]);
  const select = (id, label, chosen) =>
    h(
      "label",
      {},
      label,
      h(
        "select",
        { id, onchange: (event) => show("evaluation", { [id]: event.target.value, n: null }) },
        versions.map((value) => h("option", { value, selected: value === chosen }, value)),
      ),
    );
  const head = h(
    "div",
    { class: "bar" },
    h("h2", {}, "Question by question"),
    select("now", "version", now),
    select("before", "against", before),
  );
  const data = await load(`questions/${now}/${before}`);
  if (!data || data.error)
    return h(
      "section",
      { class: "panel" },
      head,
      h("p", { class: "quiet" }, shown(data?.error || "These two versions are not in the page.")),
    );
  const number = Math.max(
      0,
      data.sets.findIndex((known) => known.name === set),
    ),
    chosen = data.sets[number];
  if (!chosen)
    return h(
      "section",
      { class: "panel" },
      head,
      h("p", { class: "quiet" }, "The evaluation has no questions."),
    );
  const counts = {};
  for (const row of chosen.rows) {
    const kind = outcome(row[2], row[3]);
    counts[kind] = (counts[kind] || 0) + 1;
  }
  const look = {
    kind: address.k ?? (counts.gained || counts.lost ? "changed" : ""),
    wanted: address.q || "",
    question: address.n === undefined ? null : Number(address.n),
  };
  const list = h("div", { class: "groups panel", role: "group", "aria-label": "questions" }),
    detail = h("div", { class: "detail" }),
    count = h("span", { class: "quiet" });
  const fits = (row) => {
    const kind = outcome(row[2], row[3]);
    if (
      look.kind === "changed" ? !["gained", "lost"].includes(kind) : look.kind && kind !== look.kind
    )
      return false;
    return !look.wanted || row[1].toLowerCase().includes(look.wanted.toLowerCase());
  };
  let opened = 0;
  async function update() {
    const rows = chosen.rows.filter(fits),
      open = rows.find((row) => row[0] === look.question) || rows[0];
    place.write({ k: look.kind, q: look.wanted, n: open ? open[0] : null });
    count.textContent =
      `${rows.length} of ${chosen.rows.length} questions` +
      (data.left_out ? `; ${data.left_out} are left out` : "");
    const choose = (row) => {
      look.question = row[0];
      update();
      list.querySelector('[aria-current="true"]')?.focus();
    };
    fill(
      list,
      rows
        .slice(0, MAX_QUESTIONS)
        .map((row) => questionButton(row, row === open, look, () => choose(row))),
      rows.length > MAX_QUESTIONS &&
        h(
          "p",
          { class: "quiet small" },
          `${rows.length - MAX_QUESTIONS} further questions: search or filter`,
        ),
      rows.length ? null : h("p", { class: "empty" }, "no question"),
    );
    const mine = ++opened;
    if (!open) {
      fill(detail);
      return;
    }
    const [latest, earlier] = await Promise.all(
      [now, before].map((version) => load(`question/${version}/${number}/${open[0]}`)),
    );
    if (mine === opened)
      fill(
        detail,
        latest
          ? questionAnswers(latest, earlier, look)
          : h("p", { class: "panel quiet" }, "The answers to this question are not in the page."),
      );
  }
  arrowKeys(list, "button");
  const summary = h(
    "p",
    {},
    h("b", { class: "gained" }, `${counts.gained || 0} gained`),
    ", ",
    h("b", { class: "lost" }, `${counts.lost || 0} lost`),
    `, ${counts.right || 0} right and ${counts.wrong || 0} wrong both times`,
    counts.new ? `, ${counts.new} not asked at version ${before}` : "",
    chosen.metric && chosen.metric !== "greedy" ? ` (by ${chosen.metric})` : "",
    ".",
  );
  const bar = h(
    "div",
    { class: "bar" },
    h("input", {
      type: "search",
      id: "search",
      placeholder: "search questions ( / )",
      "aria-label": "search questions",
      value: look.wanted,
      oninput: (event) => {
        look.wanted = event.target.value;
        update();
      },
    }),
    h(
      "select",
      {
        id: "changes",
        "aria-label": "which questions",
        onchange: (event) => {
          look.kind = event.target.value;
          update();
        },
      },
      CHANGES.map(([value, name]) => h("option", { value, selected: value === look.kind }, name)),
    ),
    count,
  );
  await update();
  return h(
    "section",
    { class: "questions" },
    h("div", { class: "panel" }, head, summary, bar),
    h("div", { class: "split" }, list, detail),
  );
}

function questionButton([question, prompt, before, now], isOpen, look, choose) {
  const kind = outcome(before, now);
  const marks = {
    gained: "▲ gained",
    lost: "▼ lost",
    right: "✓ right",
    wrong: "✗ wrong",
    new: now >= 0.5 ? "✓ right" : "✗ wrong",
  };
  return h(
    "button",
    { "aria-current": isOpen ? "true" : null, "data-question": question, onclick: choose },
    h(
      "span",
      { class: "line" },
      h("span", {}, "question ", question),
      h("span", { class: kind }, marks[kind]),
    ),
    h("span", { class: "snip" }, shown(snippet(prompt), look.wanted)),
  );
}

function questionAnswers(latest, earlier, look) {
  const column = (title, found) =>
    h(
      "section",
      { class: "panel answers" },
      h("h3", {}, shown(title)),
      found
        ? found.answers.map((answer) =>
            h(
              "article",
              { class: "response" },
              h(
                "div",
                { class: "facts" },
                answer.kind === "sample" && h("b", {}, "sample ", answer.number),
                verdict(answer.correct),
                !answer.finished && h("span", { class: "badge cut" }, "✂ cut"),
                answer.final !== null &&
                  h("span", {}, "answer ", h("b", { class: "mono" }, shown(answer.final))),
                fact("tokens", answer.length ?? "–"),
              ),
              h(
                "div",
                { class: "body", tabindex: 0, "aria-label": title },
                chat(answer.text, look.wanted, "assistant"),
              ),
            ),
          )
        : h("p", { class: "quiet" }, "not asked, or not kept"),
    );
  return [
    h(
      "section",
      { class: "panel" },
      h(
        "div",
        { class: "facts" },
        fact("question", latest.question),
        h("span", {}, "reference answer ", h("b", { class: "mono" }, shown(latest.answer))),
      ),
      chat(latest.prompt, look.wanted, "user"),
    ),
    h(
      "div",
      { class: "responses" },
      column(`version ${latest.version}`, latest),
      earlier && earlier.version !== latest.version
        ? column(`version ${earlier.version}`, earlier)
        : null,
      (latest.peers || []).map((peer) => column(`${peer.run}, version ${peer.version}`, peer)),
    ),
  ];
}
