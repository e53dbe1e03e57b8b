/* Samples of an iteration: groups to choose from, rewards as a histogram, responses side by
   side, sessions as trees. */

const FILTERS = [
  ["", "all groups"],
  ["mixed", "rewards differ"],
  ["equal", "all rewards equal"],
  ["right", "all right"],
  ["wrong", "all wrong"],
  ["cut", "cut at the limit"],
  ["errors", "reward errors"],
];
const ORDERS = [
  ["", "by number"],
  ["low", "lowest reward first"],
  ["high", "highest reward first"],
  ["spread", "widest rewards first"],
  ["long", "longest first"],
];
const COLOURINGS = [
  ["", "plain text"],
  ["difference", "trainer − engine log-prob"],
  ["probability", "engine's probability"],
];
const LAYOUTS = [
  ["", "as a chat"],
  ["raw", "as the model sees it"],
];
/* What asks for rewards, or for log-probs of an engine, is not offered where there are none. */
const WITHOUT_REWARDS = {
  filter: ["", "cut"],
  order: ["", "long"],
};
const MAX_LISTED = 400;
const MAX_VALUES = 12;

function rewardsOf(group) {
  return group.responses.map((response) => response.reward ?? 0);
}
function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
}

function groupMatches(group, look, bars) {
  const rewards = rewardsOf(group),
    isEqual = rewards.every((reward) => reward === rewards[0]);
  const fits =
    {
      mixed: !isEqual,
      equal: isEqual,
      right: group.responses.every((response) => response.correct),
      wrong: group.responses.every((response) => !response.correct),
      cut: group.responses.some((response) => response.finish_reason === "length"),
      errors: group.errors.length > 0,
    }[look.filter] ?? true;
  const bar = look.bar === null ? null : bars[look.bar];
  if (
    !fits ||
    (bar && !group.responses.some((response) => bar.holds(rewardBy(response, look.reward))))
  )
    return false;
  const sought = look.wanted.toLowerCase();
  const texts = [group.prompt, group.answer, ...group.responses.map((response) => response.text)];
  return !sought || texts.some((text) => String(text).toLowerCase().includes(sought));
}

function sortedGroups(groups, order) {
  const largest = (values) => values.reduce((most, value) => Math.max(most, value), -Infinity);
  const smallest = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);
  const key = {
    low: (group) => smallest(rewardsOf(group)),
    high: (group) => -largest(rewardsOf(group)),
    spread: (group) => smallest(rewardsOf(group)) - largest(rewardsOf(group)),
    long: (group) => -largest(group.responses.map((response) => response.length ?? 0)),
  }[order];
  return key ? [...groups].sort((a, b) => key(a) - key(b) || a.index - b.index) : groups;
}

/* The numbers of a group's responses in the order in which they are shown. */
function responseOrder(group, order) {
  const numbers = group.responses.map((_, number) => number),
    by = (key) => numbers.sort((a, b) => key(a) - key(b) || a - b);
  if (order === "low") return by((number) => group.responses[number].reward ?? 0);
  if (order === "high" || order === "spread")
    return by((number) => -(group.responses[number].reward ?? 0));
  if (order === "long") return by((number) => -(group.responses[number].length ?? 0));
  return numbers;
}

function rewardBy(response, name) {
  return name ? response.rewards[name] : response.reward;
}

/* Bars of a histogram: one per value where there are few, else of equal width. */
function rewardBars(groups, name) {
  const values = groups
    .flatMap((group) => group.responses.filter((response) => response.rewarded))
    .map((response) => rewardBy(response, name))
    .filter(Number.isFinite);
  if (!values.length) return [];
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  if (distinct.length <= MAX_VALUES) {
    return distinct.map((value) => ({
      text: format(value),
      count: values.filter((known) => known === value).length,
      holds: (known) => known === value,
    }));
  }
  const low = distinct[0],
    high = distinct[distinct.length - 1],
    width = (high - low) / MAX_VALUES;
  const place = (value) => Math.min(MAX_VALUES - 1, Math.floor((value - low) / width));
  const counts = new Array(MAX_VALUES).fill(0);
  values.forEach((value) => counts[place(value)]++);
  const ends = tickTexts(
    Array.from({ length: MAX_VALUES + 1 }, (_, i) => low + i * width),
    "",
  );
  return counts.map((count, i) => ({
    text: format(Number((low + i * width).toPrecision(3))),
    tip: `${ends[i]} to ${ends[i + 1]}`,
    count,
    holds: (value) => Number.isFinite(value) && place(value) === i,
  }));
}

