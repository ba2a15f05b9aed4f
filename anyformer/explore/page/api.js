// Requests to the server. Answers are cached; a saved page contains its answers and needs no server.

const saved = JSON.parse(byId("saved")?.textContent || "null");
const answers = new Map(Object.entries(saved?.answers ?? {}).map(([key, answer]) => [key, Promise.resolve(answer)]));

/** A request that the server refused, with the reason. */
class Refused extends Error {}

/** Name and body as one string: keys are sorted, empty values left out. */
function keyOf(name, body) {
  const empty = (value) => value === null || value === undefined || (Array.isArray(value) && !value.length);
  const keys = Object.keys(body)
    .filter((key) => !empty(body[key]))
    .sort();
  return `${name} ${JSON.stringify(Object.fromEntries(keys.map((key) => [key, body[key]])))}`;
}

/** The server's answer; throws `Refused`. */
async function ask(name, body = {}) {
  const key = keyOf(name, body);
  if (!answers.has(key)) {
    if (saved) throw new Refused(word("notSaved"));
    answers.set(
      key,
      fetched(name, body).catch((error) => {
        answers.delete(key); // a server that was away may be back
        throw error;
      }),
    );
  }
  const answer = await answers.get(key);
  if (answer && answer.error !== undefined) throw new Refused(answer.error);
  return answer;
}

async function fetched(name, body) {
  const response = await sent(name, body);
  try {
    return await response.json();
  } catch {
    throw new Refused(word("noAnswer"));
  }
}

async function sent(name, body, signal) {
  const how =
    name === "runs"
      ? {}
      : {
          method: "POST",
          headers: { "Content-Type": "application/json" },
          body: JSON.stringify(body),
          signal,
        };
  try {
    return await fetch(`/api/${name}`, how);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(word("noServer"));
  }
}

/** Drops an answer from the cache, such as the metrics of a run being trained. */
const forget = (name, body) => saved || answers.delete(keyOf(name, body));

/** Streams an answer: passes each line to `each` as it arrives; caches all of them at the end. */
async function stream(name, body, each, signal) {
  const key = keyOf(name, body);
  if (answers.has(key) || saved) {
    for (const line of await ask(name, body)) each(line);
    return;
  }
  const response = await sent(name, body, signal);
  if (!response.ok) throw new Refused((await response.json()).error);
  const lines = [],
    reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts.filter(Boolean)) {
      const line = JSON.parse(part);
      if (line.error !== undefined) throw new Refused(line.error);
      lines.push(line);
      each(line);
    }
  }
  answers.set(key, Promise.resolve(lines));
}

/** Numbers of an answer: float32 or uint8 in base64. */
function numbers(text, Kind) {
  const raw = atob(text),
    data = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) data[i] = raw.charCodeAt(i);
  return Kind === Uint8Array ? data : new Kind(data.buffer);
}
