/* What the tabs share with the rest of the page: the server's state, settings, keys, small things. */

const TABS = ["chat", "complete"];
const POLL_BUSY_MS = 1000, POLL_IDLE_MS = 5000;
let isFirstLook = true;

// ---- tabs and menu

function selectTab(name, { focus = false } = {}) {
  for (const tab of TABS) {
    const button = byId(`tab-${tab}`);
    button.setAttribute("aria-selected", String(tab === name));
    button.tabIndex = tab === name ? 0 : -1;
    byId(tab).hidden = tab !== name;
  }
  byId("menu").hidden = name !== "chat";
  local.write("tab", name);
  if (focus) byId(`tab-${name}`).focus();
  fitHeight(promptInput);
}

for (const name of TABS) {
  byId(`tab-${name}`).addEventListener("click", () => selectTab(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      selectTab(TABS.find((other) => other !== name), { focus: true });
    }
  });
}

function closeMenu() {
  document.body.classList.remove("menu-open");
  byId("menu").setAttribute("aria-expanded", "false");
}

byId("menu").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("menu-open");
  byId("menu").setAttribute("aria-expanded", String(isOpen));
});
byId("scrim").addEventListener("click", closeMenu);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  closeMenu();
  if (!byId("chat").hidden) running.get(chats.current.id)?.abort();
  else completion.controller?.abort();
});

// ---- how the server is

async function look() {
  clearTimeout(look.timer);
  const isBusy = running.size > 0 || completion.controller !== null;
  if (!document.hidden) {
    try {
      showServer(await (await request("/stats", { isQuiet: !isFirstLook })).json());
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      showLoad(error.status === 401 ? "API key wanted" : error.status ? error.message : "not reached", true);
    }
  }
  clearTimeout(look.timer);
  look.timer = setTimeout(look, isBusy ? POLL_BUSY_MS : POLL_IDLE_MS);
}

function showServer(stats) {
  const { engine } = stats, hadChat = server.hasChat;
  Object.assign(server, { model: stats.model, hasChat: stats.has_chat });
  byId("model").textContent = stats.model;
  document.title = `${stats.model} · jaxllm`;
  for (const [name, value] of Object.entries(stats.defaults)) {
    byId("settings-form").elements[name]?.setAttribute("placeholder", `${value} (the model's)`);
  }
  if (isFirstLook || hadChat !== server.hasChat) {
    isFirstLook = false;
    selectTab(server.hasChat ? local.read("tab", "chat") : "complete");
    byId("no-chat").hidden = server.hasChat;
    showChat();
    showCompleteControls();
  }
  if (!engine || !stats.is_ready) return showLoad(engine ? "not ready" : "loading the model", true);
  byId("meter").value = engine.kv_cache_usage;
  byId("meter").title = `${Math.round(engine.kv_cache_usage * engine.kv_cache_tokens).toLocaleString("en")} of ` +
    `${engine.kv_cache_tokens.toLocaleString("en")} tokens of KV cache`;
  byId("kv").textContent = `${(100 * engine.kv_cache_usage).toFixed(engine.kv_cache_usage < 0.1 ? 1 : 0)} %`;
  const parts = [`${formatRate(stats.generation_tokens_per_s)} tokens/s`];
  if (engine.num_requests_waiting) parts.push(`${engine.num_requests_waiting} waiting`);
  if (engine.num_compiled < engine.num_executables) parts.push(`compiling ${engine.num_compiled}/${engine.num_executables}`);
  showLoad(parts.join(" · "), false);
}

function showLoad(text, isBad) {
  byId("speed").textContent = text;
  byId("load").classList.toggle("bad", isBad);
}

// ---- settings

const form = byId("settings-form");

function showSettings() {
  for (const name of Object.keys(SETTINGS)) form.elements[name].value = settings[name];
  form.elements.key.value = session.read("key", "");
  form.elements.theme.value = local.read("theme", "auto");
  byId("settings").showModal();
}

function applyTheme() {
  document.documentElement.dataset.theme = local.read("theme", "auto");
}

byId("open-settings").addEventListener("click", showSettings);
form.addEventListener("input", () => {
  for (const name of Object.keys(SETTINGS)) {
    if (form.elements[name].validity.valid) settings[name] = form.elements[name].value;
  }
  local.write("settings", settings);
  session.write("key", form.elements.key.value.trim());
  local.write("theme", form.elements.theme.value);
  applyTheme();
});
byId("reset-settings").addEventListener("click", () => {
  Object.assign(settings, SETTINGS);
  for (const name of Object.keys(SETTINGS)) form.elements[name].value = SETTINGS[name];
  local.write("settings", settings);
});
byId("settings").addEventListener("close", look);

// ---- the key

let asking = null;

/* Whether a key was given. All who need one wait for the same question. */
function askKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-wrong").hidden = !wasWrong;
    byId("key-input").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const key = byId("key-input").value.trim();
      const isGiven = dialog.returnValue === "ok" && key !== "";
      if (isGiven) session.write("key", key);
      resolve(isGiven);
      if (isGiven) look();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}

applyTheme();
chats.load();
showChat();
showCompleteControls();
fitHeight(chatInput);
document.addEventListener("visibilitychange", look);
window.addEventListener("storage", (event) => {
  if (event.key !== "jaxllm.chats" || running.size) return; // of another tab
  chats.load(chats.current.id);
  showChat();
});
look();
