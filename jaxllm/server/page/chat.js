/* The Chat tab: conversations, the one that is shown, and the answers that are being written. */

const running = new Map(); // chat id -> AbortController
const shown = new Map(); // message -> its nodes, of the current conversation
const log = byId("log"), chatInput = byId("chat-input"), chatSend = byId("chat-send");

const SUGGESTIONS = [
  "Write a function that reverses a string.",
  "Write a class for a stack with push and pop.",
  "Write a function that counts the words of a file.",
  "Write a test for a function that adds two numbers.",
];

// ---- the list of conversations

function showChats() {
  byId("chats").replaceChildren(...chats.all.map(chatEntry));
}

function chatEntry(chat) {
  const isCurrent = chat === chats.current;
  const open = () => {
    chats.select(chat);
    showChat();
    closeMenu();
  };
  const title = el("button", { type: "button", class: "chat-title", "aria-current": isCurrent ? "true" : null, onclick: open }, chat.title);
  const rename = iconButton("i-pencil", `Rename ${chat.title}`, () => renameChat(chat, entry));
  const remove = iconButton("i-trash", `Delete ${chat.title}`, () => removeChat(chat));
  const entry = el("li", { class: isCurrent ? "current" : null }, title, rename, remove);
  return entry;
}

function renameChat(chat, entry) {
  const input = el("input", { type: "text", "aria-label": "Title", maxlength: "80" });
  let isOver = false;
  const end = (keeps) => {
    if (isOver) return;
    isOver = true;
    if (keeps && input.value.trim()) chat.title = input.value.trim();
    chats.save();
    showChats();
  };
  input.value = chat.title;
  input.addEventListener("blur", () => end(true));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") end(false);
    event.stopPropagation();
  });
  entry.replaceChildren(input);
  input.select();
}

function removeChat(chat) {
  running.get(chat.id)?.abort();
  const index = chats.remove(chat);
  showChat();
  toast(`“${chat.title}” is deleted.`, "Undo", () => {
    chats.all.splice(index, 0, chat);
    chats.select(chat);
    showChat();
  });
}

function newChat() {
  chats.create();
  showChat();
  closeMenu();
  chatInput.focus();
}

// ---- the conversation

function showChat() {
  showChats();
  shown.clear();
  const { messages } = chats.current;
  log.replaceChildren(...(messages.length ? messages.map(messageNode) : [welcome()]));
  showComposer();
  log.scrollTop = log.scrollHeight;
}

function welcome() {
  if (!server.hasChat) {
    return el("div", { class: "welcome" }, el("h2", {}, "This model doesn't chat"),
      el("p", {}, "It has no chat template: it continues texts, which is what the Complete tab is for. ",
        "Whoever starts the server can give it one with --chat-template."),
      el("button", { type: "button", class: "chip", onclick: () => selectTab("complete") }, "Go to Complete"));
  }
  const chip = (text) => el("button", { type: "button", class: "chip", onclick: () => send(text) }, text);
  return el("div", { class: "welcome" }, el("h2", {}, "What would you like to ask?"),
    el("p", {}, "Conversations stay in this browser."), el("div", { class: "chips" }, ...SUGGESTIONS.map(chip)));
}

function messageNode(message) {
  if (message.role === "user") {
    return el("article", { class: "message user", "aria-label": "You" }, el("div", { class: "bubble" }, message.content));
  }
  const thoughts = el("div", { class: "thoughts-text" }), content = el("div", { class: "markdown" });
  const fold = el("details", { class: "thoughts" }, el("summary", {}, "Thoughts"), thoughts);
  const foot = el("footer", {});
  const nodes = { thoughts, fold, foot, view: new MarkdownView(content) };
  shown.set(message, nodes);
  const article = el("article", { class: "message assistant", "aria-label": "Answer" }, fold, content, foot);
  showMessage(message);
  return article;
}

function showMessage(message) {
  const nodes = shown.get(message);
  if (!nodes) return; // of a conversation that is not shown
  const isOpen = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  nodes.fold.hidden = !message.reasoning;
  nodes.thoughts.textContent = message.reasoning ?? "";
  nodes.view.update(message.content);
  nodes.foot.replaceChildren(...footNodes(message));
  if (isOpen) log.scrollTop = log.scrollHeight;
}

function footNodes(message) {
  if (message.isOpen) return [el("span", { class: "pulse" }), el("span", {}, message.note ?? "")];
  const nodes = [];
  if (message.error) nodes.push(el("span", { class: "error", role: "alert" }, message.error));
  if (message.note) nodes.push(el("span", {}, message.note));
  if (message.content) {
    nodes.push(textButton("Copy", (event) => copyText(message.content, event.currentTarget)));
  }
  const isLast = chats.current.messages.at(-1) === message;
  if (isLast) nodes.push(textButton(message.error ? "Try again" : "Answer anew", () => answer(chats.current, true)));
  return nodes;
}

function showComposer() {
  const isRunning = running.has(chats.current.id);
  chatInput.disabled = !server.hasChat;
  showSend(chatSend, isRunning, chatInput.value.trim() !== "" && server.hasChat);
}

// ---- asking and answering

function send(text) {
  const chat = chats.current;
  if (!text.trim() || running.has(chat.id) || !server.hasChat) return;
  if (!chat.messages.length) chat.title = text.trim().split("\n")[0].slice(0, 60);
  chat.messages.push({ role: "user", content: text.trim() });
  chatInput.value = "";
  fitHeight(chatInput);
  answer(chat, false);
}

/* Writes the next message of `chat`, in place of the last one if `again`. */
async function answer(chat, again) {
  if (running.has(chat.id)) return;
  if (again) chat.messages.pop();
  const system = settings.system.trim() ? [{ role: "system", content: settings.system.trim() }] : [];
  const messages = [...system, ...chat.messages.map(({ role, content }) => ({ role, content }))];
  const message = { role: "assistant", content: "", isOpen: true };
  chat.messages.push(message);
  const controller = new AbortController();
  running.set(chat.id, controller);
  if (chat === chats.current) showChat();
  look();
  const saver = setInterval(() => chats.save(), 2000);
  try {
    await writeAnswer(message, messages, controller.signal);
  } catch (error) {
    if (!(error instanceof ServerError)) console.error(error);
    if (error.isStopped) message.note = [message.note, "stopped"].filter(Boolean).join(" · ");
    else message.error = error instanceof ServerError ? error.message : "The page failed. Load it again.";
  }
  clearInterval(saver);
  running.delete(chat.id);
  delete message.isOpen;
  chats.save();
  showMessage(message);
  showChats();
  showComposer();
  say(message.error ? "The answer failed." : "The answer is complete.");
}

async function writeAnswer(message, messages, signal) {
  const draw = oncePerFrame(() => showMessage(message));
  const reason = await generate("/v1/chat/completions", { messages, ...samplingFields() }, {
    signal,
    onPart({ delta }) {
      message.content += delta.content ?? "";
      if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
      draw();
    },
    onState(state) {
      message.note = stateText(state);
      draw();
    },
  });
  if (reason === "length") message.note += " · cut at the limit of tokens";
}

chatInput.addEventListener("input", () => {
  fitHeight(chatInput);
  showComposer();
});
chatInput.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(chatInput.value);
  }
});
chatSend.addEventListener("click", () => {
  const controller = running.get(chats.current.id);
  if (controller) controller.abort();
  else send(chatInput.value);
});
byId("new-chat").addEventListener("click", newChat);
