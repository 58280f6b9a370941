// As much of a browser's document as the server's page uses; prints what the page then shows.
const [, , server, prompt, mode] = process.argv;
const elements = {};

function element() {
  const listeners = {}, own = { style: {}, value: "", hidden: false, disabled: false, children: [] };
  return Object.assign(own, {
    append(child) { own.children.push([child.textContent, child.className]); },
    addEventListener(kind, listener) { listeners[kind] = listener; },
    send(kind) { return listeners[kind]({ preventDefault() {} }); },
  });
}

globalThis.location = { href: "http://page/", hash: "" };
globalThis.document = {
  getElementById: (id) => (elements[id] ??= element()),
  createElement: element,
};
const fetched = globalThis.fetch;
globalThis.fetch = (path, options) => fetched(server + "/" + path, options);

SCRIPT;

const values = { prompt, mode, tokens: "24", temperature: "0", seed: "0" };
for (const [id, value] of Object.entries(values))
  Object.assign(at(id), { value, valueAsNumber: Number(value) });
start().then(() => {
  // The page's own request for its lists comes first; then the settings of the test.
  for (const [id, value] of Object.entries(values)) at(id).value = value;
  return at("form").send("submit");
}).then(() => {
  const shown = Object.fromEntries(RESULTS.map((id) => [id, at(id).textContent ?? ""]));
  for (const id of ["text", "plain"]) shown[id] = at(id).children;
  console.log(JSON.stringify(shown));
});
