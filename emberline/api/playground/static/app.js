// The playground: toolbar, panes, composer, settings, and the shortcuts that reach them.

import { session } from "./api.js";
import { ChatsDialog } from "./chats_dialog.js";
import { Composer, ModelButton, Transcript } from "./chat.js";
import { CodeDialog, ModelDialog, Shortcuts } from "./dialogs.js";
import { models } from "./models.js";
import { PredictionForm } from "./prediction.js";
import { SettingsPanel } from "./settings_panel.js";
import { SignIn } from "./sign_in.js";
import { announce, Button, downloadText, html, Icon, render, Shell, useLayoutEffect, useObservable, useRef, useState, visible } from "./ui.js";
import { workspace } from "./workspace.js";

const WIDE = matchMedia("(min-width: 1000px)");

function App() {
  useObservable(workspace);
  useObservable(session);
  useObservable(models);
  const [dialog, setDialog] = useState(null); // {name, pane}
  const [settings, setSettings] = useState(WIDE.matches);
  const [problem, setProblem] = useState(null);
  const picker = useRef();
  const close = () => setDialog(null);
  const openModels = (pane) => setDialog({ name: "models", pane });

  const importFile = async (file) => {
    try {
      workspace.import(JSON.parse(await file.text()));
      setProblem(null);
      announce("The conversation is imported.");
    } catch (error) {
      setProblem(error instanceof SyntaxError ? "The file is not JSON." : error.message);
    }
  };
  const actions = {
    n: () => (workspace.newChat(), document.getElementById("prompt").focus()),
    m: () => openModels(workspace.pane),
    h: () => setDialog({ name: "chats" }),
    c: () => workspace.compare(),
    s: () => setSettings((shown) => !shown),
    v: () => setDialog({ name: "code" }),
    r: () => workspace.panes.forEach((pane) => pane.conversation.last.isReply && !pane.busy && pane.regenerate(pane.conversation.last)),
  };
  useLayoutEffect(() => {
    const onKey = (event) => {
      if (session.needed || document.querySelector("dialog[open]")) return;
      const typing = event.target.matches?.("input, textarea, select");
      const shown = !workspace.compares && workspace.pane.model?.predicts ? { m: actions.m } : actions;
      const action = event.altKey && !event.ctrlKey && !event.metaKey && shown[event.code.replace("Key", "").toLowerCase()];
      if (action) action();
      else if (event.key === "Escape" && workspace.busy) workspace.stop();
      else if (event.key === "?" && !typing) setDialog({ name: "shortcuts" });
      else if (event.key === "/" && !typing && document.getElementById("prompt")) document.getElementById("prompt").focus();
      else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);

  const predicts = !workspace.compares && workspace.pane.model?.predicts;
  const top = html`
    <${Button} icon="help" label="Keyboard shortcuts" class="quiet" onClick=${() => setDialog({ name: "shortcuts" })} />
    ${session.key !== null && html`<${Button} icon="key" text="Sign out" label="Forget the key" class="quiet" onClick=${() => session.signOut()} />`}`;
  return html`<${Shell} here="/" actions=${top}>
    <main class=${`playground ${settings && !predicts ? "with-settings" : ""} ${workspace.compares ? "compares" : ""}`}>
      <h1 class="visually-hidden">Playground</h1>
      <div class="toolbar" role="toolbar" aria-label="Conversation">
        ${workspace.compares ? html`<b class="title">Side by side</b>` : html`<${ModelButton} key=${workspace.pane.settings.model} pane=${workspace.pane} open=${openModels} />`}
        <span class="space"></span>
        ${!predicts && html`<${Button} icon="plus" text="New chat" label="New chat (Alt + N)" onClick=${actions.n} />
          <${Button} icon="chats" text="Chats" label="Saved chats (Alt + H)" onClick=${actions.h} />
          <${Button} icon="columns" text="Compare" label="Compare side by side (Alt + C)" aria-pressed=${workspace.compares} onClick=${actions.c} />
          <${Button} icon="code" text="Code" label="View code (Alt + V)" onClick=${actions.v} />
          <${Button} icon="upload" label="Import a conversation" onClick=${() => picker.current.click()} />
          <${Button} icon="download" label="Export the conversation" onClick=${exportFile} />
          <${Button} icon="sliders" label="Settings (Alt + S)" aria-expanded=${settings} aria-controls="settings" onClick=${actions.s} />`}
        <input ref=${picker} type="file" accept="application/json,.json" class="visually-hidden" tabindex="-1" aria-label="Conversation file" onChange=${(event) => (importFile(event.target.files[0]), (event.target.value = ""))} />
      </div>
      ${(problem || (models.error && !session.needed)) && html`<p class="problem banner" role="alert"><${Icon} name="warn" />${visible(problem ?? models.error.message)}
        <${Button} text=${problem ? "Dismiss" : "Try again"} class="small" onClick=${() => (problem ? setProblem(null) : models.refresh())} /></p>`}
      ${predicts ? html`<div class="panes"><${PredictionForm} key=${workspace.pane.settings.model} model=${workspace.pane.model} /></div>` : html`<div class="panes">${workspace.panes.map((pane, i) => html`<${Transcript} key=${`${i}-${pane.conversation.id}`} pane=${pane} label=${workspace.compares ? ["Left", "Right"][i] : "Chat"} openModels=${openModels} />`)}</div>
      <${Composer} key=${workspace.panes.length} />`}
      ${settings && !predicts && html`<${SettingsPanel} close=${() => setSettings(false)} />`}
    </main>
    ${session.needed ? html`<${SignIn} onSignedIn=${() => models.refresh()} />` : dialog?.name === "models" ? html`<${ModelDialog} pane=${dialog.pane} onClose=${close} />`
      : dialog?.name === "code" ? html`<${CodeDialog} onClose=${close} />` : dialog?.name === "chats" ? html`<${ChatsDialog} onClose=${close} />` : dialog?.name === "shortcuts" ? html`<${Shortcuts} onClose=${close} />` : null}
  <//>`;
}

function exportFile() {
  const name = `conversation-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.json`;
  downloadText(JSON.stringify(workspace.export(), null, 2), name, "application/json");
}

const root = document.getElementById("root");
root.replaceChildren();
workspace.restore();
render(html`<${App} />`, root);
let known = "";
models.subscribe(() => {
  const ids = models.all.map((model) => model.id).join("\n");
  if (ids !== known) workspace.chooseModels();
  known = ids;
});
models.watch();
