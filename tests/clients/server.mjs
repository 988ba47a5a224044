// Where the server is, and what it says about its load.
import assert from "node:assert/strict";

export const url = process.env.KAKERA_URL;

export async function nobodyRuns() {
  for (const end = Date.now() + 3000; Date.now() < end; ) {
    const { aggregate } = await (await fetch(`${url}/v1/loads`)).json();
    if (aggregate.total_reqs === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  assert.fail("a request still runs");
}
