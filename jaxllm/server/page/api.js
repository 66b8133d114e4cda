/* Talks to the server: the key, errors in words, streams of events. */

class ServerError extends Error {
  constructor(message, { status = 0, isStopped = false } = {}) {
    super(message);
    this.status = status;
    this.isStopped = isStopped;
  }
}

const OFFLINE = "The server can't be reached. Is it still running? Your text is kept; try again.";
const CUT_OFF = "The connection broke before the answer was whole.";

/* An answer that is fine. A key is asked for when the server wants one; `isQuiet`: nobody is asked. */
async function request(path, { body, signal, isQuiet = false } = {}) {
  for (;;) {
    const headers = {}, key = session.read("key");
    if (key) headers.authorization = `Bearer ${key}`;
    if (body) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path.slice(1), {  // relative, as a proxy may serve this under a path of its own
        method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
    } catch (error) {
      throw stopped(error, OFFLINE);
    }
    if (response.ok) return response;
    if (response.status === 401 && !isQuiet) {
      if (await askKey(Boolean(key))) continue;
      throw new ServerError("This server wants an API key. Give it in the settings.", { status: 401 });
    }
    throw new ServerError(await errorText(response), { status: response.status });
  }
}

async function errorText(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = `The server answered with status ${response.status}.`;
  }
  return sentence(message);
}

function sentence(text) {
  const end = /[.!?]$/.test(text) ? "" : ".";
  return text.charAt(0).toUpperCase() + text.slice(1) + end;
}

function stopped(error, message) {
  return error.name === "AbortError" ? new ServerError("Stopped.", { isStopped: true }) : new ServerError(message);
}

/* Calls back with each event's JSON, and with the number of requests ahead while this one waits. */
async function streamEvents(path, body, { signal, onEvent, onQueue }) {
  const response = await request(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", isDone = false;
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw stopped(error, CUT_OFF);
    }
    if (part.done) break;
    const events = (text + part.value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const place = event.match(/^: queue (\d+)$/);
      if (place) onQueue(Number(place[1]));
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") isDone = true;
      else if (data) onEvent(failing(JSON.parse(data)));
    }
  }
  if (!isDone) throw new ServerError(CUT_OFF);
}

function failing(event) {
  if (event.error) throw new ServerError(sentence(event.error.message));
  return event;
}

/* Runs a request of OpenAI's API; `onPart` gets what is new of the choice, `onState` how it goes:
   {queue, tokens, rate (tokens/s), seconds}. Returns the finish reason. */
async function generate(path, fields, { signal, onPart, onState }) {
  const state = { queue: 0, tokens: 0, rate: 0, seconds: 0 }, start = performance.now();
  const stream_options = { include_usage: true, continuous_usage_stats: true, queue_position: true };
  let first = null, reason = null;
  onState(state);
  if (!server.model) await look(); // this comes before the first answer to it
  const body = { ...fields, model: server.model, stream: true, stream_options };
  const onEvent = (event) => {
    const now = performance.now(), tokens = event.usage?.completion_tokens ?? 0;
    if (tokens && !first) first = { at: now, tokens };
    state.tokens = Math.max(state.tokens, tokens);
    state.seconds = (now - start) / 1000;
    if (first && now > first.at) state.rate = (1000 * (state.tokens - first.tokens)) / (now - first.at);
    const [choice] = event.choices;
    if (choice) {
      reason = choice.finish_reason ?? reason;
      onPart(choice);
    }
    onState(state);
  };
  const onQueue = (ahead) => {
    state.queue = ahead;
    onState(state);
  };
  await streamEvents(path, body, { signal, onEvent, onQueue });
  return reason;
}

function stateText(state) {
  if (state.tokens) {
    const rate = state.rate ? ` · ${formatRate(state.rate)} tokens/s` : "";
    return `${state.tokens} token${state.tokens === 1 ? "" : "s"}${rate}`;
  }
  if (state.queue > 0) return `In the queue: ${state.queue} request${state.queue === 1 ? "" : "s"} before this one`;
  return "Reading the prompt…";
}

function formatRate(rate) {
  return rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
}
