/* A group of responses: its prompt, its sessions as trees of turns, its responses as cards,
   their tokens coloured. */

function fact(name, value) {
  return h("span", {}, name, " ", h("b", {}, value));
}

/* An image of the prompt, asked for when it is shown: a small copy, as data and never as markup. */
function promptImage(digest) {
  const image = h("img", { class: "shown", alt: "image " + digest.slice(0, 8) });
  load("image/" + digest).then((kept) => {
    if (kept) image.setAttribute("src", "data:image/png;base64," + kept.png);
    else image.replaceWith(h("span", { class: "quiet" }, "an image that was not kept"));
  });
  return image;
}

function groupPanel(group, look) {
  const differences = group.responses.flatMap((r) =>
    r.trainer_logprobs ? r.trainer_logprobs.map((value, i) => Math.abs(value - r.logprobs[i])) : [],
  );
  const largest = differences.reduce((most, value) => Math.max(most, value), 0);
  const prompt =
    look.layout === "raw"
      ? h("div", { class: "text prompt" }, shown(group.prompt, look.wanted))
      : chat(group.prompt, look.wanted, "user");
  const order = responseOrder(group, look.order);
  return [
    h(
      "section",
      { class: "panel" },
      h(
        "div",
        { class: "facts" },
        fact("group", group.index),
        fact("prompt", group.prompt_id ?? "–"),
        group.prompt_tokens !== null && fact("tokens", group.prompt_tokens),
        group.answer !== "" &&
          h(
            "span",
            {},
            "reference answer ",
            h("b", { class: "mono" }, shown(group.answer, look.wanted)),
          ),
      ),
      group.images?.length > 0 && h("div", { class: "images" }, group.images.map(promptImage)),
      h("div", { class: "prompt", tabindex: 0, "aria-label": "prompt" }, prompt),
      group.errors.map((error) => h("p", { class: "badge wrong" }, shown(error))),
    ),
    group.isShort && h("p", { class: "quiet" }, "The tokens of this group are not in the page."),
    group.responses.some((response) => response.stretches?.length) &&
      h(
        "p",
        { class: "quiet" },
        "Rows of data: ",
        h("span", { class: "trained" }, "what is trained"),
        ", and what is not.",
      ),
    look.colour && colourScale(look.colour, largest),
    group.sessions.map((session) =>
      h(
        "section",
        { class: "panel session", "data-session": session.session },
        h(
          "div",
          { class: "facts" },
          h("b", {}, "session ", session.session ?? "–"),
          h("span", {}, `${session.turns.length} turns, ${branchesOf(session)} branches`),
        ),
        branches(session, null, group, look, largest),
      ),
    ),
    h(
      "div",
      { class: "responses" },
      order.map((number) => responseCard(group, number, look, largest)),
    ),
  ];
}

function branchesOf(session) {
  return new Set(session.turns.flatMap((turn) => turn.responses)).size;
}

/* Other runs' answers to the same prompt, beside this one's. */
function peersPanel(peers, look) {
  if (!peers) return null;
  if (!peers.length)
    return h("p", { class: "quiet" }, "No run beside this one has kept an answer to this prompt.");
  return peers
    .filter((peer) => peer.group)
    .map((peer) =>
      h(
        "section",
        { class: "panel peer", "data-peer": peer.run },
        h(
          "div",
          { class: "head" },
          h("h2", {}, "The same prompt in ", shown(peer.run)),
          h(
            "span",
            { class: "quiet small" },
            `iteration ${peer.iteration}, group ${peer.group.index}`,
          ),
        ),
        h(
          "div",
          { class: "responses" },
          responseOrder(peer.group, look.order).map((number) =>
            responseCard(peer.group, number, look, 0),
          ),
        ),
      ),
    );
}

/* Turns one below the other for as long as one follows another, and an indented tree for each
   branch where several do. */
