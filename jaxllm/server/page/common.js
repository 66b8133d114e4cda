/* Small things that all parts of the page use. */

const server = { model: "", hasChat: true };

function byId(id) {
  return document.getElementById(id);
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#${name}`);
  svg.append(use);
  return svg;
}

function iconButton(name, label, onclick) {
  return el("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick }, icon(name));
}

function textButton(text, onclick) {
  return el("button", { type: "button", class: "quiet", onclick }, text);
}

function fitHeight(input) {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

/* A button that sends, or stops what runs. */
function showSend(button, isRunning, canSend) {
  const label = isRunning ? "Stop" : button.dataset.label;
  button.disabled = !isRunning && !canSend;
  button.classList.toggle("stop", isRunning);
  button.setAttribute("aria-label", label);
  button.title = label;
  button.replaceChildren(icon(isRunning ? "i-stop" : "i-send"), ...(button.dataset.text ? [isRunning ? "Stop" : label] : []));
}

function oncePerFrame(draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      draw();
    });
  };
}

async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = copyOldWay(text) ? "Copied" : "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

/* Browsers have a clipboard for pages of this machine and of https only. */
function copyOldWay(text) {
  const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

/* For those who hear the page. */
function say(text) {
  byId("live").textContent = text;
}

function toast(text, action, act) {
  const node = byId("toast");
  clearTimeout(toast.timer);
  const button = textButton(action, () => {
    node.hidden = true;
    act();
  });
  node.replaceChildren(el("span", {}, text), button);
  node.hidden = false;
  toast.timer = setTimeout(() => (node.hidden = true), 7000);
}
