// Sign in with an API key, on every page.

import { getJson, session } from "./api.js";
import { Dialog, html, useObservable, useState, visible } from "./ui.js";

export function SignIn({ onSignedIn }) {
  useObservable(session);
  const [key, setKey] = useState("");
  const [remember, setRemember] = useState(true);
  const [problem, setProblem] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await getJson("/v1/models", { key: key.trim() });
    } catch (error) {
      session.reason = "";
      setProblem(error.status === 401 ? "The server does not accept this key." : error.message);
      return;
    }
    session.signIn(key.trim(), remember);
    onSignedIn();
  };
  return html`<${Dialog} title="Sign in" onClose=${() => {}} class="sign-in">
    <form onSubmit=${submit}>
      <p>${visible(session.reason) || "This server asks for an API key."}</p>
      <label class="field">API key
        <input type="password" autocomplete="off" spellcheck=${false} required autofocus value=${key} onInput=${(event) => setKey(event.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${remember} onChange=${(event) => setRemember(event.target.checked)} /> Keep it until this tab is closed</label>
      ${problem && html`<p class="problem" role="alert">${visible(problem)}</p>`}
      <button type="submit" class="button primary">Sign in</button>
      <p class="soft">The key stays in this tab, and goes only to this server.</p>
    </form>
  <//>`;
}