function branches(session, parent, group, look, largest) {
  const after = (number) => session.turns.filter((turn) => turn.parent === number);
  const firsts = after(parent);
  return firsts.map((first, number) => {
    const rows = [turnRow(first, group, look, largest)];
    let last = first,
      next = after(first.number);
    while (next.length === 1) {
      [last] = next;
      rows.push(turnRow(last, group, look, largest));
      next = after(last.number);
    }
    const label =
      firsts.length > 1 &&
      h(
        "li",
        { class: "branch" },
        `branch ${number + 1} of ${firsts.length}, after turn ${parent ?? "–"}`,
      );
    return h(
      "ol",
      { class: "turns" },
      label,
      rows,
      branches(session, last.number, group, look, largest).map((branch) => h("li", {}, branch)),
    );
  });
}

/* The tokens of a turn, or its text where they are not to be coloured. */
function turnNodes(turn, group, look, largest) {
  const response = group.responses[turn.response];
  if (!response?.pieces)
    return [h("div", { class: "text quiet" }, "not trained: its tokens were not kept")];
  if (look.colour)
    return [
      h(
        "div",
        { class: "text", tabindex: 0, "aria-label": "turn " + turn.number },
        tokenNodes(response, look, largest, turn.start, turn.end),
      ),
    ];
  const text = response.pieces.slice(turn.start, turn.end).join("");
  const nodes =
    look.layout === "raw"
      ? [h("div", { class: "text" }, shown(text, look.wanted))]
      : messageParts(text.replace(ENDS, ""), look.wanted);
  return [h("div", { tabindex: 0, "aria-label": "turn " + turn.number }, nodes)];
}

function turnRow(turn, group, look, largest) {
  const response = group.responses[turn.response];
  const differences = (response?.trainer_logprobs || [])
    .slice(turn.start, turn.end)
    .map((value, i) => Math.abs(value - response.logprobs[turn.start + i]));
  const facts = [
    h("span", {}, "turn ", h("b", {}, turn.number)),
    h("span", {}, "in ", turn.responses.map((number) => "#" + number).join(" ")),
    turn.reward !== null && fact("reward", format(turn.reward)),
    differences.length > 0 && fact("largest log-prob difference", format(Math.max(...differences))),
  ];
  const before =
    look.layout === "raw"
      ? h("div", { class: "text" }, shown(turn.shown, look.wanted))
      : chat(turn.shown, look.wanted, turn.number ? "tool" : "user");
  return h(
    "li",
    { "data-turn": turn.number },
    turn.shown.trim() &&
      h(
        "div",
        { class: "prompt", tabindex: 0, "aria-label": "shown before turn " + turn.number },
        before,
      ),
    bubble("assistant", turnNodes(turn, group, look, largest), facts),
  );
}

/* A branch of a session turn by turn, any other response as the messages that it is made of. */
function responseText(group, number, look, largest) {
  const response = group.responses[number];
  const turns = group.sessions.flatMap((session) =>
    session.turns.filter((turn) => turn.responses.includes(number)),
  );
  if (turns.length)
    return h(
      "div",
      { class: "chat" },
      turns.map((turn) =>
        bubble("assistant", turnNodes(turn, group, look, largest), [
          h("span", {}, "turn ", h("b", {}, turn.number)),
        ]),
      ),
    );
  if (response.stretches?.length) return h("div", { class: "text" }, stretchNodes(response, look));
  if (look.colour && response.pieces)
    return h("div", { class: "text" }, tokenNodes(response, look, largest));
  return look.layout === "raw"
    ? h("div", { class: "text" }, shown(response.text, look.wanted))
    : chat(response.text, look.wanted, "assistant");
}

function responseCard(group, number, look, largest) {
  const response = group.responses[number],
    names = Object.keys(response.rewards);
  return h(
    "article",
    { class: "response", "data-response": number },
    h(
      "div",
      { class: "facts" },
      h("b", {}, "#" + number),
      response.rewarded && verdict(response.correct),
      response.finish_reason === "length" && h("span", { class: "badge cut" }, "✂ cut"),
    ),
    h(
      "div",
      { class: "facts" },
      response.rewarded && fact("reward", format(response.reward)),
      names.map(
        (name) =>
          (names.length > 1 || response.rewards[name] !== response.reward) &&
          h("span", {}, shown(name), " ", h("b", {}, format(response.rewards[name]))),
      ),
      response.advantage !== null &&
        (response.rewarded || response.advantage !== 0) &&
        fact("advantage", (response.advantage > 0 ? "+" : "") + format(response.advantage)),
      fact("tokens", response.length ?? "–"),
    ),
    h(
      "div",
      { class: "body", tabindex: 0, "aria-label": "response " + number },
      responseText(group, number, look, largest),
    ),
  );
}

