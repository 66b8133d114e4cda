/* What the browser keeps: conversations and settings for good, the key as long as the tab is open. */

function keeper(storage) {
  return {
    read(name, otherwise = null) {
      try {
        return JSON.parse(storage().getItem(`jaxllm.${name}`)) ?? otherwise;
      } catch {
        return otherwise; // storage is off, or holds what is not ours
      }
    },
    write(name, value) {
      try {
        storage().setItem(`jaxllm.${name}`, JSON.stringify(value));
        return true;
      } catch {
        return false; // full, or off
      }
    },
  };
}

const local = keeper(() => localStorage), session = keeper(() => sessionStorage);

const SETTINGS = { system: "", temperature: "", top_p: "", top_k: "", max_tokens: "512", seed: "" };
const settings = { ...SETTINGS, ...local.read("settings", {}) };

/* The sampling parameters that are given; the others are the server's. */
function samplingFields() {
  const fields = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (String(settings[name]).trim() !== "") fields[name] = Number(settings[name]);
  }
  return fields;
}

/* Conversations, the latest first: {id, title, messages: [{role, content, reasoning, note, error}]} */
const chats = {
  all: [],
  current: null,

  load(id = local.read("current")) {
    const stored = local.read("chats", []);
    this.all = Array.isArray(stored) ? stored.filter((chat) => chat && Array.isArray(chat.messages)) : [];
    for (const chat of this.all) for (const message of chat.messages) delete message.isOpen;
    this.current = this.all.find((chat) => chat.id === id) ?? this.all[0] ?? this.create();
  },

  create() {
    const empty = this.all.find((chat) => !chat.messages.length);
    const chat = empty ?? { id: newId(), title: "New chat", messages: [] };
    this.all = [chat, ...this.all.filter((other) => other !== chat)];
    this.current = chat;
    this.save();
    return chat;
  },

  select(chat) {
    this.current = chat;
    this.save();
  },

  remove(chat) {
    const index = this.all.indexOf(chat);
    this.all.splice(index, 1);
    if (this.current === chat) this.current = this.all[Math.min(index, this.all.length - 1)] ?? this.create();
    this.save();
    return index;
  },

  /* Oldest conversations go when the browser has no more room. */
  save() {
    local.write("current", this.current?.id);
    for (let count = this.all.length; count > 0; count--) {
      if (local.write("chats", this.all.slice(0, count))) return;
    }
    local.write("chats", []);
  },
};

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
