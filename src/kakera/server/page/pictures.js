// Pictures that go with the next message: chosen, pasted or dropped, made small enough to be kept, shown as they will be.

import { button, by, el } from "./dom.js";

const SIDE = 1280; // pixels of the longer side: what is kept with a chat has a bound, and the model takes no more tokens
const MOST = 8; // of a message

export class Pictures {
  constructor() {
    this.urls = [];
    this.offered = false;
    this.place = by("chat-pictures");
    this.file = by("chat-file");
    by("chat-attach").addEventListener("click", () => this.file.click());
    this.file.addEventListener("change", () => {
      this.add([...this.file.files]); // a list of its own: the next line empties that one
      this.file.value = "";
    });
    by("chat-input").addEventListener("paste", (event) => this.take(event, event.clipboardData));
    by("chat-form").addEventListener("dragover", (event) => this.offered && event.preventDefault());
    by("chat-form").addEventListener("drop", (event) => this.take(event, event.dataTransfer));
  }

  /** Whether the model sees; a page that has heard nothing yet offers nothing. */
  offer(sees) {
    this.offered = sees;
    by("chat-attach").hidden = !sees;
  }

  take(event, data) {
    const files = [...(data?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
    if (!this.offered || !files.length) return; // text is pasted as ever
    event.preventDefault();
    this.add(files);
  }

  async add(files) {
    for (const file of files) {
      const url = await small(file).catch(() => null);
      this.note(url ? "" : `${file.name || "This"} is no picture that this browser can read.`);
      if (url && this.urls.length < MOST) this.set([...this.urls, url]);
    }
  }

  note(text) {
    const old = this.place.querySelector(".bad");
    old?.remove();
    if (text) this.place.append(el("span", { class: "bad", role: "alert" }, text));
    this.place.hidden = !this.place.childElementCount;
  }

  set(urls) {
    this.urls = urls;
    const shown = urls.map((url, i) => el("span", { class: "picture" }, thumbnail(url), button("Remove", () => this.set(this.urls.filter((_, j) => j !== i)))));
    this.place.replaceChildren(...shown);
    this.place.hidden = !urls.length;
  }

  /** What was chosen, which is not chosen any more. */
  taken() {
    const { urls } = this;
    this.set([]);
    return urls;
  }
}

export const thumbnail = (url) => el("img", { src: url, alt: "attached picture", class: "thumbnail" });

/** A message's content as the server takes it. */
export function withPictures({ content, pictures }) {
  if (!pictures?.length) return content;
  return [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }];
}

/** A data URL of a picture no larger than SIDE, upright, white where it is transparent. */
async function small(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(picture.width, picture.height));
  const canvas = el("canvas", { width: Math.max(1, Math.round(picture.width * scale)), height: Math.max(1, Math.round(picture.height * scale)) });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}