/* A row of data: what is trained stands out, with its weight where that is not 1. */
function stretchNodes(response, look) {
  return response.stretches.map(({ text, weight }) => {
    if (weight === 0)
      return h("span", { class: "untrained", title: "not trained" }, shown(text, look.wanted));
    const title = "trained" + (weight === 1 ? "" : `, weight ${format(weight)}`);
    return h("span", { class: "trained", title }, shown(text, look.wanted));
  });
}

function verdict(isCorrect) {
  return h(
    "span",
    { class: "badge " + (isCorrect ? "right" : "wrong") },
    isCorrect ? "✓ right" : "✗ wrong",
  );
}

/* Blue where the trainer finds a token likelier than the engine did, orange where less; strength
   by the largest of the group. */
function tokenColour(kind, response, index, largest) {
  const engine = response.logprobs[index];
  if (kind === "probability")
    return `rgba(122, 90, 200, ${(0.75 * (1 - Math.exp(engine))).toFixed(3)})`;
  if (!response.trainer_logprobs || !largest) return null;
  const part = (response.trainer_logprobs[index] - engine) / largest;
  return `rgba(${part > 0 ? "0, 114, 200" : "230, 120, 0"}, ${(0.08 + 0.67 * Math.abs(part)).toFixed(3)})`;
}

function tokenTip(response, index) {
  const engine = response.logprobs[index],
    trainer = response.trainer_logprobs ? response.trainer_logprobs[index] : null;
  const text = `token ${index}: ${JSON.stringify(response.pieces[index])}\nengine ${engine.toFixed(6)} (probability ${Math.exp(engine).toFixed(4)})`;
  return (
    text +
    (trainer === null
      ? ""
      : `\ntrainer ${trainer.toFixed(6)}, difference ${(trainer - engine).toExponential(2)}`)
  );
}

function tokenNodes(response, look, largest, start = 0, end = Infinity) {
  return response.pieces.slice(start, end).map((piece, offset) => {
    const index = start + offset,
      colour = tokenColour(look.colour, response, index, largest);
    const node = h("span", { class: "token" }, shown(piece));
    if (colour) node.style.backgroundColor = colour;
    node.addEventListener("pointerenter", (event) =>
      tip.show(tokenTip(response, index), event.clientX, event.clientY),
    );
    node.addEventListener("pointerleave", tip.hide);
    return node;
  });
}

function colourScale(kind, largest) {
  const stops =
    kind === "probability"
      ? ["rgba(122, 90, 200, 0)", "rgba(122, 90, 200, .75)"]
      : ["rgba(230, 120, 0, .75)", "rgba(128, 128, 128, .08)", "rgba(0, 114, 200, .75)"];
  const bar = h(
    "svg",
    { width: 160, height: 12, "aria-hidden": "true" },
    h(
      "defs",
      {},
      h(
        "linearGradient",
        { id: "scale" },
        stops.map((colour, i) =>
          h("stop", { offset: i / (stops.length - 1), "stop-color": colour }),
        ),
      ),
    ),
    h("rect", { width: 160, height: 12, fill: "url(#scale)" }),
  );
  if (kind === "probability")
    return h("p", { class: "scale" }, "likely (probability 1)", bar, "unlikely (0)");
  if (!largest)
    return h(
      "p",
      { class: "scale" },
      "The trainers' log-probs of this group were not kept, or equal the engine's.",
    );
  return h(
    "p",
    { class: "scale" },
    `engine likelier (${format(-largest)})`,
    bar,
    `trainer likelier (+${format(largest)})`,
  );
}
