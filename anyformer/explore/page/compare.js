// Two subjects side by side in the same view: two runs, two texts, or one text with different heads off.

/** The run, text and heads of a pane: 0, or 1 for the second. */
function subjectOf(runs, pane) {
  const of = (name) => (pane ? state[`${name}2`] : state[name]);
  const run = runs.find((one) => one.name === of("run")) ?? runs[0];
  const target = of("target") && (run.pair || run.writes) ? of("target") : null;
  const step = of("step") >= 0 ? { step: of("step") } : {};
  return { pane, run, body: { run: run.name, text: of("text"), target, off: [...of("off")].sort(), ...step } };
}

/** The example text of a run. */
function exampleOf(run) {
  return { text: run.example, target: run.pair ? (run.example_target ?? "") : "" };
}

/** The view that is drawn; in a comparison, the compared view. */
function viewNow() {
  return state.view === "compare" ? state.both : state.view;
}

/** The selector of the compared view. */
function bothPicker(views, run) {
  const select = make(
    "select",
    { id: "both", onchange: (event) => change({ both: event.target.value }, true) },
    views.map((view) => option(view, comparedName(view, run), view === state.both, { both: view })),
  );
  return make("label", { class: "pick" }, make("span", {}, word("compareIn")), select);
}

/** The form of a subject: run, text, target. It is updated, not rebuilt, when the state changes. */
function form(pane) {
  const name = (what) => (pane ? `${what}2` : what),
    mark = pane ? "-2" : "";
  const area = (what) =>
    make("textarea", {
      id: `${what}${mark}`,
      rows: 1,
      spellcheck: "false",
      dir: "auto",
      autocomplete: "off",
      maxlength: 20000,
      readonly: Boolean(saved),
    });
  const text = area("text"),
    target = area("target");
  const run = make("select", {
    id: `run${mark}`,
    onchange: () => {
      const [old, next] = [state[name("run")], run.value].map((it) => runs.find((one) => one.name === it)),
        own = text.value && old && text.value !== old.example; // a text of one's own stays, to be compared
      const begun = own ? { text: text.value, target: target.value } : exampleOf(next);
      change(
        {
          [name("run")]: run.value,
          [name("text")]: begun.text,
          [name("target")]: begun.target,
          [name("off")]: [],
          [name("step")]: -1,
          at: -1,
          query: -1,
          key: -1,
          shown: [],
          write: 0,
        },
        true,
      );
    },
  });
  const go = (step) =>
    change({ [name("text")]: text.value, [name("target")]: target.value, at: -1, query: -1, key: -1 }, step);
  let timer = 0;
  for (const input of [text, target]) {
    input.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => go(false), 400); // after the last key: every key would be an answer nobody waits for
    });
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      clearTimeout(timer);
      go(true);
    });
  }
  const field = (what, input) =>
    make("label", { class: `field ${what}` }, make("span", what === "run" ? {} : { "data-word": what }), input);
  const button = make("button", { type: "submit", class: "go", id: `go${mark}`, "data-word": "go", disabled: Boolean(saved) });
  return make(
    "form",
    {
      id: `form${mark}`,
      onsubmit: (event) => {
        event.preventDefault();
        clearTimeout(timer);
        go(true);
      },
    },
    field("run", run),
    field("text", text),
    field("target", target),
    button,
  );
}

/** An option of the run selector; a saved page enables only its own run. */
function runOption(run, subject) {
  const off = saved && run.name !== subject.run.name ? notSaved() : {};
  return make("option", { value: run.name, ...off }, run.name);
}

/** Copies the state into a form, except a field that is being edited. */
function fillForm(runs, subject) {
  const mark = subject.pane ? "-2" : "",
    run = byId(`run${mark}`);
  if (run.options.length !== runs.length)
    run.replaceChildren(...runs.map((one) => runOption(one, subject)));
  run.value = subject.run.name;
  for (const what of ["text", "target"]) {
    const input = byId(`${what}${mark}`),
      value = subject.body[what] ?? "";
    if (input !== document.activeElement && input.value !== value) input.value = value;
  }
  if (saved) for (const what of ["text", "target", "go"]) byId(`${what}${mark}`).title = word("notSaved");
  const takes = subject.run.pair || subject.run.writes,
    label = byId(`target${mark}`).closest("label");
  label.hidden = !takes;
  label.firstChild.textContent = word(subject.run.pair ? "second" : "target");
  byId(`target${mark}`).placeholder = word(
    subject.run.pair ? "secondText" : subject.run.task === "lm" ? "goesOn" : "targetHint",
  );
  byId(`form${mark}`).classList.toggle("alone", !takes);
  run.previousSibling.textContent = `${word("run")}${state.view === "compare" ? ` ${subject.pane ? "B" : "A"}` : ""}`;
}