async function samplesView(main) {
  const available = state.run.sample_iterations;
  if (!available.length) {
    fill(main, h("div", { class: "panel empty" }, "No samples were kept (telemetry.samples)."));
    return;
  }
  const chosen = chosenIteration(available),
    address = place.read();
  const data = await load("samples/" + chosen);
  const picker = iterationPicker(available, chosen, (i) => show("samples", { i, g: null }));
  if (!data) {
    fill(
      main,
      h("div", { class: "bar" }, picker),
      h("div", { class: "panel empty" }, "This iteration's samples are not in the page."),
    );
    return;
  }
  const look = {
    wanted: address.q || "",
    filter: address.f || "",
    order: address.s || "",
    colour: address.c || "",
    layout: address.l || "",
    reward: address.w || "",
    bar: address.b === undefined ? null : Number(address.b),
    group: address.g === undefined ? null : Number(address.g),
  };
  const responses = data.groups.flatMap((group) => group.responses);
  const isRewarded = responses.some((response) => response.rewarded);
  const isWritten = responses.some((response) => response.version !== null);
  const list = h("div", { class: "groups panel", role: "group", "aria-label": "groups" }),
    detail = h("div", { class: "detail" });
  const count = h("span", { class: "quiet" }),
    rewards = h("section", { class: "panel rewards" });
  const search = h("input", {
    type: "search",
    id: "search",
    placeholder: "search prompts and responses ( / )",
    "aria-label": "search prompts and responses",
    value: look.wanted,
    oninput: (event) => {
      look.wanted = event.target.value;
      update();
    },
  });
  const choice = (id, label, options, key) =>
    h(
      "select",
      {
        id,
        "aria-label": label,
        onchange: (event) => {
          look[key] = event.target.value;
          update();
        },
      },
      options
        .filter(([value]) => isRewarded || (WITHOUT_REWARDS[key] ?? [value]).includes(value))
        .map(([value, name]) => h("option", { value, selected: value === look[key] }, name)),
    );
  const bar = h(
    "div",
    { class: "bar" },
    picker,
    search,
    choice("filter", "filter", FILTERS, "filter"),
    choice("order", "order", ORDERS, "order"),
    isWritten && choice("colour", "colour tokens by", COLOURINGS, "colour"),
    isWritten && choice("layout", "texts", LAYOUTS, "layout"),
    count,
  );
  const names = [
    ...new Set(
      data.groups.flatMap((group) =>
        group.responses.flatMap((response) => Object.keys(response.rewards)),
      ),
    ),
  ];

  function drawRewards(bars) {
    const total = bars.reduce((sum, one) => sum + one.count, 0);
    const toggle = (number) => () => {
      look.bar = look.bar === number ? null : number;
      update();
      rewards.querySelectorAll(".histogram button")[number]?.focus();
    };
    fill(
      rewards,
      h(
        "div",
        { class: "head" },
        h("h2", {}, "Rewards"),
        h("span", { class: "quiet small" }, `of ${total} kept responses; a bar chooses its groups`),
        h("span", { class: "spacer" }),
        names.length > 1 &&
          h(
            "select",
            {
              "aria-label": "reward",
              onchange: (event) => {
                look.reward = event.target.value;
                look.bar = null;
                update();
              },
            },
            [["", "total"], ...names.map((name) => [name, name])].map(([value, name]) =>
              h("option", { value, selected: value === look.reward }, name),
            ),
          ),
      ),
      histogram(
        "rewards of the kept responses",
        bars.map((one, number) => ({ ...one, on: look.bar === number, open: toggle(number) })),
      ),
    );
  }

  let opened = 0;
  function update() {
    const bars = rewardBars(data.groups, look.reward);
    if (look.bar !== null && !bars[look.bar]) look.bar = null;
    const fitting = sortedGroups(
      data.groups.filter((group) => groupMatches(group, look, bars)),
      look.order,
    );
    const open = fitting.find((group) => group.index === look.group) || fitting[0];
    place.write({
      q: look.wanted,
      f: look.filter,
      s: look.order,
      c: look.colour,
      l: look.layout,
      w: look.reward,
      b: look.bar,
      g: open ? open.index : null,
    });
    const notes = [
      data.cut && `texts are cut at ${data.cut} characters in the list and the search`,
      data.left_out && `${data.left_out} responses are left out`,
    ];
    count.textContent = [
      `${fitting.length} of ${data.groups.length} groups`,
      ...notes.filter(Boolean),
    ].join("; ");
    drawRewards(bars);
    const choose = (group) => {
      look.group = group.index;
      update();
      list.querySelector('[aria-current="true"]')?.focus();
    };
    fill(
      list,
      fitting
        .slice(0, MAX_LISTED)
        .map((group) => groupButton(group, group === open, look, () => choose(group))),
      fitting.length > MAX_LISTED &&
        h(
          "p",
          { class: "quiet small" },
          `${fitting.length - MAX_LISTED} further groups: search or filter`,
        ),
      fitting.length ? null : h("p", { class: "empty" }, "no group matches"),
    );
    return openGroup(open);
  }
  async function openGroup(open) {
    const mine = ++opened;
    if (!open) {
      fill(detail);
      return;
    }
    const whole = (await load(`group/${chosen}/${open.index}`)) || { ...open, isShort: true };
    const peers = state.compare.length ? await load(`peers/${chosen}/${open.index}`) : null;
    if (mine === opened) fill(detail, groupPanel(whole, look), peersPanel(peers, look));
  }
  arrowKeys(list, "button");
  fill(
    main,
    bar,
    data.error && h("p", { class: "panel" }, shown(data.error)),
    isRewarded && rewards,
    h("div", { class: "split" }, list, detail),
  );
  await update();
}

function groupButton(group, isOpen, look, choose) {
  return h(
    "button",
    { "aria-current": isOpen ? "true" : null, "data-group": group.index, onclick: choose },
    h(
      "span",
      { class: "line" },
      h(
        "span",
        {},
        "group ",
        group.index,
        look.order && ` · reward ${format(mean(rewardsOf(group)))}`,
      ),
      dots(group),
    ),
    h("span", { class: "snip" }, shown(snippet(group.prompt), look.wanted)),
  );
}

function dots(group) {
  if (!group.responses.some((response) => response.rewarded)) {
    const isOfData = group.responses.every((response) => response.version === null);
    const noun = isOfData ? "rows" : "responses";
    return h("span", { class: "quiet" }, `${group.responses.length} ${noun}`);
  }
  const right = group.responses.filter((response) => response.correct).length,
    isSmall = group.responses.length <= 16;
  const marks = isSmall
    ? group.responses.map((response) =>
        h("span", { class: "dot" + (response.correct ? " on" : "") }),
      )
    : `${right}/${group.responses.length} right`;
  return h("span", { class: "spark", title: `${right} of ${group.responses.length} right` }, marks);
}
