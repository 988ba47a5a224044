// One streamed answer of /v1/chat/completions: what is sent, and the chunks that come.

/** Chunks as objects. Raises an Error in words if the server refuses, fails on the way, or ends without a word. */
export async function* complete(ask, body, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, return_progress: true }),
    signal,
  }).catch(unreachable);
  if (!response.ok) {
    const problem = await response.json().catch(() => null);
    throw new Error(`${problem?.error?.message ?? "the server gives no reason"} (status ${response.status})`);
  }
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("the connection ended before the answer did");
}

function unreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("the server can not be reached");
}

/** The data of server-sent events, as they come. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ")) yield block.slice(6);
    }
  }
}

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("the connection to the server broke");
}
