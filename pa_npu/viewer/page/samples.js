/* Samples of an iteration: groups to choose from, responses side by side, tokens coloured by log-prob differences. */

const FILTERS = [["", "all groups"], ["mixed", "rewards differ"], ["equal", "all rewards equal"], ["right", "all right"], ["wrong", "all wrong"], ["cut", "cut at the limit"], ["errors", "reward errors"]];
const COLOURINGS = [["", "plain text"], ["difference", "trainer − engine log-prob"], ["probability", "engine's probability"]];

function groupMatches(group, filter, wanted) {
  const rewards = group.responses.map((response) => response.reward);
  const equal = rewards.every((reward) => reward === rewards[0]);
  const fits = { mixed: !equal, equal, right: group.responses.every((r) => r.correct), wrong: group.responses.every((r) => !r.correct), cut: group.responses.some((r) => r.finish_reason === "length"), errors: group.errors.length > 0 }[filter] ?? true;
  if (!fits || !wanted) return fits;
  const sought = wanted.toLowerCase();
  return [group.prompt, group.answer, ...group.responses.map((r) => r.text)].some((text) => String(text).toLowerCase().includes(sought));
}

async function samplesView(main) {
  const available = state.run.sample_iterations;
  if (!available.length) { fill(main, h("div", { class: "panel empty" }, "No samples were kept (telemetry.samples).")); return; }
  const chosen = chosenIteration(available), address = place.read();
  const data = await load("samples/" + chosen);
  if (!data) { fill(main, h("div", { class: "bar" }, iterationPicker(available, chosen, (i) => show("samples", { i }))), h("div", { class: "panel empty" }, "This iteration's samples are not in the page.")); return; }
  const look = { wanted: address.q || "", filter: address.f || "", colour: address.c || "", group: address.g === undefined ? null : Number(address.g) };
  const list = h("div", { class: "groups panel", role: "group", "aria-label": "groups" }), detail = h("div", {}), count = h("span", { class: "quiet" });
  const search = h("input", { type: "search", id: "search", placeholder: "search prompts and responses ( / )", "aria-label": "search prompts and responses", value: look.wanted, oninput: (event) => { look.wanted = event.target.value; update(); } });
  const tokens = data.groups.some((group) => group.responses.some((response) => response.pieces));
  const bar = h("div", { class: "bar" }, iterationPicker(available, chosen, (i) => show("samples", { i, g: null })), search,
    h("select", { "aria-label": "filter", onchange: (event) => { look.filter = event.target.value; update(); } }, FILTERS.map(([value, name]) => h("option", { value, selected: value === look.filter }, name))),
    tokens && h("select", { id: "colour", "aria-label": "colour tokens by", onchange: (event) => { look.colour = event.target.value; update(); } }, COLOURINGS.map(([value, name]) => h("option", { value, selected: value === look.colour }, name))), count);

  function update() {
    const found = data.groups.filter((group) => groupMatches(group, look.filter, look.wanted));
    const open = found.find((group) => group.index === look.group) || found[0];
    place.write({ q: look.wanted, f: look.filter, c: look.colour, g: open ? open.index : null });
    count.textContent = `${found.length} of ${data.groups.length} groups`;
    fill(list, found.map((group) => h("button", { "aria-current": group === open ? "true" : null, "data-group": group.index, onclick: () => { look.group = group.index; update(); list.querySelector('[aria-current="true"]')?.focus(); } },
      h("span", { class: "line" }, h("span", {}, "group ", group.index), dots(group)),
      h("span", { class: "snip" }, shown(group.prompt.trim().replace(/\s+/g, " ").slice(-120), look.wanted)))), found.length ? null : h("p", { class: "empty" }, "no group matches"));
    fill(detail, open ? groupPanel(open, look) : null);
  }
  arrowKeys(list, "button");
  fill(main, bar, data.error && h("p", { class: "panel" }, shown(data.error)), h("div", { class: "split" }, list, detail));
  update();
}

function dots(group) {
  const right = group.responses.filter((response) => response.correct).length;
  const few = group.responses.length <= 16;
  return h("span", { class: "spark", title: `${right} of ${group.responses.length} right` }, few ? group.responses.map((response) => h("span", { class: "dot" + (response.correct ? " on" : "") })) : `${right}/${group.responses.length} right`);
}

function groupPanel(group, look) {
  const differences = group.responses.flatMap((r) => (r.trainer_logprobs ? r.trainer_logprobs.map((value, i) => Math.abs(value - r.logprobs[i])) : []));
  const largest = differences.length ? Math.max(...differences) : 0;
  return [h("section", { class: "panel" },
      h("div", { class: "facts" }, h("span", {}, "group ", h("b", {}, group.index)), h("span", {}, "prompt ", h("b", {}, group.prompt_id ?? "–")), group.prompt_tokens !== null && h("span", {}, h("b", {}, group.prompt_tokens), " tokens"), h("span", {}, "reference answer ", h("b", { class: "mono" }, shown(group.answer, look.wanted)))),
      h("div", { class: "text prompt", tabindex: 0, "aria-label": "prompt" }, shown(group.prompt, look.wanted)), group.errors.map((error) => h("p", { class: "badge wrong" }, shown(error)))),
    look.colour && colourScale(look.colour, largest),
    h("div", { class: "responses" }, group.responses.map((response, number) => responseCard(response, number, look, largest))),
    (group.sessions || []).map((session) => h("section", { class: "panel", "data-session": session.session }, h("div", { class: "facts" }, h("b", {}, "session " + session.session)), branches(session, null, group, look, largest)))];
}

