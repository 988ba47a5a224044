// Chats and settings in this browser's local storage: bounded, and never the API key, which is the tab's alone.

const CHAT = "kakera-chat:";
const SETTINGS = "kakera-settings";
const MOST_CHATS = 100;
const MOST_CHARACTERS = 2_000_000; // of all chats; browsers give a page 5 million

/** Chats without their messages, the last changed first. */
export function chats() {
  const found = names().map(load).filter((chat) => chat !== null);
  return found.map(({ id, title, changed }) => ({ id, title, changed })).sort((one, other) => other.changed - one.changed);
}

const names = () => Object.keys(localStorage).filter((name) => name.startsWith(CHAT)).map((name) => name.slice(CHAT.length));

export function load(id) {
  const chat = read(CHAT + id);
  return chat && Array.isArray(chat.messages) ? { title: "", changed: 0, ...chat, id } : null;
}

/** Keep a chat; older ones make way for it. False if the browser does not take it. */
export function save(chat) {
  const text = JSON.stringify({ ...chat, changed: Date.now() });
  if (text.length > MOST_CHARACTERS) return false;
  for (;;) {
    const oldest = chats().filter(({ id }) => id !== chat.id).pop();
    const others = names().filter((id) => id !== chat.id);
    const held = others.reduce((sum, id) => sum + (localStorage.getItem(CHAT + id)?.length ?? 0), text.length);
    if (oldest && (others.length >= MOST_CHATS || held > MOST_CHARACTERS)) {
      remove(oldest.id);
      continue;
    }
    try {
      localStorage.setItem(CHAT + chat.id, text);
      return true;
    } catch {
      if (!oldest) return false;
      remove(oldest.id);
    }
  }
}

export function rename(id, title) {
  const chat = load(id);
  if (chat) localStorage.setItem(CHAT + id, JSON.stringify({ ...chat, title: title.trim().slice(0, 120) || chat.title }));
}

export const remove = (id) => localStorage.removeItem(CHAT + id);

export const loadSettings = () => read(SETTINGS) ?? {};

export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch (error) {
    console.debug(error); // full, or not allowed: they last as long as the page
  }
}

function read(name) {
  try {
    const value = JSON.parse(localStorage.getItem(name) ?? "null");
    return value !== null && typeof value === "object" ? value : null;
  } catch {
    return null; // not ours, or storage is not allowed
  }
}
