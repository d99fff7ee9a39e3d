// The present request as code that can be run: curl, Python, JavaScript. A key is named by its variable, never shown.

const KEY = "EMBERLINE_API_KEY";
const MAX_ARGUMENT_CHARS = 40_000; // Linux takes 131,072 bytes per argument, and a character of JSON has up to three

export function samples(body, { base, affinity, needsKey }) {
  return [
    { name: "curl", language: "bash", code: curl(body, base, affinity, needsKey) },
    { name: "Python", language: "python", code: python(body, base, affinity, needsKey) },
    { name: "JavaScript", language: "javascript", code: javascript(body, base, affinity, needsKey) },
  ];
}

function curl(body, base, affinity, needsKey) {
  const json = JSON.stringify(body, null, 2);
  const data = json.length > MAX_ARGUMENT_CHARS ? `@- <<'EOF'\n${json}\nEOF` : `'${json.replaceAll("'", `'\\''`)}'`;
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $${KEY}"` : "";
  return `curl -N ${base}/v1/chat/completions${key} \\
  -H 'content-type: application/json' \\
  -H 'x-session-affinity: ${affinity}' \\
  -d ${data}`;
}

function python(body, base, affinity, needsKey) {
  const { stream, stream_options, top_k, min_p, ...known } = body;
  const fields = Object.entries(known).map(([name, value]) => `    ${name}=${pythonValue(value, 4)},`);
  const extra = Object.fromEntries(Object.entries({ top_k, min_p }).filter(([, value]) => value !== undefined));
  if (Object.keys(extra).length) fields.push(`    extra_body=${pythonValue(extra, 4)},`);
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=${needsKey ? `os.environ["${KEY}"]` : '"none"'})
stream = client.chat.completions.create(
${fields.join("\n")}
    stream=True,
    stream_options={"include_usage": True},
    extra_headers={"x-session-affinity": "${affinity}"},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\\n{chunk.usage.completion_tokens} tokens")`;
}

/** A JSON value as a Python literal. */
function pythonValue(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const pad = " ".repeat(indent + 4);
  const inner = Array.isArray(value)
    ? value.map((item) => pad + pythonValue(item, indent + 4))
    : Object.entries(value).map(([key, item]) => `${pad}${JSON.stringify(key)}: ${pythonValue(item, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return inner.length ? `${open}\n${inner.join(",\n")},\n${" ".repeat(indent)}${close}` : open + close;
}

function javascript(body, base, affinity, needsKey) {
  const key = needsKey ? `\n    authorization: \`Bearer \${process.env.${KEY}}\`,` : "";
  return `const response = await fetch("${base}/v1/chat/completions", {
  method: "POST",
  headers: {
    "content-type": "application/json",
    "x-session-affinity": "${affinity}",${key}
  },
  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),
});
let pending = "";
for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
  const lines = (pending + text).split("\\n");
  pending = lines.pop();
  for (const line of lines) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const chunk = JSON.parse(line.slice(6));
    process.stdout.write(chunk.choices[0]?.delta.content ?? "");
  }
}`;
}
