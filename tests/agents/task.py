"""A task for every agent: three commands, each of which depends on the output of the previous one."""

from tests.agents.workspace import AgentWorkspace
from tests.e2e.clients.play import play, saying

LONG = 4000  # tokens; shorter requests are auxiliary, e.g. for a title
PROMPT = "Follow the notes in this folder, starting with one.txt."
# (cue in the prompt, command to call). No command contains a cue, so only its result can have added it.
STEPS = (
    ("", "cat one.txt"),
    ("marker-alpha", "cat two.txt"),
    ("marker-beta", "printf %s%s marker- gamma | tee three.txt"),
)
FINAL_ANSWER = saying("I followed the notes to three.txt.", cue="marker-gamma")


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


# A conversation of two turns: the second line's cue is the first line, which only the agent's own history brings back.
CONVERSATION = play(saying("The word is basalt."), saying("It was my word.", cue="The word is basalt."))


def check_conversation(workspace: AgentWorkspace) -> None:
    first, second = (request for request in workspace.requests() if request.input_tokens > LONG)
    assert second.cached_tokens >= 0.9 * first.input_tokens
