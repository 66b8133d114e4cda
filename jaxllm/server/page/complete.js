/* The Complete tab: a text, and how the model goes on. */

const promptInput = byId("prompt"), output = byId("output"), completeSend = byId("complete-send");
const completion = { controller: null, prompt: "", text: "" };

const EXAMPLES = [
  ["Read a file", "def read_lines(path"],
  ["Fibonacci", "def fibonacci(n):\n    "],
  ["A class", "class Stack:\n    \"\"\"A stack of items.\"\"\"\n\n    def __init__(self"],
  ["A test", "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_"],
  ["Arguments", "import argparse\n\nparser = argparse.ArgumentParser("],
  ["A story", "Once upon a time"],
];

byId("examples").replaceChildren(...EXAMPLES.map(([name, text]) =>
  el("button", { type: "button", class: "chip", title: text, onclick: () => showExample(text) }, name)));

function showExample(text) {
  promptInput.value = text;
  fitHeight(promptInput);
  complete();
}

function showCompletion() {
  output.hidden = !completion.prompt;
  const shownPrompt = el("span", { class: "given" }, completion.prompt);
  output.replaceChildren(shownPrompt, el("span", { class: "new" }, completion.text));
}

function showCompleteControls() {
  showSend(completeSend, Boolean(completion.controller), promptInput.value !== "");
  const isDone = !completion.controller && completion.text !== "";
  byId("complete-more").hidden = byId("complete-copy").hidden = !isDone;
}

async function complete() {
  if (completion.controller || !promptInput.value) return;
  const state = byId("complete-state");
  Object.assign(completion, { controller: new AbortController(), prompt: promptInput.value, text: "" });
  showCompleteControls();
  look();
  state.className = "";
  const draw = oncePerFrame(showCompletion);
  draw();
  try {
    const reason = await generate("/v1/completions", { prompt: completion.prompt, ...samplingFields() }, {
      signal: completion.controller.signal,
      onPart(choice) {
        completion.text += choice.text;
        draw();
      },
      onState: (how) => (state.textContent = stateText(how)),
    });
    if (reason === "length") state.textContent += " · cut at the limit of tokens";
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    if (error.isStopped) state.textContent += " · stopped";
    else {
      state.textContent = error.message;
      state.className = "error";
    }
  } finally {
    completion.controller = null;
    showCompletion();
    showCompleteControls();
  }
  say("The completion has ended.");
}

promptInput.addEventListener("input", () => {
  fitHeight(promptInput);
  showCompleteControls();
});
promptInput.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    complete();
  }
});
completeSend.addEventListener("click", () => (completion.controller ? completion.controller.abort() : complete()));
byId("complete-more").addEventListener("click", () => {
  promptInput.value = completion.prompt + completion.text;
  fitHeight(promptInput);
  complete();
});
byId("complete-copy").addEventListener("click", (event) => copyText(completion.prompt + completion.text, event.currentTarget));
