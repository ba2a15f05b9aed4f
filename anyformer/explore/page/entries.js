// The answer of a view that the page has no drawing for: entry by entry, by the kind of its value.

async function showEntries(view, subject) {
  const found = await ask(view, subject.body);
  return make("div", {}, Object.entries(found).map(([name, value]) => make("section", {}, make("h3", {}, visibleText(name)), entry(value))));
}

function entry(value) {
  if (typeof value?.png === "string") return make("img", { src: `data:image/png;base64,${value.png}`, alt: "" });
  if (!Array.isArray(value)) return make("p", { class: "value" }, typeof value === "object" ? JSON.stringify(value) : entryText(value));
  if (value.length && value.every((one) => typeof one === "number")) return vectorBars(value);
  if (!value.length || value.some((one) => typeof one !== "object" || one === null)) return make("p", { class: "value" }, value.map(entryText).join(", "));
  const columns = [...new Set(value.flatMap(Object.keys))],
    row = (one) => make("tr", {}, columns.map((column) => make("td", {}, entryText(one[column] ?? ""))));
  const table = make("table", { class: "tags" }, tableHead(columns.map(visibleText)), make("tbody", {}, value.map(row)));
  return make("div", { class: "wide" }, table);
}

const entryText = (value) => (typeof value === "number" ? figure(value) : visibleText(String(value)));
