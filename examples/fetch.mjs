// A streamed chat completion from JavaScript. Run `emberline serve`, then: node examples/fetch.mjs
const url = process.env.EMBERLINE_URL ?? "http://127.0.0.1:8686";

const response = await fetch(`${url}/v1/chat/completions`, {
  method: "POST",
  headers: { "Content-Type": "application/json", Authorization: `Bearer ${process.env.EMBERLINE_KEY ?? "none"}` },
  body: JSON.stringify({
    model: "@cf/huggingfacetb/smollm2-135m-instruct",
    messages: [{ role: "user", content: "Tell me something about tides." }],
    max_tokens: 64,
    stream: true,
  }),
});
if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);

let rest = "";
for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + text).split("\n");
  rest = lines.pop(); // the last line may not be whole yet
  for (const line of lines) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    process.stdout.write(JSON.parse(line.slice(6)).choices[0]?.delta?.content ?? "");
  }
}
console.log();
