"""A task for every agent: three commands, each of which depends on the output of the previous one."""

from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.reply_script import reply_script, text_reply

LONG = 4000  # tokens; shorter requests are auxiliary, e.g. for a title
PROMPT = "Follow the notes in this folder, starting with one.txt."
# (trigger in the prompt, command to call). No command contains a trigger, so only its result can have added it.
STEPS = (
    ("", "cat one.txt"),
    ("marker-alpha", "cat two.txt"),
    ("marker-beta", "printf %s%s marker- gamma | tee three.txt"),
)
FINAL_ANSWER = text_reply("I followed the notes to three.txt.", trigger="marker-gamma")


def prepare(workspace: AgentWorkspace) -> None:
    workspace.write("one.txt", "Go on with two.txt. marker-alpha\n")
    workspace.write("two.txt", "Write three.txt. marker-beta\n")


def check(workspace: AgentWorkspace) -> None:
    """The commands were run in the project, and each turn found the previous one in the prefix cache."""
    assert (workspace.project / "three.txt").read_text() == "marker-gamma"
    requests = [request for request in workspace.requests() if request.input_tokens > LONG]
    assert len(requests) == len(STEPS) + 1
    for request in requests[1:]:
        assert request.cached_tokens >= 0.9 * request.input_tokens


# A conversation of two turns: the second reply's trigger is the first reply, which only the agent's history contains.
CONVERSATION = reply_script(
    text_reply("The word is basalt."), text_reply("It was my word.", trigger="The word is basalt.")
)


def check_conversation(workspace: AgentWorkspace) -> None:
    first, second = (request for request in workspace.requests() if request.input_tokens > LONG)
    assert second.cached_tokens >= 0.9 * first.input_tokens
