"""One errand for every agent: three commands, each known only from what the one before printed."""

from tests.agents.workshop import Workshop
from tests.e2e.clients.play import play, saying

LONG = 4000  # tokens; shorter requests are not the agent's work but a title for it, say
PROMPT = "Follow the notes in this folder, starting with one.txt."
# A cue and the command that it calls for. No cue is in a command: only its result can have brought it.
ERRAND = (
    ("", "cat one.txt"),
    ("marker-alpha", "cat two.txt"),
    ("marker-beta", "printf %s%s marker- gamma | tee three.txt"),
)
FINDINGS = saying("I followed the notes to three.txt.", cue="marker-gamma")


def prepare(workshop: Workshop) -> None:
    workshop.write("one.txt", "Go on with two.txt. marker-alpha\n")
    workshop.write("two.txt", "Write three.txt. marker-beta\n")


def check(workshop: Workshop) -> None:
    """The commands were run here, and each turn found the one before it in the cache."""
    assert (workshop.project / "three.txt").read_text() == "marker-gamma"
    requests = [request for request in workshop.requests() if request.input_tokens > LONG]
    assert len(requests) == len(ERRAND) + 1
    for request in requests[1:]:
        assert request.cached_tokens >= 0.9 * request.input_tokens


# A conversation of two turns: the second line's cue is the first line, which only the agent's own history brings back.
TALK = play(saying("The word is basalt."), saying("It was my word.", cue="The word is basalt."))


def check_talk(workshop: Workshop) -> None:
    first, second = (request for request in workshop.requests() if request.input_tokens > LONG)
    assert second.cached_tokens >= 0.9 * first.input_tokens