/* Turns one below the other for as long as one follows another, and a list for each branch where several do. */
function branches(session, parent, group, look, largest) {
  const after = (number) => session.turns.filter((turn) => turn.parent === number);
  return after(parent).map((first) => {
    const rows = [turnRow(first, group, look, largest)];
    let last = first, next = after(first.number);
    while (next.length === 1) {
      [last] = next;
      rows.push(turnRow(last, group, look, largest));
      next = after(last.number);
    }
    return h("ol", { class: "turns" }, rows, branches(session, last.number, group, look, largest).map((branch) => h("li", {}, branch)));
  });
}

function turnRow(turn, group, look, largest) {
  const response = group.responses[turn.response];
  const differences = (response.trainer_logprobs || []).slice(turn.start, turn.end).map((value, i) => Math.abs(value - response.logprobs[turn.start + i]));
  return h("li", { "data-turn": turn.number },
    h("div", { class: "text prompt", tabindex: 0, "aria-label": "shown before turn " + turn.number }, shown(turn.shown, look.wanted)),
    h("div", { class: "facts" }, h("b", {}, "turn " + turn.number), h("span", {}, "in ", turn.responses.map((number) => "#" + number).join(" ")), turn.reward !== null && h("span", {}, "reward ", h("b", {}, format(turn.reward))), differences.length > 0 && h("span", {}, "largest log-prob difference ", h("b", {}, format(Math.max(...differences))))),
    h("div", { class: "text", tabindex: 0, "aria-label": "turn " + turn.number }, look.colour ? tokenNodes(response, look, largest, turn.start, turn.end) : shown(response.pieces.slice(turn.start, turn.end).join(""), look.wanted)));
}

function responseCard(response, number, look, largest) {
  const fact = (name, value) => h("span", {}, name, " ", h("b", {}, value));
  const names = Object.keys(response.rewards || {});
  return h("article", { class: "response", "data-response": number },
    h("div", { class: "facts" }, h("b", {}, "#" + number), h("span", { class: "badge " + (response.correct ? "right" : "wrong") }, response.correct ? "✓ right" : "✗ wrong"), response.finish_reason === "length" && h("span", { class: "badge cut" }, "✂ cut")),
    h("div", { class: "facts" }, fact("reward", format(response.reward)), names.map((name) => (names.length > 1 || response.rewards[name] !== response.reward) && fact(name, format(response.rewards[name]))),
      response.advantage !== null && fact("advantage", (response.advantage > 0 ? "+" : "") + format(response.advantage)), fact("tokens", response.length ?? "–")),
    h("div", { class: "text", tabindex: 0, "aria-label": "response " + number }, look.colour && response.pieces ? tokenNodes(response, look, largest) : shown(response.text, look.wanted)));
}

/* Blue where the trainer finds a token likelier than the engine did, orange where less; strength by the largest of the group. */
function tokenColour(kind, response, index, largest) {
  const engine = response.logprobs[index];
  if (kind === "probability") return `rgba(122, 90, 200, ${(0.75 * (1 - Math.exp(engine))).toFixed(3)})`;
  if (!response.trainer_logprobs || !largest) return null;
  const part = (response.trainer_logprobs[index] - engine) / largest;
  return `rgba(${part > 0 ? "0, 114, 200" : "230, 120, 0"}, ${(0.08 + 0.67 * Math.abs(part)).toFixed(3)})`;
}

function tokenNodes(response, look, largest, start = 0, end = Infinity) {
  return response.pieces.slice(start, end).map((piece, place) => {
    const index = start + place, trainer = response.trainer_logprobs ? response.trainer_logprobs[index] : null, engine = response.logprobs[index];
    const node = h("span", { class: "token" }, shown(piece));
    const colour = tokenColour(look.colour, response, index, largest);
    if (colour) node.style.backgroundColor = colour;
    node.addEventListener("pointerenter", (event) => tip.show(`token ${index}: ${JSON.stringify(piece)}\nengine ${engine.toFixed(6)} (probability ${Math.exp(engine).toFixed(4)})` + (trainer === null ? "" : `\ntrainer ${trainer.toFixed(6)}, difference ${(trainer - engine).toExponential(2)}`), event.clientX, event.clientY));
    node.addEventListener("pointerleave", tip.hide);
    return node;
  });
}

function colourScale(kind, largest) {
  const stops = kind === "probability" ? ["rgba(122, 90, 200, 0)", "rgba(122, 90, 200, .75)"] : ["rgba(230, 120, 0, .75)", "rgba(128, 128, 128, .08)", "rgba(0, 114, 200, .75)"];
  const bar = h("svg", { width: 160, height: 12, "aria-hidden": "true" }, h("defs", {}, h("linearGradient", { id: "scale" }, stops.map((colour, i) => h("stop", { offset: i / (stops.length - 1), "stop-color": colour })))), h("rect", { width: 160, height: 12, fill: "url(#scale)" }));
  if (kind === "probability") return h("p", { class: "scale" }, "likely (probability 1)", bar, "unlikely (0)");
  if (!largest) return h("p", { class: "scale" }, "The trainers' log-probs of this group were not kept, or equal the engine's.");
  return h("p", { class: "scale" }, `engine likelier (${format(-largest)})`, bar, `trainer likelier (+${format(largest)})`);
}
