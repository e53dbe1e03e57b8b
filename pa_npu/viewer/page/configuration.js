/* The resolved configuration: what differs from the defaults, and from another run. */

function configurationView(main) {
  const address = place.read(),
    run = state.run,
    other = state.compare[Number(address.with || 0)];
  const look = { wanted: address.q || "", only: address.only || (other ? "different" : "") };
  const text = (value) =>
    value === undefined
      ? ""
      : value === null
        ? "none"
        : typeof value === "object"
          ? JSON.stringify(value)
          : String(value);
  const names = [
    ...new Set([...Object.keys(run.config), ...(other ? Object.keys(other.config) : [])]),
  ];
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const isDifferent = (name) => other && !same(run.config[name], other.config[name]);
  const isChanged = (name) =>
    !(name in run.defaults) || !same(run.config[name], run.defaults[name]);
  const body = h("tbody"),
    count = h("span", { class: "quiet" });
  const different = names.filter(isDifferent).length;
  const bar = h(
    "div",
    { class: "bar" },
    h("input", {
      type: "search",
      id: "search",
      placeholder: "search keys and values ( / )",
      "aria-label": "search keys and values",
      value: look.wanted,
      oninput: (event) => {
        look.wanted = event.target.value;
        update();
      },
    }),
    h(
      "select",
      {
        "aria-label": "which keys",
        onchange: (event) => {
          look.only = event.target.value;
          update();
        },
      },
      [
        ["", "all keys"],
        ["changed", "not the default"],
        ...(other ? [["different", `different from ${other.name}`]] : []),
      ].map(([value, name]) => h("option", { value, selected: value === look.only }, name)),
    ),
    state.compare.length > 1 &&
      h(
        "select",
        {
          "aria-label": "other run",
          onchange: (event) => show("configuration", { with: event.target.value }),
        },
        state.compare.map((entry, i) =>
          h("option", { value: i, selected: entry === other }, entry.name),
        ),
      ),
    count,
    other && h("span", { class: "quiet" }, `${different} keys differ from ${other.name}`),
  );
  function update() {
    const sought = look.wanted.toLowerCase();
    const shownNames = names
      .filter((name) =>
        look.only === "changed"
          ? isChanged(name)
          : look.only === "different"
            ? isDifferent(name)
            : true,
      )
      .filter(
        (name) =>
          !sought ||
          `${name} ${text(run.config[name])} ${other ? text(other.config[name]) : ""}`
            .toLowerCase()
            .includes(sought),
      );
    place.write({ q: look.wanted, only: look.only });
    count.textContent = `${shownNames.length} of ${names.length} keys`;
    fill(
      body,
      shownNames.map((name) =>
        h(
          "tr",
          { class: `${isChanged(name) ? "changed " : ""}${isDifferent(name) ? "different" : ""}` },
          h(
            "td",
            {},
            h("span", { class: "mono" }, shown(name, look.wanted)),
            h("div", { class: "quiet small" }, run.meaning[name] || ""),
          ),
          h(
            "td",
            { class: "mono wide here", "data-label": run.name },
            shown(text(run.config[name]), look.wanted),
          ),
          other
            ? h(
                "td",
                { class: "mono wide there", "data-label": other.name },
                shown(text(other.config[name]), look.wanted),
              )
            : h(
                "td",
                { class: "mono wide quiet", "data-label": "default" },
                isChanged(name) && name in run.defaults ? text(run.defaults[name]) : "",
              ),
        ),
      ),
    );
  }
  fill(
    main,
    bar,
    h(
      "section",
      { class: "panel scroll" },
      h(
        "table",
        { class: "list stack" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, "key"),
            h("th", {}, shown(run.name)),
            h("th", {}, other ? shown(other.name) : "default"),
          ),
        ),
        body,
      ),
    ),
  );
  update();
}
