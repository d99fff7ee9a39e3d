// A turn with the example's chat agent over its WebSocket: `node chat.mjs HOST ROOM TEXT`; prints the parts of the reply.
import { AgentClient } from "agents/client";

const [host, room, text] = process.argv.slice(2);
const agent = new AgentClient({ agent: "chat", name: room, host });
const messages = [{ id: "1", role: "user", parts: [{ type: "text", text }] }];
const parts = [];
agent.addEventListener("message", (event) => {
  const data = JSON.parse(event.data);
  if (data.type !== "cf_agent_use_chat_response" || data.id !== "turn") return;
  if (data.error) throw new Error(data.body);
  if (data.body?.trim()) parts.push(JSON.parse(data.body));
  if (!data.done) return;
  console.log(JSON.stringify(parts));
  process.exit(0);
});
const init = { method: "POST", body: JSON.stringify({ messages }) };
agent.send(JSON.stringify({ type: "cf_agent_use_chat_request", id: "turn", init }));
